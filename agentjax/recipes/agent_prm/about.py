"""What the recipe is: AgentPRM."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="AgentPRM",
    paper="2511.08325",
    changes=(
      "A network learns from temporal differences how promising every turn is; differences of "
      "promises pay the turns, in PPO with GAE over turns."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/agent_prm_sokoban.py --workdir=runs/agent_prm"),
    ),
    tests=("tests/recipes/agent_prm",),
    data="Sokoban, generated",
    ours="beta, gamma, lambda; sizes and rates",
    page="reward_models.md#agentprm",
  ),
)
