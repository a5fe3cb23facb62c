"""What the recipe is: Rubrics (rubric anchors)."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Rubrics (rubric anchors)",
    paper="2508.12790, 2606.13473",
    changes="Criteria of a task are judged, or checked by rules; judges form a panel.",
    commands=(
      (
        "python -m agentjax.train --config=configs/rubric_judged.py --workdir=runs/rubric "
        "--config.pretrained=FOLDER --config.data.path=DIR"
      ),
    ),
    tests=("tests/recipes/rubrics",),
    data="DIR/train.jsonl and test.jsonl, a question and its rubric a row",
    ours="the closed form of saturation",
    page="reward_models.md#rubrics",
  ),
)
