r"""Recipes beside plain GRPO on one world, from one warm start, with as many episodes.

  JAX_PLATFORMS=cpu python benchmarks/recipes.py --out=runs/recipes --recipes=grpo,kimi --seeds=3
  JAX_PLATFORMS=cpu python benchmarks/recipes.py --out=runs/recipes --world=configs/MY_WORLD.py

A recipe is a file of ``configs`` with a function ``change(experiment)``; ``grpo`` changes nothing,
and ``preset:NAME`` sets that objective alone, say ``--recipes=preset:dapo,preset:gspo``. Those that
need another model have none: all begin from one.
The world is a config whose warm start is done once a seed. Every run plays as many episodes a step
as the world's config does: with larger groups a step has fewer tasks. Episodes that a recipe plays
besides (retries, replaced groups) are not taken off.

Printed are, over the seeds, success on held-out tasks, greedy, and the difference to ``grpo`` of
the same seed, each with the 95% interval of Student's t over seeds; with one seed there is none.
``recipes.png`` has the same as a plot. Finished runs are kept in ``out``.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import scipy.stats
from absl import logging
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from agentjax.names import load_config_module
from agentjax.objectives import preset
from agentjax.recipes.presets import PRESETS
from agentjax.text import SentencePieceTokenizer, TokenizerConfig
from agentjax.training import Experiment, Run, load_experiment
from agentjax.training.checkpoint import CheckpointConfig

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_FINISHED = "held_out.json"
_PRESET = "preset:"
PLAIN = "grpo"

Change = Callable[[Experiment], Experiment]


class Estimate(NamedTuple):
  """A mean over seeds and its 95% interval; infinite ends with one seed."""

  mean: float
  low: float
  high: float

  @classmethod
  def of(cls, values: Sequence[float]) -> Estimate:
    mean = statistics.fmean(values)
    if len(values) < 2:
      return cls(mean, float("-inf"), float("inf"))
    half = statistics.stdev(values) / len(values) ** 0.5
    half *= float(scipy.stats.t.ppf(0.975, len(values) - 1))
    return cls(mean, mean - half, mean + half)

  def __str__(self) -> str:
    return f"{100 * self.mean:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def find_changes() -> dict[str, Change]:
  """By name of the file, without the world's: all configs with a ``change``; and all presets."""
  found: dict[str, Change] = {PLAIN: lambda experiment: experiment}
  for file in sorted(_CONFIGS.glob("*.py")):
    if "\ndef change(" in file.read_text():
      name = file.stem.removesuffix("_word_problems")
      found[name] = load_config_module(file).change
  return found | {f"{_PRESET}{name}": functools.partial(_give, name) for name in PRESETS}


def _give(name: str, experiment: Experiment) -> Experiment:
  experiment.rl.objective = preset(name)
  return experiment


def warm_start(world: pathlib.Path, seed: int, steps: int | None) -> Experiment:
  """The world's supervised stage alone."""
  experiment = load_experiment(world)
  experiment.seed = experiment.data.seed = seed
  experiment.rl.steps = 0
  experiment.evaluation.tasks = 0
  if steps is not None:
    experiment.supervised.steps = steps
  experiment.checkpoint = CheckpointConfig(every=10_000)
  return experiment


def experiment_of(
  world: pathlib.Path,
  change: Change,
  seed: int,
  warm: pathlib.Path,
  steps: int | None = None,
  held_out: int | None = None,
) -> Experiment:
  """A recipe on the world, from the warm start, with as many episodes a step."""
  experiment = load_experiment(world)
  experiment.seed = experiment.data.seed = seed
  episodes = experiment.rl.tasks_per_step * experiment.rollout.group_size
  experiment.supervised.steps = 0
  experiment.start_from = str(warm)
  vocabulary = str(warm / "tokenizer.model")
  experiment.tokenizer = TokenizerConfig(kind="sentencepiece", path=vocabulary)
  experiment.model.vocab_size = SentencePieceTokenizer(vocabulary).vocab_size
  if steps is not None:
    experiment.rl.steps = steps
  experiment.checkpoint = CheckpointConfig(every=10_000)
  if held_out is not None:
    experiment.data.test_size = experiment.evaluation.tasks = held_out
  experiment.evaluation.every = experiment.evaluation.samples = 0
  experiment.evaluation.pass_at = ()
  experiment = change(experiment)
  experiment.rl.tasks_per_step = max(episodes // experiment.rollout.group_size, 1)
  return experiment


def train(experiment: Experiment, directory: pathlib.Path) -> dict[str, float]:
  """Held-out figures after a run, which is done if it was not yet."""
  file = directory / _FINISHED
  if not file.exists():
    report = Run(experiment, directory, console=Console(file=io.StringIO())).train()
    if not report.finished:
      raise SystemExit(f"{directory}: interrupted; the same command goes on from here")
    found = {"before": report.before, "after": report.after}
    file.write_text(json.dumps({k: v["greedy"] for k, v in found.items() if v}))
  return json.loads(file.read_text())


def table(results: Mapping[str, Sequence[float]]) -> list[str]:
  """A row a recipe, the best first.

  Args:
    results: success by recipe, one number a seed; plain GRPO is among them.
  """
  rows = []
  for name, values in sorted(results.items(), key=lambda item: -statistics.fmean(item[1])):
    differences = [a - b for a, b in zip(values, results[PLAIN], strict=True)]
    beside = "" if name == PLAIN else str(Estimate.of(differences))
    rows.append(f"| {name} | {Estimate.of(values)} | {beside} |")
  return ["| recipe | held-out success | less that of grpo |", "|---|---|---|", *rows]


def plot(results: Mapping[str, Sequence[float]], path: pathlib.Path) -> None:
  """Means with intervals, and every seed."""
  figure = Figure(figsize=(7, 1 + 0.4 * len(results)), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots()
  names = sorted(results, key=lambda name: statistics.fmean(results[name]))
  for place, name in enumerate(names):
    estimate = Estimate.of(results[name])
    if len(results[name]) > 1:
      axes.plot([estimate.low, estimate.high], [place, place], color="#9ecae1", linewidth=6)
    axes.plot(results[name], [place] * len(results[name]), "o", color="#08519c", markersize=4)
  axes.set_yticks(range(len(names)), names)
  axes.set_xlabel("held-out success, greedy; bars are 95% intervals of the mean")
  axes.grid(axis="x", alpha=0.3)
  figure.savefig(path, dpi=120)


def main() -> None:
  changes = find_changes()
  parser = argparse.ArgumentParser(description=__doc__)
  configs = ",".join(name for name in changes if not name.startswith(_PRESET))
  parser.add_argument("--recipes", default=configs, help="names, by commas")
  parser.add_argument("--world", type=pathlib.Path, default=_CONFIGS / "quickstart.py")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, help="of reinforcement learning; the world's by default")
  parser.add_argument("--warm_steps", type=int, help="of the warm start; the world's by default")
  parser.add_argument("--held_out", type=int, help="tasks to evaluate; the world's by default")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  options = parser.parse_args()
  names = [PLAIN, *(n for n in options.recipes.split(",") if n != PLAIN)]
  if unknown := [name for name in names if name not in changes]:
    parser.error(f"--recipes has {unknown}; allowed: {', '.join(changes)}")
  results: dict[str, list[float]] = {name: [] for name in names}
  for seed in range(options.seeds):
    warm = options.out / f"warm_{seed}"
    train(warm_start(options.world, seed, options.warm_steps), warm)
    for name in names:
      made = experiment_of(
        options.world, changes[name], seed, warm, options.steps, options.held_out
      )
      found = train(made, options.out / f"{name}_{seed}")
      results[name].append(found["after"])
      print(f"seed {seed}: {name} {found['before']:.3f} -> {found['after']:.3f}", flush=True)
  print("\n".join(table(results)))
  plot(results, options.out / "recipes.png")


if __name__ == "__main__":
  logging.set_verbosity(logging.ERROR)  # signs of collapse are part of the figures
  main()
