import asyncio
import dataclasses

import pytest

from agentjax.recipes.mm_webagent.execute import (
  BuiltInConfig,
  Draft,
  ExecuteConfig,
  Makers,
  Order,
  built_in,
  make_draft,
)
from agentjax.recipes.mm_webagent.issues import Issue
from agentjax.recipes.mm_webagent.plan import Plan
from agentjax.recipes.mm_webagent.reflect import ReflectConfig, reflect
from agentjax.recipes.mm_webagent.score import MediaFacts
from tests.recipes.mm_webagent.pages import BRIEF, GOOD, MEDIA, OPTIONS, PLAN, score

_BAD = {**OPTIONS["assets/sold.html"], "title": {}, "series": [{"type": "line", "data": [1, 2]}]}
_FILES = {"assets/hero.png": b"png", "assets/film.mp4": b"mp4"}


def _draft(option=_BAD):
  return Draft(PLAN, "wide", {"assets/sold.html": option}, _FILES, MEDIA)


async def _judged(draft):
  width = 1700 if draft.page == "wide" else 1280
  facts = dataclasses.replace(GOOD, content=(width, 1500))
  return score(facts, options=draft.options, media=draft.media)


def _makers(charts, pages):
  """Makers that give these in turn, and the orders that they got."""
  orders = []

  def giving(results):
    results = iter(results)

    async def make(order):
      orders.append(order)
      made = next(results)
      if isinstance(made, Exception):
        raise made
      return made

    return make

  return Makers(giving(pages), giving(charts), giving([]), giving([])), orders


def _reflect(makers, draft=None, **config):
  return asyncio.run(
    reflect(
      BRIEF,
      draft or _draft(),
      makers,
      _judged,
      config=ReflectConfig(**config),
      execute=ExecuteConfig(attempts=1),
      key=0,
    )
  )


def test_a_chart_and_the_page_are_mended_in_order_with_their_issues_told():
  good = OPTIONS["assets/sold.html"]
  makers, orders = _makers([good], ["narrow"])
  found = _reflect(makers)
  assert found.draft.page == "narrow" and found.scores.overall > 0.93
  assert [one.item for one in found.rounds] == ["assets/sold.html", "page"]
  assert orders[0].before == _BAD and "chart_type" in {i.code for i in orders[0].issues}
  assert {i.code for i in orders[1].issues} == {"overflow"} and orders[1].before == "wide"


def test_what_is_worse_is_never_kept():
  worse = {**_BAD, "series": []}
  makers, _ = _makers([worse, RuntimeError("down"), _BAD], ["wide", "wide", "wide"])
  found = _reflect(makers)
  assert found.draft == _draft() and not any(one.kept for one in found.rounds)
  assert [one.item for one in found.rounds] == ["assets/sold.html"] * 3 + ["page"] * 3


def test_a_better_round_stays_though_a_later_one_is_worse():
  better = {**_BAD, "title": {"text": "Sold"}}
  makers, _ = _makers([better, _BAD, _BAD], ["narrow"])
  found = _reflect(makers)
  assert found.draft.options["assets/sold.html"] == better
  assert [one.kept for one in found.rounds] == [True, False, False, True]


def test_what_is_good_enough_is_left_alone():
  makers, orders = _makers([], [])
  draft = _draft(OPTIONS["assets/sold.html"]).with_page("narrow")
  assert _reflect(makers, draft).rounds == () and orders == []
  assert _reflect(_makers([], [])[0], chart_rounds=0, page_rounds=0).rounds == ()


def test_an_asset_that_cannot_be_made_leaves_its_error_and_the_page_is_made():
  async def fail(order):
    raise RuntimeError("no ink")

  async def page(order):
    return "page"

  makers = dataclasses.replace(built_in(), page=page, image=fail, video=fail)
  config = ExecuteConfig(attempts=2)
  draft = asyncio.run(make_draft(BRIEF, PLAN, makers, config, 0))
  assert draft.page == "page" and set(draft.options) == {"assets/sold.html"}
  assert "no ink" in draft.media["assets/hero.png"].error
  assert score(media=draft.media).items["assets/hero.png"] == 0


def test_a_maker_is_asked_again_with_another_key():
  keys = []

  async def page(order):
    keys.append(order.key)
    if len(keys) < 3:
      raise ValueError("not yet")
    return "page"

  plan = Plan(PLAN.layout, ())
  makers = dataclasses.replace(built_in(), page=page)
  draft = asyncio.run(make_draft(BRIEF, plan, makers, ExecuteConfig(), 0))
  assert draft.page == "page" and len(set(keys)) == 3


def test_built_in_makers_make_mistakes_on_purpose_and_mend_them():
  layout = PLAN.layout.partition("\nSection film")[0]
  plan = Plan(layout, PLAN.of("image") + PLAN.of("chart"))
  config = ExecuteConfig()
  wrong = asyncio.run(make_draft(BRIEF, plan, built_in(BuiltInConfig(1.0)), config, 0))
  right = asyncio.run(make_draft(BRIEF, plan, built_in(), config, 0))
  assert right.media["assets/hero.png"].size == (1536, 1024)
  assert wrong.media["assets/hero.png"] == MediaFacts(
    (512, 512), pytest.approx(wrong.media["assets/hero.png"].spread)
  )
  assert wrong.options != right.options and wrong.page != right.page
  issue = Issue("layout", "overflow", "the page is 1700 wide; the viewport 1280")
  again = Order(BRIEF, plan, 0, None, (issue,), wrong.page)
  assert asyncio.run(built_in(BuiltInConfig(1.0)).page(again)) == right.page
