"""What the recipe is: Agent-R."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Agent-R",
    paper="its code",
    changes=(
      "A bad trajectory is cut after its first error; a thought that sees the error follows, and "
      "the rest of a good trajectory with the same beginning. Only the thought and the good rest "
      "are learnt; good trajectories are learnt as they are."
    ),
    commands=(
      "python -m agentjax.recipes.agent_r.revise --input=trajectories.jsonl \\\n"
      "  --output=DIR/train.jsonl --splice.above=0.5 --splice.gap=0.2",
      "python -m agentjax.train --config=configs/supervised.py --config.pretrained=FOLDER \\\n"
      "  --config.data.path=DIR --workdir=runs/revised",
    ),
    tests=("tests/recipes/agent_r",),
    data="trajectories.jsonl, a conversation of a task with its reward a row, of which some share "
    "their beginning",
    ours="alpha .5 and beta .2; the words of the thought; without verdicts in the rows the first "
    "action after the branch is the error. The search by UCT is rollout.sampler=tree_search",
    page="supervised.md",
  ),
)
