"""Rules against the tools and predicates of a run: nothing that is wrong waits for the run."""

import pathlib
import re

import pytest

from agentjax.recipes.agentspec.binding import bind_rules
from agentjax.recipes.agentspec.predicates import PREDICATES, predicate
from agentjax.recipes.agentspec.syntax import RuleError, parse_rules
from agentjax.rollout.guards import Situation

TOOLS = {
  "shell": {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
  },
  "file-read": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def own(situation: Situation, low: float, name: str, *more: int) -> bool:
  return low < len(name) + sum(more)


def bind(text, **settings):
  return bind_rules(parse_rules(text), tools=TOOLS, text=text, **settings)


def rule(trigger="shell", check="true", enforce="stop"):
  return f"rule @x\ntrigger {trigger}\ncheck {check}\nenforce {enforce}\nend"


@pytest.mark.parametrize(
  ("text", "line", "said"),
  [
    (rule(trigger="shel"), 2, "unknown trigger 'shel' (did you mean shell?); allowed: before_"),
    (rule(check="is_destrutive"), 3, "unknown predicate 'is_destrutive' (did you mean is_des"),
    (rule(check="turns_over"), 3, "turns_over takes (limit: 'int'): missing a required arg"),
    (rule(check="turns_over(1, 2)"), 3, "turns_over takes (limit: 'int'): too many"),
    (rule(check="turns_over(1.5)"), 3, "turns_over: limit=1.5; allowed: an integer"),
    (rule(check='turns_over("3")'), 3, "turns_over: limit='3'; allowed: an integer"),
    (rule(check='input_matches("(")'), 3, "allowed: a regular expression ("),
    (rule(check='argument_matches(1, "x")'), 3, "key=1; allowed: a string"),
    (rule(check="no.such.module:f"), 3, "no module 'no'"),
    (rule(check=f"{__name__}:TOOLS"), 3, "is no function"),
    (rule(check=f"{__name__}:own(1, 2)"), 3, "name=2; allowed: a string"),
    (rule(check=f'{__name__}:own(1, "a", 2, 2.5)'), 3, "more=2.5; allowed: an integer"),
    (rule(enforce="invoke_action(sh, {})"), 4, "unknown tool 'sh'"),
    (rule(enforce="invoke_action(shell, {})"), 4, "'command' is a required property"),
    (rule(enforce='invoke_action(shell, {"command": 3})'), 4, "command: 3 is not of type"),
    (rule(enforce='invoke_action(shell, {"cmd": "x", "command": "y"})'), 4, "'cmd' was unexpected"),
    (rule(enforce='invoke_action(shell, {"command": "x", "command": "y"})'), 4, "given twice"),
    (rule(enforce='invoke_action(shell, {"command": tool_inptu})'), 4, "did you mean tool_input?"),
    (rule(enforce='invoke_action(shell, {"command": turn["x"]})'), 4, "turn has no keys"),
    (rule(enforce="tols:shell:timeout=2"), 4, "unknown scope 'tols' (did you mean tool?)"),
    (rule(enforce="tool:bash:timeout=2"), 4, "unknown tool 'bash'"),
    (rule(enforce="tool:shell:memory=2"), 4, "unknown setting 'memory'; allowed: timeout, calls"),
    (rule(enforce="tool:shell:timeout=0"), 4, "timeout=0; allowed: seconds > 0"),
    (rule(enforce="tool:shell:calls=1.5"), 4, "calls=1.5; allowed: an integer >= 0"),
  ],
)
def test_what_does_not_fit_the_run_is_told_with_its_place(text, line, said):
  with pytest.raises(RuleError, match=re.escape(said)) as caught:
    bind(text, source="my.rules")
  assert f"my.rules:{line}:" in str(caught.value)


def test_all_problems_are_told_at_once():
  with pytest.raises(RuleError) as caught:
    bind(rule(trigger="shel", check="nonsense turns_over(1.5)", enforce="tool:bash:timeout=2"))
  assert [position.line for position, _ in caught.value.problems] == [2, 3, 3, 4]


@pytest.mark.parametrize(
  "text",
  [
    rule(trigger="file-read"),
    rule(check=f'{__name__}:own(1, "abc", 2, 3)'),
    rule(check=f'{__name__}:own(2.5, "abc")'),
    rule(enforce='invoke_action(shell, {"command": tool_input["path"]})'),
    rule(enforce='invoke_action(shell, {"command": invoke_action(file-read, {"path": "x"})})'),
  ],
)
def test_what_fits_is_taken(text):
  assert bind(text)


def test_the_documentation_names_all_predicates_and_its_rules_are_sound():
  page = (pathlib.Path(__file__).parents[3] / "docs" / "agentspec.md").read_text()
  assert not [name for name in PREDICATES if f"`{name}" not in page]
  text = page.split("```")[3]
  log = {"type": "object", "properties": {"text": {"type": "string"}}}
  rules = bind_rules(parse_rules(text), tools={**TOOLS, "log": log})
  assert [bound.rule.name for bound in rules.rules] == ["no-destruction", "stuck"]


def test_tools_that_environments_bring_may_be_spoken_of_but_not_invoked():
  assert bind(rule(trigger="query", enforce="tool:query:calls=3"), triggers=["query"])
  with pytest.raises(RuleError, match="unknown tool 'query'"):
    bind(rule(enforce="invoke_action(query, {})"), triggers=["query"])


def situation(event="before_action", tool="shell", **arguments):
  return Situation(event, 0, tool_name=tool, tool_input=arguments)


@pytest.mark.parametrize(
  ("trigger", "met", "missed"),
  [
    ("shell", [situation()], [situation(tool="file-read"), situation("after_action")]),
    ("before_action", [situation()], [situation("after_action"), situation("finish", "")]),
    ("after_action", [situation("after_action")], [situation()]),
    ("state_change", [situation("state_change", "")], [situation()]),
    ("finish", [situation("finish", "")], [situation()]),
    ("any", [situation(e) for e in ("before_action", "after_action", "finish")], []),
    (
      "git_push",
      [situation(command=" git push origin"), situation(tool="file-read", x=["git push"])],
      [situation(command="echo git push"), situation("after_action", command="git push")],
    ),
  ],
)
def test_a_rule_is_triggered_by_events_tools_and_how_an_input_begins(trigger, met, missed):
  rules = bind(rule(trigger=trigger), triggers=["git_push"])
  assert all([b.rule.name for b in rules.triggered(s)] == ["x"] for s in met)
  assert not any(list(rules.triggered(s)) for s in missed)


def test_predicates_are_anded_and_a_false_one_ends_the_question():
  asked = []

  @predicate("test_remembers")
  def remembers(situation: Situation, number: int) -> bool:
    asked.append(number)
    return number < 2

  try:
    rules = bind(rule(check="test_remembers(1) !test_remembers(2) test_remembers(3) false"))
  finally:
    del PREDICATES["test_remembers"]
  (bound,) = rules.triggered(situation())
  assert not bound.holds(situation())
  assert asked == [1, 2, 3]


def test_an_answer_that_is_no_truth_value_is_an_error():
  rules = bind(rule(check=f"{__name__}:truthy"))
  (bound,) = rules.triggered(situation())
  with pytest.raises(TypeError, match="answered 'yes' instead of True or False"):
    bound.holds(situation())


def truthy(situation):
  return "yes"


@pytest.mark.parametrize("name", ["true", "enforce", "a b", "is_destructive", "m:f"])
def test_a_name_that_rules_could_not_use_is_not_registered(name):
  with pytest.raises(ValueError, match="predicate"):
    predicate(name)(lambda situation: True)
