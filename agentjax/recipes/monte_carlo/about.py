"""What the recipe is: Monte-Carlo values (VinePPO)."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Monte-Carlo values (VinePPO)",
    paper="2410.01679, 2312.08935",
    changes=(
      "Completions from between turns estimate the value of a state; a turn is paid the value "
      "that it added."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/monte_carlo_sokoban.py "
        "--workdir=runs/monte_carlo"
      ),
    ),
    tests=("tests/recipes/monte_carlo",),
    data="Sokoban, generated",
    ours="the number of completions",
    page="reward_models.md#process-rewards",
  ),
)
