"""The service desk: its tools against recorded calls, and what an episode pays."""

import asyncio
import gzip
import json
import os
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.rollout.integrity import play_turns
from agentjax.tools.function import ToolError
from agentjax.tools.protocol import ToolContext
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, ToolCall
from agentjax.world.world import Site
from agentjax.worlds.retail import RetailConfig
from agentjax.worlds.retail.desk import Desk, Visit, read_records
from agentjax.worlds.retail.world import says, score_writes

_DATA = os.environ.get("AGENTJAX_DATA")
needs_data = pytest.mark.skipif(_DATA is None, reason="needs AGENTJAX_DATA")


def folder():
  return pathlib.Path(_DATA or "") / "tau_bench" / "retail"


@needs_data
def test_recorded_calls_give_the_recorded_results_and_records():
  desk = Desk()
  desk.records = read_records(folder())
  tools = {tool.name: tool for tool in desk.tools}
  before = json.dumps(desk.records, sort_keys=True)

  async def replay(task):
    context = ToolContext(task["id"], 0, 1.0)
    for call, wanted in zip(task["actions"], task["golden"]["observations"], strict=True):
      result = await tools[call["name"]](call["arguments"], context)
      wanted = wanted if isinstance(wanted, str) else json.dumps(wanted)
      failed = wanted.startswith("Error")
      assert (result.output.lower() == wanted.lower()) if failed else result.output == wanted
      assert failed == (result.status == "error")
    assert desk.visit(task["id"]).changed == task["golden"]["changed"]
    await desk.end_episode(task["id"])
    assert desk.visit(task["id"]).changed == {}

  async def main():
    for name in ("train", "test", "dev"):
      with gzip.open(folder() / f"tasks_{name}.jsonl.gz", "rt") as rows:
        for row in rows:
          await replay(json.loads(row))

  asyncio.run(main())
  assert json.dumps(desk.records, sort_keys=True) == before  # episodes change copies


def world(**settings):
  made = RetailConfig(**settings).build(Site(ToolRegistry([]), max_turns=30))
  splits = made.tasks(DataConfig(path=str(folder()), train_size=None, test_size=None))
  return made, splits


def play(made, task, turns):
  return asyncio.run(play_turns(task, turns, made.environment))


@needs_data
def test_the_worked_solution_is_paid_and_less_or_more_is_not():
  made, splits = world()
  assert (len(splits.train), len(splits.test)) == (495, 108)
  task = next(t for t in splits.test if t.metadata["outputs"] and t.metadata["changed"])
  right = play(made, task, task.demonstration)
  assert right.reward_parts["environment"].value == 1.0 and score_writes(right, task) == 1.0
  silent = play(made, task, (*task.demonstration[:-1], Message("assistant", "Done.")))
  assert silent.reward_parts["environment"].value == 0.0
  idle = play(made, task, task.demonstration[-1:])
  assert idle.reward_parts["environment"].value == 0.0 and score_writes(idle, task) == 0.0
  user = next(iter(read_records(folder())["users"]))
  address = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), "x")
  more = Message("assistant", "", (ToolCall("modify_user_address", {"user_id": user, **address}),))
  much = play(made, task, (more, *task.demonstration))
  assert much.reward_parts["environment"].value == 0.0 and 0 < score_writes(much, task) < 1
  assert len(world(idle=True)[1].train) == 500


@needs_data
def test_a_copy_that_goes_on_has_the_records_of_its_past():
  made, splits = world()
  task = next(t for t in splits.train if len(t.demonstration) == 3)
  write, _, last = task.demonstration

  async def main():
    first, twin = made.environment(task), made.environment(task)
    from agentjax.world.environment import Action

    await first.reset(task, 0)
    await first.step(Action("", write.tool_calls))
    await twin.resume(task, 0, first.snapshot())
    ended = await twin.step(Action(last.content))
    await first.close()
    await twin.close()
    return ended

  assert asyncio.run(main()).reward.value == 1.0


def test_what_an_answer_must_say():
  assert says("That is $1,054.20, Ann.", ["1054.2", "ann"]) and not says("1", ["1", "2"])
  assert says("", [])


def test_arithmetic_is_no_program():
  desk = Desk()
  assert asyncio.run(desk.calculate("(1 + 2) * 3.5 - -1")) == "11.5"
  for text in ("__import__('os')", "2 ** 9", "1 / 0", "(" * 150, "a", "'x' * 3", ""):
    with pytest.raises(Exception, match="no value"):
      asyncio.run(desk.calculate(text))
  with pytest.raises(ToolError, match="201"):  # reading it takes the trainer's time
    asyncio.run(desk.calculate("1" * 201))


def test_an_order_is_changed_in_the_episode_alone():
  desk = Desk()
  order = {"status": "pending", "user_id": "u", "payment_history": [], "items": []}
  desk.records = {"orders": {"#W1": order}, "users": {"u": {"payment_methods": {}}}, "products": {}}
  tools = {tool.name: tool for tool in desk.tools}
  call = {"order_id": "#W1", "reason": "no longer needed"}
  result = asyncio.run(tools["cancel_pending_order"](call, ToolContext("a", 0, 1.0)))
  assert json.loads(result.output)["status"] == "cancelled"
  assert desk.visit("b").changed == {} and order["status"] == "pending"
  assert Visit(desk.records).find("orders", "#W1")["status"] == "pending"
  again = asyncio.run(tools["cancel_pending_order"](call, ToolContext("a", 0, 1.0)))
  assert again.output == "error: non-pending order cannot be cancelled"


def test_a_user_who_has_moved_is_found_there_in_the_episode_alone():
  desk = Desk()
  names = ("address1", "address2", "city", "state", "country", "zip")
  user = {"name": {"first_name": "Ann", "last_name": "Lee"}, "address": dict.fromkeys(names, "1")}
  desk.records = {"orders": {}, "users": {"u": user}, "products": {}}
  tools = {tool.name: tool for tool in desk.tools}

  def call(name, episode, **arguments):
    return asyncio.run(tools[name](arguments, ToolContext(episode, 0, 1.0))).output

  call("modify_user_address", "a", user_id="u", **dict.fromkeys(names, "2"))
  found = {
    (episode, zip): call(
      "find_user_id_by_name_zip", episode, first_name="ann", last_name="lee", zip=zip
    )
    for episode in "ab"
    for zip in "12"
  }
  gone = "error: user not found"
  assert found == {("a", "1"): gone, ("a", "2"): "u", ("b", "1"): "u", ("b", "2"): gone}


def test_a_run_without_its_folder_is_refused():
  from agentjax.tools.build import ToolsConfig

  with pytest.raises(ConfigError, match="config.data.path"):
    RetailConfig().check_run(ToolsConfig(), DataConfig(), "config")
