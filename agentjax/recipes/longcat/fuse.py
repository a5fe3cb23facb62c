r"""Fuses models that were trained from one start into one (LongCat-Flash-Thinking, 2509.18883).

  python -m agentjax.convert --input=runs/story --output=story      # likewise the others
  python -m agentjax.recipes.longcat.fuse --base=warm --experts=story,program --output=fused \
      --drop=0.2
  python -m agentjax.train ... --config.pretrained=fused

All are Hugging Face folders of one model. ``config.json`` and tokenizer are those of the base.
"""

from __future__ import annotations

from absl import flags, logging

from agentjax.command import main
from agentjax.recipes.longcat.fusion import fuse_folders

_BASE = flags.DEFINE_string("base", None, "Folder that all were trained from.", required=True)
_EXPERTS = flags.DEFINE_list("experts", None, "Folders of the experts.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "New folder.", required=True)
_DROP = flags.DEFINE_float(
  "drop", 0.0, "Share of the differences that is dropped.", lower_bound=0, upper_bound=0.99
)
_SEED = flags.DEFINE_integer("seed", 0, "Of what is dropped.", lower_bound=0)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  number = fuse_folders(
    _BASE.value, _EXPERTS.value, _OUTPUT.value, drop=_DROP.value, seed=_SEED.value
  )
  logging.info("%s: %d tensors of %d experts", _OUTPUT.value, number, len(_EXPERTS.value))


if __name__ == "__main__":
  main(run, needs_config=False)
