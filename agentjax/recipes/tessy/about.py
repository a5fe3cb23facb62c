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
      (
        "python -m agentjax.recipes.tessy.label --config=configs/tessy_boundary.py "
        "--texts=texts.jsonl \\\n"
        "  --labeller.http.base_url=URL --labeller.http.model=NAME --output=runs/labels"
      ),
      (
        "python -m agentjax.recipes.tessy.boundary --config=configs/tessy_boundary.py \\\n"
        "  --spans=runs/labels/labels.jsonl --output=runs/boundary_data"
      ),
      ("python -m agentjax.train --config=configs/tessy_boundary.py --workdir=runs/boundary"),
      (
        "python -m agentjax.recipes.tessy.synthesise --config=configs/tessy_word_problems.py "
        "--predictor=runs/boundary \\\n"
        "  --config.data.source=word_problems --student.path=runs/student "
        "--teacher.path=runs/quickstart \\\n"
        "  --output=runs/traces"
      ),
      ("python -m agentjax.train --config=configs/tessy_word_problems.py --workdir=runs/tessy"),
    ),
    tests=("tests/recipes/tessy",),
    data=(
      "word problems, generated, or a file; texts.jsonl, a text of the student or the teacher a row"
    ),
    ours="the length of labelled pieces; rates and batches of the supervised stage",
    page="methods.md#tessy",
  ),
)
