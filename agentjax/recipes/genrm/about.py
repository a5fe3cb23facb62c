"""What the recipe is: GenRM of Nemotron 3."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="GenRM of Nemotron 3",
    paper="NeMo Gym's code",
    changes=(
      "Answers of a group are compared in pairs by a judge; long and decorated ones are paid less, "
      "and the shortest one more if it is among the best."
    ),
    commands=(
      (
        "python -m agentjax.train --config=configs/genrm_judged.py --workdir=runs/genrm "
        "--config.pretrained=FOLDER --config.data.path=DIR"
      ),
    ),
    tests=("tests/recipes/genrm",),
    data="DIR/train.jsonl and test.jsonl, a question a row",
    ours="the judge's prompt; the marks that count as style; an answer that is missing gets 1",
    page="reward_models.md#pairwise-cohorts",
  ),
)
