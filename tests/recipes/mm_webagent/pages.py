"""A plan, and what is measured of a good page of it, for tests."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from agentjax.recipes.mm_webagent.brief import Brief, Wish
from agentjax.recipes.mm_webagent.charts import make_option
from agentjax.recipes.mm_webagent.facts import Box, ChartFacts, PageFacts, Shown, Text
from agentjax.recipes.mm_webagent.plan import read_plan
from agentjax.recipes.mm_webagent.planner import chart_entry, clip_entry, image_entry
from agentjax.recipes.mm_webagent.score import MediaFacts, score_page

needs_chromium = pytest.mark.skipif(
  not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
  reason="no Chromium is installed",
)

TABLE = "| Month | Sold |\n| --- | --- |\n| Jan | 10 |\n| Feb | 20 |\n| Mar | 15 |"
LAYOUT = """Page “Harbor Books” with columns=2, ground=#fafaf7, ink=#1c1f26, accent=#0b6e99
Section hero: “Welcome aboard” “Books for every harbor.” (path: assets/hero.png)
Section sales: “Sales this year” “All figures are ours.” (path: assets/sold.html)
Section film: “Our film” “It is short.” (path: assets/film.mp4)"""


def plan_values():
  return {
    "code_generation": [{"prompt": LAYOUT}],
    "image_generation": [image_entry("assets/hero.png", "hero", "A lake at sunrise", "1536x1024")],
    "video_generation": [clip_entry("assets/film.mp4", "film", "Waves")],
    "data_visualization": [chart_entry("assets/sold.html", "sales", "bar", "“Sold”", TABLE)],
  }


PLAN = read_plan(plan_values())
BRIEF = Brief(
  "A page.",
  ("Harbor Books", "Welcome aboard", "Sales this year"),
  ((11.0, 110.0, 153.0), (250.0, 250.0, 247.0)),
  (Wish("image", "hero", "wide"), Wish("chart", "sales", "bar", TABLE)),
)
OPTIONS = {"assets/sold.html": make_option(PLAN.asset("assets/sold.html"))}
MEDIA = {
  "assets/hero.png": MediaFacts((1536, 1024), 40.0),
  "assets/film.mp4": MediaFacts((1280, 720), 40.0, 4.0, 2.0, 2.0),
}
_LIGHT, _DARK, _BLUE = (250.0, 250.0, 247.0), (28.0, 31.0, 38.0), (11.0, 110.0, 153.0)


def _text(y, text, section, size=17.0, **changes):
  return Text(
    Box(100, y, 500, 1.4 * size), text, "p", size, 400.0, "DejaVu Sans", _DARK, (_LIGHT,),
    section=section, **changes,
  )  # fmt: skip


def _shown(y, source, section, natural, height=360.0, **changes):
  return Shown(source, Box(640, y, 540, height), natural, section=section, **changes)


GOOD = PageFacts(
  viewport=(1280, 800),
  content=(1280, 1500),
  texts=(
    _text(40, "Harbor Books", "header", 44.0),
    _text(200, "Welcome aboard", "hero", 29.0),
    _text(260, "Books for every harbor. " * 4, "hero"),
    _text(600, "Sales this year", "sales", 29.0),
    _text(660, "All figures are ours. " * 4, "sales"),
    _text(1040, "Our film", "film", 29.0),
    _text(1100, "It is short. " * 4, "film"),
  ),
  shown=(
    _shown(190, "assets/hero.png", "hero", (1536, 1024)),
    _shown(590, "assets/sold.html", "sales", (0, 0), chart=ChartFacts(3, ("Sold", "Jan"))),
    _shown(1030, "assets/film.mp4", "film", (1280, 720), 540 * 9 / 16),
  ),
  colours={_LIGHT: 1e6, _DARK: 4e3, _BLUE: 1e5},
)


def score(facts=GOOD, *, options=OPTIONS, media=MEDIA, brief=BRIEF, plan=PLAN):
  return score_page(brief, plan, facts, options, media)


def with_text(number, **changes):
  texts = list(GOOD.texts)
  texts[number] = dataclasses.replace(texts[number], **changes)
  return dataclasses.replace(GOOD, texts=tuple(texts))


def with_shown(number, **changes):
  shown = list(GOOD.shown)
  shown[number] = dataclasses.replace(shown[number], **changes)
  return dataclasses.replace(GOOD, shown=tuple(shown))
