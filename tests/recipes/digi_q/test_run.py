"""The stages after each other: transitions, a critic, actions to imitate, and a policy of them."""

import json
import pathlib

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.data.errors import DataError
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.recipes.digi_q import CriticConfig, ExtractionConfig, RecordConfig
from agentjax.recipes.digi_q.extracting import extract
from agentjax.recipes.digi_q.learning import learn_critic
from agentjax.recipes.digi_q.recording import record
from agentjax.tools import ToolsConfig
from agentjax.training import (
  Experiment,
  Extensions,
  OptimizerConfig,
  Run,
  SupervisedStage,
  load_experiment,
)
from agentjax.trajectory.record import Message, Task
from agentjax.trajectory.store import write_store
from tests.recipes.digi_q.episodes import IN_TWO, TASK, played
from tests.recipes.table_policy import TABLE_MODEL, save_table_policy
from tests.training.smoke import quiet

_TABLE = {"": "abcd", **dict.fromkeys("abcd")}  # one of four actions, evenly
_GOOD = {"room 1": "a", IN_TWO: "b"}
_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def _experiment(**changes):
  made = Experiment(
    name="rooms",
    model=TABLE_MODEL,
    engine=EngineConfig(
      slots=8, max_length=96, chunk_tokens=4, extend_buckets=(32,), extend_rows=(4,), warmup=False
    ),
    supervised=SupervisedStage(steps=1),
    tools=ToolsConfig(names=()),
  )
  made.rollout.max_tokens_per_turn, made.rollout.max_total_tokens = 4, 96
  for name, value in changes.items():
    setattr(made, name, value)
  return made


def _extensions():
  return Extensions(tasks=TaskSplits([TASK], ()))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  folder = tmp_path_factory.mktemp("policy")
  save_table_policy(folder, _TABLE, 0, _experiment())
  return str(folder)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
  """Episodes of the table: "a" leads from room 1 to room 2, where "b" pays 1; all else ends."""
  rng = np.random.default_rng(0)
  found = []
  for sample in range(400):
    first, second = rng.choice(list("abcd"), 2).tolist()
    turns, answers = ([first, second], [IN_TWO]) if first == "a" else ([first], [])
    found.append(played(turns, answers, float((first, second) == ("a", "b")), sample=sample))
  path = tmp_path_factory.mktemp("episodes") / "store"
  write_store(path, found)
  return str(path)


def _record(policy, episodes, output, **settings):
  return record(
    _experiment(),
    output,
    checkpoint=policy,
    trajectories=episodes,
    config=RecordConfig(**settings),
    extensions=_extensions(),
  )


def _critic(**changes):
  settings = {
    "width": 32,
    "hidden": 1,
    "steps": 600,
    "batch": 64,
    "gamma": 0.9,
    "loss": "mse",
    "layer": 0,
    "optimizer": OptimizerConfig(learning_rate=3e-3),
    "keep_every": 300,
    "forward_rows": 4,
  }
  return CriticConfig(**{**settings, **changes})


def _learn(policy, folder, output, **changes):
  return learn_critic(
    _experiment(), output, transitions=str(folder), backbone=policy, config=_critic(**changes)
  )


def _extract(policy, folder, critic, output, **settings):
  return extract(
    settings.pop("experiment", _experiment()),
    output,
    transitions=str(folder),
    critic=str(critic),
    backbone=settings.pop("backbone", policy),
    policy=policy,
    config=ExtractionConfig(**{"stored": 8, "used": 8, "states": 24, **settings}),
    extensions=_extensions(),
  )


def _rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def made(policy, episodes, tmp_path_factory):
  """Transitions and a critic."""
  folder = tmp_path_factory.mktemp("made")
  found = _record(policy, episodes, folder / "transitions", shown_turns=1)
  assert found.episodes == 400 and found.unwritable == 0 and not found.refused
  assert found.transitions == 400 + found.questions and found.changed == found.questions
  _learn(policy, folder / "transitions", folder / "critic")
  return folder


def test_the_best_of_the_candidates_is_imitated_in_both_rooms(policy, made, tmp_path):
  """The policy that drew them does each of four things evenly: plain imitation would, too."""
  found = _extract(policy, made / "transitions", made / "critic", tmp_path / "best")
  rows = _rows(tmp_path / "best" / "train.jsonl")
  assert found.states == 24 and found.imitated == len(rows) > 12
  assert {row["messages"][-2]["content"] for row in rows} == set(_GOOD)
  for row in rows:
    *context, room, action = row["messages"]
    assert action["content"] == _GOOD[room["content"]] and "weight" not in action
    assert all(m["weight"] == 0 for m in context if m["role"] == "assistant")
    assert row["advantage"] > 0.05
  drawn = [
    c["text"] for row in _rows(tmp_path / "best" / "candidates.jsonl") for c in row["candidates"]
  ]
  assert len(drawn) == 24 * 8 and set(drawn) == set("abcd")


def test_candidates_are_drawn_once_and_chosen_among_again(policy, made, tmp_path):
  output = tmp_path / "best"
  whole = _extract(policy, made / "transitions", made / "critic", output)
  before = (output / "candidates.jsonl").read_bytes()
  # Another threshold and number: no new draws.
  again = _extract(policy, made / "transitions", made / "critic", output, used=2, threshold=0.1)
  assert again.kept == 24 and (output / "candidates.jsonl").read_bytes() == before
  assert (
    again.imitated < whole.imitated and json.loads((output / "report.json").read_text())["kept"]
  )
  with pytest.raises(ConfigError, match=r"above --extraction.threshold=5; the largest is 0\.\d"):
    _extract(policy, made / "transitions", made / "critic", output, threshold=5.0)
  # A call that was stopped goes on to the same rows.
  other = tmp_path / "stopped"
  other.mkdir()
  (other / "settings.json").write_bytes((output / "settings.json").read_bytes())
  lines = before.splitlines(keepends=True)
  (other / "candidates.jsonl").write_bytes(lines[3] + lines[0] + lines[1][:9])
  assert _extract(policy, made / "transitions", made / "critic", other).kept == 2
  assert (other / "candidates.jsonl").read_bytes() == before
  with pytest.raises(ConfigError, match="stored"):
    _extract(policy, made / "transitions", made / "critic", other, stored=9)


def test_a_critic_goes_on_where_it_was_stopped(policy, made, tmp_path):
  stopped = tmp_path / "critic"
  _learn(policy, made / "transitions", stopped, steps=600)
  state = (stopped / "critic").read_bytes()
  assert state == (made / "critic" / "critic").read_bytes()
  rows = _rows(stopped / "metrics.jsonl")
  assert [row["updates"] for row in rows] == [300, 600]
  with pytest.raises(ConfigError, match="critic.gamma"):
    _learn(policy, made / "transitions", stopped, gamma=0.5)


def test_parts_that_do_not_fit_are_refused(policy, made, episodes, tmp_path):
  other = tmp_path / "other"
  save_table_policy(other, _TABLE, 1, _experiment())
  with pytest.raises(
    ConfigError, match="--backbone=.* is another one; allowed: that of the critic"
  ):
    _extract(policy, made / "transitions", made / "critic", tmp_path / "x", backbone=str(other))
  with pytest.raises(ConfigError, match="holds no transitions; allowed: the output of"):
    _learn(policy, tmp_path, tmp_path / "x")
  with pytest.raises(ConfigError, match="holds no critic; allowed: the output of"):
    _extract(policy, made / "transitions", tmp_path, tmp_path / "x")
  with pytest.raises(ConfigError, match=r"critic\.layer=1; allowed: 0 to 0"):
    _learn(policy, made / "transitions", tmp_path / "x", layer=1)


def test_rewards_beyond_one_need_squared_errors(policy, tmp_path):
  write_store(tmp_path / "store", [played(["a"], [], 2.0)])
  _record(policy, str(tmp_path / "store"), tmp_path / "transitions")
  with pytest.raises(ConfigError, match=r"rewards go from 2 to 2 .* allowed: 0 to 1, or --critic"):
    _learn(policy, tmp_path / "transitions", tmp_path / "critic", loss="cross_entropy")


def test_episodes_of_other_tasks_are_refused(policy, tmp_path):
  other = Task(5, (Message("user", "room 9"),), "", "rooms")
  write_store(tmp_path / "store", [played(["a"], [], 1.0, task=other)])
  with pytest.raises(DataError, match="episode 0 is of task 5"):
    _record(policy, str(tmp_path / "store"), tmp_path / "transitions")


def test_the_configs_are_valid_and_share_a_model():
  lake = load_experiment(_CONFIGS / "digi_q_frozen_lake.py")
  supervised = load_experiment(_CONFIGS / "digi_q_supervised.py")
  supervised.data.path = "runs/best"
  lake.validate()
  supervised.validate()
  assert lake.model == supervised.model and lake.tokenizer == supervised.tokenizer


@pytest.mark.slow
def test_the_whole_way_from_a_run_to_a_policy_in_a_small_world(tmp_path):
  """A run logs its episodes in a game; backbone, critic and candidates follow; a policy learns."""
  pytest.importorskip("gymnasium")
  tiny = ModelConfig(d_model=32, pattern="*-*-", num_heads=2, num_kv_heads=2, head_dim=16, d_mlp=64)

  def supervised(folder, name):
    stage = load_experiment(_CONFIGS / "digi_q_supervised.py")
    stage.model, stage.data.path = tiny, str(folder)
    stage.supervised.steps, stage.supervised.tasks_per_step = 2, 1
    stage.start_from = str(tmp_path / "logged")
    assert Run(stage, tmp_path / name, console=quiet()).train().finished
    return str(tmp_path / name)

  def again():
    one = load_experiment(_CONFIGS / "digi_q_frozen_lake.py")
    one.model, one.data.train_size, one.data.test_size = tiny, 16, 4
    one.engine.slots = 16
    one.supervised.steps, one.supervised.tasks_per_step = 20, 16
    one.rl.steps, one.rl.tasks_per_step = 1, 8
    one.evaluation.tasks = 0
    return one

  assert Run(again(), tmp_path / "logged", console=quiet()).train().finished
  run = str(tmp_path / "logged")
  config = RecordConfig(compare=r"(?m)(^[PXOG_]+$\n?)+", shown_turns=1)
  transitions = tmp_path / "transitions"
  found = record(again(), transitions, checkpoint=run, trajectories=run, config=config)
  assert found.episodes == 32 and 0 < found.changed < found.questions
  backbone = supervised(transitions / "representation", "backbone")
  learn_critic(
    again(),
    tmp_path / "critic",
    transitions=str(transitions),
    backbone=backbone,
    config=CriticConfig(width=16, steps=20, batch=16),
  )
  best = extract(
    again(),
    tmp_path / "best",
    transitions=str(transitions),
    critic=str(tmp_path / "critic"),
    backbone=backbone,
    policy=run,
    # Heads of so few updates know nothing: all that can be read is imitated.
    config=ExtractionConfig(stored=4, used=4, threshold=-1.0, states=16),
  )
  assert best.states > 0 and best.imitated > 0
  supervised(tmp_path / "best", "policy")
