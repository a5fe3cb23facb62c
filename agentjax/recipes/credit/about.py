"""What the recipe is: Shared credit."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Shared credit",
    paper="the papers of its parts",
    changes=(
      "Terms of advantages and advantages that many methods share: agreement, entropy, "
      "duration, tool_success, shared, steps; parts, others_median."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/quickstart.py --workdir=runs/terms "
        "--config.rl.objective.advantage.terms=duration,tool_success"
      ),
    ),
    tests=("tests/recipes/credit",),
    data="any",
    ours="tool_success",
    page="objectives.md#terms",
  ),
)
