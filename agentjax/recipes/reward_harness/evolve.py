r"""Evolves a library of skills and tools for a frozen judge of answers (RewardHarness).

  python -m agentjax.recipes.reward_harness.evolve --pairs=pairs.jsonl --output=runs/harness \
      --judge.http.base_url=http://host:8000/v1 --judge.http.model=NAME

A row of the pairs has the texts ``prompt``, ``first`` and ``second``, and ``better``: first, second
or tie. Rows with one integer ``group`` compare the same answers, and count as one.
``--analyser`` is another model that proposes edits; without one the judge does. ``--router`` is one
that picks the entries for each question; without one all are used. A model is a run, a checkpoint
or a Hugging Face folder (``--judge.path=FOLDER``, served by the engine of ``--config``), or stands
behind an endpoint (extra [web]).

``--output`` then holds ``library.json``, which a run reads with the part of the reward
``agentjax.recipes.reward_harness:RewardHarnessConfig``, and ``state.json``. The same command goes
on where it was stopped; ``--harness.iterations`` may be raised. 2605.08703.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.adapters.judge_model import JudgeModelConfig, open_judge
from agentjax.command import main
from agentjax.recipes.reward_harness.evolution import evolve_library
from agentjax.recipes.reward_harness.library import HarnessConfig
from agentjax.recipes.reward_harness.models import HarnessModels
from agentjax.training.experiment import resolve
from agentjax.training.flags import define_config_flag, define_settings_flag, require_paths
from agentjax.training.model_pool import ModelPool
from agentjax.training.progress import print_line

_CONFIG = define_config_flag()
_JUDGE = define_settings_flag("judge", JudgeModelConfig(), "Compares answers; it is not trained.")
_ANALYSER = define_settings_flag("analyser", JudgeModelConfig(), "Proposes edits.")
_ROUTER = define_settings_flag("router", JudgeModelConfig(), "Picks entries for a question.")
_HARNESS = define_settings_flag("harness", HarnessConfig(), "The evolution.")
_PAIRS = flags.DEFINE_string("pairs", None, "Preferences (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_KEY = flags.DEFINE_integer("key", 0, "Addresses the split and all randomness.", lower_bound=0)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT, _PAIRS)
  _HARNESS.value.validate("harness")
  named = {"judge": _JUDGE.value}
  for name, flag in (("analyser", _ANALYSER), ("router", _ROUTER)):
    if flag.value.path or flag.value.http.base_url:
      named[name] = flag.value
  for name, config in named.items():
    config.validate(name)
  if any(config.path for config in named.values()):
    resolve(_CONFIG.value)
  pool = ModelPool(_CONFIG.value)
  try:
    opened = {name: open_judge(config, pool, _KEY.value) for name, config in named.items()}
    models = {name: judge for name, (judge, _) in opened.items()}
    state = evolve_library(
      _PAIRS.value,
      _OUTPUT.value,
      HarnessModels(models["judge"], models.get("analyser"), models.get("router")),
      config=_HARNESS.value,
      key=_KEY.value,
      made_with={name: made_with for name, (_, made_with) in opened.items()},
    )
  finally:
    pool.close()
  print_line(
    Console(),
    f"{_OUTPUT.value}: {len(state.best.entries)} entries after {state.iteration} iterations; "
    f"validation accuracy {100 * state.best_accuracy:.1f}%, "
    f"{100 * state.history[0]['accuracy']:.1f}% without a library",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
