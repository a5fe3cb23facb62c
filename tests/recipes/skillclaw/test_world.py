"""A catalogue in the prompt, a tool that reads skills, and the world behind them as it was."""

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.skillclaw.library import Entry, Library
from agentjax.recipes.skillclaw.retrieval import RetrievalConfig, Retriever
from agentjax.recipes.skillclaw.world import READ, SkilledEnvironment, SkillWorldConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.training import Experiment
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.flags import set_field
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.environment import Action, Environment, take_snapshot
from agentjax.world.question import QuestionEnvironment
from tests.recipes.skillclaw.nights import publish, skill
from tests.rewards.judging import run
from tests.rollout.guards.conftest import Shell

_TASK = Task(7, (Message("user", "Do it?"),), "3", "made")
_ENTRIES = (Entry(skill()),)


def _environment(show="names", task=_TASK, entries=_ENTRIES, **settings):
  inner = QuestionEnvironment(ToolRegistry([Shell()]), max_turns=4)
  made = SkilledEnvironment(inner, Retriever(entries, RetrievalConfig(show=show, **settings)))
  return made, run(made.reset(task, 1)).messages


def _read(name="good", **more):
  return ToolCall(READ, {"name": name, **more})


def _shell(command):
  return ToolCall("shell", {"command": command})


def _step(environment, *calls, text=""):
  return run(environment.step(Action(text, calls)))


def test_the_catalogue_begins_the_first_message_of_system_or_user():
  _, messages = _environment("bodies")
  assert messages[0].role == "user" and messages[0].content.startswith("<available_skills>\n")
  assert "Do it well." in messages[0].content and messages[0].content.endswith("\n\nDo it?")
  system = Task(7, (Message("system", "Be good."), Message("user", "Do it?")), "3", "made")
  _, messages = _environment(task=system)
  assert messages[0].content.endswith("\n\nBe good.") and messages[1].content == "Do it?"
  assert "- good: When it helps." in messages[0].content
  assert _environment(entries=())[1] == _TASK.prompt


def test_a_skill_is_read_without_a_turn_of_the_world():
  environment, _ = _environment(most_reads=2)
  assert [tool.name for tool in environment.tools] == ["shell", READ]
  step = _step(environment, _read())
  assert step.observation.messages == (Message("tool", skill().text),)
  assert [(r.name, r.status, r.turn) for r in step.tools] == [(READ, "ok", 0)]
  step = _step(environment, _read("none"))
  assert "there is no skill of this name; skills: good" in step.observation.messages[0].content
  assert "at most 2 skills" in _step(environment, _read()).tools[0].output
  assert _step(environment, ToolCall(READ, {}, "no JSON")).tools[0].output == "error: no JSON"
  # Four turns of the world are left, as if nothing had been read.
  for _ in range(3):
    assert not _step(environment, _shell("ls")).truncated
  assert _step(environment, _shell("ls")).truncated


def test_results_stand_in_the_order_of_their_calls():
  environment, _ = _environment()
  step = _step(environment, _shell("a"), _read(), _shell("b"))
  texts = [message.content for message in step.observation.messages]
  assert texts == ["ran a", skill().text, "ran b"]
  assert [record.name for record in step.tools] == ["shell", "shell", READ]
  ended = _step(environment, text="#### 3")
  assert ended.terminated and ended.answer == "3"


def test_with_bodies_there_is_no_tool_and_the_world_answers_its_name():
  environment, _ = _environment("bodies")
  assert [tool.name for tool in environment.tools] == ["shell"]
  assert "read_skill" in _step(environment, _read()).observation.messages[0].content


def test_a_copy_goes_on_from_a_snapshot():
  environment, _ = _environment(most_reads=1)
  _step(environment, _read())
  _step(environment, _shell("a"))
  state = run(take_snapshot(environment))
  twin, _ = _environment(most_reads=1)
  run(twin.resume(_TASK, 1, state))
  assert "at most 1" in _step(twin, _read()).tools[0].output
  assert twin._inner.conversation == environment._inner.conversation
  twin.restore(state)
  assert "at most 1" in _step(twin, _read()).tools[0].output


def test_several_agents_are_refused():
  class Two(Environment):
    agents = ("left", "right")

    async def reset(self, task, key):
      """Never played."""

    async def step(self, action):
      """Never played."""

  with pytest.raises(ConfigError, match="Two has the agents left, right"):
    SkilledEnvironment(Two(), Retriever((), RetrievalConfig()))


def test_a_run_takes_a_library_by_flags(tmp_path):
  path = publish(tmp_path, skill()).path
  experiment = Experiment()
  set_field(experiment, ["world"], "agentjax.recipes.skillclaw:SkillWorldConfig")
  set_field(experiment, ["world", "library"], str(path))
  set_field(experiment, ["data", "train_size"], "4")
  set_field(experiment, ["supervised", "steps"], "1")
  experiment.validate()
  scoring = build_scoring(experiment, Extensions())
  assert READ in [tool.name for tool in scoring.world.tools]
  task = scoring.tasks.train[0]
  observed = run(scoring.world.environment(task).reset(task, 0))
  assert "- good: When it helps." in observed.messages[0].content
  with pytest.raises(ConfigError, match=r"config\.world\.inner"):
    SkillWorldConfig(inner=SkillWorldConfig()).validate("config.world")
  assert Library(path).entries()[0].name == "good"
