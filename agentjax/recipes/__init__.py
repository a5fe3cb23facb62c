"""Recipes: code that only one published method needs, one folder each; ``presets`` need no folder.

The core imports none of them. What a recipe is, and how it is run, stands in ``RECIPES`` of the
recipe's ``about.py``, or of its file in ``configs/`` if it needs no code of its own.
``python -m agentjax.recipes`` lists them all, and ``docs/recipes.md`` is made from them.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections.abc import Iterator, Sequence

from agentjax.names import load_config_module

_HERE = pathlib.Path(__file__).parent
CONFIGS = _HERE.parents[1] / "configs"
_HEAD = """# Recipes

Published methods, and the commands that run them. This page is written by

    python -m agentjax.recipes --markdown > docs/recipes.md

from what recipes state themselves: `RECIPES` in `agentjax/recipes/METHOD/about.py`, or in a file of
`configs/` if a method needs no code of its own. `python -m agentjax.recipes WORD ...` shows the
recipes that have all words in them.

A command is for a clone of the project. `DIR` and `FOLDER` stand for your data and your model.
"Second-hand" marks a paper that we know from texts of others alone. "Ours" names what no source
gives, so that we have set it, mostly by settings. "Missing" is what a method has and its recipe
has not. "Figures" are those that we have seen. [methods.md](methods.md) describes some recipes at
length; [objectives.md](objectives.md#methods) lists the losses that are presets of one config.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What a published method is here.

  Attributes:
    name: as the paper has it.
    paper: its number, and what else the recipe was written from.
    changes: what it does that plain GRPO, or plain supervised learning, does not.
    commands: shell commands that run it, as a user types them in a clone.
    tests: files, from the root of the project, that separate it from the plain method.
    data: what it runs on.
    figures: what was measured, or a page that has it.
    ours: settings and parts that no source gives; "" if there are none.
    missing: of the method, what is not here; "" if nothing is known to be.
    page: a page that describes it, in ``docs/``, with its section.
  """

  name: str
  paper: str
  changes: str
  commands: tuple[str, ...]
  tests: tuple[str, ...]
  data: str
  figures: str = "none yet"
  ours: str = ""
  missing: str = ""
  page: str = ""

  def matches(self, words: Sequence[str]) -> bool:
    """Whether every word stands in some text of it, in any case."""
    text = repr(self).lower()
    return all(word.lower() in text for word in words)


def find_recipes(configs: pathlib.Path = CONFIGS) -> list[Recipe]:
  """All recipes by name: those of the folders here, and of the files in ``configs``."""
  found = [recipe for own in _stated(configs) for recipe in own]
  return sorted(found, key=lambda recipe: recipe.name.lower())


def _stated(configs: pathlib.Path) -> Iterator[Sequence[Recipe]]:
  for file in sorted(_HERE.glob("*/about.py")):
    yield importlib.import_module(f"{__name__}.{file.parent.name}.about").RECIPES
  for file in sorted(configs.glob("*.py")):
    if "RECIPES" in file.read_text():
      yield load_config_module(file).RECIPES


def page(recipes: Sequence[Recipe]) -> str:
  """The text of ``docs/recipes.md``."""
  return "\n".join([_HEAD, *map(_section, recipes)])


def _section(recipe: Recipe) -> str:
  commands = "\n".join(f"    {line}" for one in recipe.commands for line in one.split("\n"))
  tests = ", ".join(f"`{test}`" for test in recipe.tests)
  rows = [
    f"## {recipe.name}\n",
    f"{recipe.changes}\n",
    f"{commands}\n",
    f"* Source: {recipe.paper}",
    f"* Data: {recipe.data}",
    f"* Figures: {recipe.figures}",
    *([f"* Ours: {recipe.ours}"] if recipe.ours else []),
    *([f"* Missing: {recipe.missing}"] if recipe.missing else []),
    f"* Tests: {tests}",
    *([f"* More: [{recipe.page}]({recipe.page})"] if recipe.page else []),
  ]
  return "\n".join(rows) + "\n"
