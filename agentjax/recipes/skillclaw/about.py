"""What the recipe is: SkillClaw."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="SkillClaw",
    paper="2604.08377 and its code",
    changes="Skills evolve by night from what was done by day; nothing is trained.",
    commands=(
      (
        "python -m agentjax.recipes.skillclaw.days --config=configs/skillclaw_number_game.py \\\n"
        "  --models.player=agentjax.recipes.skillclaw.scripted:GuesserSeat \\\n"
        "  --models.writer=agentjax.recipes.skillclaw.scripted:LessonSeat \\\n"
        "  --skills.retrieval.show=bodies --skills.accept=0.3 --skills.gain=0.1 "
        "--skills.cases=64 \\\n"
        "  --library=runs/skills/library --output=runs/skills/days"
      ),
    ),
    tests=("tests/recipes/skillclaw",),
    data="a number game; sessions of your own",
    figures="docs/skillclaw.md",
    page="skillclaw.md",
  ),
)
