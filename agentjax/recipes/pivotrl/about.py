"""What the recipe is: PivotRL."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="PivotRL",
    paper="2603.21383, NeMo's guide",
    changes=(
      "GRPO on those turns of experts' trajectories that the policy gets right now and then; no"
      " environment is stepped."
    ),
    commands=(
      (
        "python -m agentjax.recipes.pivotrl.mine --config=configs/pivotrl_tool_calls.py \\\n"
        "  --config.pretrained=FOLDER --trajectories=trajectories.jsonl --form=openai "
        "--output=pivots"
      ),
      (
        "python -m agentjax.train --config=configs/pivotrl_tool_calls.py "
        "--config.pretrained=FOLDER --workdir=runs/pivots"
      ),
    ),
    tests=("tests/recipes/pivotrl", "tests/benchmarks/test_recorded_pivots.py"),
    data="trajectories.jsonl, an expert's conversation a row; .traj files of SWE-agent",
    figures=(
      "of a synthetic world in docs/pivots.md; benchmarks/recorded_pivots.py measures recordings, "
      "without figures yet"
    ),
    ours="lambda and K; when profiles are stale",
    page="pivots.md",
  ),
)
