"""What the recipe is: Behavior Priming."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Behavior Priming",
    paper="its abstract",
    changes=(
      "The warm start learns trajectories that verify information, weigh authorities, adapt their "
      "search and recover from errors, whether their answers are right or wrong; then plain GRPO."
    ),
    commands=(
      "python -m agentjax.recipes.behavior_priming.prime --input=trajectories.jsonl \\\n"
      "  --output=DIR/train.jsonl --judge.base_url=http://localhost:8000/v1 --judge.model=judge",
      "python -m agentjax.train --config=configs/supervised.py --config.pretrained=FOLDER \\\n"
      "  --config.data.path=DIR --workdir=runs/primed",
      "python -m agentjax.train --config=configs/qwen3_gsm8k_python.py \\\n"
      "  --config.pretrained=FOLDER --config.start_from=runs/primed --config.data.path=GSM8K \\\n"
      "  --workdir=runs/grpo",
    ),
    tests=("tests/recipes/behavior_priming",),
    data=(
      "trajectories.jsonl, a conversation a row; rows may name their behaviours themselves. The "
      "last command reads GSM8K from a folder; the paper has questions of research on the web"
    ),
    ours="the words in which the judge is asked; the tasks of the last command",
    page="supervised.md",
  ),
)
