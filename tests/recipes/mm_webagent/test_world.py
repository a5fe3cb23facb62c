import asyncio
import json
import pathlib
import time

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.mm_webagent import browser
from agentjax.recipes.mm_webagent import world as worlds
from agentjax.recipes.mm_webagent.plan import PlanError, plan_faults, plan_json
from agentjax.recipes.mm_webagent.tasks import (
  CHOICES,
  best_choices,
  choices_plan,
  draw_settings,
  read_choices,
  request_of,
  some_choices,
  written,
)
from agentjax.recipes.mm_webagent.world import PageWorldConfig, page_tasks, read_turn, solved
from agentjax.tools.registry import ToolRegistry
from agentjax.training import load_experiment
from agentjax.world.cheats import Setting
from agentjax.world.environment import Action
from agentjax.world.world import Site
from tests.recipes.mm_webagent.pages import GOOD, needs_chromium

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def _settings(seed=0):
  return draw_settings(np.random.default_rng(seed))


def test_choices_are_read_only_if_each_is_made_once_of_its_options():
  best = best_choices(_settings())
  text = written(best)
  assert read_choices(f" {text}\n") == best and list(best) == list(CHOICES)
  for bad in ("", text + " x=1", text.rpartition(" ")[0], f"{text} {text}", text + ".",
              text.replace("ink=", "ink=blue"), text.replace("scheme", "ink")):  # fmt: skip
    assert read_choices(bad) is None
  begun = time.process_time()
  assert read_choices("a" * 60_000) is None
  assert time.process_time() - begun < 2  # seconds; a try at each letter takes more


def test_the_best_choices_fulfil_a_request_and_others_do_not():
  random = np.random.default_rng(0)
  for seed in range(20):
    settings = _settings(seed)
    brief, best = request_of(settings), best_choices(settings)
    plan = choices_plan(settings, best)
    assert plan_faults(plan_json(plan)) == () and brief.unmet(plan) == ()
    for name in ("image", "chart"):
      other = choices_plan(settings, best | {name: "none"})
      assert [wish.kind for wish in brief.unmet(other)] == [name]
    assert some_choices(settings, 1.0, random) == best
    assert any(some_choices(settings, 0.0, random) != best for _ in range(5))


def test_train_and_test_share_no_request_and_demonstrations_can_be_read():
  config = PageWorldConfig()
  train = page_tasks(config, 40, split="train", seed=0)
  test = page_tasks(config, 20, split="test", seed=0, first_id=99)
  prompts = [{json.dumps(t.metadata) for t in tasks} for tasks in (train, test)]
  assert not prompts[0] & prompts[1]
  for task in train:
    assert read_turn(task.demonstration[0].content, task.metadata, "choices").layout
  whole = page_tasks(PageWorldConfig(form="plan"), 4, split="train", seed=0)
  for task in whole:
    assert "| Month | Sold |" in task.prompt[0].content
    assert read_turn(solved(task, "plan"), task.metadata, "plan").of("chart")


def test_a_turn_that_is_no_plan_is_refused():
  for form, text in (("choices", "a plan"), ("plan", "{}"), ("plan", "[]"), ("plan", "x")):
    with pytest.raises(PlanError):
      read_turn(text, _settings(), form)


def test_a_run_without_chromium_is_told_before_it_starts(monkeypatch):
  monkeypatch.setattr(browser.shutil, "which", lambda name: None)
  with pytest.raises(ConfigError, match="config.world.render.browser.executable"):
    PageWorldConfig().build(Site(ToolRegistry(())))


def _renderers(monkeypatch, failing=0):
  """Renderers without a browser that see one page; the first ``failing`` of them fail."""
  opened = []

  class Renderer:
    def __init__(self, config):
      self.number, self.closed = len(opened), 0
      opened.append(self)

    async def __aenter__(self):
      await asyncio.sleep(0)

    async def __aexit__(self, *error):
      self.closed += 1

    async def measure(self, draft):
      await asyncio.sleep(0)
      if self.number < failing:
        raise browser.BrowserError("it died")
      return GOOD

  monkeypatch.setattr(worlds, "Renderer", Renderer)
  return opened


def _scores(*asked, at_once=2):
  async def play():
    world = worlds.PageWorld(PageWorldConfig(at_once=at_once))
    await world.start(Site(ToolRegistry(())))
    try:
      return await asyncio.gather(*(world.scores(brief, plan) for brief, plan in asked))
    finally:
      await world.close()

  return asyncio.run(play())


def test_pages_that_fail_together_share_one_fresh_browser(monkeypatch):
  opened = _renderers(monkeypatch, failing=1)
  settings = _settings()
  bare = best_choices(settings) | {"image": "none", "chart": "none"}
  plans = [choices_plan(settings, bare | {"title": size}) for size in CHOICES["title"]]
  assert len(_scores(*((request_of(settings), plan) for plan in plans))) == 3
  assert [one.closed for one in opened] == [1, 1]


def test_requests_in_the_same_words_with_other_data_are_scored_apart(monkeypatch):
  _renderers(monkeypatch)
  settings = _settings()
  briefs = [request_of(settings | {"values": values}) for values in ([1] * 6, [2] * 6)]
  assert briefs[0].prompt == briefs[1].prompt
  bare = best_choices(settings) | {"image": "none"}
  plan = choices_plan(settings | {"values": [1] * 6}, bare)
  right, wrong = _scores(*((brief, plan) for brief in briefs), at_once=1)
  assert right.aspects["chart"] > wrong.aspects["chart"]


def test_the_config_is_valid():
  load_experiment(_CONFIGS / "mm_webagent_planner.py").validate()


@needs_chromium
def test_the_browser_pays_good_plans_more_and_cheats_nothing():
  site = Site(ToolRegistry(()))

  async def play():
    world = PageWorldConfig().build(site)
    (task,) = page_tasks(PageWorldConfig(), 1, split="train", seed=0)
    await world.start(site)
    try:

      async def reward(text):
        environment = world.environment(task)
        await environment.reset(task, 0)
        return (await environment.step(Action(text))).reward.value

      best = best_choices(task.metadata)
      good = await reward(written(best))
      worse = {
        name: await reward(written(best | {name: option}))
        for name, option in (
          ("ink", best["ground"]), ("width", "1500"), ("title", "18"), ("image", "none"),
          ("chart", "none"), ("scheme", "plum" if best["scheme"] != "plum" else "ocean"),
        )
      }  # fmt: skip
      cheats = world.cheats(task, Setting())
      paid = {name: await reward(turns[0].content) for name, turns in cheats.items()}
      again = await reward(written(best))
      return good, worse, paid, again
    finally:
      await world.close()

  good, worse, paid, again = asyncio.run(play())
  assert good == again > 0.93
  assert all(value < good - 0.01 for value in worse.values()), worse
  assert set(paid.values()) == {0.0}, paid
