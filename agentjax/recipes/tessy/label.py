r"""Labels texts for TESSY's boundary predictors: a model lists what is style (2604.14164).

  python -m agentjax.recipes.tessy.label --config=CONFIG --texts=texts.jsonl \
      --labeller.path=FOLDER --output=runs/labels

A row of the texts has a ``text``, or ``messages`` whose last is labelled. Texts of the student and
of the teacher go into folders of their own, as each has a predictor of its own. The labeller is a
run, a checkpoint or a Hugging Face folder, or stands behind an endpoint
(``--labeller.http.base_url=URL --labeller.http.model=NAME``). ``--output`` then holds
``labels.jsonl``, which ``recipes.tessy.boundary`` makes into what a run learns from. The same
command goes on where it was stopped.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.tessy.labels import LabelConfig, label_texts, labeller_config, read_texts
from agentjax.training.flags import define_config_flag, define_settings_flag
from agentjax.training.progress import ProgressDisplay, print_line, report_to

_CONFIG = define_config_flag()
_LABELLER = define_settings_flag("labeller", labeller_config(), "Lists what is style.")
_LABELS = define_settings_flag("labels", LabelConfig(), "Chunks, attempts and seed.")
_TEXTS = flags.DEFINE_string("texts", None, "Texts to label (.jsonl).", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the labels.", required=True)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Texts at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  console = Console()
  with ProgressDisplay(console, {}) as display:
    done = label_texts(
      _CONFIG.value,
      _OUTPUT.value,
      texts=read_texts(_TEXTS.value),
      labeller=_LABELLER.value,
      config=_LABELS.value,
      concurrency=_CONCURRENCY.value,
      report=report_to(display),
    )
  print_line(
    console,
    f"{_OUTPUT.value}: {done.texts} texts labelled and {done.given_up} given up, {done.kept} of "
    "them from before",
  )


if __name__ == "__main__":
  main(run)
