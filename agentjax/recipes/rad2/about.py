"""What the recipe is: RAD-2."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="RAD-2",
    paper="2604.15308, second-hand",
    changes=(
      "A driving policy of two networks: a flow proposes trajectories and learns from edits of "
      "those that it drove; a discriminator chooses, and learns by GRPO at latched decisions."
    ),
    commands=("python -m agentjax.recipes.rad2.train --output=runs/rad2",),
    tests=("tests/recipes/rad2",),
    data="traffic in two dimensions and an expert's demonstrations, both generated",
    figures=(
      "crashes, three seeds: imitation 54.7 %, generator 28.6 %, discriminator 13.8 %, both 10.3 % "
      "(docs/rad2.md)"
    ),
    ours=(
      "the traffic, the expert, sizes of networks, weights of rewards, the entropy term, the "
      "factors and bounds of edits, all numbers of updates"
    ),
    missing="maps, cameras and their features; the simulator that warps such features",
    page="rad2.md",
  ),
)
