"""What the recipe is: C2."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="C2",
    paper="2604.13618",
    changes=(
      "Rubrics that helped a judge against rubrics that misled it: DPO for the generator, "
      "verdicts for the verifier. Both are then a part of the reward of any run."
    ),
    commands=(
      (
        "python -m agentjax.recipes.c2.synthesise --config=configs/c2_generator.py "
        "--config.pretrained=FOLDER \\\n"
        "  --pairs=pairs.jsonl --generator.path=FOLDER --judge.path=FOLDER --output=runs/c2"
      ),
      (
        "python -m agentjax.train --config=configs/c2_generator.py --workdir=runs/c2_generator "
        "--config.pretrained=FOLDER"
      ),
      (
        "python -m agentjax.train --config=configs/c2_verifier.py --workdir=runs/c2_verifier "
        "--config.pretrained=FOLDER"
      ),
      (
        "python -m agentjax.train --config=configs/c2_judged.py --workdir=runs/c2_policy "
        "--config.pretrained=FOLDER \\\n"
        "  --config.data.path=DIR"
      ),
    ),
    tests=("tests/recipes/c2",),
    data=(
      "pairs.jsonl, two answers and the better one a row; DIR/train.jsonl and test.jsonl, a "
      "question a row"
    ),
    ours="which answers of a group are compared; both orders of a pair; the words of the prompts",
    page="reward_models.md#c2",
  ),
)
