"""What the recipe is: Shared scorers."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Shared scorers",
    paper="the papers of its parts",
    changes=(
      "Parts of the reward that many methods share: text_match, tags, citations, evidence, "
      "tool_calls, seconds, relative, renorm, overlong, used."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/quickstart.py --workdir=runs/cost "
        "--config.reward.parts=exact_match,tool_calls \\\n"
        '  --config.reward.formula="exact_match - 0.01 * tool_calls"'
      ),
    ),
    tests=("tests/recipes/scorers",),
    data="any",
    page="rewards.md#formulas",
  ),
)
