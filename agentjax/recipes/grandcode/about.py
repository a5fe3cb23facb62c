"""What the recipe is: GrandCode."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="GrandCode",
    paper="2604.02721, second-hand",
    changes=(
      "Seats conjecture, solve, summarise and generate tests; each stage is trained as soon as it "
      "is known."
    ),
    commands=(
      ("python -m agentjax.recipes.grandcode.separate --tasks=DIR --output=runs/separate"),
      (
        "python -m agentjax.train --config=configs/grandcode_code.py --workdir=runs/grandcode \\\n"
        "  --config.pretrained=FOLDER --config.data.path=DIR"
      ),
    ),
    tests=("tests/recipes/grandcode", "tests/recipes/agentic_grpo/test_live.py"),
    data="code tasks; DIR holds mbpp.jsonl",
    figures="docs/grandcode.md",
    ours="all words of the prompts, the tests' forms and sizes, the bounds",
    page="grandcode.md",
  ),
)
