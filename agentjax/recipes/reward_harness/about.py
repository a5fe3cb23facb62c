"""What the recipe is: RewardHarness."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="RewardHarness",
    paper="2605.08703",
    changes=(
      "Skills and tools over a frozen judge evolve on pairs; the harness is then a part of the "
      "reward."
    ),
    commands=(
      (
        "python -m agentjax.recipes.reward_harness.evolve --pairs=pairs.jsonl \\\n"
        "      --output=runs/harness --judge.path=FOLDER"
      ),
    ),
    tests=("tests/recipes/reward_harness",),
    data="pairs.jsonl, two answers and the better one a row",
    page="reward_models.md#rewardharness",
  ),
)
