"""What the recipe is: SPA-RL."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="SPA-RL",
    paper="2505.20732 and its code",
    changes=(
      "A network attributes the outcome of an episode to its turns, which are then paid by turn"
      " in PPO."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/spa_rl_sokoban.py --workdir=runs/spa_rl"),
    ),
    tests=("tests/recipes/spa_rl",),
    data="Sokoban, generated",
    ours="sizes and rates; both may learn all the time",
    page="methods.md#spa-rl",
  ),
)
