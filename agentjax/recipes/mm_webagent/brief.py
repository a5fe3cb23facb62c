"""What a request asks for, as far as it can be measured: texts, colours, elements."""

from __future__ import annotations

import dataclasses
import re

from agentjax.recipes.mm_webagent.charts import chart_type, read_table
from agentjax.recipes.mm_webagent.facts import Rgb, read_colour
from agentjax.recipes.mm_webagent.plan import Asset, Kind, Plan

_QUOTED = re.compile(r"“([^“”]{2,80}?)[,.]?”|\"([^\"\n]{2,80}?)[,.]?\"")
_COLOUR = re.compile(r"#[0-9A-Fa-f]{6}\b")
MOST_TEXTS, MOST_COLOURS = 60, 6


@dataclasses.dataclass(frozen=True)
class Wish:
  """An element that a page must have.

  Attributes:
    kind: of the element.
    section: where; "" is anywhere.
    form: of a chart its type as ECharts names it; of an image or a clip "wide", "tall" or "square".
      "" is any.
    table: of a chart, Markdown; its data must be this.
  """

  kind: Kind
  section: str = ""
  form: str = ""
  table: str = ""

  def met_by(self, asset: Asset) -> bool:
    if asset.kind != self.kind or self.section not in asset.section.lower():
      return False
    if self.kind == "chart":
      right = self.form in ("", chart_type(asset.attributes["chart_type"]))
      return right and (not self.table or read_table(asset.source_data) == read_table(self.table))
    return self.form in ("", form_of(asset.size))


@dataclasses.dataclass(frozen=True)
class Brief:
  """A request.

  Attributes:
    prompt: in words.
    texts: that the page must show.
    palette: colours that it must use.
    wishes: elements that it must have.
  """

  prompt: str
  texts: tuple[str, ...] = ()
  palette: tuple[Rgb, ...] = ()
  wishes: tuple[Wish, ...] = ()

  def unmet(self, plan: Plan) -> tuple[Wish, ...]:
    """Wishes without an asset; one asset fulfils one wish."""
    free = list(plan.assets)
    unmet = []
    for wish in self.wishes:
      found = next((asset for asset in free if wish.met_by(asset)), None)
      if found is None:
        unmet.append(wish)
      else:
        free.remove(found)
    return tuple(unmet)


def read_brief(prompt: str) -> Brief:
  """What can be read from a request in words: its quoted texts and its colours."""
  texts = [(one or other).strip() for one, other in _QUOTED.findall(prompt)]
  colours = [c for c in map(read_colour, _COLOUR.findall(prompt)) if c is not None]
  return Brief(
    prompt,
    tuple(dict.fromkeys(texts))[:MOST_TEXTS],
    tuple(dict.fromkeys(colours))[:MOST_COLOURS],
  )


def form_of(size: tuple[int, int] | None) -> str:
  """ "wide", "tall" or "square"; "" without a size."""
  if size is None:
    return ""
  width, height = size
  return "square" if width == height else "wide" if width > height else "tall"
