"""Drawings of 32 by 32 pixels whose attributes are known, and a reader that recovers them.

A drawing shows one to three equal objects in one quarter of the picture. Its attributes are a row
of four value numbers, in the order of ``ASPECTS``: shape, colour, count, place. ``UNCLEAR`` stands
for a value that cannot be read. A prompt is such a row too. An image is float32 [32, 32, 3] in
[-1, 1]. The picture has 4 by 4 cells of 8 pixels; an object never leaves its cell.

Legend: N images, A the four aspects.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

Images = Float[np.ndarray, "N 32 32 3"]
Rows = Int[np.ndarray, "N A"]

SIZE, CELL = 32, 8
UNCLEAR = -1
COLOURS: Mapping[str, tuple[float, float, float]] = {
  "red": (0.85, 0.10, 0.10),
  "green": (0.10, 0.60, 0.15),
  "blue": (0.10, 0.20, 0.85),
  "yellow": (0.90, 0.75, 0.00),
  "purple": (0.55, 0.10, 0.65),
  "black": (0.05, 0.05, 0.05),
}
VALUES: Mapping[str, tuple[str, ...]] = {
  "shape": ("disc", "square", "triangle", "cross"),
  "colour": tuple(COLOURS),
  "count": ("one", "two", "three"),
  "place": ("top left", "top right", "bottom left", "bottom right"),
}
ASPECTS = tuple(VALUES)
SIZES = np.array([len(values) for values in VALUES.values()])  # values of each aspect
STARTS = np.concatenate([[0], np.cumsum(SIZES)[:-1]])  # number of an aspect's first value among all
TOTAL = int(SIZES.sum())

_PALETTE = 2 * np.array(list(COLOURS.values()), np.float32) - 1
_RADII = (2.7, 3.3)
_SHIFT = 0.5  # how far the middle of an object is from that of its cell, pixels
_INK = 0.45  # distance from the background at which a pixel is ink
_CORE = 0.8  # pixels at this share of the largest distance from the background show a colour
_LEAST_INK = 5  # pixels of ink in a cell that shows an object
_COLOUR_ERROR = 0.5  # ink at this distance from every colour has no colour
_SHAPE_ERROR = 0.06  # mean squared error of a cell that resembles no shape


def random_rows(rng: np.random.Generator, count: int) -> Rows:
  """Attributes drawn uniformly."""
  return rng.integers(0, SIZES, (count, len(ASPECTS)))


def corrupt(rng: np.random.Generator, rows: Rows, share: float) -> Rows:
  """Each attribute is replaced by another value with probability ``share``."""
  others = (rows + rng.integers(1, SIZES, rows.shape)) % SIZES
  return np.where(rng.random(rows.shape) < share, others, rows)


def render(rng: np.random.Generator, rows: Rows) -> Images:
  """Draws each row; background, size, jitter and the cells of its quarter are drawn at random."""
  images = np.empty((len(rows), SIZE, SIZE, 3), np.float32)
  for image, (shape, colour, count, place) in zip(images, rows, strict=True):
    image[:] = 2 * rng.uniform(0.85, 0.95) - 1
    for cell in rng.choice(4, count + 1, replace=False):
      top = 16 * (place // 2) + CELL * (cell // 2)
      left = 16 * (place % 2) + CELL * (cell % 2)
      shift = rng.uniform(-_SHIFT, _SHIFT, 2)
      cover = _cover(shape, rng.uniform(*_RADII), shift[0], shift[1])[..., None]
      part = image[top : top + CELL, left : left + CELL]
      part[:] = (1 - cover) * part + cover * _PALETTE[colour]
  images += rng.normal(0, 0.02, images.shape).astype(np.float32)
  return np.clip(images, -1, 1)


def _cover(shape: int, radius: float, down: float, right: float) -> Float[np.ndarray, "8 8"]:
  """Share of each pixel of a cell that an object covers, from its signed distance."""
  steps = np.arange(CELL) - (CELL - 1) / 2
  y, x = np.meshgrid(steps - down, steps - right, indexing="ij")
  match VALUES["shape"][shape]:
    case "disc":
      distance = np.hypot(x, y) - radius
    case "square":
      distance = np.maximum(abs(x), abs(y)) - 0.85 * radius
    case "triangle":  # its tip is at the top
      distance = np.maximum(y - 0.8 * radius, (2 * abs(x) - y - 0.8 * radius) / np.sqrt(5))
    case _:
      width = 0.35 * radius
      flat = np.maximum(abs(x) - radius, abs(y) - width)
      distance = np.minimum(flat, np.maximum(abs(y) - radius, abs(x) - width))
  return np.clip(0.5 - distance, 0, 1)


def _templates() -> tuple[Float[np.ndarray, "T 64"], Int[np.ndarray, " T"]]:
  found, shapes = [], []
  for shape in range(len(VALUES["shape"])):
    for radius in (2.7, 3.0, 3.3):
      for down in (-0.5, 0.0, 0.5):
        for right in (-0.5, 0.0, 0.5):
          found.append(_cover(shape, radius, down, right).ravel())
          shapes.append(shape)
  return np.array(found), np.array(shapes)


_TEMPLATES, _TEMPLATE_SHAPES = _templates()


def read_drawings(images: Images) -> Rows:
  """The attributes of each image, by measuring it; ``UNCLEAR`` where objects disagree or none fits.

  It learns nothing, so it can measure what a reward has taught a generator.
  """
  found = np.full((len(images), len(ASPECTS)), UNCLEAR)
  for row, image in zip(found, np.asarray(images, np.float32), strict=True):
    background = np.median(image.reshape(-1, 3), axis=0)
    far = np.linalg.norm(image - background, axis=-1)
    ink = _cells(far > _INK)
    occupied = ink.sum(axis=-1) >= _LEAST_INK
    cells = np.flatnonzero(occupied)
    if not len(cells):
      continue
    core = _cells(far) >= _CORE * _cells(far).max(axis=-1, keepdims=True)
    colours = [_colour(p[i]) for p, i in zip(_cells(image)[cells], core[cells], strict=True)]
    shapes = [
      _shape(_cells(image)[cell], background, colour)
      for cell, colour in zip(cells, colours, strict=True)
    ]
    quarters = {int(cell) // 8 * 2 + int(cell) % 4 // 2 for cell in cells}
    row[0], row[1] = _common(shapes), _common(colours)
    row[2] = len(cells) - 1 if len(cells) <= SIZES[2] else UNCLEAR
    row[3] = _common(quarters)
  return found


def _cells(pixels: np.ndarray) -> np.ndarray:
  """[32, 32, ...] as [16 cells, 64 pixels, ...]."""
  tail = pixels.shape[2:]
  parts = pixels.reshape(4, CELL, 4, CELL, *tail).swapaxes(1, 2)
  return parts.reshape(16, CELL * CELL, *tail)


def _colour(core: Float[np.ndarray, "pixels 3"]) -> int:
  """The colour whose distance to the median of the pixels is least."""
  distances = np.linalg.norm(_PALETTE - np.median(core, axis=0), axis=-1)
  best = int(distances.argmin())
  return best if distances[best] < _COLOUR_ERROR else UNCLEAR


def _shape(cell: Float[np.ndarray, "64 3"], background: np.ndarray, colour: int) -> int:
  """The shape that covers the cell most like the cell is covered."""
  if colour == UNCLEAR:
    return UNCLEAR
  along = _PALETTE[colour] - background
  cover = np.clip((cell - background) @ along / (along @ along), 0, 1)
  errors = np.square(_TEMPLATES - cover).mean(axis=-1)
  best = int(errors.argmin())
  return int(_TEMPLATE_SHAPES[best]) if errors[best] < _SHAPE_ERROR else UNCLEAR


def _common(values: list[int] | set[int]) -> int:
  """The one value that all agree on."""
  one = set(values)
  return one.pop() if len(one) == 1 else UNCLEAR


def agrees(rows: Rows, prompts: Rows) -> Bool[np.ndarray, "N A"]:
  """Which attributes are as the prompt wants them; one that is unclear is not."""
  return rows == prompts


def describe(row: Int[np.ndarray, " A"]) -> str:
  """A prompt in words, such as "two red discs, top left"."""
  shape, colour, count, place = (
    VALUES[aspect][value] for aspect, value in zip(ASPECTS, row, strict=True)
  )
  plural = "" if count == "one" else "es" if shape == "cross" else "s"
  return f"{count} {colour} {shape}{plural}, {place}"
