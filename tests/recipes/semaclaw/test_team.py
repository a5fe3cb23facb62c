"""A team in a world of one agent: who acts when, what is refused, and who is paid for what."""

import asyncio
import dataclasses

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.semaclaw.context import WindowConfig
from agentjax.recipes.semaclaw.permissions import AccessConfig, AccessRules
from agentjax.recipes.semaclaw.team import ORCHESTRATOR, TeamEnvironment, TeamWorldConfig
from agentjax.recipes.semaclaw.work import HAND_IN, HandInScorer, score_work
from agentjax.rewards import Formula, RewardGraph
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.guards import PermissionBridge
from agentjax.rollout.loop import collect
from agentjax.rollout.program import tool_episode
from agentjax.text.tool_calls import format_call
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Reward, Status, ToolCall
from agentjax.trajectory.seats import learning_views
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.question import QuestionEnvironment
from tests.rewards.judging import run
from tests.rollout.conftest import make_player, make_task
from tests.rollout.guards.conftest import Log, Shell
from tests.rollout.guards.test_permissions import Person
from tests.rollout.scripted_engine import ScriptedEngine, say

WORKERS = {"ann": "counts", "bob": "checks"}


def task(label, agent="ann", needs=(), prompt="do it"):
  return {"label": label, "agentName": agent, "prompt": prompt, "dependsOn": list(needs)}


def graph(*tasks, goal="the goal"):
  return ToolCall("create_parent", {"goal": goal, "tasks": list(tasks)})


def count(text):
  return ToolCall("calculator", {"expression": text})


def team(*, inner=None, channels=(), **settings):
  config = TeamWorldConfig(workers=WORKERS, **settings)
  config.validate()
  inner = inner or QuestionEnvironment(ToolRegistry([CalculatorTool()]), max_turns=config.turns)
  bridge = PermissionBridge(config.permissions, channels)
  made = TeamEnvironment(inner, config, AccessRules(config.access, bridge))
  return made, run(made.reset(make_task(1), 1))


def act(made, agent, text="", *calls, **changes):
  return run(made.step(Action(text, calls, agent=agent, **changes)))


def shown(step):
  return step.observation.next, [message.content for message in step.observation.messages]


def test_a_graph_is_done_in_order_and_its_results_come_back():
  made, first = team()
  assert first.next == ORCHESTRATOR
  assert first.messages[0].content.endswith("\n\nWhat is 2 + 2?")
  assert "- ann: counts\n- bob: checks" in first.messages[0].content
  step = act(made, ORCHESTRATOR, "", graph(task("sum"), task("check", "bob", ["sum"])))
  who, (prompt,) = shown(step)
  assert who == "ann" and prompt.startswith("<parent_goal>\nthe goal") and prompt.endswith("do it")
  assert shown(act(made, "ann", "", count("2+2"))) == ("ann", ["4"])
  who, (prompt,) = shown(act(made, "ann", "it is 4"))
  assert who == "bob" and 'label="sum" agent="ann" status="done"' in prompt
  assert "result: it is 4" in prompt
  who, (results,) = shown(act(made, "bob", "right"))
  assert who == ORCHESTRATOR
  assert results == "[sum] ann, done: it is 4\n[check] bob, done: right"
  end = act(made, ORCHESTRATOR, "#### 4")
  assert end.terminated and end.answer == "4" and end.status is Status.OK


def test_a_circle_or_an_unknown_agent_is_answered_and_may_cost():
  made, _ = team(refused=0.25, graphs=2)
  assert made.least_return == -0.5
  step = act(made, ORCHESTRATOR, "", graph(task("a", needs=["b"]), task("b", needs=["a"])))
  who, (text,) = shown(step)
  assert who == ORCHESTRATOR and text.endswith("in a circle: a -> b -> a")
  assert step.reward == Reward(-0.25) and step.tools[0].status == "error" and not step.rewards
  _, (text,) = shown(act(made, ORCHESTRATOR, "", graph(task("a", "eve"))))
  assert "agents: ann, bob" in text
  step = act(made, ORCHESTRATOR, "", graph(task("a")))
  assert shown(step)[1] == ["error: an episode has at most 2 parents"]
  assert step.reward is None  # what can be lost has an end


def test_a_worker_that_fails_or_takes_too_long_stops_nobody():
  made, _ = team(task_turns=2)
  act(made, ORCHESTRATOR, "", graph(task("a"), task("b", "ann"), task("c", "bob", ["a", "b"])))
  step = act(made, "ann", "half a tur", truncated=True)
  assert shown(step)[0] == "ann" and step.tools[-1].status == "error"
  act(made, "ann", "", count("1"))
  step = act(made, "ann", "", count("2"))
  who, (prompt,) = shown(step)
  assert who == "bob" and step.tools[-1].status == "timeout"
  assert "its turn was cut off" in prompt and "not done within 2 turns" in prompt


def test_an_agent_has_its_own_tools_and_calls_of_others_never_reach_the_world():
  made, _ = team(tools={"bob": ("none*",)}, orchestrator_tools=("calc*",), wait="task")
  names = {agent: [tool.name for tool in made.tools_of(agent)] for agent in made.agents}
  own = ["list_agents", "create_parent", "dispatch_task", "calculator"]
  assert names == {ORCHESTRATOR: own, "ann": ["calculator"], "bob": []}
  listing = ToolCall("list_agents", {})
  step = act(made, ORCHESTRATOR, "", count("1+1"), listing, graph(task("a", "bob")), count("3"))
  said = ["2", "- ann: counts\n- bob: checks", "p-19700101-0001: a", "3"]
  assert shown(step) == (ORCHESTRATOR, said)
  unknown = ToolCall("dispatch_task", {"parentId": "p-1", "label": "a"})
  assert "no parent" in shown(act(made, ORCHESTRATOR, "", unknown))[1][0]
  waiting = ToolCall("dispatch_task", {"parentId": "p-19700101-0001", "label": "a"})
  assert shown(act(made, ORCHESTRATOR, "", waiting))[0] == "bob"
  step = act(made, "bob", "", count("1"))
  assert shown(step) == ("bob", ["error: bob has no tool 'calculator'; its tools: none"])
  assert shown(act(made, "bob", "no"))[1] == ["[a] bob, done: no"]


def test_permissions_are_asked_for_each_seat():
  person = Person(answer=False)
  access = AccessConfig(rules=("grant ann shell", "ask bob shell", "refuse * log"))
  tools = [Shell(), Log()]
  inner = QuestionEnvironment(ToolRegistry(tools), max_turns=9)
  made, _ = team(inner=inner, access=access, channels=(person,))
  act(made, ORCHESTRATOR, "", graph(task("a"), task("b", "bob")))
  call = ToolCall("shell", {"command": "ls"})
  step = act(made, "ann", "", call, ToolCall("log", {"command": "x"}))
  assert shown(step)[1] == ["ran ls", "denied: not allowed"]
  assert [(g.guard, g.decision) for g in step.guards] == [("permission ann", "deny")]
  act(made, "ann", "done")
  step = act(made, "bob", "", call)
  assert shown(step)[1] == ["denied: no permission was given"]
  assert step.tools[0].status == "denied" and tools[0].ran == ["ls"]
  assert person.asked[0].content == 'bob: {"command": "ls"}'


class Paying(Environment):
  """Pays for every turn without a call."""

  async def reset(self, task, key):
    return Observation((Message("user", "Talk."),))

  async def step(self, action):
    said = Observation((Message("user", "Go on."),))
    return Step(said, Reward(1.0), terminated=action.text == "bye")


def test_what_the_world_pays_goes_to_all_who_took_part():
  made, _ = team(inner=Paying())
  step = act(made, ORCHESTRATOR, "hello")
  assert step.reward == Reward(1.0) and step.rewards == {} and shown(step)[0] == ORCHESTRATOR
  act(made, ORCHESTRATOR, "", graph(task("a")))
  act(made, "ann", "did it")
  step = act(made, ORCHESTRATOR, "bye")
  assert step.terminated and step.rewards == {"ann": Reward(1.0)}


def test_settings_that_fit_nobody_are_refused():
  for settings, message in (
    ({"workers": {}}, "at least one worker"),
    ({"workers": {ORCHESTRATOR: "x"}}, "another name"),
    ({"tools": {"eve": ("*",)}}, "a worker, worker"),
    ({"inner": TeamWorldConfig()}, "a world of one agent"),
  ):
    with pytest.raises(ConfigError, match=message):
      TeamWorldConfig(**settings).validate()


class Turns(ScriptedEngine):
  """Draws a list of turns, whoever asks."""

  def __init__(self, *turns):
    left = iter(turns)
    super().__init__(lambda address, turn: next(left))


def call(made):
  return say("", call=format_call(made, "compact", {}))


def play(*turns, program=tool_episode, **settings):
  config = TeamWorldConfig(workers=WORKERS, **settings)
  inner = ToolRegistry([CalculatorTool()])
  own = HandInScorer(SCORERS["exact_match"], lambda text: text.removeprefix("it is "))
  parts = {"hand_in": own, "work": score_work, "exact_match": SCORERS["exact_match"]}

  limits = {"max_total_tokens": 4000, "max_tokens_per_turn": 400, "max_turns": 9}

  async def main():
    return await collect(
      [make_task(1)],
      step=5,
      samples_per_task=1,
      player=make_player(Turns(*turns), **limits),
      make_environment=lambda task: TeamEnvironment(
        QuestionEnvironment(inner, max_turns=9), config, None
      ),
      rewards=RewardGraph(parts, Formula("hand_in + 0.5 * work")),
      program=program,
    )

  (episode,) = asyncio.run(main())
  check_trajectory(episode)
  return episode


TURNS = (
  call(graph(task("sum"), task("again"))),
  say("it is 5"),
  call(count("2+2")),
  say("it is 4"),
  say("#### 4"),
)


def test_each_seat_is_paid_for_its_own_work_and_learns_from_its_own_tokens():
  episode = play(*TURNS)
  assert episode.status is Status.OK and episode.answer == "4"
  views = {view.group.rpartition(", ")[2]: view for view in learning_views([episode])}
  assert views[ORCHESTRATOR].reward == Reward(1.5) and views["ann"].reward == Reward(1.5)
  assert views["bob"].segments == []  # never asked, so nothing of it is trained
  drawn = {n: sum(int(s.sampled.sum()) for s in v.segments) for n, v in views.items()}
  assert drawn[ORCHESTRATOR] == len(TURNS[0]) + len(TURNS[4])
  assert drawn["ann"] == len(TURNS[1]) + len(TURNS[2]) + len(TURNS[3])
  trained = to_sequences([v for v in views.values() if v.segments])
  assert pack(trained, row_length=4000, pad_id=0)
  wrong = play(*TURNS[:3], say("it is 3"), say("#### 4"))
  views = {view.group.rpartition(", ")[2]: view for view in learning_views([wrong])}
  assert views[ORCHESTRATOR].reward == Reward(1.5) and views["ann"].reward == Reward(0.5)


def test_work_is_the_share_of_what_was_accepted():
  records = [dataclasses.replace(r) for r in play(*TURNS).tools if r.name == HAND_IN]
  assert [(r.agent, r.status, r.output) for r in records] == [
    ("ann", "ok", "it is 5"),
    ("ann", "ok", "it is 4"),
  ]
  episode = play(call(graph(task("a", "eve"))), call(graph(task("a"))), say("x"), say("#### 1"))
  assert episode.agents[ORCHESTRATOR].parts["work"] == Reward(0.5)
  assert episode.agents["ann"].parts["work"] == Reward(1.0)
  assert play(say("#### 4")).agents[ORCHESTRATOR].parts["work"] == Reward(0.0)


def test_a_new_task_begins_a_new_history_and_a_long_one_is_summed_up():
  fresh = WindowConfig().build()

  async def program(episode):
    await tool_episode(episode, fresh)

  episode = play(*TURNS, program=program)
  roots = [s for s in episode.segments if s.agent == "ann" and s.parent is None]
  assert len(roots) == 2  # one history for each task
  narrow = WindowConfig(tokens=50, fresh_tasks=False).build()

  async def summing(episode):
    await tool_episode(episode, narrow)

  turns = (call(count("1+1")), say("sum of it"), say("#### 4"))
  asked = play(*turns, program=summing, orchestrator_tools=("*",))
  roots = [i for i, s in enumerate(asked.segments) if s.parent is None]
  assert asked.answer == "4" and len(roots) == 2
  assert sum(int(s.sampled.sum()) for s in asked.segments) == sum(map(len, turns))
