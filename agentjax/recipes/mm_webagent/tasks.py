"""Requests whose every wish is known, and plans in a few choices: the tasks of the world.

A request names colours, an image and a chart with its data, and where they belong. A plan of it is
written as choices, ten words such as ``scheme=ocean``, which ``choices_plan`` turns into a whole
plan. So a policy with few parameters can plan; a large one writes the plan itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentjax.recipes.mm_webagent.brief import Brief, Wish
from agentjax.recipes.mm_webagent.facts import Rgb, read_colour
from agentjax.recipes.mm_webagent.plan import Plan, read_plan
from agentjax.recipes.mm_webagent.planner import chart_entry, image_entry, markdown_table

# Accent and a second colour of each scheme.
SCHEMES: Mapping[str, tuple[str, str]] = {
  "ocean": ("#0b6e99", "#0f9fb5"),
  "forest": ("#2f6b3a", "#5f9e54"),
  "sunset": ("#b8452f", "#d97a3d"),
  "plum": ("#6b3fa0", "#94569f"),
  "slate": ("#3f4f5f", "#5b6f82"),
  "rose": ("#a8345c", "#c75b7a"),
}
GROUNDS = {"light": "#fafaf7", "dark": "#16181d"}
INKS = {"light": "#f1f1ee", "dark": "#1c1f26"}
SIZES = {"wide": "1536x1024", "tall": "1024x1536", "square": "1024x1024"}
SECTIONS = ("hero", "sales", "news")

CHOICES: Mapping[str, tuple[str, ...]] = {
  "scheme": tuple(SCHEMES),
  "ground": tuple(GROUNDS),
  "ink": tuple(INKS),
  "title": ("18", "28", "44"),
  "width": ("1080", "1500"),
  "columns": ("1", "2"),
  "image": (*SIZES, "none"),
  "place": SECTIONS,
  "chart": ("bar", "line", "pie", "none"),
  "at": SECTIONS,
}
_NAMES = ("Harbor", "Maple", "Copper", "Willow", "Summit", "Juniper", "Cedar", "Lantern")
_KINDS = ("Books", "Coffee", "Cycles", "Gardens", "Music", "Maps")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun")


def request_of(settings: Mapping[str, Any]) -> Brief:
  """The request of a task's settings: name, scheme, ground, image, place, chart, at, values."""
  name = settings["name"]
  accent, second = SCHEMES[settings["scheme"]]
  table = table_of(settings)
  colours = [read_colour(text) for text in (accent, second, GROUNDS[settings["ground"]])]
  prompt = (
    f"A page for {name}. Scheme {settings['scheme']}, {settings['ground']} ground. "
    f"Show a {settings['image']} image in {settings['place']}. "
    f"Show a {settings['chart']} chart in {settings['at']}."
  )
  return Brief(
    prompt,
    (name, f"Welcome to {name}", "Sales this year", "What is new"),
    tuple[Rgb, ...](colour for colour in colours if colour is not None),
    (
      Wish("image", settings["place"], settings["image"]),
      Wish("chart", settings["at"], settings["chart"], table),
    ),
  )


def table_of(settings: Mapping[str, Any]) -> str:
  """The data of a request's chart, as Markdown."""
  return markdown_table("Month", _MONTHS, {"Sold": settings["values"]})


def draw_settings(random: np.random.Generator) -> dict[str, Any]:
  """Settings of a request."""

  def one(options: tuple[str, ...]) -> str:
    return options[int(random.integers(len(options)))]

  return {
    "name": f"{one(_NAMES)} {one(_KINDS)}",
    "scheme": one(tuple(SCHEMES)),
    "ground": one(tuple(GROUNDS)),
    "image": one(tuple(SIZES)),
    "place": one(SECTIONS),
    "chart": one(("bar", "line", "pie")),
    "at": one(SECTIONS),
    "values": [int(v) for v in random.integers(10, 100, len(_MONTHS))],
  }


def best_choices(settings: Mapping[str, Any]) -> dict[str, str]:
  """Choices that fulfil a request."""
  own = {name: settings[name] for name in CHOICES if name in settings}
  ink = "dark" if settings["ground"] == "light" else "light"
  fixed = {"ink": ink, "title": "44", "width": "1080", "columns": "2"}
  return {name: (own | fixed)[name] for name in CHOICES}


def some_choices(
  settings: Mapping[str, Any], right: float, random: np.random.Generator
) -> dict[str, str]:
  """Choices of which each is that of ``best_choices`` with a probability, and else any one."""
  best = best_choices(settings)
  return {
    name: best[name] if random.random() < right else options[int(random.integers(len(options)))]
    for name, options in CHOICES.items()
  }


def written(choices: Mapping[str, str]) -> str:
  """Choices as a policy writes them."""
  return " ".join(f"{name}={choices[name]}" for name in CHOICES)


def read_choices(text: str) -> dict[str, str] | None:
  """The choices of a turn; None unless each is made once, of its options, and nothing else is."""
  pairs = [word.partition("=") for word in text.split()]
  found = {name: value for name, _, value in pairs}
  if len(pairs) != len(CHOICES) or set(found) != set(CHOICES):
    return None
  return found if all(found[name] in options for name, options in CHOICES.items()) else None


def choices_plan(settings: Mapping[str, Any], choices: Mapping[str, str]) -> Plan:
  """The whole plan of some choices for a request."""
  accent, second = SCHEMES[choices["scheme"]]
  look = {
    "columns": choices["columns"], "ground": GROUNDS[choices["ground"]],
    "ink": INKS[choices["ink"]], "accent": accent, "second": second,
    "title": choices["title"], "width": choices["width"],
  }  # fmt: skip
  name, assets = settings["name"], dict[str, list[str]]()
  images, charts = [], []
  if choices["image"] != "none":
    assets.setdefault(choices["place"], []).append("assets/picture.png")
    prompt = "A landscape with hills at sunrise"
    size = SIZES[choices["image"]]
    images.append(image_entry("assets/picture.png", choices["place"], prompt, size))
  if choices["chart"] != "none":
    assets.setdefault(choices["at"], []).append("assets/sold.html")
    entry = chart_entry(
      "assets/sold.html", choices["at"], choices["chart"], "“Sold by month”", table_of(settings)
    )
    charts.append(entry)
  texts = {
    "hero": (f"Welcome to {name}", f"{name} has been open every day since 1987."),
    "sales": ("Sales this year", "Every month counts, and here are the figures."),
    "news": ("What is new", "We open a second shop in spring."),
  }
  pairs = ", ".join(f"{key}={value}" for key, value in look.items())
  lines = [f"Page “{name}” with {pairs}"]
  for section in SECTIONS:
    quoted = " ".join(f"“{text}”" for text in texts[section])
    named = " ".join(f"(path: {path})" for path in assets.get(section, ()))
    lines.append(f"Section {section}: {quoted} {named}".rstrip())
  return read_plan(
    {
      "code_generation": [{"prompt": "\n".join(lines)}],
      "image_generation": images,
      "data_visualization": charts,
    }
  )
