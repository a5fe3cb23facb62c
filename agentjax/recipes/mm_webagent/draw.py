"""Built-in pictures and clips: drawings by rule from the words of a plan, through Pillow.

They show that a page's picture is there, has the planned size, the palette and a subject of its
kind; nobody would take them for a model's. A generator behind an endpoint is ``models.HttpImages``.
A clip is the drawing with a phase that goes round once, so that it ends where it began.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, UnidentifiedImageError

from agentjax.recipes.mm_webagent.facts import Rgb
from agentjax.recipes.mm_webagent.plan import Asset
from agentjax.recipes.mm_webagent.score import MediaFacts

FRAMES_PER_SECOND = 10
_CLIP_SCALE = 2  # clips are drawn at half their size
_PALETTE: tuple[Rgb, ...] = ((37, 99, 235), (14, 165, 233), (245, 158, 11), (248, 250, 252))
_MOST_PIXELS = 40_000_000  # of a picture that somebody else made

# Words of a prompt -> what is drawn; the first that fits decides.
_SUBJECTS = (
  ("landscape", r"landscape|mountain|hill|forest|lake|beach|sea\b|sunrise|sunset|nature|garden"),
  ("city", r"city|skyline|street|building|architect|house|studio|office|room|gallery"),
  ("people", r"people|portrait|person|team|speaker|woman|man\b|group|face|character|silhouette"),
  ("objects", r"product|object|desk|table|laptop|device|phone|book|cup|food|game|tool|still"),
)


def draw_image(asset: Asset, palette: Sequence[Rgb] = (), key: int = 0) -> bytes:
  """A PNG of the asset's size; the same arguments give the same bytes."""
  assert asset.size is not None
  colours = _toned(tuple(palette) or _PALETTE, asset.attributes.get("color_tone", ""))
  return _png(asset.size, subject(asset.prompt), colours, key, _light(asset))


def draw_clip(asset: Asset, palette: Sequence[Rgb] = (), key: int = 0) -> bytes:
  """An MP4 of the asset's size and seconds that loops without a seam.

  Raises:
    ImportError: imageio-ffmpeg, of the extra [pages], is missing.
  """
  assert asset.size is not None
  ffmpeg = load_ffmpeg()
  width, height = (side // _CLIP_SCALE for side in asset.size)
  colours = _toned(tuple(palette) or _PALETTE, "")
  frames = asset.seconds * FRAMES_PER_SECOND
  still = asset.attributes["motion_intensity"].lower() == "none"
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "clip.mp4")
    writer = ffmpeg.write_frames(
      path,
      (width, height),
      fps=FRAMES_PER_SECOND,
      codec="libx264",
      macro_block_size=1,
      ffmpeg_log_level="error",
      output_params=["-vf", "scale={}:{}".format(*asset.size), "-movflags", "+faststart"],
    )
    writer.send(None)
    for number in range(frames):
      phase = 0.0 if still else number / frames
      frame = _scene((width, height), subject(asset.prompt), colours, key, _light(asset), phase)
      writer.send(np.ascontiguousarray(np.asarray(frame, np.uint8)))
    writer.close()
    with open(path, "rb") as file:
      return file.read()


def load_ffmpeg() -> ModuleType:
  """imageio-ffmpeg. Raises ImportError that names the extra."""
  logging.getLogger("imageio_ffmpeg").setLevel(logging.ERROR)  # it warns where frames are smaller
  try:
    return importlib.import_module("imageio_ffmpeg")
  except ImportError as error:
    raise ImportError("clips need imageio-ffmpeg: pip install 'agentjax[pages]'") from error


def subject(prompt: str) -> str:
  """What the built-in drawing of a prompt shows."""
  lower = prompt.lower()
  return next((name for name, words in _SUBJECTS if re.search(words, lower)), "shapes")


@functools.lru_cache(maxsize=64)
def image_facts(content: bytes) -> MediaFacts:
  """Size and spread of a picture; an error where it cannot be read."""
  try:
    with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as image:
      size = image.size
      if size[0] * size[1] > _MOST_PIXELS:
        return MediaFacts(error=f"it has {size[0]} by {size[1]} pixels")
      image.draft("L", (256, 256))
      grey = np.asarray(image.convert("L").resize((64, 64)), np.float64)
  except (OSError, ValueError, SyntaxError, UnidentifiedImageError) as error:
    return MediaFacts(error=f"it cannot be read: {error}"[:200])
  return MediaFacts(size, float(grey.std()))


def clip_facts(content: bytes) -> MediaFacts:
  """Size, seconds and motion of a clip; an error where it cannot be read."""
  ffmpeg = load_ffmpeg()
  with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
    file.write(content)
    file.flush()
    try:
      reader = ffmpeg.read_frames(file.name, output_params=["-vf", "scale=64:64", "-r", "5"])
      about = next(reader)
      frames = [np.frombuffer(frame, np.uint8) for frame in reader]
    except (OSError, RuntimeError, StopIteration, KeyError, ValueError) as error:
      return MediaFacts(error=f"it cannot be read: {error}"[:200])
  if not frames:
    return MediaFacts(error="it has no frame")
  grey = np.stack(frames).reshape(len(frames), -1, 3).mean(-1)
  steps = np.abs(np.diff(grey, axis=0)).mean(-1)
  return MediaFacts(
    tuple(about["source_size"]),
    float(grey[0].std()),
    float(about["duration"]),
    float(steps.mean()) if len(steps) else 0.0,
    float(np.abs(grey[-1] - grey[0]).mean()),
  )


def thumbnail(content: bytes, width: int) -> bytes:
  """A smaller PNG of a picture."""
  with Image.open(io.BytesIO(content)) as image:
    size = (width, max(1, round(image.height * width / image.width)))
    return _as_png(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))


# ------------------------------------------------------------------------------------------ scenes


def _toned(colours: tuple[Rgb, ...], tone: str) -> tuple[Rgb, ...]:
  """The colours, nearer to grey or white where the tone says so."""
  tone = tone.lower()
  target, share = None, 0.0
  if "muted" in tone or "monochrome" in tone:
    target, share = 128.0, 0.35
  elif "pastel" in tone or "soft" in tone:
    target, share = 255.0, 0.35
  if target is None:
    return colours
  return tuple(
    (c[0] + share * (target - c[0]), c[1] + share * (target - c[1]), c[2] + share * (target - c[2]))
    for c in colours
  )


def _light(asset: Asset) -> float:
  lighting = asset.attributes.get("lighting", "").lower()
  return 0.35 if "high" in lighting or "dramatic" in lighting else 0.12


@functools.lru_cache(maxsize=64)
def _png(
  size: tuple[int, int], what: str, colours: tuple[Rgb, ...], key: int, light: float
) -> bytes:
  return _as_png(_scene(size, what, colours, key, light, 0.0))


def _as_png(image: Image.Image) -> bytes:
  buffer = io.BytesIO()
  image.save(buffer, "PNG", compress_level=3)
  return buffer.getvalue()


def _scene(
  size: tuple[int, int],
  what: str,
  colours: tuple[Rgb, ...],
  key: int,
  light: float,
  phase: float,
) -> Image.Image:
  """One drawing; ``phase`` from 0 to 1 goes round once."""
  width, height = size
  top, bottom = _mixed(colours, 0, 0.55), _mixed(colours, 1, 0.15)
  ramp = np.linspace(0.0, 1.0, height)[:, None, None]
  sky = (1 - ramp) * np.array(top) + ramp * np.array(bottom)
  across = np.linspace(-1.0, 1.0, width)[None, :, None]
  ground = sky * (1 - light * across**2 * (0.6 + 0.4 * ramp))
  image = Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8), "RGB")
  draw = ImageDraw.Draw(image, "RGBA")
  random = np.random.default_rng([key, len(what)])
  for kind, where, paint in _SCENES[what](size, colours, random, phase):
    if kind == "hair":
      draw.chord(where, 180, 360, fill=paint)
    else:
      getattr(draw, kind)(where, fill=paint)
  return image


def _mixed(colours: Sequence[Rgb], which: int, white: float) -> Rgb:
  r, g, b = colours[which % len(colours)]
  return r + white * (255 - r), g + white * (255 - g), b + white * (255 - b)


Shape = tuple[str, Any, tuple[int, int, int, int]]


def _paint(colour: Rgb, alpha: int = 255, dark: float = 0.0) -> tuple[int, int, int, int]:
  r, g, b = (int(min(max(v * (1 - dark), 0), 255)) for v in colour)
  return r, g, b, alpha


def _landscape(
  size: tuple[int, int], colours: tuple[Rgb, ...], random: np.random.Generator, phase: float
) -> Iterator[Shape]:
  width, height = size
  turn = 2 * math.pi * phase
  r = 0.11 * min(size)
  x, y = width * random.uniform(0.55, 0.8), height * (0.28 + 0.03 * math.sin(turn))
  accent = colours[2 % len(colours)]
  yield "ellipse", (x - 1.6 * r, y - 1.6 * r, x + 1.6 * r, y + 1.6 * r), _paint(accent, 60)
  yield "ellipse", (x - r, y - r, x + r, y + r), _paint(accent)
  for layer in range(4):
    base = height * (0.5 + 0.13 * layer)
    first, second = random.uniform(0, 6, 2)
    xs = np.linspace(0, width, 80)
    wave = np.sin(xs / width * (3 + layer) + first + 0.15 * layer * math.sin(turn))
    ys = base - height * 0.09 * wave - height * 0.03 * np.sin(xs / width * 11 + second)
    points = [(0, height), *zip(xs.tolist(), ys.tolist(), strict=True), (width, height)]
    yield "polygon", points, _paint(colours[layer % len(colours)], 235, 0.12 + 0.17 * layer)


def _city(
  size: tuple[int, int], colours: tuple[Rgb, ...], random: np.random.Generator, phase: float
) -> Iterator[Shape]:
  width, height = size
  for layer in range(2):
    x = -0.05 * width
    while x < width:
      w = width * random.uniform(0.06, 0.13)
      h = height * random.uniform(0.25, 0.6) * (1 - 0.2 * layer)
      tone = _paint(colours[layer % len(colours)], 255, 0.3 + 0.25 * layer)
      yield "rectangle", (x, height - h, x + 0.94 * w, height), tone
      step = w / 4
      rows = int(h / (1.6 * step))
      for row in range(rows):
        for column in range(3):
          lit = random.random()
          glow = 0.5 + 0.5 * math.sin(2 * math.pi * (phase + lit))
          left, upper = x + step * (0.55 + column), height - h + step * (0.6 + 1.5 * row)
          box = (left, upper, left + 0.55 * step, upper + 0.8 * step)
          window = colours[2 % len(colours)]
          if lit > 0.45:
            yield "rectangle", box, _paint(window, int(90 + 150 * glow))
      x += w


def _people(
  size: tuple[int, int], colours: tuple[Rgb, ...], random: np.random.Generator, phase: float
) -> Iterator[Shape]:
  width, height = size
  count = 1 if height >= width else 3
  unit = min(0.24 * height, 0.8 * width / (2.2 * count))
  for i in range(count):
    sway = 0.05 * unit * math.sin(2 * math.pi * (phase + i / count))
    x, y = width * (i + 1) / (count + 1) + sway, height * 0.46
    shirt = _paint(colours[(i + 1) % len(colours)], 255, 0.2)
    skin = _paint(((230, 190, 160), (150, 105, 80), (200, 150, 120))[i % 3])
    yield "ellipse", (x - 1.4 * unit, y - 1.4 * unit, x + 1.4 * unit, y + 1.4 * unit), (
      _paint(colours[2 % len(colours)], 70)
    )  # fmt: skip
    yield "ellipse", (x - unit, y + 0.75 * unit, x + unit, y + 3.4 * unit), shirt
    yield "ellipse", (x - 0.55 * unit, y - 0.6 * unit, x + 0.55 * unit, y + 0.7 * unit), skin
    hair = _paint((60, 45, 40), 255, 0.1 * random.random())
    yield "hair", (x - 0.58 * unit, y - 0.68 * unit, x + 0.58 * unit, y + 0.4 * unit), hair


def _objects(
  size: tuple[int, int], colours: tuple[Rgb, ...], random: np.random.Generator, phase: float
) -> Iterator[Shape]:
  width, height = size
  floor = 0.72 * height
  yield "rectangle", (0, floor, width, height), _paint(colours[1 % len(colours)], 255, 0.45)
  for i in range(5):
    x = width * (0.12 + 0.19 * i)
    w, h = width * random.uniform(0.09, 0.15), height * random.uniform(0.16, 0.42)
    lift = 0.02 * height * (1 + math.sin(2 * math.pi * (phase + i / 5)))
    tone = _paint(colours[i % len(colours)], 255, 0.08 * i)
    yield "ellipse", (x - 0.1 * w, floor - 0.02 * height, x + 1.1 * w, floor + 0.05 * height), (
      (0, 0, 0, 60)
    )  # fmt: skip
    kind = ("rounded_rectangle", "ellipse", "rectangle")[int(random.integers(3))]
    yield kind, (x, floor - h - lift, x + w, floor - lift), tone
    yield "rectangle", (x + 0.2 * w, floor - 0.6 * h - lift, x + 0.8 * w, floor - 0.5 * h - lift), (
      _paint(colours[2 % len(colours)], 200)
    )  # fmt: skip


def _shapes(
  size: tuple[int, int], colours: tuple[Rgb, ...], random: np.random.Generator, phase: float
) -> Iterator[Shape]:
  width, height = size
  for i in range(16):
    x, y = random.uniform(0, width), random.uniform(0, height)
    r = min(size) * random.uniform(0.05, 0.24)
    turn = 2 * math.pi * (phase + random.random())
    x, y = x + 0.15 * r * math.cos(turn), y + 0.15 * r * math.sin(turn)
    tone = _paint(colours[i % len(colours)], 150, 0.05 * (i % 4))
    if i % 3 == 2:
      yield "polygon", [(x, y - r), (x + r, y + 0.7 * r), (x - r, y + 0.7 * r)], tone
    else:
      kind = "ellipse" if i % 3 else "rectangle"
      yield kind, (x - r, y - r, x + r, y + r), tone


_SCENES = {
  "landscape": _landscape, "city": _city, "people": _people, "objects": _objects,
  "shapes": _shapes,
}  # fmt: skip
