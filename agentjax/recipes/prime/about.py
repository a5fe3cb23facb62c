"""What the recipe is: PRIME."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="PRIME",
    paper="2502.01456",
    changes=(
      "Log-ratios of a reward model that learns outcomes in the run are rewards of tokens "
      "beside the outcome."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/prime_word_problems.py --workdir=runs/prime"),
    ),
    tests=(
      "tests/recipes/prime",
      "tests/training/test_process_rewards.py",
    ),
    data="word problems, generated",
    ours="beta; the reward model's rate",
    page="reward_models.md#process-rewards",
  ),
)
