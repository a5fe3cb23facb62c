"""What the recipe is: Lightning OPD."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Lightning OPD",
    paper="2604.13010",
    changes=(
      "Episodes are played and scored by the teacher once, then the student trains on them as "
      "stored."
    ),
    commands=(
      "make quickstart",
      (
        "python -m agentjax.train --config=configs/opd_word_problems.py --config.rl.steps=0 "
        "--config.rl.teachers= \\\n"
        "  --config.rl.objective.distillation=none --workdir=runs/warm"
      ),
      (
        "python -m agentjax.recipes.lightning_opd.distill --config=configs/opd_word_problems.py"
        " \\\n"
        "  --checkpoint=runs/warm --output=runs/stored --tasks=1024"
      ),
      (
        "python -m agentjax.train --config=configs/lightning_opd_word_problems.py "
        "--workdir=runs/lightning"
      ),
    ),
    tests=(
      "tests/recipes/lightning_opd",
      "tests/test_distillation_configs.py",
    ),
    data="word problems, generated",
    figures="docs/distillation.md",
    ours="no clip bound; the top-k form",
    page="distillation.md",
  ),
)
