"""What the recipe is: MEDS."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="MEDS",
    paper="2604.11297 and its code",
    changes="A wrong answer that a task has seen before costs more than a new one.",
    commands=(
      ("python -m agentjax.train --config=configs/meds_word_problems.py --workdir=runs/meds"),
    ),
    tests=("tests/recipes/meds",),
    data="word problems, generated",
    figures="docs/methods.md: within noise",
    ours="radius in place of HDBSCAN; noise is no cluster",
    page="methods.md#meds",
  ),
)
