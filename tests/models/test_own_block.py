"""A block that a user registers: the example of docs/own_block.md, through all that runs blocks."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import EngineConfig, SlotEngine
from agentjax.models import blocks
from agentjax.models.huggingface import family_of
from agentjax.models.lora import LoraConfig, lora_specs
from agentjax.training import Run
from agentjax.training.checkpoint import latest_checkpoint, load_whole_policy
from agentjax.training.evaluation import evaluate_checkpoint
from tests.models import parity
from tests.models.rows import TINY
from tests.training.smoke import quiet, smoke_experiment

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own_block.md"


@pytest.fixture(autouse=True)
def leaky(monkeypatch):
  """The page's module, run; the tables are as before when the test ends."""
  for table in (blocks.KINDS, blocks.NAMES):
    for character in "~^":
      monkeypatch.delitem(table, character, raising=False)
  names: dict = {}
  (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  exec(compile(code, str(PAGE), "exec"), names)
  yield names
  for table in (blocks.KINDS, blocks.NAMES):
    for character in "~^":
      table.pop(character, None)


def own_config(pattern="~-*~"):
  config = dataclasses.replace(TINY, pattern=pattern)
  config.validate()
  return config


def kind_of(leaky, **functions):
  names = ("forward", "init_cache", "extend", "step")
  return models.residual_block(
    leaky["spec"], **{name: functions.get(name, leaky[name]) for name in names}
  )


def test_decoding_computes_what_training_computes():
  config = own_config()
  params = models.init(config, jax.random.key(1))
  token_ids = jax.random.randint(jax.random.key(2), (2, 37), 0, config.vocab_size)
  computed = parity.compute(params, config, token_ids)
  wanted = np.asarray(computed.logits)[:, parity.PREFILL - 1 :]
  np.testing.assert_allclose(computed.decode_logits, wanted, atol=2e-5)


@pytest.mark.slow
def test_packed_sequences_are_apart():
  config = own_config()
  params = models.init(config, jax.random.key(1))
  ids = jax.random.randint(jax.random.key(3), (1, 12), 0, config.vocab_size)
  segments = jnp.asarray([[1] * 5 + [2] * 7])
  positions = jnp.asarray([[*range(5), *range(7)]])
  packed = models.forward(params, config, ids, segments, positions).hidden[:, 5:]
  alone = models.forward(params, config, ids[:, 5:], segments[:, 5:], positions[:, 5:]).hidden
  np.testing.assert_allclose(packed, alone, atol=2e-5)


def test_slots_start_anew_fork_and_come_back(leaky):
  """With a state that starts at 1, which no clearing to zero would restore."""

  def init_cache(config, slots, length):
    return jnp.ones((slots, config.d_model), jnp.float32)

  models.register_block("^", kind_of(leaky, init_cache=init_cache), name="from one")
  config = own_config("^-^-")
  engine = SlotEngine(
    config,
    EngineConfig(
      slots=4,
      max_length=32,
      chunk_tokens=4,
      extend_buckets=(8,),
      extend_rows=(2,),
      block_tokens=8,
      warmup=False,
    ),
  )
  engine.publish(models.init(config, jax.random.key(1)), 0)
  prompt = np.arange(6, dtype=np.int32)

  def decoded(*slots):
    plan = engine.idle_plan()
    plan.budget[list(slots)] = 4
    plan.filters.temperature[:] = 1.0
    plan.key_data[:] = (5, 6)
    chunk = engine.decode(plan)
    return [chunk.behaviour_log_probs[slot] for slot in slots]

  engine.place(None, [0])
  engine.extend([(0, prompt)])
  parked = engine.read(0)
  (first,) = decoded(0)
  engine.place(None, [0])  # used again
  engine.extend([(0, prompt)])
  engine.place(parked, [1, 3])
  for other in decoded(0, 1, 3):
    np.testing.assert_array_equal(other, first)


def test_a_run_trains_saves_and_loads_again(tmp_path):
  experiment = smoke_experiment()
  experiment.model = dataclasses.replace(experiment.model, pattern="~-")
  for stage in (experiment.supervised, experiment.rl):
    stage.router_bias_rate = 0.0
  experiment.supervised.steps = experiment.rl.steps = 1
  report = Run(experiment, tmp_path, console=quiet()).train()
  assert report.finished
  assert evaluate_checkpoint(experiment, tmp_path).metrics()["greedy"] == report.after["greedy"]
  saved = load_whole_policy(latest_checkpoint(tmp_path))
  before = models.init(experiment.model, jax.random.key(experiment.seed))
  for first, last in zip(
    jax.tree.leaves(before.groups[0][0].mixer),
    jax.tree.leaves(saved.groups[0][0].mixer),
    strict=True,
  ):
    assert np.abs(first - last).max() > 0


def test_adapters_find_its_matrix_by_name():
  adapters = lora_specs(models.param_specs(own_config("~-")), LoraConfig(targets=("*.mixer.out",)))
  assert adapters.groups[0][0].mixer.out.a.shape == (1, TINY.d_model, 16)


@pytest.mark.parametrize("character", ["M", "x", "~", "", "ab", " ", "\n"])
def test_a_character_that_is_taken_or_none_is_refused_by_name(leaky, character):
  with pytest.raises(ConfigError, match="^character="):
    models.register_block(character, kind_of(leaky), name="another")


def test_the_same_block_may_be_registered_again(leaky):
  again = kind_of(leaky)
  models.register_block("~", again, name="leaky average")
  assert blocks.KINDS["~"] is again


def test_what_has_no_rule_for_it_says_so():
  config = own_config()
  for changes, field in (
    ({"exact_chunk": 4}, "exact_chunk"),
    ({"loop": models.LoopConfig(prelude=0, coda=2, mean_depth=2)}, "loop.prelude"),
    ({"mtp": models.MtpConfig(pattern="~")}, "mtp.pattern"),
    ({"pattern": "~?"}, "pattern"),
  ):
    with pytest.raises(ConfigError, match=rf"config\.{field}="):
      dataclasses.replace(config, **changes).validate()
  assert "~" in models.unverifiable(config)
  with pytest.raises(ConfigError, match="blocks ~"):
    family_of(dataclasses.replace(config, pattern="~*-"))
