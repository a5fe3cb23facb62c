"""A signal of your own: a column, a memory on the host, settings; nothing of the core knows it."""

import dataclasses
import importlib
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import agentjax
from agentjax.config import ConfigError, check
from agentjax.objectives import AdvantageConfig
from agentjax.objectives.advantage_function import AdvantageChoice
from agentjax.objectives.columns import TOKEN_REWARDS
from agentjax.objectives.objective import policy_objective
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.signal import Result, Signal, SignalConfig, order_signals
from agentjax.training import Experiment
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner, NoEpisodesError
from agentjax.training.metrics import read_metrics
from agentjax.trajectory import columns as table
from agentjax.trajectory.columns import Column, ColumnError
from agentjax.trajectory.record import Reward
from tests.training.stages import (
  extensions,
  fingerprints,
  run,
  staged_experiment,
  train_until_killed,
)
from tests.training.teachers import base, episodes

SURPRISE = Column("surprise", "float32", "Nats beyond the mean of all steps before.")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
  monkeypatch.setattr(table, "_REGISTRY", dict(table._REGISTRY))


@dataclasses.dataclass(unsafe_hash=True)
class SurpriseConfig(SignalConfig):
  """``by`` is added to the first reward of every step, ``by`` more each time."""

  by: float = 0.0

  def check_model(self, model, path):
    check(model.d_mlp < 999, f"{path}.by", self.by, "another model")

  def build(self, tools):
    assert tools.pack is not None and len(tools.token_bytes) == tools.model.vocab_size
    return Surprise(self.by)


@dataclasses.dataclass(unsafe_hash=True)
class DroppingConfig(SignalConfig):
  def build(self, tools):
    return Dropping()


class Dropping(Signal):
  """Leaves out every episode."""

  name = "dropping"

  def observe(self, context, episodes):
    return [], {}


def test_a_step_that_signals_left_nothing_of_says_so(tmp_path):
  experiment = base(signals=(DroppingConfig(),))
  parts = build_parts(resolve(experiment), tmp_path, extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  state = learner.begin_rl(learner.initial_state("rl"))
  with pytest.raises(NoEpisodesError, match="step 1: its signals left out all 8 episodes"):
    learner.rl_step(state, episodes(), 1)


class Surprise(Signal):
  """Remembers the mean log-prob of every step; a token is told how far it is from it."""

  name = "surprise"
  adds = (SURPRISE,)

  def __init__(self, by):
    self.by, self.means = by, []

  def observe(self, context, episodes):
    first, *others = episodes
    raised = Reward(first.reward.value + self.by * (1 + len(self.means)))
    metrics = {"surprise/steps": float(len(self.means))}
    return [dataclasses.replace(first, reward=raised), *others], metrics

  def __call__(self, context, networks, batch):
    mean = float(np.mean(self.means)) if self.means else 0.0
    drawn = context.packed.weights > 0
    self.means.append(float(context.packed.behaviour_log_probs[drawn].mean()))
    found = jnp.where(batch.weights > 0, mean - batch.behaviour_log_probs, 0)
    return Result({"surprise": found}, metrics={"surprise/mean": mean})

  def get_state(self):
    return self.means

  def set_state(self, state):
    self.means = list(state)


def surprised_loss(inputs):
  """A surrogate that learns more from tokens that were less expected."""
  ratio = jnp.exp(inputs.log_probs - inputs.old_log_probs)
  surprise = inputs.column("surprise")
  return -ratio * inputs.advantages * (1 + surprise), {"surprise": surprise}


def _experiment(**own):
  experiment = staged_experiment(ScheduleConfig())
  experiment.rl.signals = (SurpriseConfig(**own),)
  return experiment


def _run(directory, function="tests.signals.test_own_signal:surprised_loss"):
  rl = dataclasses.replace(_experiment().rl, steps=3)
  rl.objective.function = function
  return run(directory, ScheduleConfig(), rl=rl, checkpoint=CheckpointConfig(every=2))


def test_a_choice_of_signals_survives_the_saved_config_and_is_asked_about_the_model():
  experiment = _experiment(by=2.0)
  assert Experiment.from_dict(experiment.to_dict()).rl.signals == (SurpriseConfig(2.0),)
  experiment.validate()
  experiment.model.d_mlp = 999
  with pytest.raises(ConfigError, match=r"config\.rl\.signals\[0\]\.by=2\.0"):
    experiment.validate()


def test_a_column_reaches_the_loss_and_a_killed_run_has_the_memory_again(tmp_path, monkeypatch):
  assert _run(tmp_path / "straight").train().finished
  rows = read_metrics(tmp_path / "straight" / "metrics.jsonl")
  assert [row["surprise/steps"] for row in rows] == [0.0, 1.0, 2.0]
  # The first step's mean is not known to it; afterwards tokens are compared with it.
  assert rows[0]["policy/surprise"] > 4 > abs(rows[2]["policy/surprise"])
  train_until_killed(_run(tmp_path / "cut"), 3)
  assert _run(tmp_path / "cut").train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  assert _run(tmp_path / "cut").replay(3).identical
  monkeypatch.setattr(Surprise, "set_state", lambda signal, state: None)
  assert not _run(tmp_path / "cut").replay(3).identical


class Named(Signal):
  """A signal of columns alone."""

  def __init__(self, name, needs=(), adds=()):
    self.name, self.needs = name, needs
    self.adds = tuple(Column(column, "float32", "Of a test.") for column in adds)


def test_signals_run_after_those_whose_columns_they_need():
  a, b, c = Named("a", ("y",), ("x",)), Named("b", ("z",), ("y",)), Named("c", (), ("z",))
  assert [signal.name for signal in order_signals([a, b, c])] == ["c", "b", "a"]
  # What nobody adds was recorded or has its fill.
  alone = Named("alone", ("teacher_log_probs",))
  assert order_signals([alone, c]) == (alone, c)


def test_signals_that_do_not_fit_each_other_are_refused_by_name():
  with pytest.raises(ConfigError, match="'a', 'b' need columns of each other"):
    order_signals([Named("a", ("y",), ("x",)), Named("b", ("x",), ("y",))])
  with pytest.raises(ConfigError, match="'a' and 'b' both add the column 'x'"):
    order_signals([Named("a", (), ("x",)), Named("b", (), ("x",))])
  with pytest.raises(ConfigError, match="two signals are called 'a'"):
    order_signals([Named("a"), Named("a")])
  with pytest.raises(ColumnError, match="no column 'nowhere'"):
    order_signals([Named("a", ("nowhere",))])


def test_signals_that_store_episodes_say_that_they_keep_them():
  """Else several processes would have references to columns that are gone."""
  folder, found = pathlib.Path(agentjax.__file__).parent, []
  for file in folder.rglob("*.py"):
    if "to_texts(" in (text := file.read_text()) and "(Signal)" in text:
      name = ".".join(("agentjax", *file.relative_to(folder).with_suffix("").parts))
      values = vars(importlib.import_module(name)).values()
      found += [v for v in values if isinstance(v, type) and v.__module__ == name]
  signals = [one for one in found if issubclass(one, Signal)]
  assert len(signals) >= 5 and [s for s in signals if not s.keeps_episodes] == []


@dataclasses.dataclass(unsafe_hash=True)
class PayingConfig(SignalConfig):
  """Pays every token; has no place where an episode is paid at its end alone."""

  def check_run(self, experiment, path):
    credit = experiment.rl.objective.advantage
    check(credit.credit != "broadcast" or credit.function, path, self, "none with 'broadcast'")

  def build(self, tools):
    return Paying(tools.updates)


class Paying(Signal):
  name = "paying"
  adds = (TOKEN_REWARDS,)

  def __init__(self, updates):
    self.updates = updates

  def __call__(self, context, networks, batch):
    return Result({"token_rewards": 0.1 * batch.weights})


def paid_advantages(inputs):
  """Needs what tokens are paid."""
  return inputs.token_rewards * 2.0


def test_a_signal_that_pays_tokens_is_known_to_the_run():
  experiment = staged_experiment(ScheduleConfig())
  experiment.rl.signals, experiment.rl.minibatches = (PayingConfig(),), 2
  with pytest.raises(ConfigError, match=r"config\.rl\.signals\[0\]=.*'broadcast'"):
    experiment.validate()
  # What comes before the end is paid by the signal, so that this credit is no broadcast.
  to_go = AdvantageConfig(centre="none", scale="none", credit="reward_to_go")
  experiment.rl.objective.advantage = to_go
  experiment.validate()
  path = "config.rl.objective.advantage.function"
  own = AdvantageChoice.from_name("tests.signals.test_own_signal:paid_advantages", path)
  experiment.rl.objective.advantage = AdvantageConfig(function=own)
  experiment = resolve(experiment)
  parts = build_parts(experiment, None, extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))  # which traces it
  assert learner.signals["paying"].updates == experiment.rl.steps * 2
