r"""The interplay study at toy size: one warm start, and reinforcement learning near it and far off.

  python -m agentjax.stages --stages=configs/stages/interplay.py --workdir=runs/interplay

    pretrained ─► edge, far, outcome

After problems of up to four operations (configs/interplay.py) "edge" trains on five alone and "far"
on nine; "outcome" is "edge" paid for answers alone. Figures of 2512.07783 and what is ours are in
configs/interplay.py.
"""

import pathlib

from agentjax.training import Experiment, load_experiment
from agentjax.training.stage_graph import Stage, begun_from

_CONFIG = pathlib.Path(__file__).parents[1] / "interplay.py"


def pretrained(done) -> Experiment:
  """Worked solutions of problems of up to four operations."""
  return load_experiment(_CONFIG)


def edge(done, operations: int = 5) -> Experiment:
  """Problems just beyond them, without worked solutions."""
  experiment = begun_from(load_experiment(_CONFIG), done["pretrained"])
  experiment.data.source.worked, experiment.data.source.reinforced = False, operations
  experiment.supervised.steps, experiment.rl.steps = 0, 60
  return experiment


def far(done) -> Experiment:
  """Problems far beyond them."""
  return edge(done, operations=9)


def outcome(done) -> Experiment:
  """The first again, with nothing paid for steps."""
  experiment = edge(done)
  experiment.reward.formula = "right"
  return experiment


def get_stages() -> tuple[Stage, ...]:
  begun = (edge, far, outcome)
  return (
    Stage("pretrained", pretrained),
    *(Stage(stage.__name__, stage, after=("pretrained",)) for stage in begun),
  )
