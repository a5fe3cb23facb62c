import dataclasses
import math
import time

import pytest

from agentjax.recipes.mm_webagent.brief import Wish
from agentjax.recipes.mm_webagent.charts import (
  chart_issues,
  make_option,
  read_number,
  read_table,
)
from agentjax.recipes.mm_webagent.facts import Box, ChartFacts, PageFacts, contrast
from agentjax.recipes.mm_webagent.score import MediaFacts
from tests.recipes.mm_webagent.pages import (
  BRIEF,
  GOOD,
  MEDIA,
  PLAN,
  TABLE,
  score,
  with_shown,
  with_text,
)

_CHART = PLAN.asset("assets/sold.html")


def test_a_good_page_scores_nearly_one():
  found = score()
  assert found.issues == () and found.overall > 0.93
  assert set(found.items.values()) == {1.0}


def _broken(number):
  return with_shown(number, loaded=False, natural=(0.0, 0.0))


@pytest.mark.parametrize(
  ("facts", "aspect", "code", "at_most"),
  [
    (dataclasses.replace(GOOD, content=(1700, 1500)), "layout", "overflow", 0.5),
    (dataclasses.replace(GOOD, shown=GOOD.shown[1:]), "image", "absent", 0.0),
    (dataclasses.replace(GOOD, shown=GOOD.shown[1:]), "layout", "missing", 0.75),
    (_broken(0), "image", "broken", 0.0),
    (_broken(2), "video", "broken", 0.0),
    (with_shown(0, box=Box(640, 190, 540, 100)), "image", "stretched", 0.8),
    (with_shown(0, box=Box(640, 190, 20, 14)), "image", "tiny", 0.8),
    (with_shown(0, natural=(300.0, 200.0)), "image", "enlarged", 0.8),
    (with_shown(0, section="footer film"), "layout", "misplaced", 0.9),
    (with_shown(0, source="assets/other.png"), "layout", "extra", 0.5),
    (with_shown(1, chart=ChartFacts(0)), "chart", "chart_blank", 0.0),
    (with_shown(1, chart=ChartFacts(3, error="x is undefined")), "chart", "chart_blank", 0.0),
    (with_shown(1, chart=ChartFacts(3, (), ("Jan",))), "chart", "chart_outside", 0.8),
    (with_text(2, colour=(225.0, 225.0, 222.0)), "style", "contrast", 0.75),
    (with_text(2, colour=(150.0, 150.0, 150.0)), "style", "contrast", 0.95),
    (with_text(2, size=8.0), "style", "small", 0.95),
    (dataclasses.replace(GOOD, colours={(28.0, 31.0, 38.0): 1.0}), "style", "palette", 0.8),
    (with_text(1, text="Ahoy"), "layout", "texts", 0.85),
    (with_text(1, clipped=True), "layout", "clipped", 0.95),
    (with_text(2, box=Box(100, 205, 500, 40)), "layout", "overlap", 0.9),
  ],
)  # fmt: skip
def test_a_damaged_page_scores_less_in_the_aspect_that_is_damaged(facts, aspect, code, at_most):
  found = score(facts)
  assert code in {issue.code for issue in found.issues if issue.aspect == aspect}
  assert found.aspects[aspect] <= at_most + 1e-9
  assert found.overall < score().overall


def test_a_text_that_is_hidden_is_missing():
  assert score().aspects["layout"] == 1
  hidden = score(with_text(1, hidden=True))
  assert [i.code for i in hidden.issues if i.aspect == "layout"] == ["texts"]
  blank = PageFacts((1280, 800), (1280, 800), (dataclasses.replace(GOOD.texts[0], hidden=True),))
  assert score(blank).overall == 0


def test_the_words_of_a_page_count_before_its_parts():
  facts = dataclasses.replace(with_text(1, text="aboard"), words=" ".join(BRIEF.texts))
  assert "texts" not in {issue.code for issue in score(facts).issues}


def test_a_blank_page_scores_nothing():
  assert score(dataclasses.replace(GOOD, texts=(), shown=())).overall == 0


@pytest.mark.parametrize(
  ("media", "code"),
  [
    (MediaFacts((512, 512), 40.0), "size"),
    (MediaFacts((1536, 1024), 0.5), "flat"),
    (MediaFacts(error="it cannot be read"), "broken"),
  ],
)
def test_a_wrong_file_of_an_image_is_seen(media, code):
  found = score(media=MEDIA | {"assets/hero.png": media})
  assert {issue.code for issue in found.issues} == {code}
  assert found.items["assets/hero.png"] == (0.0 if code == "broken" else 0.8)


@pytest.mark.parametrize(
  ("changes", "code"),
  [({"seconds": 8.0}, "seconds"), ({"motion": 0.0}, "still"), ({"seam": 50.0}, "seam")],
)
def test_a_wrong_clip_is_seen(changes, code):
  clip = dataclasses.replace(MEDIA["assets/film.mp4"], **changes)
  found = score(media=MEDIA | {"assets/film.mp4": clip})
  assert code in {issue.code for issue in found.issues}
  assert found.aspects["video"] <= 0.8


def _option(**changes):
  return make_option(_CHART) | changes


def _series(values, kind="bar"):
  return [{"type": kind, "name": "Sold", "data": values}]


@pytest.mark.parametrize(
  ("option", "code"),
  [
    (_option(series=_series([10, 21, 15])), "chart_value"),
    (_option(series=_series([10, 20])), "chart_missing"),
    (_option(series=_series([10, 20, 15], "line")), "chart_type"),
    (_option(series=[*_series([10, 20, 15]), *_series([1, 2, 3])]), "chart_extra"),
    (_option(series=[*_series([10, 21, 15]), {"type": "radar"}], legend={}), "chart_value"),
    (_option(series=[*_series([10, 20, 15]), *_series([9], "radar")], legend={}), "chart_extra"),
    (_option(title={}), "chart_title"),
    (_option(series=[]), "chart_blank"),
    (_option(xAxis={"type": "category", "data": ["Jan", "Feb", "April"]}), "chart_missing"),
  ],
)
def test_a_chart_is_compared_with_its_data(option, code):
  assert code in {issue.code for issue in chart_issues(_CHART, option)}
  found = score(options={"assets/sold.html": option})
  assert found.aspects["chart"] < 1


def test_charts_of_the_table_have_no_issue():
  for kind in ("bar", "line", "pie", "area", "donut"):
    asset = dataclasses.replace(
      _CHART, attributes={**_CHART.attributes, "chart_type": f"{kind} chart"}
    )
    assert chart_issues(asset, make_option(asset)) == [], kind


def test_rows_of_one_category_are_compared_in_their_order():
  table = "| Month | Sold |\n|-|-|\n| Jan | 1 |\n| Feb | 2 |\n| Jan | 3 |\n| Jan | |"
  for kind in ("bar", "line", "pie"):
    asset = dataclasses.replace(
      _CHART,
      attributes={**_CHART.attributes, "chart_type": f"{kind} chart"},
      source_data=table,
    )
    option = make_option(asset)
    assert chart_issues(asset, option) == [], kind
    data = option["series"][0]["data"]
    data[0], data[2] = data[2], data[0]
    assert [i.code for i in chart_issues(asset, option)] == 2 * ["chart_value"], kind
    del data[2:]
    assert "chart_missing" in {i.code for i in chart_issues(asset, option)}


def test_what_is_wished_for_and_not_planned_counts_as_missing():
  wish = Wish("image", "sales", "tall")
  found = score(brief=dataclasses.replace(BRIEF, wishes=(*BRIEF.wishes, wish)))
  assert found.aspects["image"] == 0.5 and found.aspects["layout"] == 0.75
  other = TABLE.replace("20", "21")
  found = score(brief=dataclasses.replace(BRIEF, wishes=(Wish("chart", "sales", "bar", other),)))
  assert found.aspects["chart"] == 0.5


def test_options_that_no_model_should_write_break_nothing():
  for option in ({}, {"series": 3}, {"series": [None, {"data": {"a": 1}}]}, {"series": [{}]},
                 {"series": [{"data": [[], {}, None, "x", {"value": []}]}]},
                 {"xAxis": [], "series": [{"data": [1]}]}):  # fmt: skip
    assert chart_issues(_CHART, option)


def test_numbers_and_tables_are_read():
  assert read_number("$1,200") == 1200 and read_number("45%") == 45 and read_number("1.5k") == 1500
  assert read_number(".5") == 0.5 and read_number("€ 1,000.25 net") == 1000.25
  assert all(math.isnan(read_number(text)) for text in ("", ".", "1.2.3", "ten"))
  assert [read_number(t) for t in ("\u22125", "-5", "(5)", "($1,200)", "$(5)")] == [
    -5, -5, -5, -1200, -5,
  ]  # fmt: skip
  assert [read_number(t) for t in ("\u2212$5", "-€1.5k", "\uff0d5%", "5 (net)", "+5", "+$5")] == [
    -5, -1500, -5, 5, 5, 5,
  ]  # fmt: skip
  assert all(math.isnan(read_number(text)) for text in ("9" * 400, "\u2013", "10\u201320", "()"))
  assert read_table(TABLE).series == {"Sold": (10.0, 20.0, 15.0)}
  assert read_table(f"Text | with a sign\n\n{TABLE}\n\nMore text.") == read_table(TABLE)
  assert read_table("Month | Sold\nJan | $10") is not None
  assert read_table("no table") is None and read_table("| a |\n| b |") is None


def test_contrast_is_that_of_the_standard():
  assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
  assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


def test_a_long_cell_is_read_in_time():
  begun = time.process_time()
  assert math.isnan(read_number("9" * 40_000 + "x" * 20))
  assert time.process_time() - begun < 2  # seconds; a try at each digit takes more
