"""From a plan to files: every asset and the page are made, tried again, at most so many at once.

A maker is a function of an order. Built in are makers without a model (``built_in``); ``models``
has those that ask one. An asset that cannot be made leaves its error, and the page is made all the
same: its score says what is missing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from agentjax.config import Config, PositiveFloat, PositiveInt, Share
from agentjax.faults import describe
from agentjax.recipes.mm_webagent import draw
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.charts import make_option
from agentjax.recipes.mm_webagent.facts import Rgb, hex_colour, read_colour
from agentjax.recipes.mm_webagent.issues import Issue
from agentjax.recipes.mm_webagent.page import FLAWS, Flaw, build_page
from agentjax.recipes.mm_webagent.plan import Asset, Plan
from agentjax.recipes.mm_webagent.score import MediaFacts
from agentjax.rewards.judges import question_key

_log = logging.getLogger(__name__)


@dataclasses.dataclass(unsafe_hash=True)
class ExecuteConfig(Config):
  """How assets and pages are made; the figures are the source's.

  Attributes:
    attempts: of an asset or a page.
    timeout: seconds of one attempt.
    workers: assets that are made at once.
  """

  attempts: PositiveInt = 5
  timeout: PositiveFloat = 500.0
  workers: PositiveInt = 8


@dataclasses.dataclass(frozen=True)
class Order:
  """What a maker is to make.

  Attributes:
    brief: what was asked for.
    plan: of the page.
    key: addresses all chance; a further attempt or round has another one.
    asset: which; None is the page.
    issues: of what was made before.
    before: what was made before; None at first.
  """

  brief: Brief
  plan: Plan
  key: int
  asset: Asset | None = None
  issues: tuple[Issue, ...] = ()
  before: Any = None

  @property
  def item(self) -> Asset:
    """The asset of an order that is not for the page."""
    assert self.asset is not None
    return self.asset


@dataclasses.dataclass(frozen=True)
class Makers:
  """Who makes what.

  Attributes:
    page: HTML.
    chart: an option of ECharts.
    image: the bytes of a PNG.
    video: the bytes of an MP4.
  """

  page: Callable[[Order], Awaitable[str]]
  chart: Callable[[Order], Awaitable[Mapping[str, Any]]]
  image: Callable[[Order], Awaitable[bytes]]
  video: Callable[[Order], Awaitable[bytes]]


@dataclasses.dataclass(frozen=True)
class Draft:
  """A page with its assets, as they are now.

  Attributes:
    plan: of the page.
    page: HTML; "" could not be made.
    options: of charts, by path.
    files: images and clips, by path.
    media: what is measured of images and clips, by path.
  """

  plan: Plan
  page: str
  options: Mapping[str, Mapping[str, Any]]
  files: Mapping[str, bytes]
  media: Mapping[str, MediaFacts]

  def made(self, asset: Asset) -> Any:
    """An asset as it is now; None where there is none."""
    return (self.options if asset.kind == "chart" else self.files).get(asset.path)

  def with_page(self, page: str) -> Draft:
    return dataclasses.replace(self, page=page)

  def with_asset(self, asset: Asset, made: Any) -> Draft:
    """The draft with an asset in another form; ``made`` may be a reason why there is none."""
    if isinstance(made, BaseException):
      media = {**self.media, asset.path: MediaFacts(error=describe(made))}
      return dataclasses.replace(self, media=media)
    if asset.kind == "chart":
      return dataclasses.replace(self, options={**self.options, asset.path: made})
    measure = draw.clip_facts if asset.kind == "video" else draw.image_facts
    return dataclasses.replace(
      self,
      files={**self.files, asset.path: made},
      media={**self.media, asset.path: measure(made)},
    )


async def make_draft(
  brief: Brief, plan: Plan, makers: Makers, config: ExecuteConfig, key: int
) -> Draft:
  """Makes all assets of a plan, and its page.

  Raises:
    Exception: the page could not be made; its last error.
  """
  room = asyncio.Semaphore(config.workers)
  draft = Draft(plan, "", {}, {}, {})

  async def work(asset: Asset) -> Any:
    order = Order(brief, plan, question_key(key, asset.path), asset)
    async with room:
      try:
        return await attempt(makers, order, config)
      except ImportError:
        raise
      except Exception as error:  # the page is made without it, and its score tells
        _log.warning("%s could not be made: %s", asset.path, describe(error))
        return error

  made = await asyncio.gather(*(work(asset) for asset in plan.assets))
  for asset, one in zip(plan.assets, made, strict=True):
    draft = await asyncio.to_thread(draft.with_asset, asset, one)
  order = Order(brief, plan, question_key(key, "page"))
  return draft.with_page(await attempt(makers, order, config))


async def attempt(makers: Makers, order: Order, config: ExecuteConfig) -> Any:
  """What an order is for; after an error its maker is asked again with another key.

  An ImportError is not tried again: a package is missing.
  """
  maker = makers.page if order.asset is None else getattr(makers, order.asset.kind)
  for number in range(config.attempts):
    key = question_key(order.key, "attempt", number)
    try:
      async with asyncio.timeout(config.timeout):
        return await maker(dataclasses.replace(order, key=key))
    except ImportError:
      raise
    except Exception:
      if number + 1 == config.attempts:
        raise
  raise AssertionError("attempts is at least 1")


# ---------------------------------------------------------------------------------------- built in


@dataclasses.dataclass(unsafe_hash=True)
class BuiltInConfig(Config):
  """The makers that ask no model.

  Attributes:
    mistaken: chance of a fault on purpose in each thing that is made at first, so that there is
      something to mend without a model. A thing that is made again has none of the faults that it
      was told of.
  """

  mistaken: Share = 0.0


def built_in(config: BuiltInConfig | None = None) -> Makers:
  """Makers that draw by rule."""
  mistaken = (config or BuiltInConfig()).mistaken

  def slips(order: Order) -> np.random.Generator | None:
    random = np.random.default_rng(order.key)
    return random if random.random() < mistaken and not order.issues else None

  async def page(order: Order) -> str:
    random, flaws = slips(order), tuple[Flaw, ...]()
    if random is not None:
      flaws = tuple(str(f) for f in random.choice(FLAWS, 2, replace=False))  # type: ignore[misc]
    return build_page(order.plan, flaws)

  async def chart(order: Order) -> Mapping[str, Any]:
    colours, ink = _chart_colours(order)
    option = make_option(order.item, colours, ink)
    random = slips(order)
    return option if random is None else spoilt(option, random)

  async def image(order: Order) -> bytes:
    asset = order.item
    if slips(order) is not None:
      asset = dataclasses.replace(asset, size=(512, 512))
    return await asyncio.to_thread(draw.draw_image, asset, palette_of(order), _seed(order))

  async def video(order: Order) -> bytes:
    asset = order.item
    if slips(order) is not None:
      asset = dataclasses.replace(
        asset, attributes={**asset.attributes, "motion_intensity": "none"}
      )
    return await asyncio.to_thread(draw.draw_clip, asset, palette_of(order), _seed(order))

  return Makers(page, chart, image, video)


def spoilt(option: Mapping[str, Any], random: np.random.Generator) -> dict[str, Any]:
  """An option with one wrong value and without its title."""
  changed: dict[str, Any] = {name: value for name, value in option.items() if name != "title"}
  series = [dict(one) for one in changed.get("series", ())]
  for one in series[:1]:
    data = list(one["data"])
    if data:
      at = int(random.integers(len(data)))
      point = data[at]
      wrong = 1.5 * ((point["value"] if isinstance(point, dict) else point) or 0) + 3
      data[at] = {**point, "value": wrong} if isinstance(point, dict) else wrong
    one["data"] = data
  return changed | {"series": series}


def palette_of(order: Order) -> tuple[Rgb, ...]:
  """The colours of a page: of its plan's settings, or else of its request."""
  look = order.plan.settings()
  named = [read_colour(look.get(name, "")) for name in ("accent", "second", "third")]
  found = tuple(colour for colour in named if colour is not None)
  return found or order.brief.palette


def _chart_colours(order: Order) -> tuple[list[str], str]:
  colours = [hex_colour(colour) for colour in palette_of(order)]
  return colours, order.plan.settings().get("ink", "#333333")


def _seed(order: Order) -> int:
  """Of a drawing: by the asset, so that an attempt or a round draws the same picture."""
  return question_key(order.item.path, order.item.prompt) % 2**16
