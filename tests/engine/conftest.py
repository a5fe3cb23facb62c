"""One tiny hybrid policy and one set of sizes, so that all tests share the compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SlotEngine


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
