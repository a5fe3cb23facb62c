"""What the recipe is: ARPO and AEPO."""

from agentjax.recipes import Recipe

RECIPES = (
  Recipe(
    name="ARPO",
    paper="2507.19849 and its code",
    changes=(
      "Half of the group starts at the prompt; the others branch off after tool results where "
      "the entropy rose. The second command is paid as in the paper: -1 without the form, else "
      "F1, and .1 more where every tool was used."
    ),
    commands=(
      ("python -m agentjax.train --config=configs/arpo_word_problems.py --workdir=runs/arpo"),
      (
        "python -m agentjax.train --config=configs/arpo_word_problems.py "
        "--workdir=runs/arpo_paid \\\n"
        "  --config.reward.parts=f1,format,used --config.reward.settings.f1=text_match \\\n"
        "  --config.reward.settings.used=agentjax.recipes.scorers:UsedConfig \\\n"
        "  --config.reward.settings.used.tools=calculator,python \\\n"
        '  --config.reward.formula="f1 + 0.1 * (f1 > 0) * used if format >= 1 else -1" \\\n'
        "  --config.evaluation.success_part=f1"
      ),
    ),
    tests=(
      "tests/recipes/arpo",
      "tests/recipes/scorers/test_calls.py",
      "tests/recipes/credit/test_terms.py",
    ),
    data="word problems, generated",
    ours=(
      "four updates a batch, eight in its script; the entropy is a mean, not the sum of the code; "
      "calculator and python stand for search and python, and a readable answer for the tags"
    ),
    page="rollout.md#branching-and-search",
  ),
  Recipe(
    name="AEPO",
    paper="2510.14545, second-hand, and a port",
    changes=(
      "Beside ARPO: the number of branches follows the entropies of a first episode, further "
      "branches on one path become rarer, uncertain tokens count more, and keep their gradient "
      "beyond the clip bound."
    ),
    commands=(
      "python -m agentjax.train --config=configs/aepo_word_problems.py --workdir=runs/aepo",
    ),
    tests=(
      "tests/recipes/arpo",
      "tests/recipes/credit/test_terms.py",
    ),
    data="word problems, generated",
    ours="clip bounds; the floor of the factor; four updates a batch; alpha is the port's",
    page="objectives.md#terms",
  ),
)
