"""What the recipe is: the interplay study."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Interplay of pre-training, mid-training and RL",
    paper="2512.07783 and its code",
    changes=(
      "Problems have a graph of dependencies, and their number of operations says how hard they "
      "are. A right answer earns .2, and .8 by how far the written steps are those of the graph: "
      "right answers by wrong steps earn less."
    ),
    commands=(
      "python -m agentjax.stages --stages=configs/stages/interplay.py --workdir=runs/interplay",
    ),
    tests=("tests/recipes/interplay",),
    data="problems, generated, in letters; the paper's tell stories (GSM-Infinite)",
    ours="the form of the problems; model, sizes and rates",
    missing="Mid-training between the two stages",
  ),
)
