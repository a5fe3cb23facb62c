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
    commands=(
      "python -m agentjax.train --config=configs/kv_packet_reading.py --workdir=runs/reading",
      "python -m agentjax.recipes.kv_packets.train --config=configs/kv_packet_reading.py \\\n"
      "  --checkpoint=runs/reading --output=runs/reading/adapter",
      "python -m agentjax.train --config=configs/kv_packet_search.py --workdir=runs/search \\\n"
      "  --config.start_from=runs/reading",
      "python benchmarks/kv_packets.py --part=cost",
    ),
    tests=("tests/recipes/kv_packets",),
    data=(
      "questions and passages of Wikipedia and books, in the folder AGENTJAX_DATA; "
      "for the benchmark generated"
    ),
    figures="docs/kv_packets.md",
    page="kv_packets.md",
  ),
)
