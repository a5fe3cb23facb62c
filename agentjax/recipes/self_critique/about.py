"""What the recipe is: Kimi K2's self-critique."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Kimi K2 (self-critique rubric reward)",
    paper="2507.20534, from memory",
    changes=(
      "The policy, with its present weights, compares the answers of a group in pairs by core, "
      "prescriptive and human-annotated rubrics. On tasks without a verifier its preferences are "
      "the reward. On tasks with one its verdicts are paid, and trained on, where they agree with "
      "the verifier, so that the critic improves with the policy. GRPO learns nothing without a "
      "verifier."
    ),
    commands=(
      "python -m agentjax.train --config=configs/self_critique_word_problems.py \\\n"
      "  --workdir=runs/self_critique",
      "python -m agentjax.train --config=configs/self_critique_questions.py \\\n"
      "  --workdir=runs/questions --config.pretrained=FOLDER --config.data.path=DIR",
    ),
    tests=("tests/recipes/self_critique",),
    data=(
      "word problems, generated, half of which hide their answer; or with DIR/train.jsonl and "
      "test.jsonl, an open question a row, which may have criteria"
    ),
    ours=(
      "all words of rubrics and prompt; pairs in a circle, in both orders; a tie earns the critic "
      "half; verifiable pairs are those that the verifier tells apart"
    ),
    missing="Weights of rubrics; its squared loss is a flag, --config.rl.objective=kimi",
  ),
)
