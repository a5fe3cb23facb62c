"""The figure of the experiment with drawings."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLOURS = {"rational": "#08519c", "scalar": "#d94801", "annotator": "#737373"}


@dataclasses.dataclass(frozen=True)
class Example:
  """Drawings for a prompt, by what made them, and what the critic said of the first."""

  prompt: str
  rationale: str
  drawings: Mapping[str, np.ndarray]


def draw_figure(results: Mapping[str, Any], examples: Sequence[Example]) -> bytes:
  """The figure as a PNG: three plots above a row of drawings for each example."""
  figure = Figure(figsize=(13, 4 + 1.25 * len(examples)), layout="constrained")
  FigureCanvasAgg(figure)
  heights = [4, 1.25 * len(examples)]
  upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
  axes = upper.subplots(1, 3)
  _plot_pairs(axes[0], results["pairs"])
  _plot_curves(axes[1], results["curves"])
  _plot_refinement(axes[2], results["refinement"])
  names = list(examples[0].drawings)
  grid = lower.subplots(len(examples), len(names) + 1, squeeze=False)
  for row, example in zip(grid, examples, strict=True):
    for axis in row:
      axis.set_axis_off()
    text = f"{example.prompt}\n" + "\n".join(example.rationale.split("; "))
    row[0].text(0, 0.5, text, fontsize=8, va="center", transform=row[0].transAxes)
    for axis, name in zip(row[1:], names, strict=True):
      axis.imshow(np.clip((example.drawings[name] + 1) / 2, 0, 1))
  grid[0][0].set_title("prompt, critic of the first", fontsize=9)
  for axis, name in zip(grid[0][1:], names, strict=True):
    axis.set_title(name, fontsize=9)
  image = io.BytesIO()
  figure.savefig(image, format="png", dpi=90)
  return image.getvalue()


def _plot_pairs(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
  counts = [row["pairs"] for row in rows]
  for name, colour in _COLOURS.items():
    means, lows, highs = (np.array([row[name][i] for row in rows]) for i in range(3))
    axis.errorbar(
      counts, means, [means - lows, highs - means], label=name, color=colour, marker="o", capsize=3
    )
  axis.set_xscale("log")
  axis.set_xlabel("training pairs")
  axis.set_ylabel("held-out pairs ordered right")
  axis.legend()
  axis.grid(alpha=0.3)


def _plot_curves(axis: Axes, curves: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
  for name, rows in curves.items():
    steps = [row["step"] for row in rows]
    for value, style in (("right", "o-"), ("reward", ":")):
      label = f"{'attributes right' if value == 'right' else 'reward'}, {name}"
      axis.plot(steps, [row[value] for row in rows], style, color=_COLOURS[name], label=label)
  axis.set_xlabel("steps of DiffusionNFT")
  axis.set_ylabel("held-out prompts")
  axis.legend()
  axis.grid(alpha=0.3)


def _plot_refinement(axis: Axes, row: Mapping[str, Any]) -> None:
  names = ["once", "again", "refined", "again_best", "refined_best"]
  means, lows, highs = (np.array([row[name][i] for name in names]) for i in range(3))
  axis.bar(range(len(names)), means, yerr=[means - lows, highs - means], capsize=3, color="#9ecae1")
  axis.set_xticks(range(len(names)), [name.replace("_", ",\n") for name in names])
  axis.set_ylim(max(lows.min() - 0.1, 0), 1)
  axis.set_ylabel("attributes right, held-out prompts")
  axis.set_title("generate, critique, refine")
  axis.grid(axis="y", alpha=0.3)
