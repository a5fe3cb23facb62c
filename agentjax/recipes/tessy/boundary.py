r"""Makes labelled texts into what a boundary predictor learns from, and measures one (TESSY).

  python -m agentjax.recipes.tessy.boundary --config=configs/tessy_boundary.py \
      --spans=runs/labels/labels.jsonl --output=runs/boundary_data
  python -m agentjax.train --config=configs/tessy_boundary.py --workdir=runs/boundary
  python -m agentjax.recipes.tessy.boundary --spans=held_out.jsonl --predictor=runs/boundary

The first writes the episodes of a run, whose vocabulary is that of the config; its last line has
the number of steps of three passes. The last prints the share of words that are told right.
2604.14164; labels are made by ``agentjax.recipes.tessy.label``.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.tessy.boundaries import load_predictor, write_boundary_data
from agentjax.recipes.tessy.flow import read_spans, word_accuracy
from agentjax.training.flags import define_config_flag
from agentjax.training.progress import print_line

_CONFIG = define_config_flag()
_SPANS = flags.DEFINE_string("spans", None, "Labelled texts (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made of them.")
_PREDICTOR = flags.DEFINE_string("predictor", None, "Run whose predictor is measured on them.")
_TEXTS = flags.DEFINE_integer(
  "texts", 10_000, "Labelled texts to take, from the first on.", lower_bound=1
)

_PASSES = 3  # the source's


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  output = _OUTPUT.value or ""
  if bool(output) == bool(_PREDICTOR.value):
    raise ConfigError("give either --output=FOLDER to write or --predictor=RUN to measure.")
  console = Console()
  texts, spans = read_spans(_SPANS.value)
  texts, spans = texts[: _TEXTS.value], spans[: _TEXTS.value]
  if _PREDICTOR.value:
    right, usual = word_accuracy(load_predictor(_PREDICTOR.value), texts, spans)
    said = f"{100 * right:.1f}% of the words are told right; {100 * usual:.1f}% are of the more "
    return print_line(console, f"{_PREDICTOR.value}: {said}frequent class")
  made = write_boundary_data(_CONFIG.value, output, texts, spans)
  print_line(
    console,
    f"{output}: {made.pieces} pieces of {made.texts} texts, {made.tokens} labelled tokens, "
    f"{100 * made.style:.0f}% style; {made.left_out} texts left out that the vocabulary does not "
    "spell",
  )
  steps = -(-_PASSES * made.pieces // _CONFIG.value.rl.tasks_per_step)
  print_line(
    console,
    f"train on them with --config.data.path={output} "
    f"--config.rl.rollouts={output}/episodes --config.rl.steps={steps} (three passes)",
  )


if __name__ == "__main__":
  main(run, needs_config=False)
