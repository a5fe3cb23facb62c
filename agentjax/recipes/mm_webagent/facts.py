"""What is measured of a page: boxes, colours, files. Plain data, without a browser and without jax.

``facts.js`` measures it in the page (see ``render``); tests write it by hand.
"""

from __future__ import annotations

import colorsys
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Rgb = tuple[float, float, float]  # 0 to 255


class Box(NamedTuple):
  """A rectangle of the page, in CSS pixels from its upper left corner."""

  x: float
  y: float
  width: float
  height: float

  @property
  def right(self) -> float:
    return self.x + self.width

  @property
  def bottom(self) -> float:
    return self.y + self.height

  @property
  def area(self) -> float:
    return max(self.width, 0.0) * max(self.height, 0.0)

  def shared(self, other: Box) -> float:
    """Area that both cover."""
    width = min(self.right, other.right) - max(self.x, other.x)
    height = min(self.bottom, other.bottom) - max(self.y, other.y)
    return max(width, 0.0) * max(height, 0.0)


@dataclasses.dataclass(frozen=True)
class Text:
  """An element that has text of its own.

  Attributes:
    box: of the text.
    text: at most 200 characters of it.
    tag: of the element.
    size: of its letters, in pixels.
    weight: of its letters, 400 is normal.
    family: the first family of fonts that it asks for.
    colour: of its letters.
    grounds: what may stand behind it: one colour, the stops of a gradient, or nothing where a
      picture does.
    clipped: whether a part of it cannot be seen.
    inline: whether it is a part of a line, such as a word in another colour.
    section: heading, id or label of the part of the page it stands in, in lower case.
    hidden: whether none of it can be seen: it is cut off, outside of the page or behind something.
  """

  box: Box
  text: str
  tag: str = "p"
  size: float = 16.0
  weight: float = 400.0
  family: str = "sans-serif"
  colour: Rgb = (0.0, 0.0, 0.0)
  grounds: tuple[Rgb, ...] = ((255.0, 255.0, 255.0),)
  clipped: bool = False
  inline: bool = False
  section: str = ""
  hidden: bool = False


@dataclasses.dataclass(frozen=True)
class Shown:
  """An image, clip or frame of the page.

  Attributes:
    source: path that it names, such as assets/hero.png.
    box: where it stands.
    natural: width and height of the file, as the browser read it; zeros where it could not.
    loaded: whether the browser could show it.
    fit: CSS's object-fit; "fill" stretches.
    background: whether it lies behind other content.
    section: as in Text.
    chart: what is measured in the frame of a chart; None of other things.
  """

  source: str
  box: Box
  natural: tuple[float, float] = (0.0, 0.0)
  loaded: bool = True
  fit: str = "fill"
  background: bool = False
  section: str = ""
  chart: ChartFacts | None = None


@dataclasses.dataclass(frozen=True)
class ChartFacts:
  """What is measured in the frame of a chart.

  Attributes:
    marks: drawn shapes that stand for data (paths, bars, sectors, points).
    texts: all texts of the drawing.
    outside: texts that leave the frame.
    error: of the script that draws; "" if there was none.
  """

  marks: int = 0
  texts: tuple[str, ...] = ()
  outside: tuple[str, ...] = ()
  error: str = ""


@dataclasses.dataclass(frozen=True)
class PageFacts:
  """A page as it was rendered.

  Attributes:
    viewport: width and height.
    content: width and height of all that it holds.
    texts: with text of their own, in the order of the document.
    shown: images, clips and frames that can be seen.
    colours: of grounds, borders and letters, each with the area or length that it has.
    refused: addresses that it asked for and did not get.
    words: of all texts that can be seen, as they follow each other; "" where only ``texts`` tell.
  """

  viewport: tuple[float, float]
  content: tuple[float, float]
  texts: tuple[Text, ...] = ()
  shown: tuple[Shown, ...] = ()
  colours: Mapping[Rgb, float] = dataclasses.field(default_factory=dict)
  refused: tuple[str, ...] = ()
  words: str = ""

  @property
  def blank(self) -> bool:
    """Whether nothing can be seen."""
    return not self.shown and all(text.hidden for text in self.texts)


def read_facts(
  values: Mapping[str, Any],
  charts: Mapping[str, ChartFacts] | None = None,
  refused: Sequence[str] = (),
) -> PageFacts:
  """What ``facts.js`` returned, as facts.

  Args:
    values: its result.
    charts: by the path of the frame.
    refused: see PageFacts.
  """
  charts = charts or {}
  colours: dict[Rgb, float] = {}
  for text, amount in values["colours"]:
    colour = read_colour(text)
    if colour is not None:
      colours[colour] = colours.get(colour, 0.0) + amount
  return PageFacts(
    viewport=_pair(values["viewport"]),
    content=_pair(values["content"]),
    texts=tuple(
      Text(
        Box(*one["box"]),
        one["text"],
        one["tag"],
        one["size"],
        one["weight"],
        one["family"],
        read_colour(one["colour"]) or (0.0, 0.0, 0.0),
        tuple(c for c in map(read_colour, one["grounds"]) if c is not None),
        one["clipped"],
        one["inline"],
        one["section"],
        one["hidden"],
      )
      for one in values["texts"]
    ),
    shown=tuple(
      Shown(
        one["source"],
        Box(*one["box"]),
        _pair(one["natural"]),
        one["loaded"],
        one["fit"],
        one["background"],
        one["section"],
        charts.get(one["source"]),
      )
      for one in values["shown"]
    ),
    colours=colours,
    refused=tuple(refused),
    words=values["words"],
  )


def _pair(values: Sequence[float]) -> tuple[float, float]:
  return float(values[0]), float(values[1])


_NUMBERS = re.compile(r"-?\d+(?:\.\d+)?")


def read_colour(text: str) -> Rgb | None:
  """``#rgb``, ``#rrggbb`` or ``rgb(r, g, b)``; None for others and for what is transparent."""
  text = text.strip().lower()
  if text.startswith("#"):
    digits = text[1:]
    if len(digits) == 3:
      digits = "".join(2 * digit for digit in digits)
    if len(digits) != 6 or not all(d in "0123456789abcdef" for d in digits):
      return None
    return tuple(float(int(digits[i : i + 2], 16)) for i in (0, 2, 4))  # type: ignore[return-value]
  numbers = [float(n) for n in _NUMBERS.findall(text)]
  if not text.startswith("rgb") or len(numbers) < 3 or (len(numbers) > 3 and numbers[3] < 0.05):
    return None
  return numbers[0], numbers[1], numbers[2]


def hex_colour(colour: Rgb) -> str:
  return "#" + "".join(f"{round(min(max(v, 0), 255)):02x}" for v in colour)


def contrast(one: Rgb, other: Rgb) -> float:
  """Ratio of the luminances by WCAG 2, from 1 to 21."""
  bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
  return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: Rgb) -> float:
  linear = [
    v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)
  ]
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def distance(one: Rgb, other: Rgb) -> float:
  """How unlike two colours look: Euclidean with weights for red and blue, 0 to about 765."""
  mean = (one[0] + other[0]) / 2
  red, green, blue = (a - b for a, b in zip(one, other, strict=True))
  weights = (2 + mean / 256, 4.0, 2 + (255 - mean) / 256)
  return (weights[0] * red**2 + weights[1] * green**2 + weights[2] * blue**2) ** 0.5


def hue(colour: Rgb) -> float | None:
  """In degrees; None of greys, and of what is nearly black or white."""
  h, lightness, saturation = colorsys.rgb_to_hls(*(c / 255 for c in colour))
  return None if saturation < 0.2 or not 0.08 < lightness < 0.95 else 360 * h
