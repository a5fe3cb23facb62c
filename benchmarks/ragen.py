"""Toy runs with and without selection of groups: does a policy collapse, and what shows it first?

  python benchmarks/ragen.py --steps=60 --entropy=0.05 --out=/tmp/ragen

A small policy is shown how actions are written, on one-turn Sokoban of at most three steps, and
then trained by GRPO. All runs share seed, warm start and settings; they differ in which groups they
are trained on. The entropy bonus is the pull that does not shrink where rewards do not spread: with
many groups that agree with themselves it moves the policy away from its prompts (2604.06268).

Prints a row every few steps and a table at the end. Figures belong to this toy.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import pathlib
import statistics

from rich.console import Console

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.envs import SokobanConfig, TurnConfig
from agentjax.envs.config import EnvironmentConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
  SupervisedStage,
)
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.diagnostics import DiagnosticsConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import SelectionConfig

SELECTIONS = {
  "all": SelectionConfig(),
  "top_p": SelectionConfig(rule="top_p", share=0.9),
  "top_k": SelectionConfig(rule="top_k", share=0.25, keep_zeros=True),
}
COLUMNS = {
  "reward": "reward/mean",
  "reward std": "collapse/reward_std",
  "silent": "collapse/silent_groups",
  "entropy": "policy/entropy",
  "MI (nats)": "information/first_turn_sequence",
  "retrieval": "information/first_turn_retrieval_accuracy",
  "grad norm": "grad_norm",
}


def experiment(
  selection: SelectionConfig, steps: int, entropy: float, rate: float, seed: int
) -> Experiment:
  """A run on levels that one or two actions solve; one turn, so that a step is a second or two."""
  turns = TurnConfig(max_turns=1, max_actions=3, actions_per_turn=3, tags=False)
  return Experiment(
    name="ragen_toy",
    seed=seed,
    model=ModelConfig(
      d_model=64, pattern="*-*-", num_heads=4, num_kv_heads=2, head_dim=16, d_mlp=128
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=340),
    data=DataConfig(source="environment", train_size=400, test_size=64),
    environment=EnvironmentConfig(
      kind="sokoban", sokoban=SokobanConfig(size=5, walls=0.1, most_steps=3, turns=turns)
    ),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=64, max_length=192, chunk_tokens=4),
    rollout=RolloutConfig(
      group_size=8, max_turns=1, max_tokens_per_turn=12, max_total_tokens=192, concurrency=64
    ),
    supervised=SupervisedStage(
      steps=60,
      tasks_per_step=32,
      row_length=192,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=5),
    ),
    rl=RLStage(
      steps=steps,
      tasks_per_step=8,
      row_length=192,
      microbatch_rows=16,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(entropy_coefficient=entropy)),
      selection=selection,
      optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=2),
      diagnostics=DiagnosticsConfig(information_every=5, prompts=8, samples=4),
    ),
    evaluation=HeldOutConfig(
      tasks=64, every=0, samples=0, success_part="environment", success_threshold=10.0
    ),
    checkpoint=CheckpointConfig(every=1000),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--entropy", type=float, default=0.05)
  parser.add_argument("--rate", type=float, default=1e-3)
  parser.add_argument("--seeds", type=int, default=1)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--only", choices=SELECTIONS, action="append")
  options = parser.parse_args()
  table = []
  for seed in range(options.seeds):
    for name in options.only or SELECTIONS:
      made = experiment(
        dataclasses.replace(SELECTIONS[name]), options.steps, options.entropy, options.rate, seed
      )
      directory = options.out / f"{name}_{seed}"
      report = Run(made, directory, console=Console(file=io.StringIO())).train()
      rows = [r for r in read_metrics(directory / "metrics.jsonl") if r["stage"] == "rl"]
      for row in rows[:: max(1, options.steps // 10)]:
        shown = {k: round(row[v], 3) for k, v in COLUMNS.items() if row.get(v) is not None}
        print(json.dumps({"run": name, "seed": seed, "step": row["step"], **shown}), flush=True)
      late = rows[-max(1, len(rows) // 5) :]
      means = {
        k: statistics.fmean([r[v] for r in late if r.get(v) is not None] or [float("nan")])
        for k, v in COLUMNS.items()
      }
      before, after = report.before["greedy"], report.after["greedy"]
      table.append((name, seed, before, after, means))
  print("\nrun, seed: held-out greedy success before and after; means over the last fifth of steps")
  for name, seed, before, after, means in table:
    rest = "  ".join(f"{k} {v:.3f}" for k, v in means.items())
    print(f"{name:>6} {seed}: {before:.3f} -> {after:.3f}  {rest}")


if __name__ == "__main__":
  main()
