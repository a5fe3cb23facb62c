"""What the recipe is: Math-Shepherd."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Math-Shepherd",
    paper="2312.08935",
    changes=(
      "Steps are labelled by completions from them; a model that has learnt the labels scores "
      "steps."
    ),
    commands=(
      (
        "python -m agentjax.recipes.math_shepherd.label --config=CONFIG "
        "--checkpoint=runs/policy \\\n"
        "  --solutions=solutions.jsonl --output=runs/steps"
      ),
      (
        "python -m agentjax.train --config=configs/math_shepherd_steps.py "
        "--workdir=runs/math_shepherd"
      ),
      (
        "python -m agentjax.recipes.math_shepherd.score --config=CONFIG "
        "--checkpoint=runs/math_shepherd \\\n"
        "  --solutions=others.jsonl --output=scores.jsonl"
      ),
    ),
    tests=("tests/recipes/math_shepherd",),
    data="solutions.jsonl, a solution a row",
    ours="model, sizes and rates",
    page="reward_models.md#math-shepherd",
  ),
)
