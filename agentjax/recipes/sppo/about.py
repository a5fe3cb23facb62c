"""What the recipe is: SPPO (sequence-level PPO)."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="SPPO (sequence-level PPO)",
    paper="2604.08865",
    changes=(
      "An episode is one action; a critic of its own reads prompts alone, so a task needs no group."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/sppo_word_problems.py --workdir=runs/sppo"),
    ),
    tests=(
      "tests/objectives/test_sppo.py",
      "tests/signals/test_critic.py",
      "tests/recipes/test_losses_of_methods.py",
    ),
    data="word problems, generated",
    ours="the critic's rate",
    page="custom_loss.md",
  ),
)
