"""What the recipe is: MoClip."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="MoClip",
    paper="2510.09152, abstract, reconstructed",
    changes=(
      "An optimiser's direction: the angle between gradient and momentum is bounded, and "
      "arctan2 bounds every step."
    ),
    commands=(
      "make quickstart",
      ("python -m agentjax.train --config=configs/moclip_word_problems.py --workdir=runs/moclip"),
    ),
    tests=("tests/recipes/moclip",),
    data="word problems, generated",
    figures="docs/methods.md: no gain at toy size",
    ours="the angle, and how the parts fit together",
    page="methods.md#moclip",
  ),
)
