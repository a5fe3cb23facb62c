"""The built-in maker of pages: HTML from a layout whose lines it can read.

It stands in for a model that writes HTML. It reads lines of the form

    Page “Title” with columns=2, ground=#ffffff, ink=#111111, accent=#2563eb, title=44, width=1080
    Section hero: “Heading” “text” ... (path: assets/hero.png)

and nothing else; assets that no line names go to a section of the name that their plan gives.

``flaws`` are faults on purpose, for tests and for trying the loops of ``reflect``.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Collection, Mapping
from typing import Literal, get_args

from agentjax.recipes.mm_webagent.brief import form_of
from agentjax.recipes.mm_webagent.facts import contrast, hex_colour, read_colour
from agentjax.recipes.mm_webagent.plan import Asset, Plan, named_paths

Flaw = Literal["contrast", "overflow", "missing", "stretched", "overlap", "texts"]
FLAWS: tuple[Flaw, ...] = get_args(Flaw)
_LINE = re.compile(r"^Section ([^:\n]{1,80}):(.*)$", re.M)
_TITLE = re.compile(r"^Page “([^”]{1,200})”", re.M)
_QUOTED = re.compile(r"“([^”]{1,600})”")


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of a page: its texts, of which the first is the heading, and its assets."""

  name: str
  texts: tuple[str, ...]
  paths: tuple[str, ...]


def read_sections(plan: Plan) -> tuple[str, tuple[Section, ...]]:
  """Title and sections of a layout."""
  title = _TITLE.search(plan.layout)
  sections = [
    Section(name.strip(), tuple(_QUOTED.findall(rest)), tuple(named_paths(rest)))
    for name, rest in _LINE.findall(plan.layout)
  ]
  placed = {path for section in sections for path in section.paths}
  for asset in plan.assets:
    if asset.path in placed:
      continue
    at = next((i for i, s in enumerate(sections) if s.name == asset.section), None)
    if at is None:
      sections.append(Section(asset.section, (asset.section.title(),), (asset.path,)))
    else:
      found = sections[at]
      sections[at] = dataclasses.replace(found, paths=(*found.paths, asset.path))
  return title[1] if title else "Untitled", tuple(sections)


def build_page(plan: Plan, flaws: Collection[Flaw] = ()) -> str:
  """The HTML of a plan."""
  look = plan.settings()
  title, sections = read_sections(plan)
  first_image = next((asset.path for asset in plan.of("image")), "")
  parts, cards = [], list[str]()
  for section in sections:
    paths = [p for p in section.paths if not ("missing" in flaws and p == first_image)]
    texts = section.texts[:1] if "texts" in flaws else section.texts
    assets = [plan.asset(p) for p in paths]
    if not section.paths:
      cards.append(_card(section.name, texts))
      continue
    parts += [_row(cards)] * bool(cards)
    cards = []
    parts.append(_section(section.name, texts, assets, len(parts), look, flaws))
  parts += [_row(cards)] * bool(cards)
  navigation = "".join(f"<span>{_e(section.name.title())}</span>" for section in sections[:5])
  return (
    f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{_e(title)}</title>"
    f"<style>{_style(look, flaws)}</style></head><body>"
    f"<header><div class='in'><h1>{_e(title)}</h1><nav>{navigation}</nav></div></header>"
    f"<main>{''.join(parts)}</main>"
    f"<footer><div class='in'><p>{_e(title)}</p></div></footer></body></html>"
  )


def _row(cards: list[str]) -> str:
  """Sections without assets, beside each other."""
  return f"<div class='part'><div class='in cards'>{''.join(cards)}</div></div>"


def _card(name: str, texts: tuple[str, ...]) -> str:
  heading = f"<h3>{_e(texts[0])}</h3>" if texts else ""
  body = "".join(f"<p>{_e(text)}</p>" for text in texts[1:])
  return f"<article data-section='{_e(name)}'>{heading}{body}</article>"


def _section(
  name: str,
  texts: tuple[str, ...],
  assets: list[Asset],
  number: int,
  look: Mapping[str, str],
  flaws: Collection[Flaw],
) -> str:
  heading = f"<h2>{_e(texts[0])}</h2>" if texts else ""
  body = "".join(f"<p>{_e(text)}</p>" for text in texts[1:])
  media = "".join(_figure(asset, flaws) for asset in assets)
  columns = look.get("columns", "1")
  if len(assets) > 1:
    media = f"<div class='tiles'>{media}</div>"
    inner = f"<div>{heading}{body}</div>{media}"
  elif columns == "1" or not assets:
    inner = f"<div>{heading}{body}</div>{media}"
  else:
    halves = [f"<div>{heading}{body}</div>", media]
    inner = f"<div class='halves'>{''.join(halves[:: -1 if number % 2 else 1])}</div>"
  shade = " shade" if number % 2 else ""
  return (
    f"<section data-section='{_e(name)}' class='part{shade}'>"
    f"<div class='in'>{inner}</div></section>"
  )


def _figure(asset: Asset, flaws: Collection[Flaw]) -> str:
  form = "chart" if asset.kind == "chart" else form_of(asset.size)
  squeezed = " squeezed" if "stretched" in flaws and asset.kind == "image" else ""
  path = _e(asset.path)
  if asset.kind == "chart":
    inner = f"<iframe src='{path}' title='{_e(asset.prompt[:80])}' scrolling='no'></iframe>"
  elif asset.kind == "video":
    inner = f"<video src='{path}' autoplay muted loop playsinline preload='auto'></video>"
  else:
    inner = f"<img src='{path}' alt='{_e(asset.prompt[:120])}'>"
  return f"<figure class='{form}{squeezed}'>{inner}</figure>"


def _style(look: Mapping[str, str], flaws: Collection[Flaw]) -> str:
  ground, ink = look.get("ground", "#ffffff"), look.get("ink", "#1f2937")
  accent = look.get("accent", "#2563eb")
  second, third = look.get("second", accent), look.get("third", accent)
  title, width = _number(look, "title", 44, 12, 160), _number(look, "width", 1080, 200, 4000)
  columns = _number(look, "columns", 1, 1, 3)
  on_accent = _readable_on(accent)
  if "contrast" in flaws:
    ink = _like(ground)
  if "overflow" in flaws:
    width = 1700
  lines = [
    "*{box-sizing:border-box}",
    f"body{{margin:0;background:{ground};color:{ink};font:17px/1.6 'DejaVu Sans',sans-serif}}",
    f".in{{width:{width}px;max-width:{'none' if width > 1280 else '92%'};margin:0 auto}}",
    f"header{{background:{accent};color:{on_accent};padding:28px 0}}",
    "header .in{display:flex;justify-content:space-between;align-items:center;gap:32px}",
    f"h1{{margin:0;font-size:{title}px;line-height:1.15}}",
    "nav{display:flex;gap:22px;flex-wrap:wrap}",
    f"h2{{margin:0 0 14px;font-size:{max(18, round(0.66 * title))}px;line-height:1.2;"
    f"border-left:8px solid {second};padding-left:16px}}",
    ".part{padding:52px 0}",
    f".shade{{background:{_mixed(accent, 9, ground)}}}",
    ".halves{display:grid;grid-template-columns:1fr 1fr;gap:44px;align-items:center}",
    f".tiles{{display:grid;grid-template-columns:repeat({columns},1fr);gap:26px;margin-top:22px}}",
    ".cards{display:grid;grid-template-columns:repeat(3,1fr);gap:26px}",
    f"article{{padding:24px;border-radius:14px;border:1px solid {_mixed(accent, 30, ground)};"
    f"border-top:6px solid {third}}}",
    "h3{margin:0 0 12px;font-size:21px;line-height:1.25}",
    "p{margin:0 0 12px;max-width:62ch}",
    "figure{margin:16px 0 0;overflow:hidden;border-radius:14px}",
    ".halves figure,.tiles figure{margin:0}",
    "img,video{display:block;width:100%;height:auto;border-radius:14px}",
    ".tall{max-width:420px}.square{max-width:560px}",
    f".chart{{height:380px;padding:10px;border:1px solid {_mixed(accent, 35, ground)}}}",
    "iframe{display:block;width:100%;height:100%;border:0}",
    ".squeezed img{height:120px}",
    f"footer{{background:{accent};color:{on_accent};padding:26px 0}}",
  ]
  if "overlap" in flaws:
    lines.append("h2+p,h3+p{margin-top:-46px}")
  return "".join(lines)


def _mixed(one: str, share: int, other: str) -> str:
  return f"color-mix(in srgb,{one} {share}%,{other})"


def _number(look: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
  text = look.get(name, "")
  return min(max(int(text), low), high) if text.isdigit() and len(text) < 6 else default


def _readable_on(colour: str) -> str:
  """Black or white, whichever can be read better."""
  rgb = read_colour(colour) or (0.0, 0.0, 0.0)
  white = contrast(rgb, (255.0, 255.0, 255.0))
  return "#ffffff" if white >= contrast(rgb, (17.0, 17.0, 17.0)) else "#111111"


def _like(colour: str) -> str:
  """A colour that can hardly be told from this one."""
  rgb = read_colour(colour) or (255.0, 255.0, 255.0)
  step = -28 if sum(rgb) > 380 else 28
  return hex_colour((rgb[0] + step, rgb[1] + step, rgb[2] + step))


def _e(text: str) -> str:
  return html.escape(text, quote=True)
