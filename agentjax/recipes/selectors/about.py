"""What the recipe is: Shared selectors."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Shared selectors",
    paper="ARPO-GUI's code, 1511.05952, 2508.20722, 2509.25958",
    changes=(
      "Which episodes of a step are trained on: stored successes in failed groups, groups of "
      "earlier steps, quotas of data sets, strata and ranks."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/quickstart.py --workdir=runs/successes \\\n"
        "  --config.rl.signals=agentjax.recipes.selectors:SuccessesConfig \\\n"
        "  --config.data.train_size=256 --config.supervised.steps=160 --config.rl.steps=80"
      ),
    ),
    tests=("tests/recipes/selectors",),
    data="any",
    ours="priorities, quotas and all their numbers",
    page="methods.md#selectors",
  ),
)
