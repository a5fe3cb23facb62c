"""What the recipe is: Tree search over turns."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Tree search over turns",
    paper="beam search; UCT as in Agent-R's code",
    changes="Turns are expanded by beam or UCT; the most valuable leaves are trained on.",
    commands=(
      (
        "python -m agentjax.train --config=configs/tree_search_sokoban.py "
        "--workdir=runs/tree_search"
      ),
      (
        "python -m agentjax.train --config=configs/tree_search_sokoban.py --workdir=runs/uct "
        "--config.rollout.sampler.rule=uct"
      ),
    ),
    tests=("tests/recipes/tree_search",),
    data="Sokoban, generated",
    ours="the tree's sizes",
    page="rollout.md#branching-and-search",
  ),
)
