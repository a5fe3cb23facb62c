"""What the recipe is: RoRecomp."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="RoRecomp",
    paper="2509.25958, second-hand",
    changes=(
      "A first update has the shortest successes and the longest failures; the rest waits in a "
      "queue for updates of its own."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/rorecomp_word_problems.py "
        "--workdir=runs/rorecomp"
      ),
    ),
    tests=("tests/recipes/rorecomp",),
    data="word problems, generated",
    ours="the share of episodes, the queue, the chance of a compensation batch",
  ),
)
