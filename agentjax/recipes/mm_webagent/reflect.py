"""Reflection: what scores low is made again with its issues told, and the best is kept.

The order and the figures are the source's: charts, then images (and clips), then the page; at most
three rounds each; below .8 things are made again, and an image of .999 or above is never touched.
Issues of an asset go to its maker; issues of its embedding and of the page go to the maker of the
page. After each round an item stays as it was unless its score has risen, so no loop can make a
page worse.

Ours: an asset is made again if its own score or the mean of its kind is below .8; charts and clips
of .999 stay too; for the page the overall score is compared; and an asset that would lower the
overall score is not taken.

Reference: MM-WebAgent, 2604.15309, and its code.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from agentjax.config import Config, NonNegativeInt, Share
from agentjax.faults import describe
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.execute import (
  Draft,
  ExecuteConfig,
  Makers,
  Order,
  attempt,
)
from agentjax.recipes.mm_webagent.plan import Kind
from agentjax.recipes.mm_webagent.score import Scores
from agentjax.rewards.judges import question_key

_log = logging.getLogger(__name__)
_EPSILON = 1e-9

Judged = Callable[[Draft], Awaitable[Scores]]


@dataclasses.dataclass(unsafe_hash=True)
class ReflectConfig(Config):
  """How often what is made again; see the module.

  Attributes:
    chart_rounds, image_rounds, page_rounds: at most; clips count as images.
    trigger: a score below this leads to another round.
    frozen: an asset of at least this score stays.
  """

  chart_rounds: NonNegativeInt = 3
  image_rounds: NonNegativeInt = 3
  page_rounds: NonNegativeInt = 3
  trigger: Share = 0.8
  frozen: Share = 0.999


@dataclasses.dataclass(frozen=True)
class Round:
  """One try of a loop.

  Attributes:
    item: path of an asset, or "page".
    number: of the round, from 0.
    before, after: scores of the item.
    overall: of the page with it.
    kept: whether it was taken.
  """

  item: str
  number: int
  before: float
  after: float
  overall: float
  kept: bool

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Reflected:
  """A page after its loops: the best draft, its scores, and all rounds."""

  draft: Draft
  scores: Scores
  rounds: tuple[Round, ...]


async def reflect(
  brief: Brief,
  draft: Draft,
  makers: Makers,
  judged: Judged,
  *,
  config: ReflectConfig,
  execute: ExecuteConfig,
  key: int,
) -> Reflected:
  """Runs the loops.

  Args:
    brief: what was asked for.
    draft: as first made.
    makers: who makes things again.
    judged: the scores of a draft; renders it.
    config, execute: of the loops, and of what they make.
    key: addresses all chance.
  """
  found = Reflected(draft, await judged(draft), ())
  kinds: tuple[tuple[Kind, int], ...] = (
    ("chart", config.chart_rounds), ("image", config.image_rounds), ("video", config.image_rounds)
  )  # fmt: skip
  for kind, rounds in kinds:
    for asset in draft.plan.of(kind):
      for number in range(rounds):
        score = found.scores.items.get(asset.path, 0.0)
        own = tuple(i for i in found.scores.issues if i.path == asset.path and not i.of_page)
        enough = min(score, found.scores.aspects.get(kind, 1.0)) >= config.trigger
        if enough or score >= config.frozen or not own:
          break
        address = question_key(question_key(key, number), asset.path)
        order = Order(brief, draft.plan, address, asset, own, found.draft.made(asset))
        making = _again(found.draft, order, makers, execute)
        found = await _try(found, asset.path, number, making, judged)
  for number in range(config.page_rounds):
    issues = tuple(i for i in found.scores.issues if i.of_page)
    if not issues or not _page_is_low(found.scores, config.trigger):
      break
    address = question_key(key, "page", number)
    order = Order(brief, draft.plan, address, None, issues, found.draft.page)
    making = _again(found.draft, order, makers, execute)
    found = await _try(found, "page", number, making, judged)
  return found


def _page_is_low(scores: Scores, trigger: float) -> bool:
  """Whether any score that the page decides is below the trigger."""
  return any(scores.aspects.get(a, 1.0) < trigger for a in ("layout", "style", "aesthetics")) or (
    scores.overall < trigger
  )


async def _again(draft: Draft, order: Order, makers: Makers, execute: ExecuteConfig) -> Draft:
  """The draft with the asset or the page of an order made again."""
  made = await attempt(makers, order, execute)
  return draft.with_page(made) if order.asset is None else draft.with_asset(order.asset, made)


async def _try(
  found: Reflected, item: str, number: int, making: Awaitable[Draft], judged: Judged
) -> Reflected:
  """The better of two drafts; one that cannot be made leaves all as it was."""
  before = _score(found.scores, item)
  try:
    draft = await making
    scores = await judged(draft)
  except Exception as error:  # a failed try costs a round, never what is there
    _log.warning("round %d of %s failed: %s", number, item, describe(error))
    failed = Round(item, number, before, before, found.scores.overall, False)
    return dataclasses.replace(found, rounds=(*found.rounds, failed))
  after = _score(scores, item)
  whole = scores.overall >= found.scores.overall - _EPSILON
  kept = after > before + _EPSILON and whole
  rounds = (*found.rounds, Round(item, number, before, after, scores.overall, kept))
  if not kept:
    return dataclasses.replace(found, rounds=rounds)
  return Reflected(draft, scores, rounds)


def _score(scores: Scores, item: str) -> float:
  return scores.overall if item == "page" else scores.items.get(item, 0.0)
