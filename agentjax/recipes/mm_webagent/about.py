"""What the recipe is: MM-WebAgent."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="MM-WebAgent",
    paper="2604.15309 and its code",
    changes=(
      "Pages are planned, made, shown in a browser, scored without models, and mended; a policy "
      "is paid for its plan."
    ),
    commands=(
      "python -m agentjax.recipes.mm_webagent.make --output=runs/page \\\n"
      "  --request='A page \"Harbor Books\" with a photo of a harbor and a bar chart.'",
      "python -m agentjax.train --config=configs/mm_webagent_planner.py --workdir=runs/planner",
    ),
    tests=("tests/recipes/mm_webagent",),
    data="requests, generated; requests of your own",
    figures="docs/mm_webagent.md",
    page="mm_webagent.md",
  ),
)
