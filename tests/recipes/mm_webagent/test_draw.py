import dataclasses
import importlib.util
import json
import math
import re

import pytest

from agentjax.recipes.mm_webagent import draw
from agentjax.recipes.mm_webagent.charts import (
  chart_issues,
  chart_page,
  draw_svg,
  drawn_issues,
  make_option,
)
from agentjax.recipes.mm_webagent.facts import ChartFacts
from tests.recipes.mm_webagent.pages import PLAN

_IMAGE, _FILM = PLAN.asset("assets/hero.png"), PLAN.asset("assets/film.mp4")
_CHART = PLAN.asset("assets/sold.html")


@pytest.mark.parametrize(
  "prompt", ["A lake", "A city", "Three people", "A desk with a laptop", "Something"]
)
def test_a_drawing_has_its_size_and_is_no_single_colour(prompt):
  asset = dataclasses.replace(_IMAGE, prompt=prompt, size=(256, 160))
  content = draw.draw_image(asset)
  found = draw.image_facts(content)
  assert found.size == (256, 160) and found.spread > 8 and not found.error
  assert content == draw.draw_image(asset) != draw.draw_image(asset, ((200.0, 30.0, 30.0),))


def test_what_is_no_picture_is_told():
  assert "cannot be read" in draw.image_facts(b"<svg/>").error
  whole = draw.draw_image(dataclasses.replace(_IMAGE, size=(64, 64)))
  assert draw.image_facts(whole[:200]).error


@pytest.mark.skipif(
  importlib.util.find_spec("imageio_ffmpeg") is None, reason="needs the extra [pages]"
)
def test_a_clip_has_its_size_moves_and_loops():
  asset = dataclasses.replace(_FILM, size=(320, 180), seconds=2, prompt="A city at night")
  found = draw.clip_facts(draw.draw_clip(asset))
  assert found.size == (320, 180) and abs(found.seconds - 2) < 0.2
  assert found.motion > 0.05 and found.seam < 8 * found.motion
  still = dataclasses.replace(asset, attributes={**asset.attributes, "motion_intensity": "none"})
  assert draw.clip_facts(draw.draw_clip(still)).motion < 0.05
  assert "cannot be read" in draw.clip_facts(b"no film").error


def test_without_ffmpeg_the_extra_is_named(monkeypatch):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(draw.importlib, "import_module", missing)
  with pytest.raises(ImportError, match=r"agentjax\[pages\]"):
    draw.draw_clip(_FILM)


@pytest.mark.parametrize("kind", ["bar", "line", "pie", "scatter", "stacked area"])
def test_our_drawing_of_a_chart_has_a_mark_for_each_value(kind):
  asset = dataclasses.replace(
    _CHART, attributes={**_CHART.attributes, "chart_type": f"{kind} chart"}
  )
  svg = draw_svg(make_option(asset))
  assert svg.count("class='mark'") == 3 and ">Sold<" in svg and "Feb" in svg


@pytest.mark.parametrize("kind", ["bar", "line", "pie", "scatter"])
@pytest.mark.parametrize("cell", ["", "n/a", "9" * 400])
def test_a_cell_without_a_number_is_null_in_the_option_and_no_mark(kind, cell):
  asset = dataclasses.replace(
    _CHART,
    attributes={**_CHART.attributes, "chart_type": f"{kind} chart"},
    source_data=f"| Month | Sold |\n|-|-|\n| Jan | 10 |\n| Feb | {cell} |\n| Mar | 15 |",
  )
  option = make_option(asset)
  json.dumps(option, allow_nan=False)
  data = option["series"][0]["data"]
  assert [p["value"] if kind == "pie" else p for p in data] == [10, None, 15]
  svg = draw_svg(option)
  assert svg.count("class='mark'") == 2 and "nan" not in svg and "inf" not in svg
  if kind in ("line", "scatter"):  # March stays in its place
    assert (
      re.findall("cx='([^']*)'", svg)[1] == re.findall("cx='([^']*)'", draw_svg(_whole(asset)))[2]
    )
  assert chart_issues(asset, option) == []
  assert drawn_issues(asset, option, ChartFacts(2)) == []


def _whole(asset):
  return make_option(dataclasses.replace(asset, source_data=_CHART.source_data))


def test_no_number_that_a_model_writes_breaks_a_chart():
  odd = (math.nan, math.inf, -math.inf, 10**400)
  values = [1, *odd, 1e308, -1e308, None, "-", True, [math.inf, 2]]
  for kind in ("bar", "line", "pie", "scatter"):
    option = {"title": {"text": "t"}, "grid": {"top": math.nan},
              "series": [{"type": kind, "data": values}]}  # fmt: skip
    svg = draw_svg(option)
    assert svg.count("class='mark'") == 2 and "nan" not in svg and "inf" not in svg
    page = chart_page(option, library=True)
    hidden = page.partition("application/json'>")[2].partition("</script>")[0]
    json.dumps(json.loads(hidden), allow_nan=False)
    assert json.loads(hidden)["series"][0]["data"][:5] == [1, None, None, None, None]
    assert drawn_issues(_CHART, option, ChartFacts(2)) == []


def test_texts_of_a_chart_are_escaped():
  option = make_option(_CHART) | {"title": {"text": "</script><script>alert(1)</script>"}}
  assert "<script>alert" not in draw_svg(option)
  page = chart_page(option, library=True)
  assert "<script>alert" not in page and page.count("</script>") == 3
  hidden = page.partition("application/json'>")[2].partition("</script>")[0]
  assert json.loads(hidden) == option
