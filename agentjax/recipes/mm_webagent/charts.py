"""Charts: from a table to an option of ECharts, checked against the table, drawn without a network.

An option is plain JSON, so a model that writes one writes no code. With the file of ECharts (the
npm package ``echarts``, dist/echarts.min.js) a frame draws it by that library. Without the file we
draw bars, lines, pies and points ourselves, as SVG.
"""

from __future__ import annotations

import collections
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentjax.recipes.mm_webagent.facts import ChartFacts
from agentjax.recipes.mm_webagent.issues import Issue
from agentjax.recipes.mm_webagent.plan import Asset

LIBRARY = "lib/echarts.min.js"  # where frames find the library
DRAW = "lib/draw.js"
DRAWN = ("bar", "line", "pie", "scatter")  # by us
COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4")

# What a chart type in words means for ECharts; the first word that fits decides.
_TYPES = (
  ("pie", "pie"), ("doughnut", "pie"), ("donut", "pie"), ("scatter", "scatter"),
  ("bubble", "scatter"), ("radar", "radar"), ("heat", "heatmap"), ("funnel", "funnel"),
  ("gauge", "gauge"), ("treemap", "treemap"), ("sankey", "sankey"), ("area", "line"),
  ("line", "line"), ("bar", "bar"), ("column", "bar"), ("histogram", "bar"),
)  # fmt: skip
_CHECKED = ("bar", "line", "pie", "scatter")  # types whose data is compared with the table
_TOLERANCE = 0.005  # of a value, relative; labels are often rounded
_MOST_CELLS = 4000
_MOST_VALUE = 1e300  # of a number, absolute: sums and differences of such numbers are finite
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\uff0d", "-"))  # minus, en dash, wide hyphen

DRAW_SCRIPT = """
const option = JSON.parse(document.getElementById('option').textContent);
option.animation = false;
try {
  const chart = echarts.init(document.getElementById('chart'), null, {renderer: 'svg'});
  chart.setOption(option);
} catch (error) {
  document.body.dataset.error = String(error).slice(0, 300);
}
"""


class Series(NamedTuple):
  """A series as an option shows it: a number for each category, NaN where it has none."""

  kind: str
  name: str
  categories: tuple[str, ...]
  values: tuple[float, ...]

  @property
  def numbers(self) -> tuple[float, ...]:
    """The values that are there."""
    return tuple(value for value in self.values if not math.isnan(value))


class Table(NamedTuple):
  """Categories and one column of numbers for each series; NaN where a cell holds none."""

  label: str
  categories: tuple[str, ...]
  series: Mapping[str, tuple[float, ...]]


def read_table(markdown: str) -> Table | None:
  """The first table of a Markdown text; None if there is none with a number in its second column.

  Rows are lines with ``|``. Signs of currencies, per cent and thousands are left out of numbers.
  """
  rows = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in markdown.splitlines()
    if line.count("|") >= 1
  ]
  ruled = [i for i, row in enumerate(rows) if all(re.fullmatch(r":?-+:?", c) for c in row)]
  if ruled:  # the line under a header, which may follow text with such signs
    rows = [*rows[max(ruled[0] - 1, 0) : ruled[0]], *rows[ruled[0] + 1 :]]
  rows = rows[: _MOST_CELLS // max(len(rows[0]), 1)] if rows else rows
  if len(rows) < 2 or len(rows[0]) < 2:
    return None
  header, *body = rows
  body = [row for row in body if len(row) == len(header)]
  if not body or math.isnan(read_number(body[0][1])):
    return None
  return Table(
    header[0],
    tuple(row[0] for row in body),
    {
      name: tuple(read_number(row[i]) for row in body)
      for i, name in enumerate(header[1:], 1)
      if not math.isnan(read_number(body[0][i]))
    },
  )


def read_number(text: str) -> float:
  """``$1,200`` -> 1200, ``45%`` -> 45, ``−$5`` and ``(5)`` -> -5; NaN if there is no number."""
  found = re.fullmatch(
    r"([^\d+.-]{0,3}(?:[+-][^\d+.-]{0,3})?)([\d,]*(?:\.\d+|(?<=\d)))\s*([kKmM%]?)(\D{0,12})",
    text.strip().translate(_MINUS),
  )
  if found is None:
    return math.nan
  before, digits, unit, after = found.groups()
  value = float(digits.replace(",", "")) * {"k": 1e3, "m": 1e6}.get(unit.lower(), 1.0)
  bracketed = "(" in before and ")" in after  # a loss, as books are kept
  value = -value if "-" in before or bracketed else value
  return math.nan if _finite(value) is None else value


def _finite(value: Any) -> float | None:
  """A number that can be drawn; None of all else."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  # Compared before it is converted, which fails for an integer of many digits.
  return float(value) if abs(value) <= _MOST_VALUE else None


def chart_type(text: str) -> str:
  """The series type of ECharts that words such as "stacked bar chart" mean; "bar" if none fits."""
  lower = text.lower()
  return next((kind for word, kind in _TYPES if word in lower), "bar")


def make_option(asset: Asset, colours: Sequence[str] = (), ink: str = "#333333") -> dict[str, Any]:
  """An option that shows the asset's table as its type; the built-in executor of charts.

  Args:
    asset: a chart.
    colours: of the series, as hex; ours if there are none.
    ink: of texts and axes.
  """
  kind, table = chart_type(asset.attributes["chart_type"]), read_table(asset.source_data)
  option: dict[str, Any] = {
    "color": list(colours) or list(COLOURS),
    "backgroundColor": "transparent",
    "textStyle": {"color": ink},
    "title": {"text": _title(asset), "left": "center", "textStyle": {"color": ink, "fontSize": 15}},
  }
  if table is None:
    return option | {"series": []}
  if kind == "pie":
    values = next(iter(table.series.values()))
    pairs = zip(table.categories, values, strict=True)
    data = [{"name": name, "value": _finite(value)} for name, value in pairs]
    radius = ["40%", "65%"] if re.search("do(ugh)?nut", asset.attributes["chart_type"]) else "60%"
    pie = [{"type": "pie", "radius": radius, "center": ["50%", "58%"], "data": data}]
    return option | {"series": pie}
  if kind not in DRAWN:
    kind = "bar"
  axis = {"axisLabel": {"color": ink}}
  several = len(table.series) > 1
  legend = {"legend": {"bottom": 0, "textStyle": {"color": ink}}} if several else {}
  series: list[dict[str, Any]] = [
    {"type": kind, "name": name, "data": [_finite(value) for value in values]}
    | ({"areaStyle": {}} if "area" in asset.attributes["chart_type"].lower() else {})
    | ({"stack": "all"} if "stack" in asset.attributes["chart_type"].lower() else {})
    for name, values in table.series.items()
  ]
  names = {"name": next(iter(table.series)), "nameTextStyle": {"color": ink}} if not several else {}
  return (
    option
    | legend
    | {
      "grid": {"left": 48, "right": 20, "top": 56, "bottom": 52, "containLabel": True},
      "xAxis": {"type": "category", "data": list(table.categories), **axis},
      "yAxis": {"type": "value", **axis, **names},
      "series": series,
    }
  )


def _title(asset: Asset) -> str:
  quoted = re.search(r"[“\"]([^”\"]{3,60})[”\"]", asset.prompt)
  return quoted[1] if quoted else asset.path[7:-5].replace("_", " ").replace("-", " ").title()


# ------------------------------------------------------------------------------------------ checks


def chart_issues(asset: Asset, option: Mapping[str, Any]) -> list[Issue]:
  """Where an option differs from the table of its asset.

  Compared are the type, categories, series and every value; a chart with a table that cannot be
  read, or of a type whose data has another form, is only asked for data at all. Series of such a
  type beside others are data that the table has not. A wrong value is an issue each, up to five.
  """
  shown = list(_series(option))
  if not any(one.numbers for one in shown):
    return [Issue("chart", "chart_blank", "the chart has no data", asset.path)]
  issues: list[Issue] = []

  def add(code: str, detail: str) -> None:
    issues.append(Issue("chart", code, detail, asset.path))

  wanted = chart_type(asset.attributes["chart_type"])
  kinds = {one.kind for one in shown}
  if wanted not in kinds:
    add("chart_type", f"it is {', '.join(sorted(kinds))}; the plan wants {wanted}")
  if not _text_of(option.get("title")):
    add("chart_title", "it has no title")
  if len(shown) > 1 and "legend" not in option:
    add("chart_legend", f"it has {len(shown)} series and no legend")
  table = read_table(asset.source_data)
  compared = [one for one in shown if one.kind in _CHECKED]
  if table is not None and compared and (wanted in _CHECKED or len(compared) == len(shown)):
    for code, detail in _data_faults(table, compared):
      add(code, detail)
    if beside := sorted({one.kind for one in shown if one.kind not in _CHECKED and one.numbers}):
      add("chart_extra", f"it shows data as {', '.join(beside)} beside that of the table")
  return issues


def drawn_issues(asset: Asset, option: Mapping[str, Any], facts: ChartFacts | None) -> list[Issue]:
  """What is wrong with a chart as its frame shows it."""
  if facts is None:
    return []
  if facts.error or not facts.marks:
    why = facts.error or "nothing is drawn"
    return [Issue("chart", "chart_blank", f"the frame is blank: {why}", asset.path)]
  issues = []
  points = sum(len(one.numbers) for one in _series(option) if one.kind in ("bar", "pie"))
  if facts.marks < points:
    detail = f"{facts.marks} marks are drawn for {points} values"
    issues.append(Issue("chart", "chart_marks", detail, asset.path))
  if facts.outside:
    detail = f"texts leave the frame: {', '.join(facts.outside[:3])}"
    issues.append(Issue("chart", "chart_outside", detail, asset.path))
  return issues


def _data_faults(table: Table, shown: Sequence[Series]) -> Iterator[tuple[str, str]]:
  """(code, detail) of each difference between a table and the series that are shown."""
  by_name = {one.name.lower(): one for one in shown}
  wrong = 0
  columns = list(table.series.items())
  if any(one.kind == "pie" for one in shown):
    columns = columns[:1]
  for number, (name, column) in enumerate(columns):
    found = by_name.get(name.lower())
    if found is None and number < len(shown) and len(columns) == len(shown):
      found = shown[number]  # a series without this name, at its place
    if found is None:
      yield "chart_series", f"the series {name!r} is missing"
      continue
    at = _cells(found.categories, found.values)
    for key, (category, value) in _cells(table.categories, column).items():
      _, seen = at.pop(key, ("", math.nan))
      if math.isnan(seen):
        wrong += 1
        if wrong <= 5:
          yield "chart_missing", f"{name}: {category!r} is missing"
      elif not math.isclose(seen, value, rel_tol=_TOLERANCE, abs_tol=1e-9):
        wrong += 1
        if wrong <= 5:
          yield "chart_value", f"{name}, {category}: it shows {seen:g}; the table has {value:g}"
    if at:
      extra = ", ".join([category for category, _ in at.values()][:3])
      yield "chart_extra", f"{name}: it shows what the table has not: {extra}"
  if len(shown) > len(columns):
    yield "chart_extra", f"it shows {len(shown)} series; the table has {len(columns)}"


def _cells(
  categories: Sequence[str], values: Sequence[float]
) -> dict[tuple[str, int], tuple[str, float]]:
  """Categories with a number, by their lower case and how many of the same come before."""
  counts: collections.Counter[str] = collections.Counter()
  cells = {}
  for category, value in zip(categories, values, strict=True):
    if not math.isnan(value):
      key = category.lower()
      cells[key, counts[key]] = category, value
      counts[key] += 1
  return cells


def _series(option: Mapping[str, Any]) -> Iterator[Series]:
  series = option.get("series")
  for one in series if isinstance(series, list) else [series]:
    if not isinstance(one, dict):
      continue
    data = one.get("data")
    data = data if isinstance(data, list) else []
    axis = next((a for a in (_axis(option, "xAxis"), _axis(option, "yAxis")) if a), ())
    names, values = [], []
    for number, point in enumerate(data[:_MOST_CELLS]):
      name = axis[number] if number < len(axis) else str(number)
      value = point
      if isinstance(point, dict):
        name, value = str(point.get("name", name)), point.get("value")
      if isinstance(value, list) and value:
        if len(value) > 1 and isinstance(value[0], str):
          name = value[0]
        elif len(value) > 1 and not axis:
          first = _finite(value[0])
          name = name if first is None else f"{first:g}"
        value = value[-1]
      value = _finite(value)
      names.append(name)
      values.append(math.nan if value is None else value)
    kind, title = str(one.get("type", "")), str(one.get("name", ""))
    yield Series(kind, title, tuple(names), tuple(values))


def _axis(option: Mapping[str, Any], name: str) -> tuple[str, ...]:
  """The categories of an axis."""
  axis = option.get(name)
  axis = axis[0] if isinstance(axis, list) and axis else axis
  data = axis.get("data") if isinstance(axis, dict) else None
  if not isinstance(data, list):
    return ()
  return tuple(str(d.get("value", "")) if isinstance(d, dict) else str(d) for d in data)


def _text_of(title: Any) -> str:
  title = title[0] if isinstance(title, list) and title else title
  return str(title.get("text") or "").strip() if isinstance(title, dict) else ""


# ----------------------------------------------------------------------------------------- drawing


def chart_page(option: Mapping[str, Any], *, library: bool) -> str:
  """The document of a frame that draws an option.

  Args:
    option: plain JSON.
    library: whether ``LIBRARY`` is there; else we draw it as SVG.
  """
  head = (
    "<!doctype html><meta charset='utf-8'><style>html,body{margin:0;height:100%;"
    "background:transparent;overflow:hidden}#chart{width:100%;height:100vh}</style>"
  )
  if not library:
    return f"{head}<div id='chart'>{draw_svg(option)}</div>"
  # What JSON has no number for is null to ECharts, or the script could not read its option.
  plain = json.loads(json.dumps(option), parse_constant=lambda _: None, parse_int=_read_int)
  data = json.dumps(plain).replace("<", "\\u003c")
  return (
    f"{head}<div id='chart'></div><script id='option' type='application/json'>{data}</script>"
    f"<script src='../{LIBRARY}'></script><script src='../{DRAW}'></script>"
  )


def _read_int(digits: str) -> int | None:
  value = int(digits)
  return None if _finite(value) is None else value


_WIDTH, _HEIGHT = 640, 400


def draw_svg(option: Mapping[str, Any]) -> str:
  """An option as SVG; every mark of data has the class "mark". Other types are drawn as bars.

  A category without a number keeps its place and has no mark.
  """
  colours = option.get("color")
  colours = [str(c) for c in colours] if isinstance(colours, list) and colours else list(COLOURS)
  style = option.get("textStyle")
  ink = str(style.get("color", "#333")) if isinstance(style, dict) else "#333"
  shown = [one for one in _series(option) if one.numbers]
  parts = [_label(_WIDTH / 2, 26, _text_of(option.get("title")), ink, 16, "middle")]
  if shown and shown[0].kind == "pie":
    parts += _draw_pie(shown[0], colours, ink)
  elif shown:
    parts += _draw_axes(shown, colours, ink)
    if "legend" in option:
      parts += _draw_legend([one.name for one in shown], colours, ink)
  return (
    f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' width='100%' "
    f"height='100%' font-family='sans-serif'>{''.join(parts)}</svg>"
  )


def _label(x: float, y: float, text: str, ink: str, size: int = 12, anchor: str = "middle") -> str:
  return (
    f"<text x='{x:.1f}' y='{y:.1f}' fill='{html.escape(ink)}' font-size='{size}' "
    f"text-anchor='{anchor}'>{html.escape(text[:40])}</text>"
  )


def _draw_legend(names: Sequence[str], colours: Sequence[str], ink: str) -> Iterator[str]:
  step = _WIDTH / (len(names) + 1)
  for i, name in enumerate(names):
    x = step * (i + 0.6)
    colour = html.escape(colours[i % len(colours)])
    yield f"<rect x='{x:.1f}' y='380' width='12' height='12' fill='{colour}'/>"
    yield _label(x + 18, 391, name[:16], ink, 12, "start")


def _draw_pie(shown: Series, colours: Sequence[str], ink: str) -> Iterator[str]:
  parts = [
    (i, name, max(value, 0.0))
    for i, (name, value) in enumerate(zip(shown.categories, shown.values, strict=True))
    if not math.isnan(value)
  ]
  total, angle = sum(value for _, _, value in parts) or 1.0, -math.pi / 2
  x0, y0, r = _WIDTH / 2, 220.0, 130.0
  for i, name, value in parts:
    turn = min(value / total, 0.9999) * 2 * math.pi
    x1, y1 = x0 + r * math.cos(angle), y0 + r * math.sin(angle)
    x2, y2 = x0 + r * math.cos(angle + turn), y0 + r * math.sin(angle + turn)
    yield (
      f"<path class='mark' fill='{html.escape(colours[i % len(colours)])}' d='M{x0} {y0}L{x1:.1f} "
      f"{y1:.1f}A{r} {r} 0 {int(turn > math.pi)} 1 {x2:.1f} {y2:.1f}Z'/>"
    )
    middle = angle + turn / 2
    side = "start" if math.cos(middle) >= 0 else "end"
    x, y = x0 + 1.1 * r * math.cos(middle), y0 + 1.1 * r * math.sin(middle) + 4
    yield _label(x, y, f"{name[:18]} {100 * value / total:.0f}%", ink, 12, side)
    angle += turn


def _draw_axes(shown: Sequence[Series], colours: Sequence[str], ink: str) -> Iterator[str]:
  names = max((one.categories for one in shown), key=len)
  values = [value for one in shown for value in one.numbers]
  low, high = min(0.0, *values), max(0.0, *values)
  high = high if high > low else low + 1.0
  left, top, width, height = 60.0, 52.0, 556.0, 272.0

  def at(value: float) -> float:
    return top + height * (high - value) / (high - low)

  ink_ = html.escape(ink)
  for i in range(5):
    value = low + (high - low) * i / 4
    y = at(value)
    yield (
      f"<line x1='{left}' x2='{left + width}' y1='{y:.1f}' y2='{y:.1f}' stroke='{ink_}' "
      "stroke-opacity='.15'/>"
    )
    yield _label(left - 8, y + 4, f"{value:.4g}", ink, 12, "end")
  step = width / len(names)
  every = math.ceil(len(names) / 14)
  for i, name in enumerate(names):
    if i % every == 0:
      most = max(3, int(step * every / 7))
      yield _label(left + step * (i + 0.5), top + height + 20, name[:most], ink)
  bars = [one for one in shown if one.kind not in ("line", "scatter")]
  wide = 0.7 * step / max(len(bars), 1)
  for number, one in enumerate(shown):
    colour = html.escape(colours[number % len(colours)])
    points = [(left + step * (i + 0.5), v) for i, v in enumerate(one.values) if not math.isnan(v)]
    if one in bars:
      shift = (bars.index(one) - len(bars) / 2) * wide
      for x, value in points:
        y, bottom = sorted((at(value), at(0)))
        yield (
          f"<rect class='mark' x='{x + shift:.1f}' y='{y:.1f}' width='{0.92 * wide:.1f}' "
          f"height='{max(bottom - y, 0.5):.1f}' fill='{colour}'/>"
        )
      continue
    pairs = [f"{x:.1f},{at(v):.1f}" for x, v in points]
    if one.kind == "line":
      yield (
        f"<polyline points='{' '.join(pairs)}' fill='none' stroke='{colour}' stroke-width='3'/>"
      )
    for pair in pairs:
      x_, y_ = pair.split(",")
      yield f"<circle class='mark' cx='{x_}' cy='{y_}' r='4' fill='{colour}'/>"
