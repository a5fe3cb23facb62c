"""A conversation at the terminal: tools, limits, permissions, and a transcript read back."""

import asyncio
import io
import json

import pytest

from agentjax.adapters.terminal_agent import TerminalPerson, talk
from agentjax.config import ConfigError
from agentjax.recipes.semaclaw import AccessConfig
from agentjax.rollout.seat_config import SeatConfig
from agentjax.rollout.seats import SeatPlayer
from agentjax.training import Experiment
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.record import Message, Status, ToolCall
from agentjax.trajectory.store import read_store


class Helper:
  """Calls the calculator for what the user asks, and repeats its answer."""

  def __init__(self):
    self.heard = []

  async def reply(self, messages, *, key):
    raise AssertionError("it has tools, so it is asked for a turn")

  async def turn(self, messages, tools, *, key):
    self.heard.append(messages)
    assert [tool.name for tool in tools] == ["calculator"]
    if messages[-1].role == "user":
      return Message("assistant", "", (ToolCall("calculator", {"expression": "2+3"}),))
    return Message("assistant", f"It is {messages[-1].content}.")


class HelperSeat(SeatConfig):
  def __init__(self, helper):
    self.__dict__["helper"] = helper

  def play(self, bank, name):
    return SeatPlayer(name, bank.chat, service=self.helper)


def experiment(**rollout):
  made = Experiment()
  made.rl.steps = 1  # nothing is trained here; a config trains something
  made.chat.system_prompt = "Be kind."
  made.rollout.max_turns = 8
  for name, value in rollout.items():
    setattr(made.rollout, name, value)
  return made


def converse(*lines, made=None, **settings):
  helper, out = Helper(), io.StringIO()
  trajectory = talk(made or experiment(), HelperSeat(helper), lines=lines, stdout=out, **settings)
  return trajectory, out.getvalue(), helper


def test_a_conversation_with_a_tool_is_a_trajectory_that_is_read_back(tmp_path):
  path = tmp_path / "talks.store"
  trajectory, shown, helper = converse("2+3?", "again", transcript=path)
  assert trajectory.status is Status.OK and trajectory.answer == "It is 5."
  assert shown.count("It is 5.") == 2 and 'calculator {"expression": "2+3"}' in shown
  assert [m.role for m in helper.heard[-1]] == [
    "system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool",
  ]  # fmt: skip
  assert helper.heard[0][0].content == "Be kind."
  converse("2+3?", transcript=path)
  first, second = read_store(path)
  check_trajectory(first)
  assert [len(t.tools) for t in (first, second)] == [2, 1]
  assert [t.task_id for t in (first, second)] == [0, 1] and not first.reward.valid


def test_permissions_stand_between_the_agent_and_its_tools():
  made = experiment()
  made.guards.rules = AccessConfig(rules=("ask agent calculator",))
  trajectory, shown, _ = converse("2+3?", made=made)
  assert trajectory.tools[0].status == "denied" and "denied" in shown
  assert trajectory.metadata["guards"][0]["decision"] == "deny"


def test_limits_end_a_conversation_and_the_person_reads_why():
  trajectory, shown, _ = converse("2+3?", "again", "and again", made=experiment(max_turns=3))
  assert trajectory.status is Status.TRUNCATED and "[truncated: " in shown


def test_lines_come_from_a_stream_and_its_end_is_goodbye():
  out, stdin = io.StringIO(), io.StringIO("\n2+3?\n")
  trajectory = talk(experiment(), HelperSeat(Helper()), stdin=stdin, stdout=out)
  assert trajectory.answer == "It is 5." and ">" not in out.getvalue()
  assert talk(experiment(), HelperSeat(Helper()), stdin=io.StringIO(""), stdout=out) is None


def test_a_line_of_bytes_that_are_no_text_is_heard():
  stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8")
  helper = Helper()
  talk(experiment(), HelperSeat(helper), stdin=stdin, stdout=io.StringIO())
  assert helper.heard[0][-1].content == "caf\ufffd"


def test_a_terminal_shows_what_the_agent_says_and_does_not_obey_it():
  class Rude(Helper):
    async def turn(self, messages, tools, *, key):
      return Message("assistant", "\x1b]0;x\x07\tGrüße\n\x1b[8mhid\rden")

  out = io.StringIO()
  talk(experiment(), HelperSeat(Rude()), lines=["hi"], stdout=out)
  assert "\\x1b]0;x\\x07\tGrüße\n\\x1b[8mhid\\rden\n" in out.getvalue()
  assert "\x1b" not in out.getvalue()


def test_two_conversations_at_once_never_write_over_each_other(tmp_path):
  path = tmp_path / "deep" / "talks.store"

  class Second(Helper):
    async def turn(self, messages, tools, *, key):
      with pytest.raises(ConfigError, match=r"talks.store is in use by another process"):
        await asyncio.to_thread(converse, "2+3?", transcript=path)
      return await super().turn(messages, tools, key=key)

  first = talk(
    experiment(), HelperSeat(Second()), lines=["a"], transcript=path, stdout=io.StringIO()
  )
  assert first.status is Status.OK
  converse("2+3?", transcript=path)
  assert [t.task_id for t in read_store(path)] == [0, 1]


def test_a_conversation_whose_reader_has_gone_is_kept(tmp_path):
  class Gone(io.StringIO):
    def write(self, text):
      raise BrokenPipeError(32, "Broken pipe")

  path = tmp_path / "talks.store"
  talk(experiment(), HelperSeat(Helper()), lines=["2+3?"], transcript=path, stdout=Gone())
  (kept,) = read_store(path)
  assert kept.status is Status.ENV_ERROR and kept.segments


def test_a_person_who_is_stopped_says_nothing_more():
  async def main():
    stop = asyncio.Event()

    class Silent(io.StringIO):
      def readline(self, size=-1):
        stop_seen.wait(5)
        return "late\n"

    import threading

    stop_seen = threading.Event()
    person = TerminalPerson(Silent(), io.StringIO(), stop)
    stop.set()
    try:
      return await person.line()
    finally:
      stop_seen.set()

  assert asyncio.run(main()) is None


def test_an_agent_that_cannot_start_is_an_error_of_the_settings():
  class Broken(Helper):
    async def turn(self, messages, tools, *, key):
      raise RuntimeError("no model")

  made = experiment(max_total_tokens=8)
  with pytest.raises(ConfigError, match="cannot begin: the prompt has"):
    talk(made, HelperSeat(Broken()), lines=["a"], stdout=io.StringIO())
  out = io.StringIO()
  ended = talk(experiment(), HelperSeat(Broken()), lines=["a"], stdout=out)
  assert ended.status is Status.ENV_ERROR and "no model" in out.getvalue()


def test_calls_and_results_are_joined_for_an_endpoint(monkeypatch):
  from agentjax.adapters.chat_endpoint import agent, judge
  from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
  from agentjax.tools.calculator import CalculatorTool

  asked = []

  async def post(config, path, body):
    asked.append(json.loads(json.dumps(body)))
    calls = [{"id": "x", "function": {"name": "calculator", "arguments": arguments}}
             for arguments in ('{"expression": "1"}', "{broken")]  # fmt: skip
    return {"choices": [{"message": {"content": None, "tool_calls": calls}}]}

  monkeypatch.setattr(judge, "post", post)
  config = HttpJudgeConfig(base_url="http://x/v1", model="m")
  said = (
    Message("user", "?"),
    Message("assistant", "", (ToolCall("calculator", {"expression": "2"}),)),
    Message("tool", "2"),
    Message("tool", "lost"),
  )
  reply = asyncio.run(agent.HttpAgent(config).turn(said, [CalculatorTool()], key=1))
  assert [dict(call.arguments) for call in reply.tool_calls] == [{"expression": "1"}, {}]
  (body,) = asked
  assert body["tools"][0]["function"]["name"] == "calculator"
  made, result, lost = body["messages"][1:]
  assert made["tool_calls"][0]["id"] == result["tool_call_id"] and result["role"] == "tool"
  assert lost["role"] == "user"
