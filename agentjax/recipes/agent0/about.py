"""What the recipe is: Agent0."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Agent0 (ADPO)",
    paper="2511.16043 and its code",
    changes=(
      "The solver learns without answers: the majority of a group is the label, tasks with 30% to "
      "80% agreement are kept, and advantages and clip bounds follow the agreement. The reward of "
      "the author of questions is a function."
    ),
    commands=(
      "python -m agentjax.train --config=configs/agent0_word_problems.py --workdir=runs/agent0",
    ),
    tests=("tests/recipes/agent0", "tests/recipes/credit/test_terms.py"),
    data="word problems, generated, whose answers are not read",
    ours="agreement is that of the group itself, not of an earlier round; four updates a batch",
    missing="Author and solver in turns, in one run",
    page="objectives.md#terms",
  ),
)
