r"""The stages of Nemotron 3 Super's reinforcement learning, on a policy of minutes.

  python -m agentjax.stages --stages=configs/stages/nemotron3.py --workdir=runs/nemotron3 \
      --until=swe
  python -m agentjax.stages --stages=configs/stages/nemotron3.py --workdir=runs/nemotron3 \
      --set=rlhf.reward.settings.genrm.comparer.base_url=http://host:8000/v1 \
      --set=rlhf.reward.settings.genrm.comparer.model=NAME

    warm ─► rlvr ─► pivots ─► pivot ─► swe ─► rlhf ─► healing

Loss, rules and constants are those of the published configs (``agentjax.recipes.nemotron3``). The
policy is a small hybrid with experts and prediction heads, and each stage has a small world of the
same kind: word problems with tools; single turns of their worked solutions; small libraries with a
fault; the same problems judged in pairs by a model behind an endpoint. Sizes, rates and lengths are
ours. Copy the file for your model and data, and pass ``sizes=True`` to ``change`` for the published
sizes.
"""

import dataclasses
import pathlib

from agentjax.adapters.agent_trajectories import AgentTrajectory
from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.models import MtpConfig
from agentjax.recipes.nemotron3 import change, heal_prediction_heads
from agentjax.recipes.pivotrl.profiles import profile_checkpoint
from agentjax.recipes.pivotrl.turns import candidates, select_pivots
from agentjax.rewards import RewardConfig
from agentjax.tools import ToolsConfig
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.declared import DeclaredTool
from agentjax.training import Experiment, HeldOutConfig, load_experiment
from agentjax.training.stage_graph import Stage, begun_from
from agentjax.worlds.pivot import PivotWorldConfig
from agentjax.worlds.pivot.tasks import write_pivots

_CONFIGS = pathlib.Path(__file__).parents[1]


def _begun(name: str, run: pathlib.Path) -> Experiment:
  experiment = begun_from(load_experiment(_CONFIGS / f"{name}.py"), run)
  experiment.supervised.steps = 0
  return experiment


def warm(done) -> Experiment:
  """Supervised learning, with the loss of the prediction heads."""
  experiment = load_experiment(_CONFIGS / "quickstart.py")
  experiment.model.mtp, experiment.supervised.mtp_coefficient = MtpConfig(depths=2), 0.3
  experiment.rl.steps = 0
  return experiment


def rlvr(done) -> Experiment:
  """Verifiable rewards."""
  return change(_begun("quickstart", done["warm"]), "rlvr")


def _pivot(run: pathlib.Path, turns: str) -> Experiment:
  experiment = _begun("quickstart", run)
  experiment.data = DataConfig(path=turns, train_size=None, test_size=None)
  experiment.world, experiment.tools = PivotWorldConfig(), ToolsConfig(names=())
  experiment.reward = RewardConfig(parts=("pivot",))
  experiment.rollout.max_turns = 1
  experiment.evaluation = HeldOutConfig(tasks=0)
  return change(experiment, "pivot")


def mine(done, folder: pathlib.Path) -> None:
  """Single turns of worked solutions that the policy gets right now and then."""
  problems = load_experiment(_CONFIGS / "quickstart.py").data
  tasks = problems.source.load(dataclasses.replace(problems, train_size=400)).train
  tool = CalculatorTool
  tools = (DeclaredTool(tool.name, tool.description, tool.parameters),)
  solved = [
    AgentTrajectory(str(task.id), (*task.prompt, *task.demonstration), tools) for task in tasks
  ]
  turns = [row for row in candidates(solved, "solutions") if row.expected.tool_calls]
  profiles = profile_checkpoint(_pivot(done["rlvr"], "unused"), done["rlvr"], turns, samples=8)
  pivots = select_pivots(profiles.rows, max_mean=1.0)
  if not pivots:
    raise ConfigError(f"none of {len(turns)} turns is a pivot; allowed: a longer stage before.")
  write_pivots(folder / "pivots.jsonl", pivots)


def pivot(done) -> Experiment:
  """Single turns of experts."""
  return _pivot(done["rlvr"], str(done["pivots"]))


def swe(done) -> Experiment:
  """Whole tasks on software."""
  return change(_begun("repair_agent", done["pivot"]), "swe")


def rlhf(done) -> Experiment:
  """Answers compared in pairs."""
  experiment = _begun("quickstart", done["swe"])
  experiment.reward = load_experiment(_CONFIGS / "genrm_judged.py").reward
  experiment.rl.steps = 10
  experiment.evaluation = HeldOutConfig(tasks=0)
  return change(experiment, "rlhf")


def healing(done) -> Experiment:
  """The prediction heads once more, on answers to the problems of the second stage."""
  experiment = heal_prediction_heads(_begun("quickstart", done["rlhf"]))
  experiment.rl.steps = 20
  return experiment


def get_stages() -> tuple[Stage, ...]:
  return (
    Stage("warm", warm),
    Stage("rlvr", rlvr, after=("warm",)),
    Stage("pivots", work=mine, after=("rlvr",)),
    Stage("pivot", pivot, after=("rlvr", "pivots")),
    Stage("swe", swe, after=("pivot",)),
    Stage("rlhf", rlhf, after=("swe",)),
    Stage("healing", healing, after=("rlhf",)),
  )
