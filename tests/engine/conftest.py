"""One tiny hybrid policy and one set of sizes, so that all tests share the compiled programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SlotEngine
from agentjax.engine.lane import Results, Running
from agentjax.engine.pace import Pace


def text(token_ids: list[int]) -> str:
  """One character a token."""
  return "".join(chr(ord("0") + i) for i in token_ids)


def sizes(**changes) -> EngineConfig:
  """Four slots a lane in all tests: results are bit for bit equal where lanes are equal."""
  return EngineConfig(
    **{
      "slots": 4,
      "max_length": 64,
      "chunk_tokens": 8,
      "extend_buckets": (4, 16),
      "extend_rows": (4, 2),
      "block_tokens": 8,
      "warmup": False,
      **changes,
    }
  )


@contextlib.contextmanager
def dispatched(*, ahead: bool) -> Iterator[None]:
  """Whatever it costs, cycles are dispatched ahead wherever they may be, or never.

  Results come late, as those of a larger model do.
  """
  wait = Running.wait

  def late(running: Running) -> Results:
    time.sleep(0.01)
    return wait(running)

  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(Pace, "ahead", ahead))
    stack.enter_context(mock.patch.object(Pace, "hold_back", lambda *_: 0.0))
    if ahead:
      stack.enter_context(mock.patch.object(Running, "wait", late))
    yield


@pytest.fixture(scope="session")
def model_config() -> models.ModelConfig:
  return models.ModelConfig(
    vocab_size=48,
    d_model=32,
    pattern="M*E-",
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rope_theta=100.0,
    d_mlp=32,
    mamba_heads=2,
    mamba_head_dim=16,
    mamba_state=8,
    chunk_size=8,
    num_experts=4,
    d_expert=16,
    d_shared_expert=16,
  )


@pytest.fixture(scope="session")
def params(model_config: models.ModelConfig) -> models.Params:
  return models.init(model_config, jax.random.key(0))


@pytest.fixture(scope="session")
def other_params(model_config: models.ModelConfig) -> models.Params:
  return models.init(model_config, jax.random.key(1))


@pytest.fixture
def make_engine(
  model_config: models.ModelConfig, params: models.Params
) -> Iterator[Callable[..., Engine]]:
  """Engines with weights of version 0; keywords change the sizes."""
  engines = []

  def make(**changes) -> Engine:
    engine = Engine(model_config, sizes(**changes), decode=text, devices=jax.local_devices()[:1])
    engine.publish(params, 0)
    engines.append(engine)
    return engine

  yield make
  for engine in engines:
    engine.close()


@pytest.fixture
def slot_engine(model_config: models.ModelConfig, params: models.Params) -> SlotEngine:
  """Four slots with weights of version 0."""
  engine = SlotEngine(model_config, sizes())
  engine.publish(params, 0)
  return engine
