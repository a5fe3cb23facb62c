"""Lists the recipes: ``python -m agentjax.recipes [--markdown] [WORD ...]``.

With words, only the recipes that have all of them; ``--markdown`` writes ``docs/recipes.md``.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from agentjax.recipes import Recipe, find_recipes, page

_FIELDS = ("paper", "changes", "data", "figures", "ours", "missing", "tests")


def text_of(recipe: Recipe) -> str:
  """What a terminal shows of a recipe."""
  rows = [recipe.name]
  for field in _FIELDS:
    value = getattr(recipe, field)
    if value:
      said = ", ".join(value) if isinstance(value, tuple) else value
      rows += textwrap.wrap(said, 96, initial_indent=f"  {field:8}", subsequent_indent=" " * 10)
  rows += [f"    {line}" for one in recipe.commands for line in one.split("\n")]
  return "\n".join(rows)


def main(words: Sequence[str]) -> int:
  """Prints, and returns the status of the process."""
  unknown = [word for word in words if word.startswith("-") and word != "--markdown"]
  if unknown:
    print(__doc__, file=sys.stderr if "--help" not in unknown else sys.stdout)
    return 0 if "--help" in unknown else 2
  wanted = [word for word in words if word != "--markdown"]
  recipes = [recipe for recipe in find_recipes() if recipe.matches(wanted)]
  if "--markdown" in words:
    print(page(recipes), end="")
  else:
    print("\n\n".join(map(text_of, recipes)) or f"No recipe has the words {' '.join(wanted)}.")
  return 0 if recipes else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
