"""Rules that grant, refuse or ask; people who answer, do not, or are not there."""

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.semaclaw.permissions import AccessConfig, AccessRules, Ruling
from agentjax.rollout.guards import GuardsConfig, PermissionBridge, PermissionConfig
from tests.rewards.judging import run
from tests.rollout.guards.conftest import play_guarded, shell
from tests.rollout.guards.test_permissions import Person

RULES = ('grant ann shell ^{"command": "ls', "ask * shell", "refuse b* *")


def rule(agent, command, *channels, tool="shell", rules=RULES, otherwise="grant", **settings):
  config = AccessConfig(rules=rules, otherwise=otherwise)
  config.validate()
  bridge = PermissionBridge(PermissionConfig(**settings), channels)
  return run(AccessRules(config, bridge).rule(agent, tool, {"command": command}))


def test_the_first_rule_that_fits_decides():
  assert rule("ann", "ls -l") == Ruling(True, RULES[0])
  assert rule("bob", "ls -l") == Ruling(False, "ask * shell; nobody can be asked", asked=True)
  assert rule("bob", "x", tool="log") == Ruling(False, "refuse b* *")
  assert rule("ann", "x", tool="log") == Ruling(True, "otherwise grant")
  assert not rule("ann", "x", tool="log", otherwise="refuse").granted


def test_people_are_asked_and_their_silence_is_an_answer():
  person = Person(answer=True)
  assert rule("bob", "rm x", person).granted
  assert person.asked[0].content == 'bob: {"command": "rm x"}'
  assert not rule("bob", "rm x", Person(answer=False)).granted
  late = rule("bob", "rm x", Person(seconds=30.0), timeout=0.02)
  assert not late.granted and "no answer within 0.02 s" in late.by
  assert rule("bob", "rm x", Person(answer=OSError("gone")), when_nobody="grant").granted
  asked = Person()
  rule("bob", "y" * 1000, asked)
  assert len(asked.asked[0].content) <= 200


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("ask shell", "DECISION AGENT TOOL"),
    ("maybe * shell", "DECISION AGENT TOOL"),
    ("ask * shell (", "no regular expression"),
  ],
)
def test_a_line_that_is_no_rule_is_refused(line, message):
  with pytest.raises(ConfigError, match=message):
    AccessConfig(rules=(line,)).validate("config.guards.rules")


def test_one_agent_is_guarded_by_the_same_rules():
  access = AccessConfig(rules=("refuse agent shell rm", "grant * log"), otherwise="ask")
  guarded = play_guarded(GuardsConfig(rules=access), shell("rm x"), shell("ls"))
  assert guarded.ran == []
  assert guarded.outputs == [["denied: not allowed"], ["denied: no permission was given"]]
  person = Person(answer=True)
  guarded = play_guarded(GuardsConfig(rules=access), shell("ls"), channels=(person,))
  assert guarded.ran == ["ls"] and guarded.guards == [("permission", "continue")]
  with pytest.raises(ConfigError, match="one for the tools shell, log"):
    play_guarded(GuardsConfig(rules=AccessConfig(rules=("ask * web",))), shell("ls"))
  with pytest.raises(ConfigError, match="one for the agents agent"):
    play_guarded(GuardsConfig(rules=AccessConfig(rules=("ask ann shell",))), shell("ls"))
