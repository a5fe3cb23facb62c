"""A world in which a policy plans pages and is paid what they score in the browser.

One turn: the request, a plan, the score. The plan is made into a page by the built-in makers, shown
by Chromium and measured; a plan that cannot be used scores 0. The world needs a Chromium.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from agentjax.config import PositiveInt, Share
from agentjax.faults import Fault, Owner, describe
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.browser import BrowserError, find_chromium
from agentjax.recipes.mm_webagent.execute import ExecuteConfig, built_in, make_draft
from agentjax.recipes.mm_webagent.models import json_object
from agentjax.recipes.mm_webagent.plan import Plan, PlanError, plan_json, read_plan
from agentjax.recipes.mm_webagent.render import RenderConfig, Renderer
from agentjax.recipes.mm_webagent.score import Scores, score_page
from agentjax.recipes.mm_webagent.tasks import (
  CHOICES,
  best_choices,
  choices_plan,
  draw_settings,
  read_choices,
  request_of,
  some_choices,
  table_of,
  written,
)
from agentjax.trajectory.record import Message, Reward, Status, Task
from agentjax.world.cheats import Turns, claims, each
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.games import GameConfig, GameWorld
from agentjax.world.text_game import Split, make_tasks
from agentjax.world.world import Site, World

_KEPT = 4096  # scores of pages, by request and plan
_MOST_ASSETS = 6  # of a plan that a policy writes; each is drawn


@dataclasses.dataclass(unsafe_hash=True)
class PageWorldConfig(GameConfig):
  """Attributes:
  form: what the policy writes: "choices", ten words of which a plan is made, or "plan", the JSON
    of a plan.
  right: how often each choice of a demonstration is the best one; a demonstration shows the form.
  at_once: pages that the browser shows at once.
  render: the browser.
  """

  form: Literal["choices", "plan"] = "choices"
  right: Share = 0.5
  at_once: PositiveInt = 2
  render: RenderConfig = dataclasses.field(default_factory=RenderConfig)

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    return page_tasks(self, count, **place)

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    """Texts that are no plan, and choices beyond those that there are."""
    right = written(best_choices(task.metadata))
    return each(
      claims(task)
      | {
        "twice": f"{right} {right}",
        "beyond": right.replace("width=1080", "width=1"),
        "more": f"{right} score=1",
        "fewer": right.rpartition(" ")[0],
        "page": "<h1>1.0</h1>",
        "empty_plan": "{}",
      },
      str,
    )

  def solution(self, task: Task) -> Turns:
    """The choices that fulfil the request, or their plan."""
    return (Message("assistant", solved(task, self.form)),)

  def build(self, site: Site) -> World:
    find_chromium(self.render.browser, "config.world.render.browser")
    self.render.library("config.world.render")
    return PageWorld(self)


class PageWorld(GameWorld):
  """Holds the browser; the part "environment" of the reward is the score of the page."""

  def __init__(self, config: PageWorldConfig):
    super().__init__(config)
    self._pages = config
    self._room = asyncio.Semaphore(config.at_once)
    self._renderer: Renderer | None = None
    self._makers = built_in()
    self._opening = asyncio.Lock()
    self._known: collections.OrderedDict[tuple[Brief, str], Scores] = collections.OrderedDict()

  async def start(self, site: Site) -> None:
    await self._opened()

  async def close(self) -> None:
    renderer, self._renderer = self._renderer, None
    if renderer is not None:
      await renderer.__aexit__()

  def environment(self, task: Task) -> Environment:
    return PageEnvironment(self, self._pages)

  async def scores(self, brief: Brief, plan: Plan) -> Scores:
    """Scores of a plan's page; equal plans of one request are shown once.

    Raises:
      BrowserError: it cannot be shown, also not in a fresh browser.
    """
    address = (brief, json.dumps(plan_json(plan), sort_keys=True))
    async with self._room:
      if address in self._known:
        self._known.move_to_end(address)
        return self._known[address]
      draft = await make_draft(brief, plan, self._makers, ExecuteConfig(), 0)
      renderer = await self._opened()
      try:
        facts = await renderer.measure(draft)
      except BrowserError:
        facts = await (await self._opened(failed=renderer)).measure(draft)
      found = score_page(brief, plan, facts, draft.options, draft.media)
      self._known[address] = found
      if len(self._known) > _KEPT:
        self._known.popitem(last=False)
      return found

  async def _opened(self, failed: Renderer | None = None) -> Renderer:
    """The renderer; a fresh one where there is none, or the one that failed is still in use."""
    async with self._opening:  # pages that fail together share one fresh browser
      if self._renderer is None or self._renderer is failed:
        await self.close()
        renderer = Renderer(self._pages.render)
        await renderer.__aenter__()
        self._renderer = renderer
      return self._renderer


class PageEnvironment(Environment):
  """One request, one plan."""

  def __init__(self, world: PageWorld, config: PageWorldConfig):
    self._world, self._config = world, config

  async def reset(self, task: Task, key: int) -> Observation:
    del key  # nothing is left to chance
    self._settings = task.metadata
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    if action.truncated:
      return Step(Observation(()), Reward(0.0), truncated=True, status=Status.TRUNCATED)
    try:
      plan = read_turn(action.text, self._settings, self._config.form)
    except PlanError as error:
      return Step(Observation(()), Reward(0.0), terminated=True, reason=error.faults[0][:300])
    try:
      found = await self._world.scores(request_of(self._settings), plan)
    except BrowserError as error:
      fault = Fault(Owner.INFRASTRUCTURE, "environment", describe(error))
      return Step(Observation(()), terminated=True, status=Status.ENV_ERROR, fault=fault)
    return Step(Observation(()), Reward(found.overall), terminated=True, answer=action.text)

  def snapshot(self) -> bytes:
    return b""

  def restore(self, state: bytes) -> None:
    del state  # nothing changes before the only turn


def read_turn(text: str, settings: Mapping[str, Any], form: str) -> Plan:
  """The plan of a turn.

  Raises:
    PlanError: it cannot be used.
  """
  if form == "choices":
    choices = read_choices(text)
    if choices is None:
      raise PlanError((f"allowed: each of {', '.join(CHOICES)} once, as NAME=OPTION.",))
    return choices_plan(settings, choices)
  plan = read_plan(json_object(text))
  if len(plan.assets) > _MOST_ASSETS or plan.of("video"):
    raise PlanError((f"allowed: up to {_MOST_ASSETS} assets, and no clips.",))
  return plan


def solved(task: Task, form: str) -> str:
  """A turn that fulfils a task's request."""
  best = best_choices(task.metadata)
  if form == "choices":
    return written(best)
  return json.dumps(plan_json(choices_plan(task.metadata, best)))


def page_tasks(
  config: PageWorldConfig, count: int, *, split: Split, seed: int, first_id: int = 0
) -> list[Task]:
  """Requests; what a demonstration chooses is right in part, see ``PageWorldConfig``."""

  def draw(random: np.random.Generator) -> tuple[str, Task]:
    settings = draw_settings(random)
    shown = some_choices(settings, config.right, random)
    text = request_of(settings).prompt
    if config.form == "choices":
      turn = written(shown)
    else:
      turn = json.dumps(plan_json(choices_plan(settings, shown)))
      text += f"\nData of the chart:\n{table_of(settings)}\nWrite the plan as JSON."
    task = Task(
      id=0,
      prompt=(Message("user", text),),
      answer=solved(Task(0, (), "", "pages", metadata=settings), config.form),
      source="pages",
      demonstration=(Message("assistant", turn),),
      metadata=settings,
    )
    return json.dumps(settings, sort_keys=True), task

  return make_tasks(draw, count, split=split, seed=seed, first_id=first_id, source="pages")
