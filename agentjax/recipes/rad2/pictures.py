"""What people look at: the policies side by side, and a replay from above.

Pillow comes with matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from agentjax.recipes.rad2.closed_loop import Episode
from agentjax.recipes.rad2.geometry import out_of_frame
from agentjax.recipes.rad2.settings import STEP_SECONDS, TrafficConfig
from agentjax.recipes.rad2.traffic import CAR, LANE, LANES, Scenario

_METRES, _PIXELS = 90.0, 8  # width of a view, pixels a metre
_BEHIND = 20.0  # metres of it behind the car
_HEIGHT = (LANES * LANE + 9.0, 5.0)  # metres shown, of them below the road
_TITLE = 22  # pixels
_COLOURS = {
  "ground": "#e8efe2", "road": "#6f7479", "line": "#ffffff", "ego": "#1f5fd0", "crash": "#d02020",
  "other": "#f2b134", "plan": "#a8c8ff", "chosen": "#ffffff", "text": "#202020",
}  # fmt: skip


def compare(report: Mapping[str, Any], names: Sequence[str]) -> bytes:
  """A PNG: crashes and progress of the policies, with intervals; a small dot for each seed."""
  figure = Figure(figsize=(9, 3.8), layout="constrained")
  FigureCanvasAgg(figure)
  places = np.arange(len(names))
  for axes, column, label, scale in zip(
    figure.subplots(1, 2),
    ("crashed", "progress"),
    ("crashed, % of test scenarios", "progress, share of the expert's"),
    (100.0, 1.0),
    strict=True,
  ):
    rows = [report["policies"][name] for name in names]
    means = scale * np.array([row[column]["mean"] for row in rows])
    low, high = (scale * np.array([r[column][end] for r in rows]) for end in ("low", "high"))
    errors = [means - low, high - means]
    axes.errorbar(places, means, errors, fmt="o", color="#08519c", capsize=5, markersize=7)
    for place, row in zip(places, rows, strict=True):
      seeds = scale * np.array(row[f"{column}_by_seed"])
      axes.plot(np.full(len(seeds), place + 0.18), seeds, ".", color="#d94801")
    axes.set_xticks(places, names, rotation=15)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
  figure.axes[0].set_ylim(bottom=0)
  image = io.BytesIO()
  figure.savefig(image, format="png", dpi=120)
  return image.getvalue()


def replay(
  traffic: TrafficConfig,
  scenario: Scenario,
  episodes: Mapping[str, Episode],
  *,
  every: int = 2,
) -> bytes:
  """An animated GIF of one scenario, a strip for each policy, seen from above.

  Light lines are the candidates of the last decision, the white one was chosen. A car that has
  crashed is red.

  Args:
    traffic: the clock.
    scenario: the sizes of the others.
    episodes: by name, one each of this scenario.
    every: steps between two frames.
  """
  frames = []
  for step in range(0, traffic.steps + 1, every):
    strips = [_strip(traffic, scenario, name, one, step) for name, one in episodes.items()]
    frame = Image.new("RGB", (strips[0].width, sum(s.height for s in strips)))
    for place, strip in enumerate(strips):
      frame.paste(strip, (0, place * strip.height))
    frames.append(frame.quantize(32, method=Image.Quantize.MEDIANCUT))
  image = io.BytesIO()
  shown = round(1000 * STEP_SECONDS * every)
  frames[0].save(
    image, format="GIF", save_all=True, append_images=frames[1:], duration=shown, loop=0
  )
  return image.getvalue()


def _strip(
  traffic: TrafficConfig, scenario: Scenario, name: str, episode: Episode, step: int
) -> Image.Image:
  ego, others = np.asarray(episode.ego), np.asarray(episode.others)
  height, below = _HEIGHT
  size = (round(_METRES * _PIXELS), round(height * _PIXELS) + _TITLE)
  strip = Image.new("RGB", size, _COLOURS["ground"])
  draw = ImageDraw.Draw(strip)
  left = ego[step, 0] - _BEHIND

  def pixels(points: Any) -> list[tuple[float, float]]:
    points = np.asarray(points)
    x = (points[..., 0] - left) * _PIXELS
    y = _TITLE + (height - below - LANE / 2 - points[..., 1]) * _PIXELS
    return list(zip(x.ravel().tolist(), y.ravel().tolist(), strict=True))

  edges = [-LANE / 2, (LANES - 0.5) * LANE]
  draw.rectangle([*pixels([left, edges[1]]), *pixels([left + _METRES, edges[0]])], _COLOURS["road"])
  for lane in range(1, LANES):
    for dash in range(int(left // 6) * 6, int(left + _METRES), 6):
      y = (lane - 0.5) * LANE
      draw.line(pixels([[dash, y], [dash + 3, y]]), _COLOURS["line"], 1)
  decision = min(step // traffic.latch, traffic.decisions - 1)
  pose = jnp.asarray(ego[decision * traffic.latch, :3])
  plans = np.asarray(episode.choices.candidates[decision])
  chosen = int(episode.choices.chosen[decision])
  for plan, colour in [*((plan, "plan") for plan in plans), (plans[chosen], "chosen")]:
    whole = np.concatenate([np.zeros((1, 2)), plan])
    draw.line(pixels(out_of_frame(jnp.asarray(whole), pose)), _COLOURS[colour], 1)
  for vehicle, present in enumerate(np.asarray(scenario.present)):
    if present:
      corners = _corners(others[step, vehicle], np.asarray(scenario.size)[vehicle])
      draw.polygon(pixels(corners), _COLOURS["other"], "black")
  hurt = bool(episode.crashed[step])
  draw.polygon(pixels(_corners(ego[step], CAR)), _COLOURS["crash" if hurt else "ego"], "black")
  draw.rectangle([0, 0, size[0], _TITLE], "white")
  words = f"{name}   {STEP_SECONDS * step:4.1f} s   {ego[step, 3]:4.1f} m/s"
  draw.text((8, 5), words + ("   crash" if hurt else ""), _COLOURS["text"])
  return strip


def _corners(vehicle: Any, size: Any) -> np.ndarray:
  signs = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]])
  corners = jnp.asarray(signs * np.asarray(size) / 2)
  return np.asarray(out_of_frame(corners, jnp.asarray(vehicle)[:3]))
