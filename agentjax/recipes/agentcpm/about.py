"""What the recipe is: AgentCPM-Explore."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="AgentCPM-Explore",
    paper="2602.06485 and its code",
    changes=(
      "Groups whose rewards differ by less than .1 are dropped, and so are right answers of one "
      "turn and episodes that ran out of room. Among right ones fewer turns earn more, among "
      "wrong ones more turns. The loss is MiniRL's."
    ),
    commands=(
      "python -m agentjax.train --config=configs/agentcpm_word_problems.py --workdir=runs/agentcpm",
    ),
    tests=("tests/recipes/agentcpm", "tests/objectives/test_nine_losses.py"),
    data="word problems, generated",
    ours="sizes and rates",
    missing="Merged weights and summaries of pages",
  ),
)
