"""What the recipe is: KV packets."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="KV packets",
    paper="2604.13226",
    changes=(
      "Documents that were computed once drop into any context; an adapter learns to make up "
      "for it."
    ),
    commands=("python benchmarks/kv_packets.py",),
    tests=("tests/recipes/kv_packets",),
    data="questions about documents, generated",
    figures="docs/kv_packets.md",
    page="kv_packets.md",
  ),
)
