"""Six scores of a page, from what is measured of it: no model is asked.

The scores and what an issue costs are the source's; it asks a vision model for the issues, and ours
are counted by rules. So the figures of the two cannot be compared.

* layout, style: ``clip(1 - .5 penalty, 0, 1)``. Layout: an element that is missing or too many .5,
  a minor one .3, misplaced .1 or .2, a broken structure 1, a detail .1. Style: .5, .2 or .1.
* aesthetics: the mean of five aspects, each .2, .4, .6, .8 or 1.
* image, chart, video: ``1 - .2 issues`` each, 0 for one that is missing, broken or blank.

A page's score is the mean of those that apply: a page that neither has nor needs a clip has no
score of video (the source counts six of six).

Reference: MM-WebAgent, 2604.15309, and its code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from agentjax.recipes.mm_webagent import facts as measured
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.charts import chart_issues, drawn_issues
from agentjax.recipes.mm_webagent.facts import PageFacts, Shown, Text
from agentjax.recipes.mm_webagent.issues import Aspect, Issue
from agentjax.recipes.mm_webagent.plan import LISTS, Asset, Kind, Plan

ASPECTS: tuple[Aspect, ...] = get_args(Aspect)

# All thresholds are ours.
NEAR = 60.0  # distance below which a colour counts as one of the palette
_SMALL_TEXT = 10.0  # pixels
_STRETCHED = 0.12  # of the ratio of width to height
_ENLARGED = 1.3  # of the file's width
_SMALL = 48.0  # pixels of an asset's side
_COVERED = 0.25  # share of the smaller of two boxes
_MOST_REPEATS = 3  # of one kind of issue that lower a score


@dataclasses.dataclass(frozen=True)
class MediaFacts:
  """What is measured of the file of an image or a clip.

  Attributes:
    size: width and height.
    spread: standard deviation of its grey values, 0 to 127; near 0 is one colour.
    seconds: of a clip.
    motion: mean change of grey values from frame to frame, of a clip.
    seam: the same from its last frame to its first.
    error: why it could not be made or read; "" if it could.
  """

  size: tuple[int, int] = (0, 0)
  spread: float = 0.0
  seconds: float = 0.0
  motion: float = 0.0
  seam: float = 0.0
  error: str = ""


@dataclasses.dataclass(frozen=True)
class Scores:
  """Scores of a page.

  Attributes:
    aspects: name -> 0 to 1; without those that do not apply.
    items: path -> score of each asset of the plan.
    issues: what lowers them.
    notes: how each aspect of aesthetics was graded.
  """

  aspects: Mapping[Aspect, float]
  items: Mapping[str, float]
  issues: tuple[Issue, ...]
  notes: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def overall(self) -> float:
    return sum(self.aspects.values()) / len(self.aspects)

  def to_json(self) -> dict[str, Any]:
    return {
      "overall": round(self.overall, 4),
      "aspects": {name: round(value, 4) for name, value in self.aspects.items()},
      "items": {path: round(value, 4) for path, value in self.items.items()},
      "notes": dict(self.notes),
      "issues": [dataclasses.asdict(issue) for issue in self.issues],
    }


def score_page(
  brief: Brief,
  plan: Plan,
  facts: PageFacts,
  options: Mapping[str, Mapping[str, Any]],
  media: Mapping[str, MediaFacts],
) -> Scores:
  """The scores of a page that was rendered.

  Args:
    brief: what was asked for.
    plan: what was planned.
    facts: what is seen.
    options: of charts, by path.
    media: of images and clips, by path.
  """
  if facts.blank:
    issue = Issue("layout", "blank", "the page is blank", penalty=2.0)
    return Scores(dict.fromkeys(("layout", "style", "aesthetics"), 0.0), {}, (issue,))
  issues = list(_layout_issues(brief, plan, facts)) + list(_style_issues(brief, facts))
  items: dict[str, float] = {}
  aspects: dict[Aspect, float] = {
    "layout": _after_penalties(i for i in issues if i.aspect == "layout"),
    "style": _after_penalties(i for i in issues if i.aspect == "style"),
  }
  notes = aesthetics(facts)
  aspects["aesthetics"] = sum(notes.values()) / len(notes)
  unmet = brief.unmet(plan)
  for kind in LISTS:
    values = []
    for asset in plan.of(kind):
      own = list(asset_issues(asset, facts, options, media))
      issues += own
      gone = any(issue.code in _ZERO for issue in own)
      items[asset.path] = 0.0 if gone else max(0.0, 1.0 - 0.2 * len(own))
      values.append(items[asset.path])
    values += [0.0 for wish in unmet if wish.kind == kind]
    if values:
      aspects[kind] = sum(values) / len(values)
  return Scores({a: aspects[a] for a in ASPECTS if a in aspects}, items, tuple(issues), notes)


_ZERO = ("absent", "broken", "chart_blank")


def _after_penalties(issues: Iterator[Issue]) -> float:
  """``clip(1 - .5 penalty, 0, 1)``; of one kind of issue the first three count."""
  total, seen = 0.0, dict[str, int]()
  for issue in issues:
    seen[issue.code] = seen.get(issue.code, 0) + 1
    if seen[issue.code] <= _MOST_REPEATS:
      total += issue.penalty
  return min(1.0, max(0.0, 1.0 - 0.5 * total))


# ------------------------------------------------------------------------------------------ layout


def _layout_issues(brief: Brief, plan: Plan, facts: PageFacts) -> Iterator[Issue]:
  shown = {one.source for one in facts.shown}
  planned = {asset.path for asset in plan.assets}
  for asset in plan.assets:
    if asset.path not in shown:
      yield Issue(
        "layout", "missing", f"the page does not show {asset.path}", asset.path, 0.5, True
      )
  for source in sorted(shown - planned):
    yield Issue("layout", "extra", f"the page shows {source[:120]}, which is not planned", "", 0.5)
  for wish in brief.unmet(plan):
    where = f" in {wish.section!r}" if wish.section else ""
    yield Issue("layout", "unmet", f"no {wish.form or 'planned'} {wish.kind}{where}", "", 0.5)
  yield from _text_issues(brief, facts)
  width = facts.viewport[0]
  if facts.content[0] > width + 2:
    detail = f"the page is {facts.content[0]:.0f} wide; the viewport {width:.0f}"
    yield Issue("layout", "overflow", detail, "", 1.0)
  yield from _place_issues(plan, facts)
  yield from _overlap_issues(facts)
  for text in facts.texts:
    if text.clipped:
      yield Issue("layout", "clipped", f"a part of {text.text[:60]!r} cannot be seen", "", 0.1)


def _text_issues(brief: Brief, facts: PageFacts) -> Iterator[Issue]:
  seen = " ".join(text.text for text in facts.texts if not text.hidden)
  page = _plain(facts.words or seen)
  gone = [text for text in brief.texts if _plain(text) not in page]
  if not gone:
    return
  share = len(gone) / len(brief.texts)
  penalty = 0.5 if share > 0.5 else 0.3 if share > 0.2 else 0.1
  some = ", ".join(repr(text) for text in gone[:8])
  detail = f"{len(gone)} of {len(brief.texts)} texts are missing: {some}"
  yield Issue("layout", "texts", detail, "", penalty)


def _plain(text: str) -> str:
  return re.sub(r"\W+", " ", text.casefold()).strip()


def _place_issues(plan: Plan, facts: PageFacts) -> Iterator[Issue]:
  """Assets whose section of the page names nothing of the section that was planned."""
  for asset in plan.assets:
    places = [one.section for one in facts.shown if one.source == asset.path]
    words = {w for w in _plain(asset.section).split() if len(w) > 2} - {"section", "the", "and"}
    known = {w for text in facts.texts for w in _plain(text.section).split()}
    if places and words & known and not any(words & set(_plain(p).split()) for p in places):
      detail = f"{asset.path} stands in {places[0][:40]!r}; planned: {asset.section!r}"
      yield Issue("layout", "misplaced", detail, asset.path, 0.2, True)


def _overlap_issues(facts: PageFacts) -> Iterator[Issue]:
  texts = [text for text in facts.texts if not text.inline]
  for number, text in enumerate(texts):
    for other in texts[number + 1 :]:
      if _covers(text.box, other.box):
        detail = f"{text.text[:40]!r} and {other.text[:40]!r} overlap"
        yield Issue("layout", "overlap", detail, "", 0.2)
  front = [one for one in facts.shown if not one.background]
  for number, one in enumerate(front):
    for text in texts:
      if _covers(text.box, one.box):
        detail = f"{one.source} and {text.text[:40]!r} overlap"
        yield Issue("layout", "overlap", detail, one.source, 0.1, True)
    for other_one in front[number + 1 :]:
      if _covers(one.box, other_one.box):
        detail = f"{one.source} and {other_one.source} overlap"
        yield Issue("layout", "overlap", detail, one.source, 0.2, True)


def _covers(one: measured.Box, other: measured.Box) -> bool:
  smaller = min(one.area, other.area)
  return smaller > 0 and one.shared(other) > _COVERED * smaller


# ------------------------------------------------------------------------------------------- style


def _style_issues(brief: Brief, facts: PageFacts) -> Iterator[Issue]:
  for text in facts.texts:
    ratio = min((measured.contrast(text.colour, g) for g in text.grounds), default=21.0)
    least = 3.0 if text.size >= 24 or (text.size >= 18.5 and text.weight >= 700) else 4.5
    if ratio < least:
      penalty = 0.5 if ratio < 2 else 0.2 if ratio < 3 else 0.1
      yield Issue("style", "contrast", _contrast_detail(text, ratio, least), "", penalty)
  for colour in brief.palette:
    if not any(measured.distance(colour, used) < NEAR for used in facts.colours):
      detail = f"the page does not use {measured.hex_colour(colour)}"
      yield Issue("style", "palette", detail, "", 0.2)
  families = {text.family.lower() for text in facts.texts}
  if len(families) > 3:
    yield Issue("style", "families", f"it uses {len(families)} families of fonts", "", 0.2)
  small = [text for text in facts.texts if text.size < _SMALL_TEXT]
  if small:
    detail = f"{len(small)} texts are smaller than {_SMALL_TEXT:g} px: {small[0].text[:40]!r}"
    yield Issue("style", "small", detail, "", 0.1)


def _contrast_detail(text: Text, ratio: float, least: float) -> str:
  return f"{text.text[:40]!r} has a contrast of {ratio:.2f}; at least {least:g} can be read"


# -------------------------------------------------------------------------------------- aesthetics


def aesthetics(facts: PageFacts) -> dict[str, float]:
  """Five aspects, each .2 to 1: what can be computed of how a page looks. All rules are ours."""
  boxes = [text.box for text in facts.texts if not text.inline and text.box.area > 0]
  boxes += [one.box for one in facts.shown if not one.background and one.box.area > 0]
  return {
    "alignment": _graded(_aligned(boxes), (0.9, 0.75, 0.6, 0.4)),
    "spacing": _graded(_spaced(boxes, facts), (0.95, 0.85, 0.7, 0.5)),
    "hierarchy": _graded(_hierarchy(facts), (2.0, 1.6, 1.3, 1.1)),
    "balance": _graded(_balance(boxes, facts), (0.95, 0.88, 0.8, 0.7)),
    "harmony": _graded(-float(len(_hues(facts))), (-3.0, -4.0, -5.0, -6.0)),
  }


def _graded(value: float, steps: tuple[float, float, float, float]) -> float:
  """1, .8, .6, .4 or .2: the first step that ``value`` reaches decides."""
  for grade, step in zip((1.0, 0.8, 0.6, 0.4), steps, strict=True):
    if value >= step:
      return grade
  return 0.2


def _aligned(boxes: list[measured.Box]) -> float:
  """Share of boxes whose left side, middle or right side is that of another one, within 4 px."""
  if len(boxes) < 2:
    return 0.0
  sides: tuple[Callable[[measured.Box], float], ...] = (
    lambda b: b.x,
    lambda b: b.x + b.width / 2,
    lambda b: b.right,
  )
  shared = set()
  for side in sides:
    places: dict[int, list[int]] = {}
    for i, box in enumerate(boxes):
      places.setdefault(round(side(box) / 4), []).append(i)
    shared |= {i for found in places.values() if len(found) > 1 for i in found}
  return len(shared) / len(boxes)


def _spaced(boxes: list[measured.Box], facts: PageFacts) -> float:
  """1 less the share of the page's height that lies in bands of emptiness above 200 px, and less
  the share of boxes that touch the left edge of the page."""
  if not boxes:
    return 0.0
  height, empty, end = max(facts.content[1], 1.0), 0.0, 0.0
  for box in sorted(boxes, key=lambda b: b.y):
    empty += max(0.0, box.y - end - 200.0)
    end = max(end, box.bottom)
  empty += max(0.0, height - end - 200.0)
  width = facts.viewport[0]
  tight = sum(box.x < 4 and box.right < 0.9 * width for box in boxes)
  return 1.0 - empty / height - tight / len(boxes)


def _hierarchy(facts: PageFacts) -> float:
  """Size of the largest letters over that of most letters."""
  letters: dict[float, int] = {}
  for text in facts.texts:
    letters[text.size] = letters.get(text.size, 0) + len(text.text)
  if not letters:
    return 0.0
  return max(letters) / max(letters, key=lambda size: letters[size])


def _balance(boxes: list[measured.Box], facts: PageFacts) -> float:
  """1 less the distance of the middle of all boxes from the middle of the page, in widths."""
  area = sum(box.area for box in boxes)
  if not area:
    return 0.0
  middle = sum((box.x + box.width / 2) * box.area for box in boxes) / area
  return 1.0 - abs(middle / facts.viewport[0] - 0.5)


def _hues(facts: PageFacts) -> set[int]:
  """Twelfths of the colour circle that the page uses for at least 0.2% of its colours' area."""
  total = sum(facts.colours.values()) or 1.0
  amounts: dict[int, float] = {}
  for colour, amount in facts.colours.items():
    angle = measured.hue(colour)
    if angle is not None:
      amounts[int(angle // 30)] = amounts.get(int(angle // 30), 0.0) + amount
  return {h for h, amount in amounts.items() if amount >= 0.002 * total}


# ------------------------------------------------------------------------------------------ assets


def asset_issues(
  asset: Asset,
  facts: PageFacts,
  options: Mapping[str, Mapping[str, Any]],
  media: Mapping[str, MediaFacts],
) -> Iterator[Issue]:
  """What is wrong with an asset, as it was made and as the page shows it."""
  shown = [one for one in facts.shown if one.source == asset.path]
  if not shown:
    yield _issue(asset, "absent", f"the page does not show {asset.path}", embedding=True)
  if asset.kind == "chart":
    option = options.get(asset.path)
    if option is None:
      yield _issue(asset, "broken", "it could not be made")
      return
    yield from chart_issues(asset, option)
    if shown:
      yield from drawn_issues(asset, option, shown[0].chart)
  else:
    found = media.get(asset.path, MediaFacts(error="it was not made"))
    if found.error:
      yield _issue(asset, "broken", found.error)
      return
    yield from _file_issues(asset, found)
  if shown:
    yield from _shown_issues(asset, max(shown, key=lambda one: one.box.area))


def _file_issues(asset: Asset, found: MediaFacts) -> Iterator[Issue]:
  if asset.size is not None and found.size != asset.size:
    sizes = ("{}x{}".format(*size) for size in (found.size, asset.size))
    yield _issue(asset, "size", "it is {}; planned: {}".format(*sizes))
  if found.spread < 4:
    yield _issue(asset, "flat", f"it is nearly one colour (spread {found.spread:.1f} of 255)")
  if asset.kind != "video":
    return
  if abs(found.seconds - asset.seconds) > 0.1 * asset.seconds:
    yield _issue(asset, "seconds", f"it takes {found.seconds:.1f} s; planned: {asset.seconds}")
  if found.motion < 0.05:
    yield _issue(asset, "still", "nothing moves")
  loops = asset.attributes["loopability"].lower()
  if "loop" in loops and "no" not in loops and found.seam > 8 * max(found.motion, 0.05):
    yield _issue(asset, "seam", "its end does not lead to its beginning")


def _shown_issues(asset: Asset, shown: Shown) -> Iterator[Issue]:
  if not shown.loaded:
    yield _issue(asset, "broken", "the browser cannot show it", embedding=True)
    return
  box, (width, height) = shown.box, shown.natural
  if min(box.width, box.height) < _SMALL:
    detail = f"it is shown {box.width:.0f} by {box.height:.0f} px small"
    yield _issue(asset, "tiny", detail, embedding=True)
    return
  if asset.kind == "chart" or not width or not height:
    if asset.kind == "chart" and (box.width < 240 or box.height < 160):
      detail = f"its frame has {box.width:.0f} by {box.height:.0f} px; texts need 240 by 160"
      yield _issue(asset, "tiny", detail, embedding=True)
    return
  ratio = (box.width / box.height) / (width / height)
  if shown.fit == "fill" and not shown.background and abs(ratio - 1) > _STRETCHED:
    yield _issue(asset, "stretched", f"its sides are changed by {ratio:.2f}", embedding=True)
  if shown.fit == "cover" and not 0.4 < ratio < 2.5:
    yield _issue(asset, "cropped", f"most of it is cut off ({ratio:.2f})", embedding=True)
  if box.width > _ENLARGED * width:
    yield _issue(asset, "enlarged", f"it is enlarged {box.width / width:.1f} times", embedding=True)


def _issue(asset: Asset, code: str, detail: str, *, embedding: bool = False) -> Issue:
  kind: Kind = asset.kind
  return Issue(kind, code, detail, asset.path, embedding=embedding)
