"""What the recipe is: Agentic GRPO (GrandCode)."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Agentic GRPO (GrandCode)",
    paper="2604.02721, second-hand",
    changes=(
      "A turn learns twice: from its own reward within its stage of the group, then from the "
      "difference to the outcome in narrower bounds."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/agentic_grpo_sokoban.py "
        "--workdir=runs/agentic_grpo"
      ),
    ),
    tests=("tests/recipes/agentic_grpo",),
    data="Sokoban, generated",
    ours="both clip bounds; updates wait for the end of the episodes, but for GrandCode's",
    page="methods.md#agentic-grpo-of-staged-rollouts",
  ),
)
