"""Rules of any language: how a run chooses them, what they see and what their judgements do."""

import asyncio
import copy
import dataclasses
import json

import pytest
from absl import flags

from agentjax.config import ConfigError
from agentjax.fields import find_fields
from agentjax.rollout.guards import (
  Decision,
  Entry,
  GuardError,
  GuardsConfig,
  HookConfig,
  Judgement,
  PermissionConfig,
  RulesConfig,
  Verdict,
)
from agentjax.tools.egress import EgressConfig
from agentjax.training.flags import check_overrides, define_config_flag
from agentjax.trajectory.record import Message, Status, ToolRecord
from agentjax.world.environment import Action, Environment, Observation, Step
from tests.rollout.guards.conftest import shell
from tests.training.smoke import smoke_experiment

NAME = f"{__name__}:WordConfig"


@dataclasses.dataclass(unsafe_hash=True)
class WordConfig(RulesConfig):
  """Rules against one word.

  Attributes:
    word: what no text may hold.
    event: when it is looked for.
    decision: what becomes of the action.
    most: how often the word may be met before it counts.
    timeout: seconds that every call may take.
  """

  word: str = ""
  event: str = "before_action"
  decision: str = "skip"
  most: int = 0
  timeout: float | None = None

  def bind(self, registry, *, offered=(), bridge, path):
    if "shell" not in registry.schemas:
      raise ConfigError(f"{path}: no shell")
    return WordRules(self, bridge) if self.word else None


class WordRules:
  def __init__(self, config, bridge):
    self.config, self.bridge = config, bridge

  def listens_to(self, event):
    return event == self.config.event

  def start(self, episode, seed):
    return WordEpisode(self)


class WordEpisode:
  def __init__(self, rules):
    self.config, self.bridge, self.met, self.seen = rules.config, rules.bridge, 0, []

  def begin_turn(self):
    self.seen.clear()

  async def judge(self, situation, context):
    self.seen.append(dataclasses.replace(situation, steps=[*map(copy.copy, situation.steps)]))
    if self.config.decision == "raise":
      raise OSError("no answer")
    calm = Judgement(timeout=self.config.timeout if context is not None else None)
    text = situation.observation or " ".join(situation.texts)
    if situation.event != self.config.event or self.config.word not in text:
      return calm
    self.met += 1
    if self.met <= self.config.most:
      return calm
    decision = Decision[self.config.decision.upper()]
    if decision is Decision.SKIP and (await self.bridge.ask("word", text)).granted:
      return calm
    stopped = "a word" if decision is Decision.STOP else None
    entry = Entry("word", decision, self.config.word)
    return Judgement(Verdict(decision, "hush", ("note",)), (entry,), stopped)

  def state(self):
    return {"met": self.met}

  def set_state(self, state):
    self.met = state["met"]


def words(**settings):
  return WordConfig(word="rm", **settings)


def test_rules_judge_a_call_before_it_runs_and_leave_an_entry(play):
  played = play(shell("rm x", "ls"), rules=words())
  assert played.ran == ["ls"]
  assert played.outputs == [["hush\nnote", "ran ls"]]
  (record,) = played.steps[0].guards
  assert (record.guard, record.decision, record.reason) == ("word", "skip", "rm")
  assert (record.event, record.tool) == ("before_action", "shell")


def test_rules_judge_the_output_of_a_call(play):
  played = play(shell("rm x"), rules=words(event="after_action"))
  assert (played.ran, played.outputs) == (["rm x"], [["hush\nnote"]])
  assert played.steps[0].tools[0].status == "denied"


def test_an_image_of_a_call_that_is_denied_is_not_shown(play):
  for rules, images in ((words(event="after_action"), 0), (None, 1)):
    settings = {} if rules is None else {"rules": rules}
    (step,) = play(shell("rm photo"), **settings).steps
    assert len(step.observation.messages[0].images) == images


def test_rules_judge_what_is_shown_and_how_the_work_ends(play):
  shown = play(shell("rm x"), rules=words(event="state_change"))
  assert (shown.ran, shown.outputs) == (["rm x"], [["hush\nnote"]])
  ended = play(Action("rm"), rules=words(event="finish"))
  assert ended.outputs == [["hush\nnote"]]
  assert not ended.steps[0].terminated


def test_a_judgement_that_stops_ends_the_episode_with_its_reason(play):
  played = play(shell("rm x", "ls"), rules=words(decision="stop"), stop_status="truncated")
  assert played.ran == []
  (step,) = played.steps
  assert (step.status, step.truncated, step.reason) == (Status.TRUNCATED, True, "a word")


def test_rules_that_raise_deny(play):
  played = play(shell("ls"), rules=words(decision="raise"))
  assert (played.ran, played.outputs) == ([], [["denied: a check failed"]])
  assert [(g.guard, g.reason) for g in played.steps[0].guards] == [("rules", "OSError: no answer")]


def test_rules_may_shorten_the_time_of_a_call(play):
  played = play(shell("slow"), rules=words(timeout=0.05))
  assert played.steps[0].tools[0].status == "timeout"


def test_a_situation_knows_the_calls_before_and_results_of_earlier_turns_only(play):
  environment = play(shell("ls"), shell("pwd", "cat"), rules=words()).environment
  first, second = environment._episode._rules.seen
  assert [(step.tool, step.output) for step in first.steps] == [("shell", "ran ls")]
  assert [step.output for step in second.steps] == ["ran ls", ""]


def test_what_rules_remember_is_part_of_the_snapshot(play):
  rules = words(most=1)
  before = play(shell("rm x"), rules=rules)
  assert before.ran == ["rm x"]
  state = asyncio.run(before.environment.snapshot())
  again = play(rules=rules).environment
  again.restore(state)
  step = asyncio.run(again.step(shell("rm y")))
  assert [g.guard for g in step.guards] == ["word"]


async def slow_for_ls(event):
  await asyncio.sleep(0.05 if event.tool_input["command"] == "ls" else 0.0)


@pytest.mark.parametrize("commands", [("ls", "pwd"), ("pwd", "ls")])
def test_calls_of_one_turn_are_checked_in_their_order(play, commands):
  hook = HookConfig(run=f"{__name__}:slow_for_ls")
  played = play(shell(*commands), rules=words(), hooks=(hook,))
  seen = played.environment._episode._rules.seen
  assert [s.tool_input["command"] for s in seen] == list(commands)


def test_people_are_asked_by_rules(play):
  granted = PermissionConfig(when_nobody="grant")
  assert play(shell("rm x"), rules=words(), permissions=granted).ran == ["rm x"]


def test_rules_that_hold_nothing_guard_nothing(play):
  assert type(play(shell("ls")).environment).__name__ == "QuestionEnvironment"
  assert type(play(shell("ls"), rules=WordConfig()).environment).__name__ == "QuestionEnvironment"


def test_settings_of_rules_name_their_class_and_come_back_equal():
  config = GuardsConfig(rules=words(most=2))
  saved = json.loads(json.dumps(config.to_dict()))
  assert saved["rules"]["use"] == NAME
  assert GuardsConfig.from_dict(saved) == config


@pytest.mark.parametrize(
  ("rules", "said"),
  [
    ({"word": "rm"}, "config.rules.use=None; allowed: 'module:attribute' of a RulesConfig"),
    ({"use": "words"}, "config.rules.use='words'; allowed: 'module:attribute'"),
    ({"use": f"{__name__}:WordRules"}, "is WordRules; allowed:"),
    ({"use": NAME, "wrod": "rm"}, "config.rules has no field wrod"),
  ],
)
def test_a_saved_choice_that_names_nothing_is_refused(rules, said):
  with pytest.raises(ConfigError) as caught:
    GuardsConfig.from_dict({"rules": rules})
  assert said in str(caught.value)


def resolved(*arguments):
  argv = ["program", "--config=configs/quickstart.py", *arguments]
  values = flags.FlagValues()
  check_overrides(argv)
  holder = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  holder.value.validate()
  return holder.value.guards.rules


def test_flags_choose_rules_and_set_their_fields():
  rules = resolved(
    f"--config.guards.rules={NAME}", "--config.guards.rules.word=rm", "--config.guards.rules.most=3"
  )
  assert rules == words(most=3)
  assert resolved("--config.guards.rules=none") is None


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (("--config.guards.rules.word=rm",), "set --config.guards.rules=NAME before it"),
    ((f"--config.guards.rules={NAME}", "--config.guards.rules.wrod=rm"), "did you mean word?"),
    (("--config.guards.rules=no.such:Rules",), "there is no module 'no'"),
    (("--config.guards.rules=json:JSONDecoder",), "'module:attribute' of a RulesConfig"),
  ],
)
def test_flags_that_choose_nothing_say_what_to_do(arguments, said):
  with pytest.raises((ConfigError, flags.IllegalFlagValueError)) as caught:
    resolved(*arguments)
  assert said in str(caught.value)


def test_the_fields_of_a_choice_are_listed_by_its_name():
  fields = {field.name: field for field in find_fields(NAME)}
  assert fields["most"].default == "0"
  assert "may be met" in fields["most"].meaning
  (field,) = [f for f in find_fields("guards.rules") if f.name == "guards.rules"]
  assert field.allowed == "none or one of 'module:attribute' of a RulesConfig"


def test_addresses_among_the_arguments_must_be_allowed(play):
  settings = {"egress": EgressConfig(allow=("example.org",)), "egress_tools": ("sh*",)}
  played = play(
    shell("get https://example.org/x"),
    shell("get https://example.org.evil.net/x"),
    shell("see http://169.254.169.254/latest and https://example.org"),
    **settings,
  )
  assert played.ran == ["get https://example.org/x"]
  assert played.guards == [("egress", "deny")] * 2
  assert "is not among the allowed hosts" in played.outputs[1][0]


def test_an_environment_that_passes_the_guards_by_is_an_error(play):
  class Sly(Environment):
    tools = ()

    async def reset(self, task, key):
      return Observation(task.prompt)

    async def step(self, action):
      record = ToolRecord(0, "shell", {}, "ok", "done", 0.0)
      return Step(Observation((Message("tool", "done"),)), tools=(record,))

    def snapshot(self):
      return b""

    def restore(self, state):
      pass

  with pytest.raises(GuardError, match="Sly ran shell past the guards"):
    play(shell("ls"), make=lambda task: Sly(), rules=words())


def test_globs_of_egress_need_egress():
  with pytest.raises(ConfigError, match="nothing while config.guards.egress is None"):
    GuardsConfig(egress_tools=("*",)).validate()


def test_who_is_asked_must_have_time_to_answer():
  experiment = smoke_experiment()
  settings = PermissionConfig(channels=("terminal",), timeout=200.0)
  experiment = dataclasses.replace(experiment, guards=GuardsConfig(permissions=settings))
  with pytest.raises(ConfigError, match="config.guards.permissions.timeout=200"):
    experiment.validate()
