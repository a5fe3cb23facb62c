"""What the recipe is: Agent-RLVR."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Agent-RLVR",
    paper="its abstract, and second-hand",
    changes=(
      "Where a whole group fails, some of its members try again with a hint; the hint is then "
      "taken out of the prompt, so that the policy learns to do without. Plain GRPO learns nothing "
      "from such a group."
    ),
    commands=(
      "python -m agentjax.train --config=configs/agent_rlvr_word_problems.py \\\n"
      "  --workdir=runs/agent_rlvr",
      "python -m agentjax.train --config=configs/agent_rlvr_word_problems.py \\\n"
      "  --workdir=runs/agent_rlvr_dpo --config.rl.objective=dpo",
    ),
    tests=("tests/recipes/agent_rlvr",),
    data='word problems, generated; tasks of your own have texts in metadata["hints"]',
    ours="hints from the task or its worked solution, where the paper asks a teacher; two of eight "
    "try again; GRPO beside the paper's DPO",
  ),
)
