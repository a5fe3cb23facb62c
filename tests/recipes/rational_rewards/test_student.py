"""PARROT's folder: made pair by pair, resumed, refused, and trained on."""

import dataclasses
import json
import pathlib

import pytest

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig, JudgeRefusedError
from agentjax.adapters.judge_model import JudgeModelConfig
from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.engine import SamplingConfig
from agentjax.files import write_atomically
from agentjax.recipes.rational_rewards import student
from agentjax.recipes.rational_rewards.parrot import ParrotConfig, Preference, read_preferences
from agentjax.recipes.rational_rewards.student import measure_judge, write_student_data
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.text import TokenizerConfig
from agentjax.training import Run, load_experiment
from agentjax.training.experiment import write_experiment
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Message
from tests.recipes.rational_rewards.scripted_critics import checker_reply, critique, teacher_reply
from tests.rewards.judging import Scripted
from tests.training.smoke import quiet
from tests.training.stages import staged_experiment
from tests.training.teachers import MODEL, save_policy

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_PARROT = ParrotConfig(aspects=("correctness", "clarity"))
_HTTP = JudgeModelConfig(http=EndpointConfig("http://localhost:1/v1", "big"))
_PAIRS = [
  Preference(i, (Message("user", f"Name a prime above {i}."),), f"It is {i}1.", f"It is {i}4, é.")
  for i in range(1, 6)
]


def _reply(messages, key):
  """Teacher and checker: pair 2 gets no critique, in pair 4 the grades contradict the label."""
  if "Which answer is better" in messages[-1].content:
    return checker_reply(messages, key)
  reply = teacher_reply(messages, key)
  if "above 2." in messages[-1].content:
    return "I prefer the first"
  if "above 4." in messages[-1].content:
    return critique(2, "right" if "right" in reply else "wrong")
  return reply


@pytest.fixture
def judge(monkeypatch):
  made = Scripted(_reply)
  monkeypatch.setattr(student, "open_judge", lambda config, pool, seed: (made, config.to_dict()))
  return made


def _write(folder, pairs=_PAIRS, **changes):
  settings = {"teacher": _HTTP, "checker": _HTTP, "parrot": _PARROT, "concurrency": 2} | changes
  return write_student_data(
    staged_experiment(ScheduleConfig()), folder, preferences=pairs, **settings
  )


def _rows(file):
  return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_folder_holds_what_passed_the_filter(judge, tmp_path):
  written = _write(tmp_path)
  assert (written.pairs, written.given_up, written.kept) == (5, 1, 3)
  assert (written.by_words, written.by_grades, written.conversations) == (4, 3, 6)
  assert [row["id"] for row in _rows(tmp_path / "critiques.jsonl")] == [1, 3, 4, 5]
  assert [row["by_grades"] for row in _rows(tmp_path / "checks.jsonl")] == [True, True, False, True]
  (lost,) = _rows(tmp_path / "given_up.jsonl")
  assert lost["id"] == 2 and "it has no grade" in lost["reason"]
  rows = _rows(tmp_path / "student/train.jsonl")
  assert [m["role"] for m in rows[0]["messages"]] == ["system", "user", "assistant"]
  assert "It is 14, é." in rows[1]["messages"][1]["content"]
  assert rows[1]["messages"][2]["content"] == critique(1, "wrong")
  assert not any("above 4." in row["messages"][1]["content"] for row in rows)


def test_it_goes_on_where_it_was_stopped(judge, tmp_path, monkeypatch):
  _write(tmp_path / "whole")
  whole = len(judge.asked)
  judge.asked.clear()
  judge.answer = lambda messages, key: (
    JudgeUnavailableError("down") if "above 5." in messages[-1].content else _reply(messages, key)
  )

  async def at_once(seconds):
    pass

  with monkeypatch.context() as patch:
    patch.setattr("agentjax.rewards.judges.asyncio.sleep", at_once)
    with pytest.raises(JudgeUnavailableError):
      _write(tmp_path / "parts", concurrency=1)
  before = len(judge.asked) - 3  # the question that failed three times
  judge.answer = _reply
  judge.asked.clear()
  written = _write(tmp_path / "parts")
  assert written.resumed == (3, 0) and before + len(judge.asked) == whole
  for name in ("critiques.jsonl", "checks.jsonl", "student/train.jsonl"):
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("where", ["People who compared", "Which answer is better"])
def test_a_refused_request_gives_up_its_pair_and_a_refusing_endpoint_stops(judge, tmp_path, where):
  def refuse(status):
    judge.answer = lambda messages, key: (
      JudgeRefusedError(f"answered {status}", status)
      if where in messages[-1].content and "above 5." in messages[-1].content
      else _reply(messages, key)
    )

  refuse(404)
  with pytest.raises(JudgeRefusedError, match=r"pair 5, \w+: answered 404"):
    _write(tmp_path)
  refuse(400)
  written = _write(tmp_path)
  assert (written.given_up, written.kept) == (2, 2)
  assert "answered 400" in _rows(tmp_path / "given_up.jsonl")[-1]["reason"]
  judge.asked.clear()
  assert _write(tmp_path).kept == 2 and not judge.asked


def test_pairs_with_half_an_emoji_go_on_too(judge, tmp_path):
  file = tmp_path / "pairs.jsonl"
  row = {"prompt": "Name a prime above 1.", "chosen": "It is 11 \ud83d", "rejected": "It is 14"}
  file.write_text(json.dumps(row) + "\n")
  for known in (0, 1):
    written = _write(tmp_path / "out", read_preferences(file))
    assert written.kept == 1 and written.resumed == (known, known)


def test_other_settings_and_other_pairs_are_refused(judge, tmp_path):
  _write(tmp_path)
  with pytest.raises(ConfigError, match="seed"):
    _write(tmp_path, parrot=dataclasses.replace(_PARROT, seed=1))
  changed = [dataclasses.replace(_PAIRS[0], chosen="It is 2."), *_PAIRS[1:]]
  with pytest.raises(ConfigError, match="pair 1 was another"):
    _write(tmp_path, changed)
  with pytest.raises(ConfigError, match=r"teacher\.path"):
    _write(tmp_path, teacher=JudgeModelConfig())


def test_a_folder_in_which_nothing_is_kept_says_so(judge, tmp_path):
  judge.answer = lambda messages, key: "hm"
  with pytest.raises(DataError, match="none of 5 pairs was kept; 5 were given up"):
    _write(tmp_path)
  assert not (tmp_path / "student").exists()


def test_a_judge_is_measured_with_an_interval(judge):
  def grades(messages, key):
    text = messages[-1].content
    return critique(3, "") if "é" not in text or "above 3." in text else critique(1, "")

  judge.answer = grades
  estimate, too_long = measure_judge(
    staged_experiment(ScheduleConfig()), preferences=_PAIRS, judge=_HTTP, parrot=_PARROT
  )
  assert estimate.mean == pytest.approx((4 + 0.5) / 5) and estimate.count == 5 and too_long == 0
  assert estimate.low < estimate.mean < estimate.high


def test_a_pair_that_an_endpoint_refuses_is_left_out_of_the_measure(judge):
  def measured(status):
    judge.answer = lambda messages, key: (
      JudgeRefusedError("no", status) if "above 2." in messages[-1].content else critique(3, "")
    )
    return measure_judge(
      staged_experiment(ScheduleConfig()), preferences=_PAIRS, judge=_HTTP, parrot=_PARROT
    )

  estimate, left_out = measured(413)
  assert (estimate.mean, estimate.count, left_out) == (0.5, 4, 1)
  with pytest.raises(JudgeRefusedError):
    measured(401)


def _on_disk(tmp_path):
  made = staged_experiment(ScheduleConfig())
  made.model = dataclasses.replace(MODEL)
  made.engine = dataclasses.replace(
    made.engine, slots=4, extend_buckets=(256,), extend_rows=(4,), warmup=False
  )
  made.engine.max_length = made.rollout.max_total_tokens = made.rl.row_length = 2048
  save_policy(tmp_path / "run", MODEL, 0)
  write_atomically(tmp_path / "run/config.json", write_experiment(made))
  return made, JudgeModelConfig(str(tmp_path / "run"), SamplingConfig(temperature=1.0), 8)


def test_a_policy_on_disk_is_a_judge(tmp_path):
  """One of random weights, which writes no grades: each pair counts one half."""
  experiment, judge = _on_disk(tmp_path)
  long = dataclasses.replace(_PAIRS[1], chosen="x" * 2000)
  estimate, too_long = measure_judge(
    experiment, preferences=[_PAIRS[0], long], judge=judge, parrot=_PARROT
  )
  assert (estimate.mean, estimate.count, too_long) == (0.5, 1, 1)


@pytest.mark.slow
def test_the_students_run_learns_the_critiques(judge, tmp_path):
  _write(tmp_path / "parrot")
  made = load_experiment(_CONFIGS / "rational_rewards_student.py")
  made.pretrained, made.data.path = None, str(tmp_path / "parrot/student")
  made.tokenizer, made.model = TokenizerConfig(), dataclasses.replace(MODEL)
  made.supervised.steps, made.supervised.tasks_per_step = 4, 6
  made.supervised.row_length, made.supervised.microbatch_rows = 2048, 2
  made.supervised.optimizer = dataclasses.replace(
    made.supervised.optimizer, learning_rate=1e-2, warmup_steps=0
  )
  assert Run(made, tmp_path / "run", console=quiet()).train().finished
  losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
  assert losses[-1] < losses[0]
