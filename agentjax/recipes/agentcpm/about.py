"""What the recipe is: AgentCPM-Explore."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="AgentCPM-Explore",
    paper="2602.06485 and its code",
    changes=(
      "Groups whose outcomes differ by less than .1 are dropped, and then right answers of one "
      "turn. Among the right ones that are left fewer turns earn more, among wrong ones more "
      "turns. The loss is MiniRL's, with advantages against the other episodes, not divided by "
      "their deviation."
    ),
    commands=(
      "python -m agentjax.train --config=configs/agentcpm_word_problems.py --workdir=runs/agentcpm",
    ),
    tests=(
      "tests/recipes/agentcpm",
      "tests/recipes/test_losses_of_methods.py",
      "tests/objectives/test_nine_losses.py",
    ),
    data="word problems, generated",
    ours="sizes and rates; episodes are compared with those that are left",
    missing="Merged weights and summaries of pages; its code compares with the outcomes of the "
    "whole group, and no wrong episode has an advantage above 0",
  ),
)
