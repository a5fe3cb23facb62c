"""Labels of steps by a policy on disk, and a process reward model that learns from them."""

import json
import pathlib

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.config import JsonlConfig
from agentjax.data.errors import DataError
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.recipes.math_shepherd import MathShepherdConfig
from agentjax.recipes.math_shepherd.labels import LabelConfig, label_solutions
from agentjax.recipes.math_shepherd.scorer import StepScorer
from agentjax.recipes.math_shepherd.scores import score_solutions
from agentjax.recipes.math_shepherd.solutions import read_solutions, step_scores
from agentjax.rewards import RewardConfig
from agentjax.rewards.config import build_rewards
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.tools import ToolsConfig
from agentjax.training import (
  Experiment,
  Extensions,
  OptimizerConfig,
  Run,
  SupervisedStage,
  load_experiment,
)
from agentjax.training.flags import set_field
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Task
from agentjax.trajectory.store import write_store
from tests.recipes.reader_signal import TOKENIZER
from tests.recipes.table_policy import TABLE_MODEL, save_table_policy
from tests.rewards.judging import run
from tests.training.smoke import quiet

_TASKS = [Task(i, (Message("user", f"{i}?"),), "5", "sums") for i in range(4)]
_TABLE = {"\n": "56", "5": None, "6": None}  # after a step an answer, right or wrong


def _no_slip(trajectory, task):
  """A solution is right if it ends in the answer and has no slip "w"."""
  text = trajectory.answer or ""
  return float(text.endswith(task.answer) and "w" not in text)


def _experiment(**changes):
  made = Experiment(
    name="steps",
    model=TABLE_MODEL,
    engine=EngineConfig(
      slots=8, max_length=64, chunk_tokens=4, extend_buckets=(32,), extend_rows=(4,), warmup=False
    ),
    reward=RewardConfig(parts=("no_slip",)),
    supervised=SupervisedStage(steps=1),
    tools=ToolsConfig(names=()),
  )
  made.rollout.answer, made.rollout.max_tokens_per_turn = "text", 4
  made.rollout.max_total_tokens = 64
  for name, value in changes.items():
    setattr(made, name, value)
  return made


def _extensions():
  return Extensions(tasks=TaskSplits(_TASKS, ()), scorers={"no_slip": _no_slip})


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  folder = tmp_path_factory.mktemp("policy")
  plain = _experiment(reward=RewardConfig())
  save_table_policy(folder, _TABLE, 0, plain)
  return folder


def _write(path, solutions):
  path.write_text("".join(json.dumps({"task": t, "steps": s}) + "\n" for t, s in solutions))
  return str(path)


def _label(policy, solutions, output, **settings):
  return label_solutions(
    _experiment(),
    output,
    checkpoint=str(policy),
    solutions=solutions,
    labels=settings.pop("labels", LabelConfig()),
    extensions=_extensions(),
    **settings,
  )


def _rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_slip_is_found_by_completions_and_labels_go_on_where_they_stopped(policy, tmp_path):
  solutions = [(0, ["a", "b", "5"]), (1, ["a", "w", "5"]), (2, ["a", "6"])]
  file = _write(tmp_path / "solutions.jsonl", solutions)
  written = _label(policy, file, tmp_path / "steps", concurrency=16)
  assert (written.solutions, written.steps, written.right, written.kept) == (3, 8, 5, 0)
  rows = _rows(tmp_path / "steps" / "labels.jsonl")
  assert [row["hard"] for row in rows] == [[1, 1, 1], [1, 0, 0], [1, 0]]
  assert all(0 < row["soft"][0] < 1 for row in rows) and rows[1]["soft"][1:] == [0, 0]
  assert [len(one) for one in rows[0]["completions"]] == [8, 8, 1]
  train = _rows(tmp_path / "steps" / "train.jsonl")
  assert train[4]["messages"][0]["content"] == "1?\n\nSolution:\na\nw"
  assert [row["answer"][-1] for row in train[3:6]] == ["+", "-", "-"]

  # The same, with two solutions from an earlier call that was cut off, one question at a time.
  again = tmp_path / "again"
  again.mkdir()
  for name in ("settings.json", "labels.jsonl"):
    (again / name).write_bytes((tmp_path / "steps" / name).read_bytes())
  lines = (again / "labels.jsonl").read_bytes().splitlines(keepends=True)
  (again / "labels.jsonl").write_bytes(lines[2] + lines[0] + lines[1][:20])
  assert _label(policy, file, again, concurrency=1).kept == 2
  for name in ("labels.jsonl", "train.jsonl"):
    assert (again / name).read_bytes() == (tmp_path / "steps" / name).read_bytes()
  with pytest.raises(ConfigError, match="completions"):
    _label(policy, file, again, labels=LabelConfig(completions=2))


def test_episodes_of_one_turn_are_solutions(policy, tmp_path):
  def stored(task, *turns):
    builder = TrajectoryBuilder(step=0, task_id=task, sample=0, source="sums")
    for text in turns:
      ids = TOKENIZER.encode(text)
      builder.append("user", TOKENIZER.encode("?"))
      builder.append_sampled(ids, [0.0] * len(ids), [0.0] * len(ids), 0)
    return builder.build()

  write_store(tmp_path / "store", [stored(0, "a\n\n5"), stored(1, "a", "5"), stored(2, "w\n5")])
  written = _label(policy, None, tmp_path / "steps", trajectories=str(tmp_path / "store"))
  rows = _rows(tmp_path / "steps" / "labels.jsonl")
  assert [(row["id"], row["task"], row["steps"]) for row in rows] == [
    (0, 0, ["a", "5"]),
    (2, 2, ["w", "5"]),
  ]
  assert (written.steps, written.right) == (4, 2)
  write_store(tmp_path / "other", [stored(1, "a", "5")])
  with pytest.raises(DataError, match="none of 1 episodes is a solution"):
    _label(policy, None, tmp_path / "none", trajectories=str(tmp_path / "other"))


@pytest.mark.parametrize(
  "row, named",
  [
    ({"task": 9, "steps": ["a"]}, "2: 'task' is 9; allowed: the id of one of the 4 tasks"),
    ({"steps": ["a"]}, "2: 'task' is None"),
    ({"task": 1, "steps": []}, r"2: 'steps' is \[\]"),
    (
      {"task": 1, "steps": ["a", "b\nc"]},
      r"2: 'steps'\[1\] is 'b\\nc'; allowed: a text of one line",
    ),
    ({"task": 1, "steps": ["a", 3]}, r"2: 'steps'\[1\] is 3"),
  ],
)
def test_solutions_that_do_not_fit_are_refused_with_their_line(tmp_path, row, named):
  file = tmp_path / "solutions.jsonl"
  file.write_text(json.dumps({"task": 0, "steps": ["a"]}) + "\n" + json.dumps(row) + "\n")
  with pytest.raises(DataError, match=named):
    read_solutions(file, {task.id: task for task in _TASKS})


def test_solutions_come_from_one_place_and_need_no_tools(tmp_path):
  for more in ({}, {"trajectories": "runs/a"}):
    file = "solutions.jsonl" if more else None
    with pytest.raises(ConfigError, match="either --solutions=FILE or --trajectories=RUN"):
      _label(tmp_path, file, tmp_path / "steps", **more)
  with pytest.raises(ConfigError, match=r"config\.tools\.names=\('calculator',\); allowed: \(\)"):
    label_solutions(
      _experiment(tools=ToolsConfig(names=("calculator",))),
      tmp_path / "steps",
      checkpoint=str(tmp_path),
      solutions="solutions.jsonl",
      labels=LabelConfig(),
      extensions=_extensions(),
    )


class _Reader:
  """Knows that a slip is one, and is unavailable as often as it is told."""

  def __init__(self, failures=0):
    self.failures = failures

  async def log_probs(self, messages, opening, choices):
    assert (opening, tuple(choices)) == ("Verdict: ", ("+", "-"))
    if self.failures:
      self.failures -= 1
      raise JudgeUnavailableError("busy")
    right = 0.75 if "w" not in messages[0].content else 0.25
    return [float(np.log(right)), float(np.log(1 - right))]


def test_a_solution_is_scored_by_its_steps(monkeypatch):
  reader = _Reader()
  scores = run(step_scores(reader.log_probs, _TASKS[0].prompt, ["a", "w", "5"]))
  np.testing.assert_allclose(scores, [0.75, 0.25, 0.25])

  def scored(answer, judge=reader, **settings):
    builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="sums")
    builder.append_sampled([1], [0.0], [0.0], 0)
    return run(StepScorer(judge, MathShepherdConfig(**settings))(
      builder.build(answer=answer), _TASKS[0]
    ))  # fmt: skip

  assert scored("a\n\nw\n5").value == pytest.approx(0.25)
  assert scored("a\nw", aggregate="mean").value == pytest.approx(0.5)
  assert scored(None).value == scored("\n").value == 0
  monkeypatch.setattr("asyncio.sleep", _no_time)
  assert scored("a", _Reader(failures=1)).value == pytest.approx(0.75)
  assert "judge unavailable" in scored("a", _Reader(failures=9)).reason


async def _no_time(seconds):
  """Does not wait."""


def test_the_config_is_valid_and_a_run_takes_the_scorer_by_flags():
  load_experiment(pathlib.Path(__file__).parents[3] / "configs/math_shepherd_steps.py").validate()
  experiment = Experiment()
  way = ["reward", "settings", "steps"]
  set_field(experiment, ["reward", "parts"], "steps")
  set_field(experiment, way, "agentjax.recipes.math_shepherd:MathShepherdConfig")
  set_field(experiment, [*way, "judge", "base_url"], "http://a:8000/v1")
  set_field(experiment, [*way, "judge", "model"], "one")
  assert build_rewards(experiment.reward).part_names == ("steps",)


@pytest.mark.slow
def test_a_reward_model_learns_the_labels_and_picks_the_right_solution(policy, tmp_path):
  """Slips stand anywhere; what has been learnt holds for solutions that were not labelled."""
  random = np.random.default_rng(0)

  def solution(slip):
    steps = list(random.choice(list("abcd"), 3))
    if slip:
      steps[random.integers(3)] = "w"
    return [*steps, "5"]

  labelled = [(i % 4, solution(i % 2)) for i in range(80)]
  _label(policy, _write(tmp_path / "solutions.jsonl", labelled), tmp_path / "steps")
  data = DataConfig(
    path=str(tmp_path / "steps"), source=JsonlConfig(messages_field="messages", test_file="")
  )
  model = ModelConfig(
    d_model=32, pattern="*-*-", num_heads=2, num_kv_heads=2, head_dim=16, d_mlp=64
  )
  stage = SupervisedStage(
    steps=150,
    tasks_per_step=32,
    row_length=128,
    microbatch_rows=8,
    optimizer=OptimizerConfig(learning_rate=3e-3),
  )
  experiment = _experiment(data=data, model=model, supervised=stage, reward=RewardConfig())
  experiment.evaluation.tasks = 0
  assert Run(experiment, tmp_path / "run", console=quiet()).train().finished
  # Of two solutions of each task the second has a slip.
  pairs = [(task, solution(slip)) for task in range(4) for slip in (False, True)]
  output = tmp_path / "scores.jsonl"
  counted = score_solutions(
    _experiment(),
    output,
    checkpoint=str(tmp_path / "run"),
    solutions=_write(tmp_path / "others.jsonl", pairs),
    extensions=_extensions(),
  )
  assert counted == (8, 4)
  rows = _rows(output)
  assert [row["best"] for row in rows] == [True, False] * 4
  assert min(r["score"] for r in rows[::2]) > 0.8 > 0.2 > max(r["score"] for r in rows[1::2])
