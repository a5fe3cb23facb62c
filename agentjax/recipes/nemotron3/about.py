"""What the recipe is: the reinforcement learning of Nemotron 3 Super."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="Nemotron 3 Super (stages)",
    paper="2604.12374 and its public configs",
    changes=(
      "Verifiable rewards, then single turns of experts, whole software tasks, comparison by a "
      "generative reward model, and the prediction heads once more, each from the last: advantages "
      "beside the others of a group, token weights up to 5, sequences left out where sampler and "
      "trainer disagree, -5 for messages with a fault, a frozen router."
    ),
    commands=(
      "python -m agentjax.stages --stages=configs/stages/nemotron3.py --workdir=runs/nemotron3 \\\n"
      "  --set=rlhf.reward.settings.genrm.comparer.base_url=http://host:8000/v1",
    ),
    tests=("tests/recipes/nemotron3", "tests/training/test_stage_graph.py"),
    data="word problems and small libraries with a fault, generated",
    ours="model, data, sizes and rates, for a machine without accelerator (change(..., sizes=True) "
    "sets those of the configs); which turns count as misplaced thinking; the coefficient of the "
    "last stage",
    missing="37 data sets in 21 environments; answers with little effort; a curriculum by pass "
    "rate; figures of a trained model",
    page="methods.md#nemotron-3-super",
  ),
)
