"""What the recipe is: TESSY."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="TESSY",
    paper="2604.14164 and its code",
    changes=(
      "A student writes the style and a teacher the substance of one trace; the student then "
      "learns it."
    ),
    commands=(
      ("python -m agentjax.recipes.tessy.synthesise --spans=labels.jsonl --predictor=words.npy"),
      (
        "python -m agentjax.recipes.tessy.synthesise --config=configs/tessy_word_problems.py "
        "--predictor=words.npy \\\n"
        "  --config.data.source=word_problems --student.path=runs/student "
        "--teacher.path=runs/quickstart \\\n"
        "  --output=runs/traces"
      ),
      ("python -m agentjax.train --config=configs/tessy_word_problems.py --workdir=runs/tessy"),
    ),
    tests=("tests/recipes/tessy",),
    data="word problems, generated, or a file; labels.jsonl",
    ours="the linear predictor; rates",
    page="methods.md#tessy",
  ),
)
