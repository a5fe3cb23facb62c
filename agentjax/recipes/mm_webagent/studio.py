"""From a request to a page on disk: plan, make, render, score, reflect."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.config import Config, ConfigError, PositiveInt, Share
from agentjax.faults import describe
from agentjax.files import write_atomically
from agentjax.recipes.mm_webagent import draw
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.browser import BrowserError
from agentjax.recipes.mm_webagent.execute import (
  BuiltInConfig,
  Draft,
  ExecuteConfig,
  Makers,
  make_draft,
)
from agentjax.recipes.mm_webagent.plan import Plan, PlanError, plan_json
from agentjax.recipes.mm_webagent.reflect import ReflectConfig, Reflected, reflect
from agentjax.recipes.mm_webagent.render import RenderConfig, Renderer
from agentjax.recipes.mm_webagent.score import Scores, score_page
from agentjax.rewards.judges import question_key

RESULT = "result.json"
_THUMBNAIL = 640  # pixels


@dataclasses.dataclass(unsafe_hash=True)
class StudioConfig(Config):
  """How pages are made.

  Attributes:
    plan_attempts: of a model that plans; it is told the faults of a plan that cannot be used. Ours.
    judge_weight: share of a judge's scores where one is named; the rest is what is measured. Ours.
    execute: how assets and pages are made.
    built_in: makers without a model.
    reflect: the loops.
    render: the browser.
  """

  plan_attempts: PositiveInt = 3
  judge_weight: Share = 0.5
  execute: ExecuteConfig = dataclasses.field(default_factory=ExecuteConfig)
  built_in: BuiltInConfig = dataclasses.field(default_factory=BuiltInConfig)
  reflect: ReflectConfig = dataclasses.field(default_factory=ReflectConfig)
  render: RenderConfig = dataclasses.field(default_factory=RenderConfig)


Opinion = Callable[[Brief, Scores, bytes, int], Awaitable[Scores]]


@dataclasses.dataclass(frozen=True)
class Studio:
  """All that makes a page.

  Attributes:
    plan: a request -> its plan, with a key.
    makers: of assets and pages.
    renderer: started.
    config: of the whole.
    opinion: mixes a judge's scores in; None asks nobody.
  """

  plan: Callable[[Brief, int], Awaitable[Plan]]
  makers: Makers
  renderer: Renderer
  config: StudioConfig
  opinion: Opinion | None = None

  async def make(self, brief: Brief, key: int) -> Result:
    """A page, before and after reflection.

    Raises:
      PlanError: no plan that can be used.
      BrowserError: the first page cannot be shown.
    """
    plan = await self.plan(brief, question_key(key, "plan"))
    draft = await make_draft(brief, plan, self.makers, self.config.execute, key)
    seen: list[tuple[Draft, Scores, bytes]] = []

    async def judged(one: Draft) -> Scores:
      scores, picture = await self.scores(brief, one, key)
      seen.append((one, scores, picture))
      return scores

    best = await reflect(
      brief,
      draft,
      self.makers,
      judged,
      config=self.config.reflect,
      execute=self.config.execute,
      key=question_key(key, "reflect"),
    )
    first_draft, first_scores, first_picture = seen[0]
    best_picture = next(picture for one, _, picture in seen if one is best.draft)
    first = Reflected(first_draft, first_scores, ())
    return Result(brief, first, best, first_picture, best_picture)

  async def scores(self, brief: Brief, draft: Draft, key: int) -> tuple[Scores, bytes]:
    """Scores and picture of a draft."""
    facts, picture = await self.renderer.render(draft)
    scores = score_page(brief, draft.plan, facts, draft.options, draft.media)
    if self.opinion is not None:
      scores = await self.opinion(brief, scores, picture, question_key(key, "judge"))
    return scores, picture


@dataclasses.dataclass(frozen=True)
class Result:
  """A page before and after reflection, with pictures of both."""

  brief: Brief
  first: Reflected
  best: Reflected
  first_picture: bytes
  best_picture: bytes

  def to_json(self, name: str) -> dict[str, Any]:
    return {
      "id": name,
      "request": self.brief.prompt,
      "first": self.first.scores.to_json(),
      "best": self.best.scores.to_json(),
      "rounds": [one.to_json() for one in self.best.rounds],
    }


def write_result(result: Result, folder: pathlib.Path, name: str, renderer: Renderer) -> None:
  """The page with its assets, plan, scores and pictures, as files; ``result.json`` is the last."""
  draft = result.best.draft
  folder.mkdir(parents=True, exist_ok=True)
  for path, file in renderer.files(draft).items():
    where = folder / path
    where.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(where, file.content)
  write_atomically(folder / "plan.json", _json(plan_json(draft.plan)))
  pictures = (("first", result.first_picture), ("best", result.best_picture))
  for which, picture in pictures:
    write_atomically(folder / f"{which}.png", picture)
    write_atomically(folder / f"{which}_small.png", draw.thumbnail(picture, _THUMBNAIL))
  write_atomically(folder / RESULT, _json(result.to_json(name)))


def read_result(folder: pathlib.Path) -> dict[str, Any] | None:
  """What ``write_result`` wrote last; None if the page is not finished."""
  try:
    return json.loads((folder / RESULT).read_text("utf-8"))
  except FileNotFoundError:
    return None


def _json(values: Any) -> bytes:
  try:
    return json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"
  except UnicodeEncodeError:  # half of a pair, where a model's reply was cut
    return json.dumps(values, indent=2).encode() + b"\n"


async def make_all(
  studio: Studio, requests: Mapping[str, Brief], folder: pathlib.Path, key: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
  """The results of all requests, and by name why others have no page.

  A request without a usable plan or page does not hold up those behind it. A model that is away, a
  missing package or a wrong setting ends the call.
  """
  results, failed = [], dict[str, str]()
  for number, (name, brief) in enumerate(requests.items()):
    result = read_result(folder / name)
    if result is None:
      try:
        made = await studio.make(brief, question_key(key, name))
      except (PlanError, BrowserError, JudgeRefusedError, TimeoutError, ValueError) as error:
        if isinstance(error, ConfigError) and not isinstance(error, PlanError):
          raise
        failed[name] = describe(error)
        continue
      await asyncio.to_thread(write_result, made, folder / name, name, studio.renderer)
      result = made.to_json(name)
    results.append(result)
    first, best = (result[which]["overall"] for which in ("first", "best"))
    print(f"{number + 1}/{len(requests)} {name}: {first:.3f} -> {best:.3f}", flush=True)
  return results, failed
