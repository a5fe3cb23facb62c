"""What the recipe is: Logits Replay."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Logits Replay",
    paper="2510.09152, abstract",
    changes=(
      "The supervised loss of a token runs over the tokens that the first policy found likely "
      "there."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/moclip_word_problems.py --workdir=runs/moclip"),
    ),
    tests=("tests/recipes/logits_replay",),
    data="word problems, generated",
    figures="docs/methods.md: no gain at toy size",
    ours="mass and set size",
    page="methods.md#logits-replay",
  ),
)
