"""What the recipe is: GRPO-RoC (rStar2-Agent)."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="GRPO-RoC (rStar2-Agent)",
    paper="2508.20722 and its code",
    changes=(
      "Of twice as many episodes half are trained on: failures by chance, successes with fewer "
      "tool errors first."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/grpo_roc_word_problems.py --workdir=runs/roc"),
    ),
    tests=("tests/recipes/grpo_roc",),
    data="word problems, generated",
    ours="sizes and rates; one update a batch, with which clip bounds do not act (rl.minibatches)",
  ),
)
