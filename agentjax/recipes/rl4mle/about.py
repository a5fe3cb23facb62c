"""What the recipe is: RL for machine-learning engineering."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="RL for machine-learning engineering (rl4mle)",
    paper="2509.01684, second-hand",
    changes=(
      "The advantage of a turn is multiplied by the seconds of its calls over the mean of the "
      "step: short programs run more often within an hour and would otherwise learn more. "
      "Milestones are paid in part. Half of the prompts show an earlier program of the policy with "
      "its score, and ask for a better one (8% in the paper's ablation)."
    ),
    commands=("python -m agentjax.train --config=configs/rl4mle.py --workdir=runs/rl4mle",),
    tests=("tests/recipes/credit/test_terms.py", "tests/recipes/rl4mle"),
    data="data sets, generated; --config.data.path=DIR reads folders of your own",
    ours=(
      "the weights of the milestones; a failure earns 0, not -10; .01 s at least a turn; the "
      "earlier program is of the same group; its words"
    ),
    page="objectives.md#terms",
  ),
)
