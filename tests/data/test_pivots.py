"""From experts' trajectories to pivots: reading, profiling, selecting, and what training gets."""

import asyncio
import dataclasses
import gzip
import json
import os
import pathlib
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.data.agent_trajectories import AgentTrajectory, read_trajectories
from agentjax.data.errors import DataError
from agentjax.data.pivots import (
  PivotRow,
  Profile,
  candidates,
  pivot_tasks,
  read_pivots,
  select_pivots,
  write_pivots,
)
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.envs.pivot import PivotEnvironment
from agentjax.objectives.objective import ObjectiveConfig, prepare
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.pivot import PivotScorer, PivotVerifierConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.pivots import profile_pivots
from agentjax.tools.declared import read_tool
from agentjax.training.pivots import StalenessConfig, mixed_share, staleness
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Reward, ToolCall, Trajectory
from tests.rollout.conftest import make_player
from tests.rollout.scripted_engine import ScriptedEngine, say

DATA = os.environ.get("AGENTJAX_DATA")
TOOL = read_tool(
  {
    "name": "find",
    "parameters": {
      "type": "object",
      "properties": {"item": {"type": "string"}},
      "required": ["item"],
    },
  }
)
TALK = (
  Message("system", "Find things."),
  Message("user", "Where is the cup?"),
  Message("assistant", "I look.", (ToolCall("find", {"item": "cup"}),)),
  Message("tool", "on the shelf"),
  Message("assistant", "<think>\nTell it kindly.\n</think>\n\nIt is on the shelf."),
)


def write(path, *rows, name="rows.jsonl"):
  file = path / name
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return file


def call(identity="c1", name="find", arguments='{"item": "cup"}'):
  return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(*messages, **more):
  return {"messages": [{"role": "user", "content": "Where?"}, *messages], **more}


# --- reading -------------------------------------------------------------------------------------


def test_openai_rows_are_read_with_calls_reasoning_tools_and_facts(tmp_path):
  row = talk(
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "shelf"}]},
    {"role": "assistant", "content": "On the shelf."},
    tools=[{"type": "function", "function": TOOL.to_dict()}],
    reward=0.5,
    id="a7",
  )
  [found] = read_trajectories(write(tmp_path, row), "openai")
  assert found.messages == (
    Message("user", "Where?"),
    Message("assistant", "", (ToolCall("find", {"item": "cup"}),)),
    Message("tool", "shelf"),
    Message("assistant", "On the shelf."),
  )
  assert (found.name, found.tools, found.metadata) == ("a7", (TOOL,), {"reward": 0.5})
  [kept] = read_trajectories(write(tmp_path, row), "openai", thinking="keep")
  assert kept.messages[1].content == "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"text": "x"}, "no messages, traj, history; fields: text"),
    (talk(), "no assistant message"),
    (talk({"role": "bot", "content": "x"}), "message 1: role 'bot'"),
    (talk({"role": "assistant", "content": ""}), "message 1: an assistant message without text"),
    (talk({"role": "assistant", "content": 3}), "message 1: content is no list"),
    (talk({"role": "assistant", "tool_calls": [call(arguments="{item}")]}), "'find' is not JSON"),
    (talk({"role": "assistant", "tool_calls": [call(arguments="[1]")]}), "no JSON object"),
    (talk({"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}), "no 'name'"),
    (
      talk(
        {"role": "assistant", "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
      ),
      "tool_call_id 'c2' is of no call",
    ),
    (
      talk({"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}),
      "message 2: a tool's answer without a call",
    ),
    (talk({"role": "assistant", "content": "x"}, tools=[{"name": ""}]), "a tool needs a name"),
    (
      talk({"role": "assistant", "content": [{"type": "image_url", "image_url": ""}]}),
      "content of type 'image_url'",
    ),
  ],
)
def test_a_row_that_does_not_fit_is_refused_with_file_and_line(tmp_path, row, reason):
  good = talk({"role": "assistant", "content": "x"})
  path = write(tmp_path, good, row)
  with pytest.raises(DataError, match=reason) as caught:
    list(read_trajectories(path, "openai"))
  assert str(caught.value).startswith(f"{path}:2: ")


WHOLE = {
  "openai": talk(
    {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "shelf"}]},
    tools=[{"type": "function", "function": TOOL.to_dict()}],
    id="a",
  ),
  "sharegpt": {
    "conversations": [
      {"from": "human", "value": "Where?"},
      {"from": "function_call", "value": '{"name": "find", "arguments": {}}'},
    ],
    "tools": "[]",
    "system": "s",
  },
  "adp": {
    "id": "x",
    "content": [
      {"class_": "text_observation", "content": "Where?", "source": "user", "name": None},
      {"class_": "code_action", "language": "bash", "content": "ls", "description": None},
      {"class_": "web_observation", "axtree": "page", "html": None, "url": "u"},
      {"class_": "api_action", "function": "find", "kwargs": {}, "description": "d"},
    ],
  },
}


def places(value, at=()):
  """Paths to everything inside a JSON value."""
  items = value.items() if isinstance(value, dict) else enumerate(value)
  for key, inner in items:
    yield (*at, key)
    if isinstance(inner, dict | list):
      yield from places(inner, (*at, key))


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize("junk", [None, 3, "x", [], ["x"], {}, {"x": 1}, [[1]], True])
def test_junk_anywhere_in_a_row_is_read_or_refused_but_never_a_crash(tmp_path, form, junk):
  path = tmp_path / "rows.jsonl"
  rows = []
  for place in places(WHOLE[form]):
    row = json.loads(json.dumps(WHOLE[form]))
    holder = row
    for key in place[:-1]:
      holder = holder[key]
    holder[place[-1]] = junk
    rows.append(row)
  for row in rows:
    path.write_text(json.dumps(row))
    try:
      [found] = read_trajectories(path, form, thinking="keep")
    except DataError as error:
      assert error.line == 1
    else:
      assert all(isinstance(m.content, str) for m in found.messages)


def test_lists_of_pairs_and_standardised_rows_give_the_same_record(tmp_path):
  pairs = [
    ("human", "Where?"),
    ("function_call", '{"name": "find", "arguments": {"item": "cup"}}'),
    ("observation", "shelf"),
    ("gpt", "There."),
  ]
  sharegpt = {"conversations": [{"from": a, "value": b} for a, b in pairs], "tools": "[]"}
  adp = {
    "id": "x",
    "content": [
      {"class_": "text_observation", "content": "Where?", "source": "user", "name": None},
      {"class_": "api_action", "function": "find", "kwargs": {"item": "cup"}, "description": None},
      {"class_": "text_observation", "content": "shelf", "source": "environment"},
      {"class_": "message_action", "content": "There.", "description": None},
    ],
    "details": {},
  }
  expected = (
    Message("user", "Where?"),
    Message("assistant", "", (ToolCall("find", {"item": "cup"}),)),
    Message("tool", "shelf"),
    Message("assistant", "There."),
  )
  for form, row in (("sharegpt", sharegpt), ("adp", adp)):
    path = tmp_path / f"{form}.json"
    path.write_text(json.dumps([row, row]))
    one, two = read_trajectories(path, form)
    assert one.messages == two.messages == expected
    path.write_text(json.dumps([row, {**row, "content": [], "conversations": []}]))
    with pytest.raises(DataError, match=r"row 2: con\w+ is no list with something in it"):
      list(read_trajectories(path, form))


def test_actions_in_a_row_are_one_turn_and_code_is_a_call(tmp_path):
  content = [
    {"class_": "text_observation", "content": "Fix it.", "source": "user"},
    {"class_": "message_action", "content": "I look.", "description": None},
    {"class_": "code_action", "language": "bash", "content": "ls", "description": None},
    {"class_": "api_action", "function": "view", "kwargs": {}, "description": None},
    {"class_": "text_observation", "content": "a.py", "source": "environment"},
    {"class_": "text_observation", "content": "x = 1", "source": "environment"},
    {"class_": "web_observation", "axtree": "page", "html": None, "url": "u"},
    {"class_": "code_action", "language": "python", "content": "1", "description": "Then this."},
  ]
  path = write(tmp_path, {"id": "x", "content": content, "details": {}})
  [found] = read_trajectories(path, "adp")
  assert found.messages == (
    Message("user", "Fix it."),
    Message(
      "assistant", "I look.", (ToolCall("execute_bash", {"command": "ls"}), ToolCall("view", {}))
    ),
    Message("tool", "a.py"),
    Message("tool", "x = 1"),
    Message("user", "URL: u\npage"),
    Message("assistant", "Then this.", (ToolCall("execute_ipython_cell", {"code": "1"}),)),
  )


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_real_trajectories_are_read_whole(tmp_path):
  root = pathlib.Path(DATA or "")
  tools = [read_tool(t) for t in json.loads((root / "tau_bench/airline/tools.json").read_text())]
  counts = {}
  for form, name in (
    ("openai", "tau_trajectories/gpt-4o-airline.jsonl.gz"),
    ("openai", "toolcall_sft/reason_tool_use_50.jsonl.gz"),
    ("sharegpt", "toolcall_sft/glaive_toolcall_en_300.json.gz"),
  ):
    found = list(read_trajectories(root / name, form, tools=tools))
    turns = [m for t in found for m in t.messages if m.role == "assistant"]
    counts[name] = (len(found), len(turns), sum(len(m.tool_calls) for m in turns))
  assert list(counts.values()) == [(200, 2454, 1164), (50, 112, 68), (300, 957, 211)]
  with tarfile.open(root / "adp_samples/adp_samples.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  read = {
    path.parent.name: sum(1 for _ in read_trajectories(path, "adp"))
    for path in tmp_path.rglob("sample_std.json")
  }
  assert len(read) == 17 and sum(read.values()) == 85


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
      rewards=build_rewards(RewardConfig(parts=("pivot",))),
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
  rewards = build_rewards(RewardConfig(parts=("pivot",)))
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
      rewards=build_rewards(RewardConfig(parts=("pivot",))),
      refusal=PivotScorer(PivotVerifierConfig()).refusal,
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
  rewards = build_rewards(RewardConfig(parts=("pivot",)))
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


def test_compressed_trajectories_read_the_same(tmp_path):
  row = talk({"role": "assistant", "content": "x"})
  path = tmp_path / "one.traj.gz"
  path.write_bytes(gzip.compress(json.dumps({"history": row["messages"]}).encode()))
  [found] = read_trajectories(path, "openai")
  assert found.messages[1] == Message("assistant", "x") and found.name == "one.traj.gz"
