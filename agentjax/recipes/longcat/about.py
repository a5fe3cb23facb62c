"""What the recipe is: LongCat-Flash-Thinking."""

from agentjax.recipes import Recipe

_TRAIN = "python -m agentjax.train --config=configs/longcat_domain.py"
_CONVERT = "python -m agentjax.convert"
RECIPES = (
  Recipe(
    name="LongCat-Flash-Thinking (domain-parallel RL, fusion)",
    paper="2509.18883",
    changes=(
      "Each domain is trained from one start by itself, with the loss of the preset; then the "
      "differences to the start are brought to one size, thinned, freed of the signs of the "
      "minority, and added to it."
    ),
    commands=(
      "make quickstart",
      f"{_TRAIN} --workdir=runs/story --config.data.source.program_share=0",
      f"{_TRAIN} --workdir=runs/program --config.data.source.program_share=1",
      f"{_CONVERT} --input=runs/quickstart --output=warm",
      f"{_CONVERT} --input=runs/story --output=story",
      f"{_CONVERT} --input=runs/program --output=program",
      "python -m agentjax.recipes.longcat.fuse --base=warm --experts=story,program \\\n"
      "  --output=fused --drop=0.2",
    ),
    tests=("tests/recipes/longcat", "tests/objectives/test_nine_losses.py"),
    data="word problems, generated, of two kinds",
    ours="clip bounds, which act only with several updates a batch (rl.minibatches; here there is "
    "one), C and T_max; when an episode repeats itself; the share that is dropped and the measure "
    "of size",
    missing="Lengths by domain, filters with replacement and DORA's versions",
    page="objectives.md#methods",
  ),
)
