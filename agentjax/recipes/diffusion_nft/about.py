"""What the recipe is: DiffusionNFT."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="DiffusionNFT",
    paper="2509.16117, as the code of RationalRewards (2604.11626) has it",
    changes=(
      "A flow-matching generator of images learns from rewards by a loss on its velocity: towards "
      "good images and away from bad ones. The reward is a critic's rationale."
    ),
    commands=("python -m agentjax.recipes.diffusion_nft.draw --output=runs/drawings",),
    tests=("tests/recipes/diffusion_nft",),
    data="none; drawings of 32 by 32 pixels are rendered",
    figures="right attributes 28.3 % -> 37.2 % by the rational critic, 27.0 % by the scalar one",
    ours="drawings, networks and their sizes; teacher, annotator and how a prompt is edited",
    missing="LoRA, guidance and generators of real images",
    page="diffusion_nft.md",
  ),
)
