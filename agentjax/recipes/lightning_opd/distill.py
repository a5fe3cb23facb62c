"""Plays episodes once, asks the teachers once, and stores both: Lightning OPD's offline part.

  python -m agentjax.recipes.lightning_opd.distill --config=CONFIG --checkpoint=runs/warm \\
      --output=stored/a
  python -m agentjax.train --config=CONFIG --config.rl.rollouts=stored/a \\
      --config.start_from=runs/warm --workdir=runs/distilled

The policy of ``--checkpoint`` plays ``--samples`` episodes of each of the first ``--tasks``
training tasks; the teachers of ``config.rl.teachers`` score each token once or, with
``--config.rl.objective.distillation.form=top_k``, each of its ``top_k`` candidates. Training on the
folder then needs neither a sampler nor a teacher. ``--episodes`` takes the episodes of a store that
is there already. ``--demonstrations_by`` names the model that wrote the policy's demonstrations:
that should be the teacher, otherwise there is a warning (2604.13010).
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.training.flags import define_config_flag
from agentjax.training.progress import print_line

_CONFIG = define_config_flag()
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Policy that plays: RUN, or RUN/checkpoints/STEP.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "New or empty directory.", required=True)
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Training tasks to play, from the first on; all if not given.", lower_bound=1
)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Episodes a task.", lower_bound=1)
_EPISODES = flags.DEFINE_string(
  "episodes", None, "Stored episodes to score in the place of playing new ones."
)
_DEMONSTRATIONS_BY = flags.DEFINE_string(
  "demonstrations_by", None, "Model that wrote the warm start's answers, as in teachers' paths."
)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.recipes.lightning_opd.precompute import precompute

  manifest, timing = precompute(
    _CONFIG.value,
    _CHECKPOINT.value,
    _OUTPUT.value,
    tasks=_TASKS.value,
    samples=_SAMPLES.value,
    episodes=_EPISODES.value,
    demonstrations_by=_DEMONSTRATIONS_BY.value,
  )
  print_line(
    Console(),
    f"{_OUTPUT.value}: {manifest.episodes:,} episodes, {manifest.tokens:,} sampled tokens; "
    f"{timing.playing:.1f} s playing, {timing.scoring:.1f} s scoring",
  )


if __name__ == "__main__":
  main(run)
