"""Whatever a config chooses has one of three names: built in, ``module:attribute``, entry point."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from absl import flags

from agentjax.config import ConfigError
from agentjax.training.experiment import load_experiment, own_names, write_experiment
from agentjax.training.flags import define_config_flag
from tests.training.stages import fingerprints

MODULE = '''
import dataclasses

import optax

from agentjax import Environment, Message, Observation, Reward, Step, Task, TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.models import ModelConfig
from agentjax.objectives import ObjectiveConfig
from agentjax.sandbox.process import ProcessSandboxConfig
from agentjax.signals.signal import Result, Signal, SignalConfig
from agentjax.trajectory.columns import Column
from agentjax.world import World


class Guess(Environment):
  async def reset(self, task, key):
    self.turn = 0
    return Observation(task.prompt)

  async def step(self, action):
    self.turn += 1
    return Step(Observation((Message("user", "Again."),)), Reward(1.0), terminated=self.turn == 2)


class Guessing(World):
  def tasks(self, data):
    def made(first):
      return [Task(first + i, (Message("user", "Guess."),), "", "guess") for i in range(4)]

    return TaskSplits(made(0), made(FIRST_TEST_ID))

  def environment(self, task):
    return Guess()


def double(number: float) -> str:
  """Twice a number."""
  return str(2 * number)


@dataclasses.dataclass(unsafe_hash=True)
class Box(ProcessSandboxConfig):
  """A back end of mine."""


def even(trajectory, task):
  drawn = [int(i) for s in trajectory.segments for i in s.token_ids[s.sampled]]
  return sum(i % 2 == 0 for i in drawn) / max(len(drawn), 1)


class Plain:
  async def sample(self, group):
    return group.settle([await group.episode(i) for i in range(group.size)])


async def program(episode):
  await episode.open(await episode.reset())
  while True:
    await episode.observe((await episode.step(await episode.act())).observation)


async def forget(episode, observation):
  return Observation((*episode.task.prompt, *observation.messages))


def all_of_them(scores):
  return scores > -1


def longest(group):
  return max(len(t.segments) for t in group)


class Surprise(Signal):
  name = "my_surprise"
  adds = (Column("my_surprise", "float32", "Nats."),)

  def __call__(self, context, networks, batch):
    return Result({"my_surprise": -batch.behaviour_log_probs})


@dataclasses.dataclass(unsafe_hash=True)
class SurpriseConfig(SignalConfig):
  def build(self, tools):
    return Surprise()


def loss(inputs):
  return -inputs.log_probs * inputs.advantages + 0.0 * inputs.column("my_surprise")


OBJECTIVE = ObjectiveConfig(function="mine:loss")
sign = lambda: optax.scale_by_lion()
MODEL = ModelConfig(d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16)
SEVEN = 7
'''

# What a flag sets, the attribute of MODULE, the group of entry points.
KINDS = {
  "world": ("world", "Guessing", "worlds"),
  "tool": ("tools.settings.twice", "double", "tools"),
  "sandbox": ("sandboxes.box", "Box", "sandboxes"),
  "scorer": ("reward.settings.share", "even", "scorers"),
  "sampler": ("rollout.sampler", "Plain", "samplers"),
  "program": ("rollout.program", "program", "programs"),
  "context manager": ("rollout.program.context", "forget", "contexts"),
  "selector": ("rl.selection.rule", "all_of_them", "selectors"),
  "score of a selector": ("rl.selection.score", "longest", "selectors"),
  "signal": ("rl.signals", "SurpriseConfig", "signals"),
  "objective or preset": ("rl.objective", "OBJECTIVE", "objectives"),
  "optimiser": ("rl.optimizer.direction", "sign", "optimizers"),
  "model": ("model", "MODEL", "models"),
}


USED = {  # by the kinds whose settings stand apart from their use
  "tool": ["--config.tools.names=calculator,twice"],
  "scorer": ["--config.reward.parts=exact_match,share", "--config.reward.weights=1,1"],
  "world": ["--config.data.source=none", "--config.supervised.steps=0"],
}
_SMOKE = str(pathlib.Path(__file__).parents[2] / "configs" / "smoke.py")


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A working directory with a module and an installed package that names all of it."""
  (tmp_path / "mine.py").write_text(MODULE)
  info = tmp_path / "mine-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
  groups = {}
  for _, attribute, group in KINDS.values():
    groups.setdefault(group, []).append(f"my_{attribute.lower()} = mine:{attribute}")
  merged = "\n".join("\n".join([f"[agentjax.{g}]", *lines]) for g, lines in groups.items())
  (info / "entry_points.txt").write_text(merged)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(tmp_path)
  yield tmp_path
  sys.modules.pop("mine", None)


def parse(*argv):
  values = flags.FlagValues()
  words = ["train", f"--config={_SMOKE}", *argv]
  config = define_config_flag(flag_values=values, argv=words)
  values(words)
  return config.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_named_by_module_and_by_entry_point_and_saved_by_name(kind, folder):
  field, attribute, _ = KINDS[kind]
  before = parse()
  for name in (f"mine:{attribute}", f"my_{attribute.lower()}"):
    made = parse(f"--config.{field}={name}", *USED.get(kind, ()))
    made.validate()
    assert made != before
    saved = folder / "config.json"
    saved.write_text(write_experiment(made))
    assert load_experiment(saved) == made
    if kind not in ("objective or preset", "model"):  # those are saved by their fields
      assert any(f'"{n}"' in saved.read_text() for n in (name, f"my_{attribute.lower()}"))


@pytest.mark.parametrize("wrong", ["no_such_name", "mine:SEVEN", "mine:missing", "missing:x"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_name_is_one_line_with_what_is_allowed(kind, wrong, folder):
  field = KINDS[kind][0]
  with pytest.raises(ConfigError, match="allowed: ") as error:
    parse(f"--config.{field}={wrong}", *USED.get(kind, ())).validate()
  message = str(error.value)
  assert message.startswith(f"config.{field}={wrong!r}") and "\n" not in message


def test_every_module_that_a_config_names_is_kept(folder):
  shutil.rmtree(folder / "mine-1.0.dist-info")  # else the shorter names of entry points are saved
  given = [f"--config.{f}=mine:{a}" for f, a, _ in KINDS.values() if a not in ("program", "MODEL")]
  made = parse(*given)
  by_fields = {"mine:program", "mine:MODEL", "mine:OBJECTIVE"}
  kept = {f"mine:{a}" for _, a, _ in KINDS.values()} - by_fields
  assert set(own_names(made)) == kept | {"mine:loss"}


@pytest.mark.slow
def test_a_run_of_all_kinds_and_the_same_run_from_its_saved_config(folder):
  given = [f"--config.{f}=mine:{a}" for f, a, _ in KINDS.values() if a != "program"]
  given += [
    "--config.data.source=none",
    "--config.supervised.steps=0",
    "--config.rl.steps=2",
    "--config.rl.router_bias_rate=0",
    "--config.tools.workspace.sandbox=box",
    "--config.tools.names=calculator,twice",
    "--config.reward.parts=environment,share",
    "--config.reward.weights=1,1",
    "--config.evaluation.success_part=environment",
  ]

  def train(name, *words):
    command = [sys.executable, "-m", "agentjax.train", f"--workdir={name}", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return fingerprints(folder / name)

  first = train("first", f"--config={_SMOKE}", *given)
  assert len(first) == 2 and first == train("again", "--config=first/config.json")
  assert (folder / "first" / "functions" / "mine.py").read_text() == MODULE
  saved = json.loads((folder / "first" / "config.json").read_text())
  assert saved["rollout"]["program"] == {"context": "mine:forget"}
  train("program", "--config=first/config.json", "--config.rollout.program=mine:program")
