"""What a run was extended with: written down, used again, or asked for."""

import functools
import importlib
import linecache

import pytest

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.tools import function_tool
from agentjax.training import Extensions, Run
from agentjax.training.evaluation import evaluate_checkpoint
from agentjax.training.experiment import write_experiment
from agentjax.training.extended import (
  ALL_PARTS,
  Extended,
  describe,
  extensions_of_run,
  use_recorded,
  write_description,
)
from agentjax.trajectory.record import Message, Task
from tests.training.smoke import quiet, smoke_experiment

WORLD = '''
from agentjax.data import TaskSplits
from agentjax.world.environment import Environment
from agentjax.tools import function_tool
from agentjax.trajectory.record import Task

class World(Environment):
  size = 1

def score(trajectory, task):
  return 1.0

def loss(inputs):
  return inputs.log_probs

@function_tool
def double(number: int) -> str:
  """Twice a number."""
  return str(2 * number)

TASKS = TaskSplits([Task(1, (), "a", "s")], [Task(2, (), "b", "s")])
'''


@pytest.fixture
def world(tmp_path, monkeypatch):
  """A module of one's own that can be imported."""
  name = f"world_{tmp_path.name}".replace("-", "_")
  (tmp_path / f"{name}.py").write_text(WORLD)
  monkeypatch.syspath_prepend(str(tmp_path))
  return importlib.import_module(name)


def all_of(world) -> Extended:
  extensions = Extensions(
    tools=[world.double],
    tasks=world.TASKS,
    make_environment=world.World,
    scorers={"mine": world.score},
  )
  return Extended(extensions, world.loss)


def complete(directory, given):
  return use_recorded(directory, given, call="Run(...)", needed=ALL_PARTS)


def test_what_a_module_has_is_imported_again(tmp_path, world):
  extended = all_of(world)
  write_description(tmp_path, describe(extended))
  assert complete(tmp_path, Extended(Extensions())) == (extended, [])
  assert complete(tmp_path, extended) == (extended, [])
  own = extensions_of_run(tmp_path, None, call="", needed=("scorers",))
  assert own.scorers == {"mine": world.score} and own.tasks is None


@pytest.mark.parametrize("kind", ["lambda", "local", "partial", "tasks"])
def test_what_no_module_has_is_asked_for_and_used_when_given(tmp_path, world, kind):
  def local(task):
    return world.World()

  made = {
    "lambda": Extensions(make_environment=lambda task: world.World()),
    "local": Extensions(make_environment=local),
    "partial": Extensions(make_environment=functools.partial(world.World)),
    "tasks": Extensions(tasks=TaskSplits([Task(3, (Message("user", "x"),), "a", "s")], [])),
  }[kind]
  part = "tasks" if kind == "tasks" else "make_environment"
  write_description(tmp_path, describe(Extended(made)))
  with pytest.raises(ConfigError, match=rf"extended with {part}=.*no module has it.*Call Run"):
    complete(tmp_path, Extended(Extensions()))
  found, differing = complete(tmp_path, Extended(made))
  assert not differing and getattr(found.extensions, part) is getattr(made, part)


def test_what_changed_or_was_added_is_named(tmp_path, world):
  write_description(tmp_path, describe(all_of(world)))
  changed = WORLD.replace("size = 1", "size = 23").replace('"b"', '"other"')
  (tmp_path / f"{world.__name__}.py").write_text(changed)
  linecache.clearcache()
  importlib.reload(world)
  given = Extended(Extensions(scorers={"added": lambda trajectory, task: 0.0}))
  _, differing = complete(tmp_path, given)
  assert [words.partition("=")[0] for words in sorted(differing)] == [
    "make_environment",
    "scorers.added",
    "tasks",
  ]


def test_tasks_scorers_and_partials_are_told_apart_by_their_content(world):
  def described(**fields):
    return describe(Extended(Extensions(**fields)))

  one, two = (TaskSplits([Task(1, (), a, "s")], []) for a in "ab")
  assert described(tasks=one) == described(tasks=TaskSplits([Task(1, (), "a", "s")], []))
  assert described(tasks=one) != described(tasks=two)
  first, second = (functools.partial(world.score, task=i) for i in (1, 2))
  assert described(scorers={"x": first}) != described(scorers={"x": second})
  inline = function_tool(world.double.__wrapped__)
  assert described(tools=[inline])["tools.double"]["importable"] is None
  assert described(tools=[world.double])["tools.double"]["importable"].endswith(":double")


def test_evaluation_resume_and_replay_refuse_without_the_world(tmp_path):
  """They must not fall back on the world that the config names."""
  (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  description = describe(Extended(Extensions(make_environment=lambda task: None)))  # type: ignore
  write_description(tmp_path, description)
  experiment = smoke_experiment()
  (tmp_path / "config.json").write_text(write_experiment(experiment))
  words = "extended with make_environment="
  with pytest.raises(ConfigError, match=words + r".*evaluate_checkpoint\(experiment, "):
    evaluate_checkpoint(experiment, tmp_path)
  run = Run(experiment, tmp_path, console=quiet())
  for start in (run.train, lambda: run.replay(1)):
    with pytest.raises(ConfigError, match=words + r".*Run\(experiment, "):
      start()
  assert (tmp_path / "checkpoints" / "3").exists()
  changed = Extensions(make_environment=lambda task: quiet())  # type: ignore
  with pytest.raises(ConfigError, match="make_environment=.*--allow_changes"):
    Run(experiment, tmp_path, extensions=changed, console=quiet()).train()


@pytest.mark.slow
def test_a_run_in_a_world_of_its_own_is_evaluated_in_it(tmp_path, world, caplog):
  experiment = smoke_experiment()
  experiment.supervised.steps, experiment.rl.steps = 0, 1
  experiment.reward.parts, experiment.evaluation.success_part = ("mine",), "mine"
  directory = tmp_path / "run"
  own = Extensions(scorers={"mine": world.score})
  report = Run(experiment, directory, extensions=own, console=quiet()).train()
  assert report.after["greedy"] == 1.0
  assert evaluate_checkpoint(experiment, directory).metrics()["greedy"] == 1.0
  assert "its scorers.mine are imported" in caplog.text
  assert Run(experiment, directory, console=quiet()).replay(1).identical
