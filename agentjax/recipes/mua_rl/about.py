"""What the recipe is: MUA-RL."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="MUA-RL",
    paper="its code",
    changes=(
      "A user takes part in the episode and tells what is wanted only when asked; turns of the "
      "user and results of tools have no weight. 1 is paid if the database ends in the right state "
      "and everything that had to be said was said. A warm start, then GRPO."
    ),
    commands=("python -m agentjax.train --config=configs/mua_rl_shop.py --workdir=runs/mua_rl",),
    tests=("tests/recipes/mua_rl",),
    data="orders of a toy shop, generated; the paper's are airline and retail",
    ours="the shop; a scripted user in the place of GPT-4o, or config.world.user, a model behind "
    "an endpoint; model, sizes and rates",
  ),
)
