"""Metrics: one JSONL row per step (exact), TensorBoard files, and a reward plot.

Wall times are under ``time/``, memory under ``memory/``; only these differ between identical runs.
``time/step`` is the whole step in seconds. ``time/rollout`` is the wait for episodes,
``time/update`` the updates, ``time/evaluation`` the held-out tasks, ``time/publish`` the weights
for the engines, of which ``memory/published`` GiB were sent; ``time/compilation`` is part of these.
``time/save`` is the checkpoint before the step. ``time/lanes`` is the work of the engines' devices,
and ``time/lanes_idle`` what they waited for the host while calls were under way; both are sums over
the lanes of this process.
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from tensorboardX import SummaryWriter

from agentjax.files import write_atomically


class MetricsWriter:
  """Appends rows to ``metrics.jsonl`` and scalars to TensorBoard event files.

  On resume, rows after the step that training continues from are dropped first, so the file reads
  as if the run had never stopped.
  """

  def __init__(self, directory: str | pathlib.Path, resume_step: int):
    self.directory = pathlib.Path(directory)
    self.directory.mkdir(parents=True, exist_ok=True)
    self.path = self.directory / "metrics.jsonl"
    kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
    write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))
    self._file = self.path.open("a")
    self._tensorboard = SummaryWriter(
      str(self.directory / "tensorboard"), purge_step=resume_step + 1
    )

  def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
    """Appends one row; NaN and infinities become null (JSON has neither)."""
    numbers = {name: float(value) for name, value in sorted(values.items())}
    for name, number in numbers.items():
      self._tensorboard.add_scalar(f"{stage}/{name}", number, step)
    row = {"step": step, "stage": stage, **finite_or_null(numbers)}
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()

  def close(self) -> None:
    """Closes both files."""
    self._file.close()
    self._tensorboard.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def finite_or_null(values: Mapping[str, float]) -> dict[str, float | None]:
  """``values`` for JSON, which has neither NaN nor infinities: they become None."""
  return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """Rows of a metrics file; a torn last line (the process died while writing) is left out."""
  path = pathlib.Path(path)
  if not path.exists():
    return []
  rows = []
  for line in path.read_text().splitlines():
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:
      break
  return rows


def memory_in_use() -> dict[str, float]:
  """GiB: ``memory/host_peak`` of this process, ``memory/device`` and its peak where one tells.

  Those of devices are the largest of this process's.
  """
  values = {"memory/host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
  stats = [s for device in jax.local_devices() if (s := device.memory_stats())]
  for name, key in (("device", "bytes_in_use"), ("device_peak", "peak_bytes_in_use")):
    found = [s[key] for s in stats if key in s]
    if found:
      values[f"memory/{name}"] = max(found) / 2**30
  return values


def plot_rewards(rows: Sequence[Mapping[str, Any]], path: str | pathlib.Path, title: str) -> None:
  """Draws reward, held-out success and entropy over RL steps as a PNG."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  rl = [row for row in rows if row["stage"] == "rl" and "reward/mean" in row]
  figure = Figure(figsize=(8, 4.5), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots()
  steps = [row["step"] for row in rl]
  rewards = [row["reward/mean"] for row in rl]
  axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="reward of a step")
  smooth: list[float] = []
  for value in rewards:
    smooth.append(value if not smooth else 0.8 * smooth[-1] + 0.2 * value)
  axes.plot(steps, smooth, color="#08519c", linewidth=2, label="smoothed")
  held_out = [(r["step"], r["eval/greedy"]) for r in rows if r.get("eval/greedy") is not None]
  if held_out:
    axes.plot(*zip(*held_out, strict=True), "o--", color="#d94801", label="held-out, greedy")
  axes.set_xlabel("step")
  axes.set_ylabel("reward, success")
  axes.grid(alpha=0.3)
  entropy = axes.twinx()
  entropy.plot(
    steps,
    [float(r.get("policy/entropy") or math.nan) for r in rl],
    color="#31a354",
    linewidth=1,
    label="entropy (right)",
  )
  entropy.set_ylabel("entropy, nats a token")
  handles = [*axes.get_lines(), *entropy.get_lines()]
  figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
  axes.set_title(title)
  image = io.BytesIO()
  figure.savefig(image, format="png", dpi=120)
  write_atomically(path, image.getvalue())
