"""From experts' trajectories to pivots: rows, profiling, selecting, and what training gets."""

import asyncio
import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.adapters.agent_trajectories import AgentTrajectory, read_trajectories
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.preparation import prepare
from agentjax.recipes.pivotrl.profiles import profile_pivots
from agentjax.recipes.pivotrl.staleness import StalenessConfig, mixed_share, staleness
from agentjax.recipes.pivotrl.turns import candidates, observed_tools, select_pivots
from agentjax.rewards import RewardConfig, RewardGraph, build_rewards
from agentjax.rollout.loop import collect
from agentjax.tools.declared import read_tool
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Reward, ToolCall, Trajectory
from agentjax.worlds.pivot.environment import PivotEnvironment
from agentjax.worlds.pivot.tasks import PivotRow, Profile, pivot_tasks, read_pivots, write_pivots
from agentjax.worlds.pivot.verifier import PivotScorer, PivotVerifierConfig
from tests.adapters.test_agent_trajectories import TOOL, write
from tests.rollout.conftest import make_player
from tests.rollout.scripted_engine import ScriptedEngine, say

DATA = os.environ.get("AGENTJAX_DATA")
TALK = (
  Message("system", "Find things."),
  Message("user", "Where is the cup?"),
  Message("assistant", "I look.", (ToolCall("find", {"item": "cup"}),)),
  Message("tool", "on the shelf"),
  Message("assistant", "<think>\nTell it kindly.\n</think>\n\nIt is on the shelf."),
)


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_every_turn_of_the_airline_agent_can_be_judged():
  root = pathlib.Path(DATA or "")
  tools = [read_tool(t) for t in json.loads((root / "tau_bench/airline/tools.json").read_text())]
  path = root / "tau_trajectories/gpt-4o-airline.jsonl.gz"
  rows = candidates(read_trajectories(path, "openai", tools=tools), "airline")
  scorer = PivotScorer(PivotVerifierConfig())
  refused = [reason for row in rows if (reason := scorer.refusal(row.task())) is not None]
  assert len(rows) == 2454 and not refused
  for row in rows[:200]:  # an expert does what it does
    assert scorer.matcher.match(row.expected, row.expected, tools).score == 1.0


def pivot_rewards() -> RewardGraph:
  """What the world pivot pays for a turn."""
  scorer = PivotScorer(PivotVerifierConfig())
  return build_rewards(RewardConfig(parts=("pivot",)), {"pivot": scorer})


# --- candidates and rows -------------------------------------------------------------------------


def rows_of_talk() -> list[PivotRow]:
  return candidates([AgentTrajectory("a", TALK, (TOOL,)), AgentTrajectory("b", TALK, ())], "made")


def test_every_assistant_turn_is_a_candidate_with_the_history_before_it():
  rows = rows_of_talk()
  assert [(r.id, r.trajectory, r.turn) for r in rows] == [
    (0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1)
  ]  # fmt: skip
  assert rows[0].history == TALK[:2] and rows[1].history == TALK[:4]
  assert rows[0].expected == TALK[2]
  assert rows[1].expected.content == "It is on the shelf."  # without what it thought


def test_neither_the_expected_turn_nor_its_reasoning_is_ever_in_a_prompt():
  engine = ScriptedEngine(lambda address, turn: say("no idea"))
  player = make_player(engine)
  asyncio.run(
    profile_pivots(
      rows_of_talk(),
      samples=2,
      player=player,
      rewards=pivot_rewards(),
    )
  )
  prompts = {player.chat.tokenizer.decode(ids) for ids in engine.prefills}
  assert len(prompts) == 2  # both trajectories say the same
  for prompt in prompts:
    assert "Where is the cup?" in prompt
    assert "It is on the shelf." not in prompt and "kindly" not in prompt
  assert not any("find cup" in p for p in prompts if "on the shelf" not in p)


def test_rows_survive_their_file(tmp_path):
  rows = rows_of_talk()
  rows[1] = dataclasses.replace(rows[1], profile=Profile(0.25, 0.1875, 8, 3))
  cut = Message("user", "Wo ist die Tür? \ud83d")  # half of a pair: a recording that was cut
  rows[2] = dataclasses.replace(rows[2], history=(cut, *rows[2].history))
  path = tmp_path / "deep" / "rows.jsonl"
  write_pivots(path, rows)
  assert read_pivots(path) == rows
  tasks = pivot_tasks(path, first_id=FIRST_TEST_ID, limit=3)
  assert [t.id - FIRST_TEST_ID for t in tasks] == [0, 1, 2]
  assert tasks[0].prompt == TALK[:2] and tasks[0].demonstration == (TALK[2],)


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"format": 9}, "format 9"),
    ({"id": 0}, "id 0 is given twice"),
    ({"id": 1 << 30}, "not in 0"),
    ({"id": "1"}, "'1' is no integer"),
    ({"history": []}, "a history and an expected message"),
    ({"expected": {"role": "user", "content": "x"}}, "a history and an expected message"),
    ({"tools": [{}]}, "a tool needs a name"),
    ({"profile": {"mean": 1}}, "missing 3 required"),
  ],
)
def test_a_row_that_is_none_is_refused_with_its_line(tmp_path, change, reason):
  path = tmp_path / "rows.jsonl"
  write_pivots(path, rows_of_talk()[:2])
  first, second = (json.loads(line) for line in path.read_text().splitlines())
  path = write(tmp_path, first, {**second, **change})
  with pytest.raises(DataError, match=reason) as caught:
    read_pivots(path)
  assert str(caught.value).startswith(f"{path}:2: ")


def test_a_row_that_cannot_be_judged_is_refused_with_the_reason():
  scorer = PivotScorer(PivotVerifierConfig())
  reasons = [scorer.refusal(row.task()) for row in rows_of_talk()]  # the third declares no tool
  assert reasons[:2] == [None, None]
  assert "calls 'find', which is not decl" in reasons[2]


# --- profiles ------------------------------------------------------------------------------------


def test_mean_and_variance_are_those_of_the_population():
  assert Profile.of([1.0] + [0.0] * 7, 3) == Profile(0.125, 0.109375, 8, 3)
  assert Profile.of([0.1] * 3, 0).variance == 0.0  # not what rounding leaves


def profiled(*passes, samples=8):
  row = rows_of_talk()[0]
  return [
    dataclasses.replace(row, id=i, profile=Profile.of([1.0] * n + [0.0] * (samples - n), version=0))
    for i, n in enumerate(passes)
  ]


def test_pivots_are_mixed_and_below_lambda_and_the_easiest_go_first():
  rows = profiled(8, 0, 1, 7, 4, 6)
  assert [r.id for r in select_pivots(rows, max_mean=0.6)] == [2, 4]
  assert [r.id for r in select_pivots(rows)] == [2, 3, 4, 5]
  assert [r.id for r in select_pivots(rows, limit=2)] == [2, 4]
  assert select_pivots([dataclasses.replace(rows[2], profile=None)]) == []


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=9))
def test_variance_is_above_zero_just_where_rewards_differ(rewards):
  profile = Profile.of(rewards, 0)
  assert (profile.variance > 0) == (len(set(rewards)) > 1)
  assert profile.variance == pytest.approx(float(np.var(rewards)), abs=1e-12)


def world():
  """Twenty turns: task i is right in ``rate[i]`` of 8 samples."""
  talk = lambda i: (  # noqa: E731
    Message("user", f"Where is thing {i}?"),
    Message("assistant", "", (ToolCall("find", {"item": f"t{i}"}),)),
  )
  rows = candidates((AgentTrajectory(f"{i}", talk(i), (TOOL,)) for i in range(20)), "made")
  rate = [8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 4, 1, 7, 2, 8, 0]

  def script(address, turn):
    step, task, sample = address
    return say("", call=f"find {'t' if sample < rate[task] else 'x'}{task}")

  return rows, rate, script


def test_profiles_are_what_the_samples_earn_from_one_prefill_a_turn():
  rows, rate, script = world()
  engine = ScriptedEngine(script, version=5)
  rewards = pivot_rewards()
  found = asyncio.run(profile_pivots(rows, samples=8, player=make_player(engine), rewards=rewards))
  assert [r.profile.mean for r in found.rows] == [n / 8 for n in rate]
  assert {(r.profile.samples, r.profile.version) for r in found.rows} == {(8, 5)}
  assert set(engine.prefills.values()) == {1} and len(engine.prefills) == 20
  assert len(engine.requests) == 160 and not engine.live_contexts and not engine.live_prefixes
  assert found.prompt_tokens == sum(map(len, engine.prefills))


def test_what_cannot_be_profiled_is_named_with_its_reason():
  rows, _, script = world()
  long = dataclasses.replace(rows[0], history=(Message("user", "x" * 500),))
  strange = dataclasses.replace(rows[1], expected=Message("assistant", "", (ToolCall("fly", {}),)))
  found = asyncio.run(
    profile_pivots(
      [long, strange, rows[2]],
      samples=2,
      player=make_player(ScriptedEngine(script)),
      rewards=pivot_rewards(),
    )
  )
  assert [r.id for r in found.rows] == [2]
  assert "rollout.max_total_tokens=400" in found.refused[0]
  assert "'fly', which is not declared" in found.refused[1]
  with pytest.raises(ValueError, match="samples=1"):
    asyncio.run(profile_pivots([], samples=1, player=None, rewards=None))


def test_pivots_have_a_gradient_and_most_other_turns_have_none():
  """What sets PivotRL apart from GRPO on the same trajectories."""
  rows, _, script = world()
  rewards = pivot_rewards()
  player = make_player(ScriptedEngine(script))
  found = asyncio.run(profile_pivots(rows, samples=8, player=player, rewards=rewards))
  pivots = {row.id for row in select_pivots(found.rows)}
  trajectories = asyncio.run(
    collect(
      [row.task() for row in rows],
      step=1,
      samples_per_task=8,
      player=player,
      make_environment=lambda task: PivotEnvironment(),
      rewards=rewards,
    )
  )
  pull = {}
  for row in rows:
    group = [t for t in trajectories if t.task_id == row.id]
    batch = pack(to_sequences(group), row_length=64, pad_id=0)
    prepared, _ = prepare(batch, ObjectiveConfig())
    pull[row.id] = float(np.abs(prepared.advantages * prepared.coefficients).sum())
  assert pivots == {14, 15, 16, 17}
  assert all((pull[i] > 0) == (i in pivots) for i in pull)
  assert mixed_share([t for t in trajectories if t.task_id in pivots]) == 1.0
  assert mixed_share(trajectories) == 0.2


# --- staleness -----------------------------------------------------------------------------------


def test_profiles_are_stale_when_most_groups_of_the_latest_steps_agree():
  rule = StalenessConfig(least_mixed=0.5, window=3)
  assert not staleness({}, rule).stale
  assert not staleness({1: 0.0, 2: 0.0}, rule).stale  # too early to tell
  assert staleness({1: 1.0, 2: 1.0, 3: 0.4, 4: 0.4, 5: 0.4}, rule).stale
  late = staleness({5: 0.4, 4: 0.6, 3: 0.6, 1: 0.0}, rule)
  assert not late.stale and late.mixed == pytest.approx(1.6 / 3) and late.steps == 3


def test_a_group_is_mixed_where_two_valid_rewards_differ():
  def group(task, *rewards):
    values = [Reward(r) if r is not None else Reward.invalid("x") for r in rewards]
    return [Trajectory(1, task, i, "s", [], reward=r) for i, r in enumerate(values)]

  assert mixed_share([*group(0, 0.0, 1.0), *group(1, 1.0, 1.0, None)]) == 0.5
  assert mixed_share([]) == 0.0


def test_tools_are_declared_by_the_calls_that_were_seen():
  def called(**arguments):
    return AgentTrajectory("a", (Message("assistant", "", (ToolCall("f", arguments),)),), ())

  [tool] = observed_tools([called(x=1, y="a", z=[1]), called(x=2.5, y="b", w=True)])
  assert tool.name == "f" and tool.parameters == {
    "type": "object",
    "properties": {
      "w": {"type": "boolean"},
      "x": {},  # an integer and a number were seen
      "y": {"type": "string"},
      "z": {"type": "array"},
    },
    "required": ["x", "y"],
  }
  assert observed_tools([AgentTrajectory("a", TALK[:2], ())]) == ()
