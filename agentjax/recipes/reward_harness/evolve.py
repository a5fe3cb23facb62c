r"""Evolves a library of skills and tools for a frozen judge of answers (RewardHarness).

  python -m agentjax.recipes.reward_harness.evolve --pairs=pairs.jsonl --output=runs/harness \
      --judge.base_url=http://host:8000/v1 --judge.model=NAME

A row of the pairs has the texts ``prompt``, ``first`` and ``second``, and ``better``: first, second
or tie. Rows with one integer ``group`` compare the same answers, and count as one.
``--analyser.base_url`` and ``--analyser.model`` name another model that proposes edits; without
them the judge does. ``--router.base_url`` and ``--router.model`` name one that picks the entries
for each question; without them all are used.

``--output`` then holds ``library.json``, which a run reads with the part of the reward
``agentjax.recipes.reward_harness:RewardHarnessConfig``, and ``state.json``. The same command goes
on where it was stopped; ``--harness.iterations`` may be raised. Extra [web]. 2605.08703.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.adapters.chat_endpoint.endpoint import endpoint_identity
from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.command import main
from agentjax.recipes.reward_harness.evolution import evolve_library
from agentjax.recipes.reward_harness.library import HarnessConfig
from agentjax.recipes.reward_harness.models import HarnessModels
from agentjax.training.flags import define_settings_flag, require_paths
from agentjax.training.progress import print_line

_JUDGE = define_settings_flag("judge", HttpJudgeConfig(), "Compares answers; it is not trained.")
_ANALYSER = define_settings_flag("analyser", HttpJudgeConfig(), "Proposes edits.")
_ROUTER = define_settings_flag("router", HttpJudgeConfig(), "Picks entries for a question.")
_HARNESS = define_settings_flag("harness", HarnessConfig(), "The evolution.")
_PAIRS = flags.DEFINE_string("pairs", None, "Preferences (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_KEY = flags.DEFINE_integer("key", 0, "Addresses the split and all randomness.", lower_bound=0)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT, _PAIRS)
  _JUDGE.value.validate("judge")
  _HARNESS.value.validate("harness")
  analyser = _ANALYSER.value if _ANALYSER.value.base_url else _JUDGE.value
  analyser.validate("analyser")
  router = _ROUTER.value if _ROUTER.value.base_url else None
  if router is not None:
    router.validate("router")
  state = evolve_library(
    _PAIRS.value,
    _OUTPUT.value,
    HarnessModels(
      HttpJudge(_JUDGE.value),
      HttpJudge(analyser),
      None if router is None else HttpJudge(router),
    ),
    config=_HARNESS.value,
    key=_KEY.value,
    made_with={
      "judge": endpoint_identity(_JUDGE.value),
      "analyser": endpoint_identity(analyser),
      **({} if router is None else {"router": endpoint_identity(router)}),
    },
  )
  print_line(
    Console(),
    f"{_OUTPUT.value}: {len(state.best.entries)} entries after {state.iteration} iterations; "
    f"validation accuracy {100 * state.best_accuracy:.1f}%, "
    f"{100 * state.history[0]['accuracy']:.1f}% without a library",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
