"""What the recipe is: SPEAR."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="SPEAR",
    paper="2509.22601 and its code",
    changes=(
      "A memory of successes is trained on again with recalibrated advantages; tool calls are "
      "paid at first; clip-cov; episodes that were cut off or repeat themselves are left out."
    ),
    commands=("python -m agentjax.train --config=configs/spear_sokoban.py --workdir=runs/spear",),
    tests=("tests/recipes/spear",),
    data="Sokoban, generated",
    ours="the final weight of imitation; the size of the memory; repetition is looked for in the "
    "policy's own turns",
    missing="the code's second recalibration, and its filter of unreadable answers",
    page="methods.md#spear",
  ),
)
