"""What the recipe is: KAT-Coder's training on a tree of shared histories."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="KAT-Coder (tree of shared histories)",
    paper="2510.18779",
    changes=(
      "Conversations that share their beginning are branches of a tree. A shared message is learnt "
      "in one branch, with the number of its conversations as weight, so that loss and gradient "
      "are those of all conversations learnt separately; a conversation that another one continues "
      "is computed once."
    ),
    commands=(
      "python -m agentjax.recipes.kat_coder.share --input=trajectories.jsonl \\\n"
      "  --output=DIR/train.jsonl",
      "python -m agentjax.train --config=configs/supervised.py --config.pretrained=FOLDER \\\n"
      "  --config.data.path=DIR --workdir=runs/tree",
    ),
    tests=("tests/recipes/kat_coder", "tests/trajectory/test_weights.py"),
    data="trajectories.jsonl, a conversation with calls of tools a row",
    ours=(
      "that a message may count once instead, --tree.count=once. In reinforcement learning the "
      "rule leaves of config.rl.weights.rules does the same for an episode of several branches"
    ),
    missing=(
      "Where several leaves branch off one beginning, each of their rows computes it again: rows "
      "are packed as independent sequences, attention has no mask of a tree, and a Mamba layer "
      "would have to hand its state from the fork to each branch. Pruning by entropy"
    ),
    page="supervised.md",
  ),
)
