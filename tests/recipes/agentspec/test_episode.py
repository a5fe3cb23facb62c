"""What rules mean while an episode runs."""

import asyncio
import os

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.agentspec import AgentSpecConfig
from agentjax.rollout.guards import GuardsConfig
from agentjax.trajectory.record import Message, Status, ToolCall
from agentjax.world.environment import Action
from agentjax.worlds.number_game.game import GuessNumber, guess_number_tasks
from tests.rollout.guards.conftest import TASK, shell
from tests.rollout.guards.test_permissions import Person

THINK = "not done: rule @x objects. Think again, and choose another way."


def rule(name="x", trigger="shell", check="is_destructive", enforce="skip"):
  return f"rule @{name} trigger {trigger} check {check} enforce {enforce} end\n"


def explodes(situation):
  raise OSError("no answer")


def test_a_call_that_no_rule_is_about_runs_as_if_there_were_none(play):
  played = play(shell("ls"), rules=rule())
  assert played.ran == ["ls"]
  assert played.outputs == [["ran ls"]]
  assert played.guards == []


@pytest.mark.parametrize(
  ("enforce", "ran", "output", "decision"),
  [
    ("skip", [], "skipped", "skip"),
    ("none", ["rm -rf x"], "ran rm -rf x", "continue"),
    ("llm_self_reflect", [], THINK, "reflect"),
    ("user_inspection", [], "skipped", "skip"),
  ],
)
def test_an_enforcement_decides_over_the_call(play, enforce, ran, output, decision):
  played = play(shell("rm -rf x"), rules=rule(enforce=enforce))
  assert played.ran == ran
  assert played.outputs == [[output]]
  assert played.guards == [("rule @x", decision)]
  (step,) = played.steps
  assert step.tools[0].status == ("ok" if ran else "denied")
  assert step.tools[0].arguments == {"command": "rm -rf x"}
  assert (step.status, step.terminated) == (Status.OK, False)


@pytest.mark.parametrize(
  ("stop_status", "status", "terminated", "truncated"),
  [
    ("policy_error", Status.POLICY_ERROR, True, False),
    ("truncated", Status.TRUNCATED, False, True),
    ("ok", Status.OK, True, False),
  ],
)
def test_stop_ends_the_episode_and_runs_no_later_call_of_the_turn(
  play, stop_status, status, terminated, truncated
):
  action = shell("ls", "rm -rf x", "pwd")
  played = play(action, rules=rule(enforce="stop"), stop_status=stop_status)
  assert played.ran == ["ls"]
  (step,) = played.steps
  assert (step.status, step.terminated, step.truncated) == (status, terminated, truncated)
  assert step.reason == "rule @x ended the episode at before_action"
  assert [record.status for record in step.tools] == ["ok", "denied", "denied"]
  assert step.answer is None


def test_a_fault_of_the_system_is_not_blamed_on_the_policy_by_a_stop(play):
  rules = rule(enforce="stop") + rule("y", trigger="after_action", check="true")
  played = play(shell("break", "rm -rf x"), rules=rules)
  assert played.steps[0].status is Status.ENV_ERROR
  assert [record.status for record in played.steps[0].tools] == ["infra_error", "denied"]
  assert played.guards == [("rule @x", "stop")]  # a fault is nobody's action


def test_all_enforcements_of_a_rule_are_carried_out_and_the_strictest_decides(play):
  log = 'invoke_action(log, {"command": tool_input["command"]})'
  played = play(shell("rm -rf x"), rules=rule(enforce=f"skip {log} none tool:log:calls=0"))
  assert (played.ran, played.logged) == ([], ["rm -rf x"])
  assert played.outputs == [["skipped\nlog: ran rm -rf x"]]
  (record,) = played.steps[0].guards
  assert record.decision == "skip"
  assert record.reason == "skip; invoke_action log: ok; none; tool:log:calls=0"


def test_rules_act_in_their_order_until_one_refuses(play):
  rules = (
    rule("first", check="true", enforce='invoke_action(log, {"command": "1"})')
    + rule("second", enforce="skip")
    + rule("third", check="true", enforce='invoke_action(log, {"command": "3"})')
  )
  played = play(shell("rm -rf x"), shell("ls"), rules=rules)
  assert played.guards[:2] == [("rule @first", "continue"), ("rule @second", "skip")]
  assert played.logged == ["1", "1", "3"]
  assert played.outputs[1] == ["ran ls\nlog: ran 1\nlog: ran 3"]


def test_the_rules_of_the_file_come_before_those_of_the_text(play, tmp_path):
  (tmp_path / "a.rules").write_text(rule("file", enforce="skip"))
  rules = rule("text", enforce="stop")
  played = play(shell("rm -rf x"), rules=rules, file=str(tmp_path / "a.rules"))
  assert played.guards == [("rule @file", "skip")]


@pytest.mark.parametrize("check", [f"{__name__}:explodes", f"!{__name__}:explodes"])
def test_a_predicate_that_raises_denies_and_is_logged(play, caplog, check):
  played = play(shell("ls"), rules=rule(check=check, enforce="none"))
  assert played.ran == []
  assert played.outputs == [["denied: rule @x could not be checked"]]
  (record,) = played.steps[0].guards
  assert (record.decision, record.reason) == ("deny", "a predicate raised OSError: no answer")
  assert "rule @x cannot be checked" in caplog.text


def test_an_invocation_that_fails_denies(play):
  played = play(
    shell("ls"), rules=rule(check="true", enforce='invoke_action(log, {"command": "fail"})')
  )
  assert played.ran == []
  assert played.outputs == [["denied: rule @x\nlog: it failed"]]


def test_an_invocation_takes_what_another_one_put_out(play):
  inner = 'invoke_action(log, {"command": user_input})'
  enforce = f'invoke_action(log, {{"command": {inner}}})'
  played = play(shell("ls"), rules=rule(check="true", enforce=enforce))
  assert played.logged == ["list the files", "ran list the files"]
  assert played.ran == ["ls"]


def test_reflection_is_bounded_by_turns_in_a_row(play):
  bad, good = shell("rm -rf x", "rm -rf y"), shell("ls")
  rules = rule(enforce="llm_self_reflect")
  played = play(bad, bad, bad, bad, bad, good, bad, rules=rules)
  decisions = [[g.decision for g in step.guards] for step in played.steps]
  # Three turns are sent back, each once however many calls it has; then one is skipped.
  assert decisions == [["reflect"] * 2] * 3 + [["skip"] * 2, ["reflect"] * 2, [], ["reflect"] * 2]
  assert played.ran == ["ls"]
  assert [s.guards[0].decision for s in play(bad, rules=rules, max_reflections=0).steps] == ["skip"]


def test_settings_bind_later_calls_of_a_tool(play):
  rules = rule(check="true", enforce="tool:shell:timeout=0.05 tool:shell:calls=2")
  played = play(shell("ls"), shell("slow"), shell("pwd"), rules=rules)
  assert [step.tools[0].status for step in played.steps] == ["ok", "timeout", "denied"]
  assert played.outputs[2] == ["denied: 2 calls of shell were made, all that are allowed"]
  assert played.guards[-1] == ("setting tool:shell:calls", "deny")


@pytest.mark.parametrize(
  ("enforce", "output", "status"),
  [
    ("skip", "skipped", "denied"),
    ("none", "it failed", "error"),
    ("llm_self_reflect", f"it failed\n{THINK}", "error"),
    ('invoke_action(log, {"command": observation})', "it failed\nlog: ran it failed", "error"),
  ],
)
def test_after_an_action_its_result_is_judged(play, enforce, output, status):
  played = play(
    shell("fail"), rules=rule(trigger="after_action", check="tool_failed", enforce=enforce)
  )
  assert played.ran == ["fail"]
  assert played.outputs == [[output]]
  assert played.steps[0].tools[0].status == status


def test_a_stop_after_an_action_ends_the_episode(play):
  rules = rule(trigger="after_action", check='observation_matches("ran l")', enforce="stop")
  played = play(shell("pwd"), shell("ls"), rules=rules)
  assert [step.status for step in played.steps] == [Status.OK, Status.POLICY_ERROR]
  assert played.ran == ["pwd", "ls"]


def test_an_answer_may_be_refused_and_given_again(play):
  rules = rule(trigger="finish", check='!turns_over(1) argument_matches("text", "3")')
  played = play(Action("#### 3"), Action("#### 3"), rules=rules)
  refused, taken = played.steps
  assert refused.observation.messages == (Message("user", "skipped"),)
  assert not refused.terminated
  assert (taken.terminated, taken.answer) == (True, "3")
  stopped = play(Action("#### 3"), rules=rule(trigger="finish", check="true", enforce="stop"))
  assert stopped.steps[0].status is Status.POLICY_ERROR
  assert stopped.steps[0].answer is None


def test_a_turn_that_was_cut_off_is_no_answer(play):
  played = play(Action("####", truncated=True), rules=rule(trigger="finish", check="true"))
  assert played.steps[0].truncated


def test_a_change_of_state_is_an_observation_that_differs_from_the_last(play):
  rules = rule(trigger="state_change", check="true", enforce='invoke_action(log, {"command": "!"})')
  played = play(shell("ls"), shell("ls"), shell("pwd"), rules=rules)
  assert played.outputs == [["ran ls\nlog: ran !"], ["ran ls"], ["ran pwd\nlog: ran !"]]
  withheld = play(shell("ls"), rules=rule(trigger="state_change", check="true"))
  assert withheld.outputs == [["skipped"]]


def test_an_environment_without_tools_is_guarded_by_its_observations(play):
  (task,) = guess_number_tasks(1)
  played = play(
    Action("1"),
    Action("2"),
    task=task,
    make=lambda task: GuessNumber(),
    rules=rule(trigger="state_change", check="turns_over(1)", enforce="stop")
    + rule("never", trigger="finish", check="true", enforce="stop"),
  )
  # The second answer is the first one's again.
  assert [step.status for step in played.steps] == [Status.OK, Status.OK]
  assert played.outputs == [["higher"], ["higher"]]


def test_rules_see_the_calls_before_and_results_of_earlier_turns_only(play):
  rules = rule(check="is_repeated") + rule("y", check="output_characters_over(4)", enforce="skip")
  played = play(shell("ls", "ls", "pwd"), shell("cat"), rules=rules)
  assert played.outputs == [["ran ls", "skipped", "ran pwd"], ["skipped"]]
  assert played.guards == [("rule @x", "skip"), ("rule @y", "skip")]


def test_after_an_action_its_own_call_is_not_among_those_before(play):
  played = play(shell("ls", "ls"), rules=rule(trigger="after_action", check="is_repeated"))
  assert played.outputs == [["ran ls", "skipped"]]


def test_calls_that_cannot_be_run_ask_nobody(play):
  wrong = Action("", (ToolCall("oracle", {}), ToolCall("shell", {}), ToolCall("shell", {}, "torn")))
  played = play(wrong, rules=rule(trigger="any", check="true", enforce="stop"))
  assert played.steps[0].status is Status.POLICY_ERROR  # by the observation
  assert {g.event for g in played.steps[0].guards} == {"state_change"}
  assert [record.status for record in played.steps[0].tools] == ["error"] * 3


def test_a_snapshot_holds_what_guards_remember(play):
  rules = rule(check="is_repeated") + rule("y", check="is_destructive", enforce="llm_self_reflect")
  rules += rule("z", check='input_matches("pwd")', enforce="tool:shell:calls=2")
  before = play(shell("ls", "pwd"), shell("rm -rf x"), rules=rules, max_reflections=1)
  state = asyncio.run(before.environment.snapshot())

  async def go_on(environment):
    return [await environment.step(shell(c)) for c in ("ls", "rm -rf x", "cat")]

  straight = asyncio.run(go_on(before.environment))
  again = play(rules=rules, max_reflections=1).environment
  again.restore(state)
  branched = asyncio.run(go_on(again))
  assert branched == straight
  assert [s.guards[0].guard for s in straight] == ["setting tool:shell:calls"] * 3


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"text": "rule"}, "config.guards.rules.text:1:5: expected '@'"),
    ({"file": "no/such/file"}, "config.guards.rules.file='no/such/file' cannot be read"),
    ({"triggers": ("a b",)}, "config.guards.rules.triggers='a b'"),
    ({"max_reflections": -1}, "config.guards.rules.max_reflections=-1"),
    ({"tool_timeout": 0.0}, "config.guards.rules.tool_timeout=0.0"),
  ],
)
def test_settings_that_cannot_be_used_are_refused(settings, said):
  with pytest.raises(ConfigError) as caught:
    AgentSpecConfig(**settings).validate()
  assert said in str(caught.value)


def test_the_file_of_rules_is_saved_by_its_absolute_path():
  config = GuardsConfig(rules=AgentSpecConfig(file="shell.rules"))
  config.make_paths_absolute()
  assert config.to_dict()["rules"]["file"] == os.path.abspath("shell.rules")


def test_modules_of_predicates_must_exist(play):
  with pytest.raises(ConfigError, match="predicates: 'no_such_module' cannot be imported"):
    play(predicates=("no_such_module",))


def test_no_rules_guard_nothing(play):
  played = play(shell("ls"), rules="// none")
  assert type(played.environment).__name__ == "QuestionEnvironment"


def test_the_reset_shows_the_task_unchanged(play):
  environment = play(rules=rule()).environment
  assert asyncio.run(environment.reset(TASK, 1)).messages == TASK.prompt


def test_a_person_decides_over_a_call_and_the_answer_is_recorded(play):
  rules = "rule @ask trigger shell check is_destructive enforce user_inspection end"
  for granted in (True, False):
    person = Person(answer=granted)
    played = play(shell("rm -rf x"), rules=rules, channels=[person])
    assert played.ran == ["rm -rf x"] * granted
    assert person.asked[0].content == '{"command": "rm -rf x"}'
    (record,) = played.steps[0].guards
    word = "granted" if granted else "refused"
    assert record.reason == f"user_inspection: {word} (person)"


def test_in_training_nobody_is_asked_and_the_call_refused(play):
  rules = "rule @ask trigger shell check true enforce user_inspection end"
  played = play(shell("ls"), rules=rules)
  assert played.outputs == [["skipped"]]
  assert played.steps[0].guards[0].reason == "user_inspection: refused (nobody can be asked)"


@pytest.mark.parametrize("commands", [("ls", "pwd"), ("pwd", "ls")])
def test_calls_of_one_turn_know_no_results_of_it(play, commands):
  rules = rule(check="calls_over(1)") + rule("y", check="output_characters_over(0)", enforce="stop")
  assert play(shell(*commands), rules=rules).outputs == [[f"ran {commands[0]}", "skipped"]]
