"""The plan of a page: a layout in words, and the images, clips and charts that it names.

The form is the source's: one JSON object with ``code_generation``, ``image_generation``,
``video_generation`` and ``data_visualization``. A plan is refused with every fault at once, so that
a planner can mend all of them in its next try.

Reference: MM-WebAgent, 2604.15309, and its code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from agentjax.config import ConfigError

Kind = Literal["image", "video", "chart"]

LISTS: Mapping[Kind, str] = {
  "image": "image_generation",
  "video": "video_generation",
  "chart": "data_visualization",
}
SUFFIXES: Mapping[Kind, str] = {"image": "png", "video": "mp4", "chart": "html"}
SIZES: Mapping[Kind, tuple[str, ...]] = {
  "image": ("1024x1024", "1024x1536", "1536x1024"),
  "video": ("720x1280", "1280x720", "1024x1792", "1792x1024"),
  "chart": (),
}
SECONDS = ("4", "8", "12")
CONTEXT = ("section", "role", "page_style")
ATTRIBUTES: Mapping[Kind, tuple[str, ...]] = {
  "image": ("visual_style", "color_tone", "composition", "lighting"),
  "video": ("visual_style", "motion_intensity", "camera_behavior", "loopability"),
  "chart": ("chart_style", "chart_type", "color_palette", "visual_emphasis"),
}
MOST_ASSETS = 40  # of a plan; ours
_LONGEST = 60_000  # characters of a text; ours
_PATH = re.compile(r"assets/[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.(png|mp4|html)")
_NAMED = re.compile(r"(?<![\w/.-])assets/[\w./-]*?\.(?:png|mp4|html)\b")
_SETTING = re.compile(r"\b([a-z]+)=([a-z0-9#]+)")


class PlanError(ConfigError):
  """A plan that cannot be used; ``faults`` holds one sentence each."""

  def __init__(self, faults: tuple[str, ...]):
    super().__init__("the plan cannot be used:\n" + "\n".join(faults))
    self.faults = faults


@dataclasses.dataclass(frozen=True)
class Asset:
  """An image, a clip or a chart of a plan.

  Attributes:
    kind: which.
    path: where the page finds it, such as assets/hero.png.
    context: section, role and page_style.
    attributes: by the names of ATTRIBUTES.
    prompt: what it shows.
    size: width and height in pixels; None for charts, which fill their frame.
    seconds: of a clip, else 0.
    source_data: Markdown table of a chart, else "".
  """

  kind: Kind
  path: str
  context: Mapping[str, str]
  attributes: Mapping[str, str]
  prompt: str
  size: tuple[int, int] | None = None
  seconds: int = 0
  source_data: str = ""

  @property
  def section(self) -> str:
    return self.context["section"]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A valid plan.

  Attributes:
    layout: what the page shows and where, in words; names every asset by its path.
    assets: in the order of the lists.
  """

  layout: str
  assets: tuple[Asset, ...]

  def of(self, kind: Kind) -> tuple[Asset, ...]:
    return tuple(asset for asset in self.assets if asset.kind == kind)

  def asset(self, path: str) -> Asset:
    return next(asset for asset in self.assets if asset.path == path)

  def settings(self) -> dict[str, str]:
    """The ``name=value`` pairs of the layout, which the built-in page builder follows."""
    return dict(_SETTING.findall(self.layout))


def read_plan(values: Any) -> Plan:
  """The plan of a JSON object.

  Raises:
    PlanError: it has faults; all are told.
  """
  faults = plan_faults(values)
  if faults:
    raise PlanError(faults)
  assets = tuple(
    _asset(kind, entry) for kind, name in LISTS.items() for entry in values.get(name) or ()
  )
  return Plan(values["code_generation"][0]["prompt"], assets)


def plan_json(plan: Plan) -> dict[str, Any]:
  """Inverse of ``read_plan``."""
  values: dict[str, Any] = {"code_generation": [{"prompt": plan.layout}]}
  for kind, name in LISTS.items():
    values[name] = [_entry(asset) for asset in plan.of(kind)]
  return values


def named_paths(layout: str) -> list[str]:
  """The assets that a layout names, once each, in their order."""
  return list(dict.fromkeys(_NAMED.findall(layout)))


def plan_faults(values: Any) -> tuple[str, ...]:
  """Why a plan cannot be used, one sentence a fault; empty for a valid one.

  The paths of all assets must be those that the layout names, neither more nor fewer.
  """
  if not isinstance(values, dict):
    return (f"the plan is a {type(values).__name__}; allowed: a JSON object.",)
  faults = list(_form_faults(values))
  if not faults:
    faults += _path_faults(values)
  return tuple(faults)


def _form_faults(values: Mapping[str, Any]) -> Iterator[str]:
  known = ("code_generation", *LISTS.values())
  for name in sorted(set(values) - set(known)):
    yield f"{name[:80]!r} is no part of a plan; allowed: {', '.join(known)}."
  layout = values.get("code_generation")
  if not isinstance(layout, list) or len(layout) != 1 or not isinstance(layout[0], dict):
    yield "code_generation must be a list of one object with a prompt."
  else:
    yield from _text_fault(layout[0], "prompt", "code_generation[0]")
  entries = 0
  for kind, name in LISTS.items():
    found = values.get(name, [])
    if not isinstance(found, list):
      yield f"{name} is a {type(found).__name__}; allowed: a list."
      continue
    entries += len(found)
    for number, entry in enumerate(found[: MOST_ASSETS + 1]):
      yield from _entry_faults(kind, entry, f"{name}[{number}]")
  if entries > MOST_ASSETS:
    yield f"the plan has {entries} assets; allowed: up to {MOST_ASSETS}."


def _entry_faults(kind: Kind, entry: Any, where: str) -> Iterator[str]:
  if not isinstance(entry, dict):
    yield f"{where} is a {type(entry).__name__}; allowed: an object."
    return
  path = entry.get("save_path")
  matched = _PATH.fullmatch(path) if isinstance(path, str) else None
  if matched is None or matched[1] != SUFFIXES[kind]:
    yield f"{where}.save_path={_shown(path)}; allowed: assets/NAME.{SUFFIXES[kind]}."
  yield from _text_fault(entry, "prompt", where)
  for part, names in (("context", CONTEXT), ("compiled_attributes", ATTRIBUTES[kind])):
    inner = entry.get(part)
    if not isinstance(inner, dict):
      yield f"{where}.{part} must be an object with {', '.join(names)}."
      continue
    for name in names:
      yield from _text_fault(inner, name, f"{where}.{part}")
  if SIZES[kind] and entry.get("size") not in SIZES[kind]:
    yield f"{where}.size={_shown(entry.get('size'))}; allowed: {', '.join(SIZES[kind])}."
  if kind == "video" and str(entry.get("seconds")) not in SECONDS:
    yield f"{where}.seconds={_shown(entry.get('seconds'))}; allowed: {', '.join(SECONDS)}."
  if kind == "chart":
    yield from _text_fault(entry, "source_data", where)


def _path_faults(values: Mapping[str, Any]) -> list[str]:
  saved = [e["save_path"] for name in LISTS.values() for e in values.get(name, [])]
  named = named_paths(values["code_generation"][0]["prompt"])
  faults = [f"{path} is saved twice." for path in sorted({p for p in saved if saved.count(p) > 1})]
  faults += [
    f"{path} is saved, but the layout does not name it; write (path: {path}) where it stands."
    for path in dict.fromkeys(saved)
    if path not in named
  ]
  faults += [
    f"the layout names {path[:120]}, but no list saves it; add an entry or leave it out."
    for path in named
    if path not in saved
  ]
  return faults


def _text_fault(entry: Mapping[str, Any], name: str, where: str) -> Iterator[str]:
  text = entry.get(name)
  if not isinstance(text, str) or not text.strip() or len(text) > _LONGEST:
    yield f"{where}.{name}={_shown(text)}; allowed: a text of 1 to {_LONGEST} characters."


def _shown(value: Any) -> str:
  return repr(value)[:80]


def _asset(kind: Kind, entry: Mapping[str, Any]) -> Asset:
  size = entry["size"].split("x") if SIZES[kind] else None
  return Asset(
    kind,
    entry["save_path"],
    {name: entry["context"][name] for name in CONTEXT},
    {name: entry["compiled_attributes"][name] for name in ATTRIBUTES[kind]},
    entry["prompt"],
    None if size is None else (int(size[0]), int(size[1])),
    int(entry["seconds"]) if kind == "video" else 0,
    entry["source_data"] if kind == "chart" else "",
  )


def _entry(asset: Asset) -> dict[str, Any]:
  entry: dict[str, Any] = {
    "save_path": asset.path,
    "context": dict(asset.context),
    "compiled_attributes": dict(asset.attributes),
    "prompt": asset.prompt,
  }
  if asset.size is not None:
    entry["size"] = "{}x{}".format(*asset.size)
  if asset.kind == "video":
    entry["seconds"] = str(asset.seconds)
  if asset.kind == "chart":
    entry["source_data"] = asset.source_data
  return entry


assert set(LISTS) == set(get_args(Kind))
