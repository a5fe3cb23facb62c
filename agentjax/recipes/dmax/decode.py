r"""Decodes held-out tasks with a block-diffusion policy, in several ways, and compares them.

  python -m agentjax.recipes.dmax.decode --config=configs/dmax_running_sums.py \
      --checkpoint=runs/dmax --modes=soft,threshold --thresholds=0.5,0.7,0.9,1

Prints for each mode and threshold how many answers are right, and how many tokens a forward pass
decides: over passes that decide tokens, and over all passes after the prompt. ``--samples_file``
takes readable episodes of the last way. ``agentjax.evaluate`` measures the way that
``config.likelihood.decoding`` names, with samples and pass@k. 2604.08302.
"""

from __future__ import annotations

import json

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import check
from agentjax.files import write_atomically
from agentjax.training.flags import define_config_flag

_CONFIG = define_config_flag()
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Policy to measure: RUN, or RUN/checkpoints/STEP.", required=True
)
_MODES = flags.DEFINE_list("modes", ["soft", "threshold"], "Modes of config.likelihood.decoding.")
_THRESHOLDS = flags.DEFINE_list(
  "thresholds", ["0.5", "0.9"], "Its thresholds, each with each mode."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the figures to as well.")
_SAMPLES = flags.DEFINE_string("samples_file", None, "Text file for readable episodes.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.recipes.dmax.config import DecodingConfig, DMaxConfig
  from agentjax.recipes.dmax.measure import measure
  from agentjax.training.progress import print_table

  experiment = _CONFIG.value
  likelihood = experiment.likelihood
  check(isinstance(likelihood, DMaxConfig), "config.likelihood", likelihood, "a DMaxConfig")
  assert isinstance(likelihood, DMaxConfig)
  ways = []
  for mode in _MODES.value:
    for threshold in _THRESHOLDS.value:
      try:
        number = float(threshold)
      except ValueError:
        number = float("nan")
      values = likelihood.decoding.to_dict() | {"mode": mode, "threshold": number}
      way = DecodingConfig.from_dict(values, "--modes, --thresholds")
      way.validate("--modes, --thresholds")
      ways.append(way)
  found = measure(experiment, _CHECKPOINT.value, ways, samples_file=_SAMPLES.value)
  rows: list[tuple[str, ...]] = []
  report: list[dict[str, object]] = []
  for one in found:
    shown = "no verdict" if one.success is None else str(one.success)
    stats = one.stats
    figures = (f"{stats.tokens_per_decision:.2f}", f"{stats.tokens_per_forward:.2f}")
    rows.append((one.decoding.mode, f"{one.decoding.threshold:g}", shown, *figures))
    report.append(
      {
        **one.decoding.to_dict(),
        "success": None if one.success is None else one.success.mean,
        "tokens": stats.sampled_tokens,
        "forwards": stats.forwards,
        "commits": stats.commits,
        "tokens_per_decision": stats.tokens_per_decision,
        "tokens_per_forward": stats.tokens_per_forward,
      }
    )
  header = ("mode", "threshold", "right", "tokens a decision", "tokens a forward")
  print_table(Console(), f"{_CHECKPOINT.value}", header, rows)
  if _OUTPUT.value is not None:
    write_atomically(_OUTPUT.value, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main(run)
