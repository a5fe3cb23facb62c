"""What the recipe is: AgentSpec."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="AgentSpec",
    paper="2503.18666 and its code",
    changes=(
      "Rules before and after an action of the agent: go on, skip, stop, plan again, ask. The "
      "policy learns under them."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/agentspec_word_problems.py "
        "--workdir=runs/agentspec"
      ),
    ),
    tests=("tests/recipes/agentspec",),
    data="word problems, generated",
    ours="that the tokens of a refused call are trained on",
    page="agentspec.md",
  ),
)
