"""Speed of one update and one scoring pass of the quickstart's policy on this machine.

  python benchmarks/training_step.py [--repeats=5] [--rows=32] [--row_length=256]

Prints wall and CPU seconds (machines are shared), tokens a second, and the ratio of an update to a
scoring pass: 3 would be the count of matrix products, what is above it is overhead.
"""

from __future__ import annotations

import pathlib
import statistics
import time

import jax
import numpy as np
from absl import app, flags

from agentjax.models.spec import count
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.sharding import make_mesh
from agentjax.training import load_experiment
from agentjax.training.optimizer import build_optimizer
from agentjax.training.state import init_state, network_specs, state_shardings
from agentjax.training.update import (
  UpdateBatch,
  UpdateSettings,
  make_score,
  make_update,
  split_rows,
  used_micro_batches,
)
from agentjax.trajectory.packing import PackedSequence, pack

_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls of each function.")
_ROWS = flags.DEFINE_integer("rows", 32, "Rows of the batch.")
_ROW_LENGTH = flags.DEFINE_integer("row_length", 256, "Tokens a row.")
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


def main(argv: list[str]) -> None:
  del argv
  experiment = load_experiment(_CONFIG)
  config, rows = experiment.model, experiment.rl.microbatch_rows
  specs = network_specs(config, critic=False)
  optimizer = build_optimizer(experiment.rl.optimizer, 1000, specs)
  placed = state_shardings(
    config, optimizer, make_mesh(experiment.mesh), critic=False, reference=False
  )
  state = init_state(config, optimizer, jax.random.key(0), placed)
  batch = _batch(config.vocab_size)
  prepared, _ = prepare(batch, experiment.rl.objective)
  micro = split_rows(UpdateBatch(batch.token_ids, batch.positions, prepared), rows)
  used = used_micro_batches(batch.segment_ids, rows)
  tokens = int((batch.segment_ids != 0).sum())
  print(
    f"{count(specs):,} parameters, pattern {config.pattern}, {tokens:,} tokens, "
    f"jax {jax.__version__} on {jax.default_backend()}"
  )
  objective = policy_objective(experiment.rl.objective)
  update = make_update(config, optimizer, objective, UpdateSettings(), placed)
  score = make_score(config, temperature=1.0)
  held = [state]

  def run_update():
    held[0], metrics, _ = update(held[0], micro, used)
    return metrics

  def run_score():
    grids = (batch.token_ids, batch.segment_ids, batch.positions)
    return score(held[0].weights, *split_rows(grids, rows), None, used)

  forward = _time("score", tokens, run_score)
  both = _time("update", tokens, run_update)
  print(f"update / score = {both / forward:.2f} (CPU seconds)")


if __name__ == "__main__":
  app.run(main)
