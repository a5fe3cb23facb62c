"""Measures a checkpoint on held-out tasks: greedy, pass@k, avg@k, tool calls, tokens.

  python -m agentjax.evaluate --config=runs/a/config.json --checkpoint=runs/a/checkpoints/300
  python -m agentjax.evaluate --config=runs/a/config.json --checkpoint=runs/a --output=report.json
  python -m agentjax.evaluate --config=configs/mine.py --checkpoint=Qwen3-0.6B
  python -m agentjax.evaluate --config=runs/a/config.json --checkpoint=runs/a --policy=seat_right

``--checkpoint`` may name a run's directory: its newest checkpoint is used. Or a Hugging Face
folder, which is then ``config.pretrained``. Every figure comes with a bootstrap confidence interval
over tasks. ``config.evaluation`` says what is measured; ``--policy`` chooses the policy if
``config.seats`` trains several. With ``--distributed`` several processes share the tasks, and the
first reports; 4 is the exit status where another one failed or is gone.
"""

from __future__ import annotations

import json

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.files import write_atomically
from agentjax.training.flags import define_config_flag, define_distributed_flags

_CONFIG = define_config_flag()
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  None,
  "Directory of a checkpoint (RUN/checkpoints/STEP), of a run for its newest, or of a model in "
  "Hugging Face's form.",
  required=True,
)
_POLICY = flags.DEFINE_string(
  "policy", "policy", "Name of the policy whose rewards count: 'policy', or one that a seat trains."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the report to as well.")
_SAMPLES = flags.DEFINE_string("samples_file", None, "Text file for readable episodes.")
_join_others = define_distributed_flags()


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  _join_others()
  from agentjax.training import processes
  from agentjax.training.evaluation import evaluate_checkpoint
  from agentjax.training.progress import print_table

  with processes.failing_together():
    report = evaluate_checkpoint(
      _CONFIG.value, _CHECKPOINT.value, samples_file=_SAMPLES.value, measured=_POLICY.value
    )
  if not processes.is_first():
    return
  console = Console()
  rows = []
  for name, scores in {"all": report.overall, **report.breakdown}.items():
    for measure, estimate in report.estimates(scores).items():
      count, value = (0, "no verdict") if estimate is None else (estimate.count, str(estimate))
      rows.append((name, str(count), measure, value))
  print_table(console, f"{_CHECKPOINT.value}", ("tasks", "number", "measure", "value"), rows)
  for mode, statistics in (
    ("greedy", report.greedy_statistics),
    ("sampled", report.sampled_statistics),
  ):
    if statistics is not None:
      console.print(
        f"{mode}: {statistics.tool_calls:.2f} tool calls, {statistics.sampled_tokens:.1f} tokens "
        f"and {statistics.turns:.2f} turns an episode, "
        f"{100 * statistics.truncated_share:.1f}% cut short",
        highlight=False,
      )
  if report.masked:
    episodes = len(report.greedy_trajectories) + len(report.sampled_trajectories)
    console.print(
      f"{report.masked} of {episodes} episodes have no verdict: the environment, the verifier or "
      "the policy's numbers failed; no figure above counts them",
      highlight=False,
    )
  if _OUTPUT.value is not None:
    write_atomically(_OUTPUT.value, json.dumps(report.to_dict(), indent=2) + "\n")


if __name__ == "__main__":
  main(run)
