"""What the recipe is: SemaClaw."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="SemaClaw",
    paper="2604.11548 and its code",
    changes=(
      "A team works on a graph of tasks that an orchestrator writes; permissions are asked for, "
      "and each seat is paid by itself."
    ),
    commands=(
      (
        "python -m agentjax.recipes.semaclaw.run --config=configs/semaclaw_team.py \\\n"
        '  --output=runs/team --goal="What is (2 + 3) * (4 + 5)?" \\\n'
        "  --team.player=agentjax.recipes.semaclaw.scripted:CounterSeat"
      ),
      (
        "python -m agentjax.train --config=configs/semaclaw_retail.py --workdir=runs/retail \\\n"
        "  --config.data.path=DIR --config.pretrained=FOLDER --config.tokenizer.kind=huggingface"
      ),
    ),
    tests=("tests/recipes/semaclaw", "tests/worlds/test_retail.py"),
    data="goals of your own; retail tasks of tau-bench (DIR); code tasks",
    figures="docs/semaclaw.md",
    page="semaclaw.md",
  ),
)
