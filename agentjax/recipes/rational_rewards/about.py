"""What the recipe is: RationalRewards."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="RationalRewards",
    paper="2604.11626",
    changes=(
      "A judge criticises an answer aspect by aspect and then grades it. It learned this from a "
      "teacher that knew which of two answers is better, by critiques from which the label follows."
    ),
    commands=(
      (
        "python -m agentjax.recipes.rational_rewards.synthesise --pairs=pairs.jsonl "
        "--output=runs/parrot \\\n"
        "  --teacher.http.base_url=URL --teacher.http.model=NAME"
      ),
      (
        "python -m agentjax.train --config=configs/rational_rewards_student.py "
        "--workdir=runs/student \\\n"
        "  --config.pretrained=FOLDER"
      ),
      (
        "python -m agentjax.recipes.rational_rewards.compare --pairs=others.jsonl \\\n"
        "  --config=configs/rational_rewards_student.py --config.pretrained=FOLDER "
        "--judge.path=runs/student"
      ),
      (
        "python -m agentjax.train --config=configs/rational_rewards_judged.py "
        "--workdir=runs/critiques --config.pretrained=FOLDER \\\n"
        "  --config.data.path=DIR"
      ),
    ),
    tests=("tests/recipes/rational_rewards",),
    data="pairs.jsonl, two answers and the better one a row; DIR/train.jsonl and test.jsonl, a "
    "question a row",
    figures="none yet in text; first ones of drawings in docs/diffusion_nft.md",
    ours="aspects of texts, as the paper's judge sees pictures; one critique an answer, where the "
    "paper has one a pair; all words of the prompts",
    missing="The student has to stand behind an endpoint to be a part of the reward; the run does "
    "not serve it",
    page="reward_models.md#rationalrewards",
  ),
)
