"""What the recipe is: iStar."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="iStar (OPRL)",
    paper="its code, and second-hand",
    changes=(
      "A reward model learns in the run which of two episodes of a task was better. Its log-ratio "
      "to the policy pays every turn, and a turn's advantage is that of the outcome and its own, "
      "each standardised in the group."
    ),
    commands=(
      "python -m agentjax.train --config=configs/istar_word_problems.py --workdir=runs/istar",
    ),
    tests=("tests/recipes/istar", "tests/recipes/credit/test_terms.py"),
    data="word problems, generated",
    ours="all pairs of a group, where the code pairs each episode once; the reward model's rate",
    page="reward_models.md#process-rewards",
  ),
)
