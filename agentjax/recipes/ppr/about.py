"""What the recipe is: PPR."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="PPR (principle process rewards, ReNorm)",
    paper="second-hand",
    changes=(
      "A judge scores every step by principles, 0 to 1, and the step earns that score and the "
      "outcome, less 1: a good step of a failure earns nothing, a bad one -1. The answer earns 1 "
      "or -1. PPO with GAE. "
      "Where episodes differ in their number of steps, long successes earn more."
    ),
    commands=(
      "python -m agentjax.train --config=configs/ppr_word_problems.py --workdir=runs/ppr",
      "python -m agentjax.train --config=configs/ppr_word_problems.py --workdir=runs/judged \\\n"
      "  --config.reward.settings.process.judge.base_url=http://localhost:8000/v1 \\\n"
      "  --config.reward.settings.process.judge.model=judge",
    ),
    tests=("tests/recipes/ppr", "tests/recipes/scorers/test_renorm.py"),
    data="word problems, generated",
    ours="the words of the principles; any judge in place of the paper's 8B model; without one, "
    "the share of a step's calls that succeeded; the pay of the last turn where it was not judged",
    page="rewards.md#parts-with-settings",
  ),
)
