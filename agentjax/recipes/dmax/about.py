"""What the recipe is: DMax."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="DMax",
    paper="2604.08302",
    changes=(
      "A block-diffusion policy: its losses, its bound in place of log-probs, and its engine."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/dmax_running_sums.py --workdir=runs/dmax"),
      ("python -m agentjax.train --config=configs/dmax_running_sums_rl.py --workdir=runs/dmax_rl"),
      (
        "python -m agentjax.recipes.dmax.decode --config=configs/dmax_running_sums.py "
        "--checkpoint=runs/dmax"
      ),
    ),
    tests=("tests/recipes/dmax",),
    data="running sums, generated; configs/dmax_gsm8k.py reads GSM8K",
    figures="docs/dmax.md",
    page="dmax.md",
  ),
)
