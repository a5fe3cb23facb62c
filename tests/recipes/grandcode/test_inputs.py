"""Inputs look like the examples, whoever proposes them."""

import random

import pytest

from agentjax.recipes.grandcode.inputs import Domain, read_problem
from agentjax.trajectory.record import Message, Task
from agentjax.worlds.code.tasks import code_task
from tests.recipes.grandcode.local import problem

_SORTED = problem((([3, 1, 2], 3), [1, 2, 3]), (([5, 4], 2), [4, 5]))


def test_a_problem_is_read_from_what_the_policy_sees_alone():
  task = code_task(
    id=4,
    source="x",
    text="Add.",
    reference="def add(a, b):\n  return a + b\n",
    tests=["assert add(1, 2) == 3", "assert add(4, 5) == 9", "assert add(7, 7) == 14"],
    shown=2,
  )
  found = read_problem(task)
  assert found.function == "add"
  assert [(e.arguments, e.expected) for e in found.examples] == [((1, 2), 3), ((4, 5), 9)]


@pytest.mark.parametrize(
  "line",
  [
    "assert add(x) == 3",
    "assert add(1, 2)",
    "assert add(1, k=2) == 3",
    "assert len(add([1], [2])) == 2",  # says nothing of what it gives
    "assert (",
    "",
  ],
)
def test_without_an_assert_on_plain_values_there_is_no_problem(line):
  task = Task(0, (Message("user", f"Add.\n{line}"),), "", "x", metadata={"entry_points": ["add"]})
  assert read_problem(task) is None


@pytest.mark.parametrize(
  ("arguments", "reason"),
  [
    (([1, 2], 2), None),
    (([], 0), None),
    ([[1, 2], 2], None),
    (([1, 2], 3), "argument 2 is not the length of argument 1"),
    (([1, -2], 2), "a number below 0"),
    ((["a"], 1), "a str where examples have int"),
    (([True], 1), "a bool where examples have int"),
    (("ab", 2), "a str where examples have list"),
    (([1],), "1 arguments in the place of 2"),
    ("ab", "a str in the place of the arguments"),
    (None, "a NoneType in the place of the arguments"),
    (([0] * 300_000, 300_000), "more than 200000 values"),
    (([10**5000], 1), "a number of more than 10000 bits"),
  ],
)
def test_an_input_that_does_not_look_like_the_examples_is_refused(arguments, reason):
  found = Domain(_SORTED).refusal(arguments)
  assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
  "given",
  [
    _SORTED,
    problem(((-3,), 9), ((0.5,), 1)),
    problem((("abca", "a"), 2)),
    problem((([[1, 2], [3, 4]], 1, 1), 4)),
    problem((({"a": 1, "b": 2},), 3), (({},), 0)),
    problem((((1, 2), {3}), True)),
    problem(((), 1)),
  ],
)
def test_changed_and_large_inputs_are_valid_and_repeatable(given):
  domain = Domain(given)
  draws = random.Random(1), random.Random(1)
  made, again = ([domain.near(draw, changes=3) for _ in range(200)] for draw in draws)
  assert made == again
  assert {domain.refusal(a) for a in made + domain.edges()} == {None}
  large = domain.large(500, random.Random(2))
  assert large is None or domain.refusal(large) is None


def test_large_inputs_grow_containers_and_keep_the_length_argument():
  values, length = Domain(_SORTED).large(500, random.Random(0))
  assert len(values) == length == 500 and len(set(values)) > 100
  (number,) = Domain(problem(((6,), 720))).large(500, random.Random(0))
  assert 500 <= number < 550
