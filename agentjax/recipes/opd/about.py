"""What the recipes are: on-policy distillation, by samples and by candidates, and TIP."""

from agentjax.recipes import Recipe

_OPD = "python -m agentjax.train --config=configs/opd_word_problems.py"
_TOP_K = "python -m agentjax.train --config=configs/opd_top_k_word_problems.py"
RECIPES = (
  Recipe(
    name="OPD (on-policy distillation)",
    paper="2604.13016, Thinking Machines 2025",
    changes=(
      "A teacher pays every token that the student wrote by log q - log p, in PPO's loss; no "
      "reward is looked at."
    ),
    commands=("make quickstart", f"{_OPD} --workdir=runs/opd"),
    tests=("tests/objectives/test_distillation.py", "tests/training/test_teacher.py"),
    data="word problems, generated",
    figures="docs/distillation.md",
    ours="sizes and rates",
    page="distillation.md",
  ),
  Recipe(
    name="OPD, top k",
    paper="2604.13016 and its code",
    changes=(
      "Of every token the teacher is asked about k candidates. Each of them has an advantage, a "
      "ratio to the policy at the start of the step, and PPO's clip of its own. Three other runs: "
      "the divergence on the candidates; the symmetric difference of the two models' candidates; "
      "the advantages of outcomes beside the teacher."
    ),
    commands=(
      "make quickstart",
      f"{_TOP_K} --workdir=runs/opd_top_k",
      f"{_TOP_K} --workdir=runs/opd_divergence \\\n"
      "  --config.rl.objective.distillation.candidate_loss=none",
      f"{_TOP_K} --workdir=runs/opd_difference \\\n"
      "  --config.rl.objective.distillation.candidates=difference \\\n"
      "  --config.rl.objective.distillation.candidate_loss.normalise=False",
      f"{_TOP_K} --workdir=runs/opd_outcomes \\\n"
      "  --config.rl.objective.distillation.outcome_weight=1 --config.rollout.group_size=4 \\\n"
      "  --config.rl.tasks_per_step=16 --config.rl.objective.advantage.centre=group_mean \\\n"
      "  --config.rl.objective.advantage.scale=group_std",
    ),
    tests=("tests/recipes/opd",),
    data="word problems, generated",
    ours="sizes and rates; four updates a batch, where its script makes one; advantages of "
    "outcomes are on the sampled tokens, in a clipped loss beside that of the candidates",
    page="distillation.md#clipped-candidates",
  ),
  Recipe(
    name="TIP",
    paper="2604.14084",
    changes=(
      "Exact KL to the teacher on half of the tokens of a batch: those with the highest soft-OR of "
      "the student's entropy and the divergence. The last command takes those of highest entropy."
    ),
    commands=(
      "make quickstart",
      f"{_OPD} --workdir=runs/tip \\\n"
      "  --config.rl.objective.distillation.form=full --config.rl.objective.distillation.keep=0.5",
      f"{_OPD} --workdir=runs/tip_entropy \\\n"
      "  --config.rl.objective.distillation.form=full "
      "--config.rl.objective.distillation.keep=0.5 \\\n"
      "  --config.rl.objective.distillation.select_by=entropy",
    ),
    tests=("tests/objectives/test_distillation.py", "tests/training/test_teacher.py"),
    data="word problems, generated",
    figures="docs/distillation.md",
    ours="the selection is over the whole batch; sizes and rates",
    page="distillation.md",
  ),
)
