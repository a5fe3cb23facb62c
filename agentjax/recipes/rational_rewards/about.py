"""What the recipe is: RationalRewards."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="RationalRewards",
    paper="2604.11626",
    changes="A judge criticises an answer aspect by aspect and then grades it.",
    commands=(
      (
        "python -m agentjax.train --config=configs/rational_rewards_judged.py "
        "--workdir=runs/critiques --config.pretrained=FOLDER \\\n"
        "  --config.data.path=DIR"
      ),
    ),
    tests=("tests/recipes/rational_rewards",),
    data="DIR/train.jsonl and test.jsonl, a question a row",
    ours="aspects of texts; the paper's judge sees pictures",
    page="reward_models.md#rationalrewards",
  ),
)
