"""A planner without a model: a plan from what can be read of a request.

It stands in where no model is at hand. It takes texts in quotation marks, colours, and the words
near "image", "video" and "chart" of a request, and lays them out in sections. It understands
nothing: a model plans far better (``models.ask_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.facts import Rgb, contrast, hex_colour
from agentjax.recipes.mm_webagent.plan import Plan, read_plan

_SENTENCE = re.compile(r"[^.!?\n]{20,}[.!?]")
_IMAGE = re.compile(r"illustration|image|photo|picture|portrait", re.I)
_CLIP = re.compile(r"\bvideo|animation|animated (?:loop|clip|background)", re.I)
_CHART = re.compile(r"\b(bar|line|pie|donut|doughnut|area|scatter) (?:chart|graph)", re.I)
_NO_CHART = re.compile(r"no (?:animations?, and no )?charts", re.I)
_STOP = frozenset("the and with that this into from are its for".split())
_PER_SECTION = 5  # texts
_MOST_IMAGES = 3


def plan_request(brief: Brief) -> Plan:
  """The plan of a request."""
  texts = list(brief.texts) or ["Untitled"]
  title, rest = texts[0], texts[1:] or ["Welcome"]
  colours = _roles(brief.palette)
  groups = [rest[i : i + _PER_SECTION] for i in range(0, len(rest), _PER_SECTION)]
  names = _names(groups)
  sentences = _SENTENCE.findall(brief.prompt)
  entries: dict[str, list[dict[str, Any]]] = {
    "image_generation": [], "video_generation": [], "data_visualization": []
  }  # fmt: skip
  named: dict[int, list[str]] = {i: [] for i in range(len(groups))}
  images = [s for s in sentences if _IMAGE.search(s)][:_MOST_IMAGES]
  for number, sentence in enumerate(images):
    path = f"assets/image_{number}.png"
    at = min(number, len(groups) - 1)
    named[at].append(path)
    size = ("1536x1024", "1024x1024")[number % 2]
    entries["image_generation"].append(image_entry(path, names[at], sentence.strip(), size))
  if clip := next((s for s in sentences if _CLIP.search(s)), None):
    named[0].append("assets/clip_0.mp4")
    entries["video_generation"].append(clip_entry("assets/clip_0.mp4", names[0], clip.strip()))
  kinds = [] if _NO_CHART.search(brief.prompt) else _CHART.findall(brief.prompt)
  for number, kind in enumerate(dict.fromkeys(k.lower() for k in kinds)):
    path, at = f"assets/chart_{number}.html", (number + len(images)) % len(groups)
    named[at].append(path)
    caption = groups[at][0]
    entries["data_visualization"].append(
      chart_entry(path, names[at], kind, f"“{caption[:60]}”", _made_up(number))
    )
  lines = [f"Page “{title}” with {_settings(colours)}"]
  for i, group in enumerate(groups):
    quoted = " ".join(f"“{text}”" for text in group)
    assets = " ".join(f"(path: {path})" for path in named[i])
    lines.append(f"Section {names[i]}: {quoted} {assets}".rstrip())
  return read_plan({"code_generation": [{"prompt": "\n".join(lines)}], **entries})


def image_entry(path: str, section: str, prompt: str, size: str) -> dict[str, Any]:
  """An entry of ``image_generation`` with plain attributes."""
  return {
    "save_path": path,
    "context": {"section": section, "role": "illustration", "page_style": "modern"},
    "compiled_attributes": {
      "visual_style": "illustration",
      "color_tone": "vibrant",
      "composition": "wide shot",
      "lighting": "soft",
    },
    "prompt": prompt[:2000],
    "size": size,
  }


def clip_entry(
  path: str, section: str, prompt: str, size: str = "1280x720", seconds: str = "4"
) -> dict[str, Any]:
  """An entry of ``video_generation`` with plain attributes."""
  return {
    "save_path": path,
    "context": {"section": section, "role": "background loop", "page_style": "modern"},
    "compiled_attributes": {
      "visual_style": "abstract",
      "motion_intensity": "low",
      "camera_behavior": "static",
      "loopability": "loops seamlessly",
    },
    "prompt": prompt[:2000],
    "seconds": seconds,
    "size": size,
  }


def chart_entry(path: str, section: str, kind: str, prompt: str, table: str) -> dict[str, Any]:
  """An entry of ``data_visualization`` with plain attributes."""
  return {
    "save_path": path,
    "context": {"section": section, "role": "explanatory", "page_style": "modern"},
    "compiled_attributes": {
      "chart_style": "clean",
      "chart_type": f"{kind} chart",
      "color_palette": "that of the page",
      "visual_emphasis": "differences",
    },
    "prompt": f"{kind} chart {prompt}",
    "source_data": table,
  }


def markdown_table(
  label: str, categories: Sequence[str], series: Mapping[str, Sequence[float]]
) -> str:
  """A table as ``charts.read_table`` reads it."""
  rows = [[label, *series], ["---"] * (1 + len(series))]
  for i, category in enumerate(categories):
    rows.append([category, *(f"{values[i]:g}" for values in series.values())])
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _made_up(number: int) -> str:
  """Figures for a chart of which a request tells none."""
  random = np.random.default_rng(number)
  values = {"Share": [float(v) for v in random.integers(20, 90, 6)]}
  return markdown_table("Month", ("Jan", "Feb", "Mar", "Apr", "May", "Jun"), values)


def _names(groups: Sequence[Sequence[str]]) -> list[str]:
  """A short name for each group of texts, of its first words; no two are alike."""
  names: list[str] = []
  for number, group in enumerate(groups):
    words = [w for w in re.findall(r"[a-z]+", group[0].lower()) if w not in _STOP][:2]
    name = " ".join(words) or f"part {number}"
    names.append(name if name not in names else f"{name} {number}")
  return names


def _roles(palette: Sequence[Rgb]) -> dict[str, str]:
  """Ground, ink, accent and two more colours: the palette's where they can be read together."""
  white, black = (255.0, 255.0, 255.0), (24.0, 24.0, 27.0)
  light = max(palette, key=lambda c: contrast(c, black), default=white)
  ground = light if contrast(light, black) > 12 else white
  inks = [c for c in palette if contrast(c, ground) >= 7]
  ink = inks[0] if inks else black
  others = [c for c in palette if contrast(c, ground) >= 1.8 and c != ink]
  accents = others or [(37.0, 99.0, 235.0)]
  roles = {"ground": ground, "ink": ink, "accent": accents[0]}
  roles |= dict(zip(("second", "third"), accents[1:], strict=False))
  return {name: hex_colour(colour) for name, colour in roles.items()}


def _settings(colours: Mapping[str, str]) -> str:
  pairs = {"columns": "2", **colours, "title": "40"}
  return ", ".join(f"{name}={value}" for name, value in pairs.items())
