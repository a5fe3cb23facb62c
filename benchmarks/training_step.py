"""Speed of one update and one scoring pass of the quickstart's policy on this machine.

  python benchmarks/training_step.py [--repeats=5] [--rows=32] [--row_length=256] [--lora_rank=16]

Prints wall and CPU seconds (machines are shared), tokens a second, and the ratio of an update to a
scoring pass: 3 would be the count of matrix products, what is above it is overhead. Then the update
of adapters, beside the weights as a run does it and added in for comparison, with the temporary
memory of each program, and bytes and seconds of a first and a second publication to an engine.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from unittest import mock

import jax
import numpy as np
from absl import app, flags

from agentjax.engine import Engine, EngineConfig
from agentjax.models import LoraConfig, ModelConfig, Params
from agentjax.models.spec import count, init_params
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.sharding import make_mesh, split_rows
from agentjax.training import load_experiment
from agentjax.training import update as update_module
from agentjax.training.optimizer import build_optimizer
from agentjax.training.state import (
  StateSpec,
  Weights,
  full_policy,
  merged_policy,
  network_specs,
)
from agentjax.training.update import (
  UpdateBatch,
  UpdateSettings,
  make_score,
  make_update,
  used_micro_batches,
)
from agentjax.trajectory.packing import PackedSequence, pack

_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each function.")
_ROWS = flags.DEFINE_integer("rows", 32, "Rows of the batch.")
_ROW_LENGTH = flags.DEFINE_integer("row_length", 256, "Tokens a row.")
_LORA_RANK = flags.DEFINE_integer("lora_rank", 16, "Rank of the adapters.")
_CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"


def _batch(vocab_size: int):
  """Rows filled by four sequences each, half of whose tokens are weighted."""
  rng = np.random.default_rng(0)
  length = _ROW_LENGTH.value // 4
  sequences = [
    PackedSequence(
      name=str(i),
      token_ids=rng.integers(8, vocab_size, length).astype(np.int32),
      weights=(rng.random(length) < 0.5).astype(np.float32),
      behaviour_log_probs=-rng.random(length).astype(np.float32),
      entropies=rng.random(length).astype(np.float32),
      versions=np.zeros(length, np.int32),
      turns=np.zeros(length, np.int32),
      reward=float(rng.random() < 0.5),
      group=i // 8,
    )
    for i in range(_ROWS.value * 4)
  ]
  return pack(sequences, row_length=_ROW_LENGTH.value, pad_id=0, rows=_ROWS.value)


def _time(name: str, tokens: int, call) -> float:
  started = time.perf_counter()
  jax.block_until_ready(call())
  first = time.perf_counter() - started
  walls, cpus = [], []
  for _ in range(_REPEATS.value):
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
  print(
    f"{name:8s} first {first:6.2f} s  best {min(walls):.3f} s  "
    f"median {statistics.median(walls):.3f} s  CPU {statistics.median(cpus):.3f} s  "
    f"{tokens / min(walls):,.0f} tokens/s"
  )
  return statistics.median(cpus)


def _update(name: str, experiment, lora, micro, used: int, tokens: int):
  """CPU seconds of an update, and the state after it."""
  config = experiment.model
  optimizer = build_optimizer(
    experiment.rl.optimizer, 1000, network_specs(config, critic=False, lora=lora)
  )
  mesh = make_mesh(experiment.mesh)
  spec = StateSpec(config, optimizer, mesh, lora=lora)
  state = spec.create(jax.random.key(0))
  objective = policy_objective(experiment.rl.objective)
  update = make_update(config, optimizer, objective, UpdateSettings(lora=lora), spec.placed)
  memory = update.lower(state, micro, used).compile().memory_analysis()
  held = [state]

  def run():
    held[0], metrics, _ = update(held[0], micro, used)
    return metrics

  seconds = _time(name, tokens, run)
  print(f"{name:8s} temporary memory {memory.temp_size_in_bytes / 2**20:.1f} MiB")
  return seconds, held[0]


def _publish(config: ModelConfig, policy: Params) -> None:
  engine = Engine(config, EngineConfig(slots=4, warmup=False), devices=jax.local_devices()[:1])
  for version in range(3):
    before = dataclasses.replace(engine.stats)
    engine.publish(policy, version)
    print(
      f"publication {version}: {engine.stats.published_bytes - before.published_bytes:,} bytes in "
      f"{engine.stats.publish_seconds - before.publish_seconds:.4f} s"
    )
  engine.close()


def main(argv: list[str]) -> None:
  del argv
  experiment = load_experiment(_CONFIG)
  config, rows = experiment.model, experiment.rl.microbatch_rows
  specs = network_specs(config, critic=False)
  batch = _batch(config.vocab_size)
  prepared, _ = prepare(batch, experiment.rl.objective)
  micro = split_rows(UpdateBatch(batch.token_ids, batch.positions, prepared), rows)
  used = used_micro_batches(batch.segment_ids, rows)
  tokens = int((batch.segment_ids != 0).sum())
  print(
    f"{count(specs):,} parameters, pattern {config.pattern}, {tokens:,} tokens, "
    f"jax {jax.__version__} on {jax.default_backend()}"
  )
  score = make_score(config, temperature=1.0)
  weights = Weights(init_params(specs.policy, jax.random.key(0)))

  def run_score():
    grids = (batch.token_ids, batch.segment_ids, batch.positions)
    return score(weights, *split_rows(grids, rows), None, used)

  forward = _time("score", tokens, run_score)
  both, _ = _update("update", experiment, None, micro, used, tokens)
  print(f"update / score = {both / forward:.2f} (CPU seconds)")
  lora = LoraConfig(rank=_LORA_RANK.value).freeze()
  with mock.patch.object(update_module, "full_policy", merged_policy):
    _update("merged", experiment, lora, micro, used, tokens)
  _, state = _update("beside", experiment, lora, micro, used, tokens)
  _publish(config, full_policy(state.weights, state.reference, lora))


if __name__ == "__main__":
  app.run(main)
