"""What the recipe is: ROME's IPA."""

from agentjax.recipes import Recipe

_RUN = "python -m agentjax.train --config=configs/ipa_word_problems.py"
RECIPES = (
  Recipe(
    name="ROME (IPA, anchored resampling)",
    paper="2512.24873, notes, and ROLL's code",
    changes=(
      "Chunks, from one answer of the environment to the next, are the unit of returns, ratios "
      "and the filter against the sampler. Episodes begin inside an expert's trajectory, at first "
      "before its last turn, then further back as the policy succeeds; or at anchors by chance. "
      "Successes are learnt with weight 1, failures with the ratio, clipped to 0..1."
    ),
    commands=(
      f"{_RUN} --workdir=runs/ipa",
      f"{_RUN} --workdir=runs/ipa_parallel --config.world.mode=parallel",
      "python -m agentjax.train --config=configs/ragen_sokoban.py --workdir=runs/ipa_sokoban \\\n"
      "  --config.rl.objective=ipa --config.rl.old_log_probs=recomputed",
    ),
    tests=(
      "tests/recipes/ipa",
      "tests/recipes/test_losses_of_methods.py",
      "tests/objectives/test_nine_losses.py",
    ),
    data="word problems, generated; an expert's trajectory is the worked solution of a task",
    ours="gamma .95 and H 1.2; rewards of 1 and -1; one update a batch, in which ratios are 1 "
    "(rl.minibatches makes more); when the anchor moves",
    missing="The term that imitates the expert's chunk",
    page="objectives.md#methods",
  ),
)
