r"""A generator of drawings learns from a critic's rationales (RationalRewards, DiffusionNFT).

  python -m agentjax.recipes.diffusion_nft.draw --output=runs/drawings

trains a small generator, a critic that writes rationales and one that gives a number on the same
preference pairs, fine-tunes the generator by each, and refines drawings at test time. It needs no
data. ``results.json`` and ``drawings.png`` in the folder say what came of it. 2604.11626,
2509.16117.
"""

from __future__ import annotations

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.recipes.diffusion_nft.experiment import run_experiment
from agentjax.recipes.diffusion_nft.settings import DrawingsConfig
from agentjax.training.flags import define_settings_flag, require_paths
from agentjax.training.progress import print_line

_DRAWINGS = define_settings_flag("drawings", DrawingsConfig(), "Sizes of the experiment.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT)
  console = Console()

  def say(text: str) -> None:
    print_line(console, text)

  run_experiment(_DRAWINGS.value, _OUTPUT.value, say)
  say(f"{_OUTPUT.value}: results.json and drawings.png")


if __name__ == "__main__":
  main(run, needs_config=False)
