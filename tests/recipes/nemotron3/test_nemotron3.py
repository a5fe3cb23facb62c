"""Nemotron 3 Super: its advantages, messages with faults, sequences left out, its stages."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.models import MtpConfig
from agentjax.models.spec import ParamSpec
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, prepare
from agentjax.recipes.nemotron3 import (
  PUBLISHED,
  LeaveOneOut,
  MessageFaultsConfig,
  MessageTerm,
  change,
  heal_prediction_heads,
)
from agentjax.recipes.nemotron3.credit import MessageFaults, leave_one_out, misplaced
from agentjax.signals.signal import StepContext
from agentjax.text import TokenizerConfig
from agentjax.text.build import build_chat
from agentjax.tools.calculator import CalculatorTool
from agentjax.training import HeldOutConfig, OptimizerConfig, Run, load_experiment
from agentjax.training.checkpoint import latest_checkpoint, load_whole_policy
from agentjax.training.experiment import read_experiment, resolve, write_experiment
from agentjax.training.optimizer import build_optimizer
from agentjax.training.stage_graph import begun_from, load_stages
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Reward, ToolCall
from tests.training.smoke import quiet, smoke_experiment

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def advantages_of(rewards, valid=None, groups=None):
  rewards = jnp.asarray(rewards, jnp.float32)
  valid = jnp.ones(len(rewards), bool) if valid is None else jnp.asarray(valid)
  groups = jnp.zeros(len(rewards), int) if groups is None else jnp.asarray(groups)
  return np.asarray(leave_one_out(rewards, valid, groups))


def test_advantage_is_that_beside_the_others():
  # Beside 1: the others 0, 0, 1 have mean 1/3 and deviation .57735.
  np.testing.assert_allclose(
    advantages_of([1, 0, 0, 1]), [1.154699, -1.154699, -1.154699, 1.154699], rtol=1e-5
  )
  # The others of the only success are equal: nothing is divided.
  np.testing.assert_allclose(
    advantages_of([1, 0, 0, 0]), [1, -0.57735, -0.57735, -0.57735], rtol=1e-5
  )
  np.testing.assert_allclose(advantages_of([2, 5]), [-3, 3], rtol=1e-6)
  np.testing.assert_array_equal(advantages_of([0.7, 0.7, 0.7]), [0, 0, 0])
  np.testing.assert_array_equal(advantages_of([3]), [0])


def test_equal_rewards_of_the_others_are_equal_however_they_are_rounded():
  """A variance from squares would leave a rest of the last one's others and divide by it."""
  for reward in (0.35, 0.1, 1e3 + 0.1, 1e-4):
    found = advantages_of([reward] * 7 + [0.0])
    np.testing.assert_allclose(found[-1], -reward, rtol=1e-4)


@settings(deadline=None, max_examples=30)
@given(
  st.lists(st.integers(-4, 4), min_size=1, max_size=8),
  st.lists(st.booleans(), min_size=8, max_size=8),
  st.integers(0, 2**31),
)
def test_groups_and_members_that_are_not_valid_do_not_touch_each_other(rewards, valid, seed):
  valid = np.array(valid[: len(rewards)])
  alone = advantages_of(np.array(rewards)[valid]) if valid.any() else np.zeros(0)
  np.testing.assert_allclose(advantages_of(rewards, valid)[valid], alone, atol=1e-4)
  other = np.random.default_rng(seed).normal(size=3)
  both = advantages_of([*rewards, *other], [*valid, True, True, True], [0] * len(rewards) + [1] * 3)
  np.testing.assert_allclose(both[: len(rewards)][valid], alone, atol=1e-4)


@pytest.mark.parametrize(
  "text, fault",
  [
    ("an answer", False),
    ("<think>a</think>an answer", False),
    ("a</think>an answer", False),  # the prompt opened it
    ("<think>cut off", False),
    ("<think>a<think>b</think>c", True),
    ("<think>a</think>b</think>c", True),
    ("a <think>b</think>c", True),
    ("a</think>b<think>c", True),
  ],
)
def test_tags_of_thinking_that_stand_where_they_must_not(text, fault):
  assert misplaced(text, "<think>", "</think>") is fault


@pytest.fixture(scope="module")
def chat():
  experiment = load_experiment(_CONFIGS / "smoke.py")
  return build_chat(experiment.chat, TokenizerConfig(kind="byte"))


def episode(chat, turns, sample=0, reward=1.0):
  builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
  builder.append("user", [1, 2])
  for text in turns:
    ids = chat.tokenizer.encode(text) if isinstance(text, str) else text
    builder.append_sampled(ids, [-1.0] * len(ids), [0.5] * len(ids), 0)
    builder.append("tool", [5])
  return builder.build(reward=Reward(reward))


def observed(chat, episodes, **settings):
  tool = CalculatorTool
  signal = MessageFaults(MessageFaultsConfig(**settings), chat, [tool])
  return signal.observe(StepContext(1, None), episodes)


def test_a_call_that_cannot_be_read_and_misplaced_thinking_are_found_by_turn(chat):
  right = chat.assistant(Message("assistant", "so", (ToolCall("calculator", {"expression": "1"}),)))
  broken = _broken(chat, right)
  episodes, metrics = observed(
    chat, [episode(chat, [right, broken, "a<think>b</think>"])], thinking_advantage=-3.0
  )
  drawn = [s for s in episodes[0].segments if s.sampled.any()]
  assert [float(s.columns["message_advantage"]) for s in drawn] == [0.0, -5.0, -3.0]
  assert metrics == {"message/bad_calls": 1 / 3, "message/bad_thinking": 1 / 3}


def _broken(chat, right):
  """The first beginning of a call's turn that has a call which cannot be read."""
  tools = [CalculatorTool]
  for end in range(1, len(right)):
    if any(call.error for call in chat.parse(right[:end], tools).calls):
      return right[:end]
  raise AssertionError("no beginning of the turn is a broken call")


def test_faults_stand_in_the_place_of_the_episodes_advantage(chat):
  right = chat.assistant(Message("assistant", "so", (ToolCall("calculator", {"expression": "1"}),)))
  broken = _broken(chat, right)
  episodes, _ = observed(
    chat, [episode(chat, [right, broken], 0, 1.0), episode(chat, [right], 1, 0.0)]
  )
  batch = pack(to_sequences(episodes), row_length=512, pad_id=0)
  credit = AdvantageConfig(function=LeaveOneOut(), clip=50.0, terms=(MessageTerm(),))
  prepared, _ = prepare(batch, ObjectiveConfig(credit))
  found, ids = np.asarray(prepared.advantages), np.asarray(batch.segment_ids)
  weighted = np.asarray(batch.weights) > 0
  good, bad = (found[weighted & (ids == i + 1)] for i in range(2))
  np.testing.assert_array_equal(good, [1.0] * len(right) + [-5.0] * len(broken))
  np.testing.assert_array_equal(bad, [-1.0] * len(right))


@pytest.mark.parametrize("stage", list(PUBLISHED))
def test_stages_are_settings_that_a_run_takes_and_keeps(stage):
  experiment = load_experiment(_CONFIGS / "quickstart.py")
  experiment.model.mtp = MtpConfig(depths=2)
  found = resolve(change(experiment, stage, sizes=False))
  assert resolve(read_experiment(write_experiment(found), "x")) == found
  credit, loss = found.rl.objective.advantage, found.rl.objective.policy_loss
  assert (loss.clip_low, loss.clip_high, loss.mismatch.weight_cap) == (0.2, 0.28, 5.0)
  assert loss.mismatch.filter_high == 2.0 and found.model.frozen_router
  assert credit.clip == (50.0 if stage in ("rlvr", "rlhf") else 100.0)
  assert ("incomplete" in found.rl.weights.rules) == (stage in ("pivot", "swe"))
  assert loss.kl_coefficient == (1e-4 if stage == "rlhf" else 0)


def test_published_sizes():
  experiment = change(load_experiment(_CONFIGS / "quickstart.py"), "swe", sizes=True)
  found = resolve(experiment)
  assert (found.rl.tasks_per_step, found.rollout.group_size) == (16, 32)
  assert found.rl.row_length == found.engine.max_length == 196_608
  assert found.rl.optimizer.learning_rate == 1e-6 and found.rl.schedule.bound == 1
  with pytest.raises(ConfigError, match="stage='sft'; allowed: rlvr, pivot, swe, rlhf"):
    change(experiment, "sft")


def test_term_without_its_signal_is_refused():
  experiment = change(smoke_experiment(), "rlvr")
  experiment.rl.signals = ()
  with pytest.raises(ConfigError, match="MessageFaultsConfig among them"):
    resolve(experiment)


def test_heads_cannot_be_healed_where_there_are_none():
  with pytest.raises(ConfigError, match=r"config\.model\.mtp=None"):
    heal_prediction_heads(smoke_experiment())


def test_healing_does_not_let_the_rest_decay():
  """A decay needs no gradient: it would move all that is to stay as it is."""
  experiment = smoke_experiment()
  experiment.model.mtp, experiment.rl.optimizer = MtpConfig(), OptimizerConfig(weight_decay=0.1)
  healed = resolve(heal_prediction_heads(experiment))
  specs = {"backbone": ParamSpec((2, 2), (None, None))}
  optimizer = build_optimizer(healed.rl.optimizer, 1, specs)
  params, none = {"backbone": jnp.ones((2, 2))}, {"backbone": jnp.zeros((2, 2))}
  changes, _ = optimizer.update(none, optimizer.init(params), params)
  np.testing.assert_array_equal(changes["backbone"], 0)


def test_graph_of_the_config():
  names = [stage.name for stage in load_stages(_CONFIGS / "stages" / "nemotron3.py")]
  assert names == ["warm", "rlvr", "pivots", "pivot", "swe", "rlhf", "healing"]


@pytest.mark.slow
def test_a_run_of_a_stage_then_healing_moves_the_heads_alone(tmp_path):
  experiment = smoke_experiment(evaluation=HeldOutConfig(tasks=0))
  experiment.model.mtp = MtpConfig(depths=2, pattern="*-")
  first = change(experiment, "rlvr")
  first.rl.steps = 1
  Run(first, tmp_path / "rlvr", console=quiet()).train()
  second = begun_from(smoke_experiment(evaluation=HeldOutConfig(tasks=0)), tmp_path / "rlvr")
  second.supervised.steps, second.rl.steps = 0, 2
  Run(heal_prediction_heads(second), tmp_path / "healing", console=quiet()).train()
  before, after = (
    load_whole_policy(latest_checkpoint(tmp_path / name)) for name in ("rlvr", "healing")
  )

  def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)

  assert not same(before.mtp, after.mtp)
  assert same(dataclasses.replace(before, mtp=None), dataclasses.replace(after, mtp=None))
