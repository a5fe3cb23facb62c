"""The rule language: what it reads, and what it says about text it cannot read."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.recipes.agentspec.syntax import (
  ACTIONS,
  TRIGGERS,
  Act,
  Constant,
  Invocation,
  Not,
  Position,
  Rule,
  RuleError,
  Setting,
  Test,
  Variable,
  parse_rules,
)

EXAMPLE = """\
// Rules of a shell.
rule @no-force
trigger shell
check
  is_destructive  // a fence
  !my.rules:is_asked
  !!calls_over(3)
enforce
  user_inspection
  invoke_action(log, {"text": tool_input["command"], "level": 2, "loud": false,
                      "again": invoke_action(clock, {})})
  tool:shell:timeout=2.5
end
rule @all trigger any check true enforce none end
"""


def test_everything_the_grammar_has_is_read():
  first, second = parse_rules(EXAMPLE)
  assert first == Rule(
    "no-force",
    "shell",
    (
      Test("is_destructive"),
      Not(Test("my.rules:is_asked")),
      Not(Not(Test("calls_over", (3,)))),
    ),
    (
      Act("user_inspection"),
      Invocation(
        "log",
        (
          ("text", Variable("tool_input", "command")),
          ("level", 2),
          ("loud", False),
          ("again", Invocation("clock")),
        ),
      ),
      Setting("tool", "shell", "timeout", 2.5),
    ),
  )
  assert second == Rule("all", "any", (Constant(True),), (Act("none"),))


def test_nodes_know_where_they_stand():
  first, second = parse_rules(EXAMPLE)
  assert first.position == Position(2, 1)
  assert first.trigger_position == Position(3, 9)
  assert [p.position.line for p in first.predicates] == [5, 6, 7]
  assert first.enforcements[1].arguments[3][1].position == Position(11, 32)
  assert second.position == Position(14, 1)


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=8)
PREDICATE_NAMES = NAMES.filter(lambda name: name not in ("true", "false", "enforce"))
PREDICATES = st.recursive(
  st.builds(Constant, st.booleans())
  | st.builds(
    Test,
    PREDICATE_NAMES | st.tuples(PREDICATE_NAMES, NAMES).map(":".join),
    st.lists(TEXTS | NUMBERS, max_size=3).map(tuple),
  ),
  lambda inner: st.builds(Not, inner),
  max_leaves=3,
)
VALUE_NAMES = NAMES.filter(lambda name: name not in ("true", "false", "invoke_action"))


def invocations(values):
  pairs = st.lists(st.tuples(TEXTS, values), max_size=3).map(tuple)
  return st.builds(Invocation, NAMES, pairs)


VALUES = st.recursive(
  TEXTS | NUMBERS | st.booleans() | st.builds(Variable, VALUE_NAMES, st.none() | TEXTS),
  invocations,
  max_leaves=4,
)
ENFORCEMENTS = (
  st.builds(Act, st.sampled_from(ACTIONS))
  | invocations(VALUES)
  | st.builds(Setting, NAMES, NAMES, NAMES, NUMBERS)
)
RULES = st.lists(
  st.builds(
    Rule,
    NAMES,
    NAMES | st.sampled_from(TRIGGERS),
    st.lists(PREDICATES, min_size=1, max_size=3).map(tuple),
    st.lists(ENFORCEMENTS, min_size=1, max_size=3).map(tuple),
  ),
  max_size=3,
  unique_by=lambda rule: rule.name,
)


def written(node):
  """A node as text."""
  match node:
    case Rule():
      checks, enforcements = map(" ".join, (map(written, node.predicates),
                                            map(written, node.enforcements)))  # fmt: skip
      return f"rule @{node.name} trigger {node.trigger} check {checks} enforce {enforcements} end"
    case Constant():
      return str(node.value).lower()
    case Not():
      return f"!{written(node.predicate)}"
    case Test():
      arguments = ", ".join(map(written, node.arguments))
      return f"{node.name}({arguments})" if arguments else node.name
    case Act():
      return node.action
    case Setting():
      return f"{node.scope}:{node.component}:{node.name}={written(node.number)}"
    case Invocation():
      pairs = ", ".join(f"{json.dumps(k)}: {written(v)}" for k, v in node.arguments)
      return f"invoke_action({node.tool}, {{{pairs}}})"
    case Variable():
      return node.name if node.key is None else f"{node.name}[{json.dumps(node.key)}]"
  return json.dumps(node)


@settings(max_examples=150, deadline=None)
@given(RULES)
def test_any_rules_that_are_written_out_are_read_as_they_were(rules):
  read = parse_rules("\n".join(map(written, rules)))
  assert read == tuple(rules)
  assert repr(read) == repr(tuple(rules))  # which tells 1 from 1.0 and True


WORDS = re.findall(r"\w+|\S", "rule @x trigger any check true f enforce stop end !(){}[]:=,#")
WORDS += [" ", "\n", "//", '"a', '"b"', '"\\q"', "3", "-1.5e3", "-"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=20).map("".join))
def test_any_text_is_read_or_refused_with_a_place_in_it(text):
  try:
    parse_rules(text)
  except RuleError as error:
    ((position, _),) = error.problems
    assert 1 <= position.line <= text.count("\n") + 1
    assert 1 <= position.column <= len(text.split("\n")[position.line - 1]) + 1


@pytest.mark.parametrize(
  ("text", "line", "column", "said"),
  [
    ("rule x", 1, 6, "expected '@', got 'x'"),
    ("rule @x\ntriger shell", 2, 1, "expected 'trigger', got 'triger'"),
    ("rule @x trigger any check enforce", 1, 27, "expected a predicate, 'true', 'false' or '!'"),
    ("rule @x trigger any check true stop end", 1, 40, "'!' or 'enforce', got the end of the text"),
    ("rule @x trigger any check true enforce end", 1, 40, "expected user_inspection, "),
    ("rule @x trigger any check true enforce halt end", 1, 40, "got 'halt'"),
    ("rule @x trigger any check true enforce stop", 1, 44, "or 'end', got the end of the text"),
    ("rule @x trigger any check f(x) enforce stop end", 1, 29, "expected a string or a number"),
    ("rule @x trigger any check f(1 2) enforce stop end", 1, 31, "expected ',' or ')', got '2'"),
    ('rule @x trigger any check f("a) enforce stop end', 1, 29, "not closed on its line"),
    ('rule @x trigger any check f("\\q") enforce stop end', 1, 29, "is no JSON string"),
    ("rule @x trigger any check true enforce invoke_action(t {})", 1, 56, "expected ',', got '{'"),
    ("rule @x trigger any check true enforce a:b:c=x end", 1, 46, "expected a number, got 'x'"),
    ("rule @x trigger any check true # enforce", 1, 32, "unexpected character '#'"),
    ("rule @x trigger any check true enforce stop end " * 2, 1, 49, "two rules are named @x"),
    ("!" * 5000, 1, 1, "expected 'rule', got '!'"),
    ("rule @x trigger any check " + "!" * 5000, 1, 1, "nested too deeply"),
  ],
)
def test_an_error_says_where_and_what_may_stand_there(text, line, column, said):
  with pytest.raises(RuleError) as caught:
    parse_rules(text, "my.rules")
  ((position, message),) = caught.value.problems
  assert (position.line, position.column) == (line, column)
  assert said in message
  assert str(caught.value).startswith(f"my.rules:{line}:{column}: ")
  assert isinstance(caught.value, ConfigError)  # shown as one by the command line


def test_an_error_points_at_the_place():
  with pytest.raises(RuleError) as caught:
    parse_rules("rule @x\n  triger any", "my.rules")
  assert str(caught.value).split("\n")[1:] == ["    triger any", "    ^"]
