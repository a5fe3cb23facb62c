"""Hooks: functions and commands around calls, answers and episodes."""

import asyncio
import json
import os
import signal
import sys
import time

import pytest

from agentjax.config import ConfigError
from agentjax.rollout.guards import GuardError, GuardsConfig, HookAnswer, HookConfig
from agentjax.trajectory.record import Status
from agentjax.world.environment import Action
from tests.rollout.guards.conftest import TASK, shell
from tests.rollout.guards.test_rules import WordConfig

EVENTS = []
ANSWERS = {}


def listens(event):
  EVENTS.append(event)
  return ANSWERS.get(event.event)


async def listens_too(event):
  return listens(event)


async def hangs(event):
  await asyncio.sleep(60)


def hangs_in_a_thread(event):
  time.sleep(1)


def breaks(event):
  raise RuntimeError("broken")


@pytest.fixture(autouse=True)
def forget():
  EVENTS.clear()
  ANSWERS.clear()


def hook(event="before_tool", function="listens", **settings):
  return HookConfig(event=event, run=f"{__name__}:{function}", **settings)


def command(program, event="before_tool", **settings):
  return HookConfig(
    event=event, kind="command", run=f"{sys.executable} -S -c '{program}'", **settings
  )


@pytest.mark.parametrize("function", ["listens", "listens_too"])
def test_hooks_hear_of_the_start_of_calls_and_of_the_end(play, function):
  moments = ("episode_start", "before_tool", "after_tool", "stop")
  played = play(
    shell("ls"), Action("#### 3"), hooks=tuple(hook(moment, function) for moment in moments)
  )
  assert [(e.event, e.turn) for e in EVENTS] == [
    ("episode_start", -1), ("before_tool", 0), ("after_tool", 0), ("stop", 1),
  ]  # fmt: skip
  _, before, after, stop = EVENTS
  assert (before.tool_name, before.tool_input) == ("shell", {"command": "ls"})
  assert (after.tool_status, after.tool_output) == ("ok", "ran ls")
  assert stop.text == "#### 3"
  assert {e.user_input for e in EVENTS} == {"list the files"}
  assert {e.episode for e in EVENTS} == {"made/7/5"}
  assert played.guards == []  # nothing was changed
  assert played.steps[-1].answer == "3"


@pytest.mark.parametrize(
  ("answer", "ran", "output", "decision"),
  [
    (HookAnswer("reject", "no"), [], "denied: no", "deny"),
    (HookAnswer("reject"), [], "denied", "deny"),
    (HookAnswer("skip", "hush"), [], "skipped", "skip"),
    (HookAnswer(reason="fine"), ["ls"], "ran ls", "continue"),
    (HookAnswer(updated_input={"command": "pwd"}), ["pwd"], "ran pwd", "continue"),
    (HookAnswer(additional_context="mind"), ["ls"], "ran ls\nmind", "continue"),
  ],
)
def test_a_hook_before_a_tool_decides_over_the_call(play, answer, ran, output, decision):
  ANSWERS["before_tool"] = answer
  played = play(shell("ls"), hooks=(hook(),))
  assert (played.ran, played.outputs) == (ran, [[output]])
  (record,) = played.steps[0].guards
  assert (record.guard, record.decision) == (f"hook {__name__}:listens", decision)
  assert record.arguments == answer.updated_input
  assert played.steps[0].tools[0].arguments == {"command": "ls"}  # what the policy wrote


def test_changed_arguments_are_checked_again_and_seen_by_rules(play):
  ANSWERS["before_tool"] = HookAnswer(updated_input={"command": 3})
  played = play(shell("ls"), hooks=(hook(),))
  assert played.outputs == [
    ["error: invalid arguments of shell: command: 3 is not of type 'string'"]
  ]
  ANSWERS["before_tool"] = HookAnswer(updated_input={"command": "rm -rf x"})
  assert play(shell("ls"), hooks=(hook(),), rules=WordConfig(word="rm")).ran == []


@pytest.mark.parametrize(
  ("answer", "output", "status"),
  [
    (HookAnswer(updated_output="secret"), "secret", "ok"),
    (HookAnswer(additional_context="mind"), "ran ls\nmind", "ok"),
    (HookAnswer("reject", "no"), "denied: no", "denied"),
    (HookAnswer("skip"), "skipped", "denied"),
  ],
)
def test_a_hook_after_a_tool_decides_over_its_output(play, answer, output, status):
  ANSWERS["after_tool"] = answer
  played = play(shell("ls"), hooks=(hook("after_tool"),))
  assert (played.ran, played.outputs) == (["ls"], [[output]])
  assert played.steps[0].tools[0].status == status


@pytest.mark.parametrize("event", ["before_tool", "after_tool", "stop"])
def test_an_abort_ends_the_episode(play, event):
  ANSWERS[event] = HookAnswer(abort=True, reason="enough")
  action = Action("#### 3") if event == "stop" else shell("ls")
  played = play(action, hooks=(hook(event),))
  (step,) = played.steps
  assert (step.status, step.reason, step.answer) == (Status.POLICY_ERROR, "enough", None)


def test_a_hook_may_send_the_policy_back_to_work(play):
  ANSWERS["stop"] = HookAnswer("reject", "not yet")
  played = play(Action("#### 3"), hooks=(hook("stop"),))
  assert played.outputs == [["denied: not yet"]]
  assert not played.steps[0].terminated


def test_a_hook_may_add_to_the_prompt_or_refuse_the_episode(play):
  ANSWERS["episode_start"] = HookAnswer(additional_context="today is Monday")
  environment = play(hooks=(hook("episode_start"),)).environment
  first = asyncio.run(environment.reset(TASK, 5))
  assert first.messages[-1].content == "list the files\ntoday is Monday"
  ANSWERS["episode_start"] = HookAnswer("reject", "closed")
  with pytest.raises(GuardError, match="refused the episode: closed"):
    play(hooks=(hook("episode_start"),))


def test_a_branch_begins_without_the_hooks_of_the_start_and_knows_the_task(play):
  ANSWERS["episode_start"] = HookAnswer(additional_context="today is Monday")
  hooks = (hook("episode_start"), hook("stop"))
  origin = play(shell("ls"), hooks=hooks).environment
  state = asyncio.run(origin.snapshot())
  branch = play(hooks=hooks).environment
  EVENTS.clear()
  asyncio.run(branch.resume(TASK, 5, state))
  assert EVENTS == []
  asyncio.run(branch.step(Action("#### 3")))
  assert [(e.event, e.turn, e.user_input) for e in EVENTS] == [("stop", 1, "list the files")]


def test_hooks_act_in_order_and_each_sees_what_the_one_before_changed(play):
  ANSWERS["before_tool"] = HookAnswer(updated_input={"command": "pwd"})
  play(shell("ls"), hooks=(hook(), hook(function="listens_too")))
  assert [e.tool_input["command"] for e in EVENTS] == ["ls", "pwd"]
  EVENTS.clear()
  ANSWERS["before_tool"] = HookAnswer("skip")
  play(shell("ls"), hooks=(hook(), hook(function="listens_too")))
  assert len(EVENTS) == 1


@pytest.mark.parametrize(
  ("settings", "heard"),
  [
    ({"tools": "sh*"}, True),
    ({"tools": "s"}, False),
    ({"arguments": r'"command": "l'}, True),
    ({"arguments": "^l"}, False),
  ],
)
def test_a_hook_hears_only_of_what_it_asked_for(play, settings, heard):
  play(shell("ls"), hooks=(hook(**settings),))
  assert bool(EVENTS) is heard


@pytest.mark.parametrize(
  ("function", "reason"),
  [
    ("hangs", "no answer within 0.05 s"),
    ("hangs_in_a_thread", "no answer within 0.05 s"),
    ("breaks", "RuntimeError: broken"),
  ],
)
def test_a_hook_that_fails_denies(play, caplog, function, reason):
  played = play(shell("ls"), hooks=(hook(function=function, timeout=0.05),))
  assert (played.ran, played.outputs) == ([], [["denied: a check failed"]])
  (record,) = played.steps[0].guards
  assert record.decision == "deny" and reason in record.reason
  assert "which denies" in caplog.text


@pytest.mark.parametrize(
  ("answer", "reason"),
  [
    (True, "returned bool instead of a HookAnswer"),
    (HookAnswer("maybe"), "allowed: approve, reject, skip"),
    (HookAnswer(reason=3), "reason=3 has the wrong type"),
    (HookAnswer(updated_input="x"), "updated_input='x' has the wrong type"),
    (HookAnswer(updated_output="x"), "updated_output has no meaning at before_tool"),
  ],
)
def test_an_answer_that_makes_no_sense_denies(play, answer, reason):
  ANSWERS["before_tool"] = answer
  played = play(shell("ls"), hooks=(hook(),))
  assert played.ran == []
  assert reason in played.steps[0].guards[0].reason


def test_a_command_is_told_the_event_and_answers_in_json(play, tmp_path):
  file = tmp_path / "event.json"
  program = (
    "import sys, json; e = json.load(sys.stdin); "
    f'json.dump(e, open("{file}", "w")); '
    'print(json.dumps({"updatedInput": {"command": "pwd"}, "additionalContext": "so"}))'
  )
  played = play(shell("ls"), hooks=(command(program),))
  assert (played.ran, played.outputs) == (["pwd"], [["ran pwd\nso"]])
  told = json.loads(file.read_text())
  assert (told["event"], told["tool_name"]) == ("before_tool", "shell")
  assert told["tool_input"] == {"command": "ls"}


@pytest.mark.parametrize(
  ("program", "decision", "reason"),
  [
    ("", "", ""),
    ('print("""{"decision": "reject", "reason": "no"}""")', "deny", "no"),
    (
      'import sys; print("bad day", file=sys.stderr); sys.exit(3)',
      "deny",
      "exit status 3: bad day",
    ),
    ('print("hello")', "deny", "its output is no JSON"),
    ('print("""{"verdict": 1}""")', "deny", "must be a JSON object with some of decision"),
    ('print("""{"decision": []}""")', "deny", "decision=[]"),
  ],
)
def test_what_a_command_writes_and_how_it_exits_decides(play, program, decision, reason):
  played = play(shell("ls"), hooks=(command(program),))
  assert played.ran == ([] if decision else ["ls"])
  records = played.steps[0].guards
  assert [r.decision for r in records] == [decision] * bool(decision)
  assert all(reason in r.reason for r in records)


def test_it_is_said_which_commands_run_on_this_machine(play, caplog):
  play(hooks=(command("pass"), command("pass")))
  (said,) = [r.getMessage() for r in caplog.records if "outside every sandbox" in r.getMessage()]
  assert said.count("pass") == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_command_is_killed_with_its_children_at_its_end_or_when_time_is_up(play, tmp_path, waits):
  file = tmp_path / "pid"
  program = (
    'import subprocess, time; p = subprocess.Popen(["sleep", "60"]); '
    f'open("{file}", "w").write(str(p.pid)); time.sleep({60 * waits})'
  )
  start = time.monotonic()
  played = play(shell("ls"), hooks=(command(program, timeout=1.0 if waits else 30.0),))
  assert [g.reason for g in played.steps[0].guards] == ["no answer within 1 s"] * waits
  child = int(file.read_text())
  while os.path.exists(f"/proc/{child}") and not _is_zombie(child):
    assert time.monotonic() - start < 30, "the command's child lives on"
    time.sleep(0.02)


def test_a_command_whose_child_has_fled_holds_up_nobody(play, tmp_path):
  file = tmp_path / "pid"
  program = (
    'import subprocess; p = subprocess.Popen(["sleep", "60"], start_new_session=True); '
    f'open("{file}", "w").write(str(p.pid))'
  )
  start = time.monotonic()
  played = play(shell("ls"), hooks=(command(program, timeout=50.0),))
  assert time.monotonic() - start < 30
  assert played.ran == ["ls"]
  os.kill(int(file.read_text()), signal.SIGKILL)


def _is_zombie(pid):
  with open(f"/proc/{pid}/stat") as file:
    return file.read().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"run": "f"}, "package.module:function"),
    ({"kind": "command", "run": "  "}, "a command"),
    ({"kind": "command", "run": "'unclosed"}, "a command"),
    ({"run": "m:f", "timeout": 0.0}, "timeout=0.0"),
    ({"run": "m:f", "arguments": "("}, "is no regular expression"),
    ({"run": "m:f", "event": "stop", "tools": "x"}, "which is about no tool"),
    ({"run": "m:f", "event": "sometimes"}, "'before_tool'"),
  ],
)
def test_settings_that_cannot_be_used_are_refused(settings, said):
  with pytest.raises(ConfigError) as caught:
    GuardsConfig(hooks=(HookConfig(**settings),)).validate()
  assert said in str(caught.value)
  assert "config.guards.hooks[0]" in str(caught.value)


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"run": "no.such:f"}, "no module .no."),
    ({"run": f"{__name__}:EVENTS"}, "a function"),
    ({"kind": "command", "run": "no-such-program --x"}, "a program of this machine"),
  ],
)
def test_hooks_that_do_not_exist_are_refused_before_the_run(play, settings, said):
  with pytest.raises(ConfigError, match=said):
    play(hooks=(HookConfig(**settings),))


def test_settings_of_hooks_survive_being_written_down():
  config = GuardsConfig(hooks=(hook(tools="sh*"), command("pass")), rules=WordConfig(word="rm"))
  assert GuardsConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
