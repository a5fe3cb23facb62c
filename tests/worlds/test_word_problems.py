import asyncio
import collections
import dataclasses
import hashlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.rewards.answers import answers_equal
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment
from agentjax.worlds.question.word_problems import (
  MAX_LEVEL,
  Problem,
  Program,
  Step,
  WordProblemConfig,
  vocabulary,
  word_problems,
)

ALL = WordProblemConfig(levels=(1, 2, 3, 4), program_share=0.3)


def make(config=ALL, train=60, test=20, seed=0):
  return word_problems(config, train_size=train, test_size=test, seed=seed)


def text(task):
  [message] = task.prompt
  return message.content


def content(task):
  """The calls of the demonstration: the arithmetic, whatever the words."""
  return tuple(str(c.arguments) for m in task.demonstration for c in m.tool_calls)


@settings(max_examples=15, deadline=None)
@given(
  st.integers(0, 2**31),
  st.integers(0, 2**31),
  st.sampled_from([(1,), (2,), (1, 2, 3, 4)]),
  st.floats(0, 1),
)
def test_no_train_problem_of_any_seed_is_a_test_problem_of_any_other(a, b, levels, share):
  config = WordProblemConfig(levels=levels, program_share=share)
  train = {content(t) for t in make(config, train=80, test=0, seed=a).train}
  test = {content(t) for t in make(config, train=0, test=15, seed=b).test}
  assert len(test) == 15  # and no two test problems are the same
  assert not train & test


def test_swapping_the_two_numbers_of_a_sum_makes_no_new_problem():
  one = Problem(12, (Step("+", 30), Step("*", 2)))
  other = Problem(30, (Step("+", 12), Step("*", 2)))
  assert one.content == other.content
  assert one.split == other.split
  assert Problem(30, (Step("-", 12),)).content != Problem(12, (Step("-", 30),)).content


def test_a_fifth_of_all_problems_is_for_testing():
  problems = [Problem(a, (Step("*", b),)) for a in range(11, 400) for b in range(2, 10)]
  share = sum(p.split == "test" for p in problems) / len(problems)
  assert share == pytest.approx(0.2, abs=0.02)  # 3 standard deviations of 3112 draws


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(31, 60))
def test_a_task_depends_on_seed_and_place_alone(seed, few, many):
  short = make(train=few, test=few // 2, seed=seed)
  long = make(train=many, test=many // 2, seed=seed)
  assert long.train[:few] == short.train
  assert long.test[: few // 2] == short.test


def test_other_seeds_give_other_problems():
  assert [text(t) for t in make(seed=0).train] != [text(t) for t in make(seed=1).train]


def test_the_problems_of_a_seed_never_change():
  # Figures of a paper are only comparable while this hash stands.
  splits = make(train=200, test=50, seed=0)
  told = "\n".join(f"{text(t)}|{t.answer}|{content(t)}" for t in (*splits.train, *splits.test))
  assert hashlib.sha256(told.encode()).hexdigest()[:16] == "d30c42c8f093bbc6"


def test_ids_are_unique_and_tell_the_split():
  splits = make()
  assert [t.id for t in splits.train] == list(range(60))
  assert [t.id for t in splits.test] == [FIRST_TEST_ID + i for i in range(20)]


def test_every_right_demonstration_replays_through_the_real_tools():
  registry = build_tools(ToolsConfig(names=("calculator", "python")))
  splits = make(train=240, test=40)

  async def replay(task):
    environment = QuestionEnvironment(registry, max_turns=MAX_LEVEL + 1, tool_timeout=60.0)
    await environment.reset(task, 0)
    messages = iter(task.demonstration)
    for message in messages:
      step = await environment.step(Action(message.content, message.tool_calls))
      if step.terminated:
        assert answers_equal(step.answer, task.answer), task
        assert next(messages, None) is None
        return
      assert step.observation.messages == (next(messages),), task
    raise AssertionError(f"the demonstration of {task} does not answer")

  async def run():
    try:
      for task in (*splits.train, *splits.test):
        await replay(task)
    finally:
      await registry.close()

  asyncio.run(run())


@pytest.mark.parametrize("family", ["story", "program"])
@pytest.mark.parametrize("level", range(1, MAX_LEVEL + 1))
def test_the_level_is_the_number_of_tool_calls_and_programs_start_with_python(level, family):
  config = WordProblemConfig(levels=(level,), program_share=float(family == "program"))
  for task in make(config).train:
    calls = [c for m in task.demonstration for c in m.tool_calls]
    assert len(calls) == level == task.metadata["level"]
    tools = ["python" if i == 0 and family == "program" else "calculator" for i in range(level)]
    assert [c.name for c in calls] == tools
    assert task.metadata["family"] == family


@pytest.mark.parametrize(("level", "most"), [(1, 21), (2, 30), (3, 40), (4, 46)])
def test_prompts_are_short(level, most):
  config = WordProblemConfig(levels=(level,), program_share=0.3)
  lengths = [len(text(t).split()) for t in make(config, train=1000).train]
  assert max(lengths) <= most


def test_prompts_use_no_word_outside_a_small_vocabulary():
  told = {w for t in make(train=2000).train for w in re.findall(r"[A-Za-z]+", text(t))}
  assert told <= vocabulary()
  assert len(vocabulary()) <= 110
  assert len(vocabulary() - told) <= 2  # and hardly a word is never used


def test_every_number_of_the_arithmetic_stands_in_the_prompt():
  for task in make(train=500).train:
    numbers = re.findall(r"\d+", text(task))
    operands = [
      re.split(r"[-+*/]", c.arguments["expression"])[-1]
      for m in task.demonstration
      for c in m.tool_calls
      if c.name == "calculator"
    ]
    assert not collections.Counter(operands) - collections.Counter(numbers)


def test_operations_and_phrasings_are_all_in_use():
  tasks = make(train=4000).train
  counts = collections.Counter("".join(t.metadata["operators"] for t in tasks))
  assert min(counts[o] for o in "+-*/") > 0.18 * counts.total()
  for phrase in ("fewer than", "more than", "times as many as", "How many more", "equal parts"):
    assert any(phrase in text(t) for t in tasks)


def test_values_stay_whole_and_small():
  for task in make(train=1000).train:
    values = [int(m.content) for m in task.demonstration if m.role == "tool"]
    assert min(values) >= 11
    assert max(values) <= (9999 if task.metadata["family"] == "program" else 999)


@pytest.mark.parametrize(("first", "distracted"), [(2, {2, 3}), (3, {3}), (5, set())])
def test_distractors_start_at_their_level(first, distracted):
  config = WordProblemConfig(levels=(1, 2, 3), program_share=0.0, distractors_from_level=first)
  for task in make(config, train=150).train:
    level = task.metadata["level"]
    numbers = len(re.findall(r"\d+", text(task)))
    assert numbers == level + 1 + (level in distracted)


def test_only_the_levels_asked_for_are_demonstrated_in_train():
  splits = make(dataclasses.replace(ALL, demonstration_levels=(1, 3)))
  for task in splits.train:
    assert bool(task.demonstration) is (task.metadata["level"] in (1, 3))
    assert (task.metadata["demonstration"] == "none") is not bool(task.demonstration)
  assert all(t.demonstration for t in splits.test)


def test_noise_makes_its_share_of_demonstrations_wrong_and_no_other():
  config = dataclasses.replace(ALL, demonstration_noise=0.4, program_share=0.0)
  splits = make(config, train=2000)
  kinds = collections.Counter(t.metadata["demonstration"] for t in splits.train)
  assert kinds["right"] / 2000 == pytest.approx(0.6, abs=0.035)  # 3 standard deviations
  assert kinds["wrong_operation"] / 2000 == pytest.approx(0.2, abs=0.03)
  for task in splits.train:
    right = task.demonstration[-1].content == f"#### {task.answer}"
    assert right is (task.metadata["demonstration"] == "right"), task
    if task.metadata["demonstration"] == "stops_early":
      assert len(content(task)) == task.metadata["level"] - 1
  assert {t.metadata["demonstration"] for t in splits.test} == {"right"}


def test_direct_demonstrations_state_the_right_answer_without_a_tool():
  splits = make(dataclasses.replace(ALL, direct_share=0.5), train=2000)
  direct = [t for t in splits.train if t.metadata["demonstration"] == "direct"]
  assert len(direct) / 2000 == pytest.approx(0.5, abs=0.035)  # 3 standard deviations
  for task in direct:
    assert [m.content for m in task.demonstration] == [f"#### {task.answer}"]
    assert not content(task)
  assert all(content(t) for t in splits.train if t.metadata["demonstration"] == "right")
  assert {t.metadata["demonstration"] for t in splits.test} == {"right"}
  assert [text(t) for t in splits.train[:60]] == [text(t) for t in make().train]


def test_noise_changes_neither_questions_nor_answers():
  noisy = make(dataclasses.replace(ALL, demonstration_noise=1.0))
  assert [(text(t), t.answer) for t in noisy.train] == [(text(t), t.answer) for t in make().train]


def test_the_results_in_wrong_demonstrations_are_true():
  from agentjax.tools.calculator import evaluate, format_value

  config = WordProblemConfig(levels=(3,), program_share=0.0, demonstration_noise=1.0)
  for task in make(config, train=500).train:
    calls = [m.tool_calls[0] for m in task.demonstration if m.tool_calls]
    results = [m.content for m in task.demonstration if m.role == "tool"]
    for call, result in zip(calls, results, strict=True):
      assert format_value(evaluate(call.arguments["expression"])) == result


@pytest.mark.parametrize(
  ("program", "value"),
  [
    (Program("multiples", 6, 60), 270),
    (Program("consecutive", 12, 14), 39),
    (Program("squares", 2, 4), 29),
    (Program("saving", 5, 3, 4), 5 + 8 + 11 + 14),
  ],
)
def test_a_programs_value_is_what_its_text_asks_for(program, value):
  assert program.value == value


def test_a_division_with_a_rest_is_refused():
  with pytest.raises(ValueError, match="17/5"):
    Step("/", 5).apply(17)


def test_asking_for_more_test_problems_than_there_are_is_an_error():
  config = WordProblemConfig(levels=(1,), program_share=0.0)
  with pytest.raises(DataError, match="different test problems at levels"):
    make(config, train=0, test=4000)


@pytest.mark.parametrize(
  "fields",
  [
    {"levels": ()},
    {"levels": (0,)},
    {"levels": (5,)},
    {"demonstration_levels": (9,)},
    {"program_share": 1.5},
    {"demonstration_noise": -0.1},
    {"direct_share": 2.0},
    {"distractors_from_level": 0},
    {"levels": (1.5,)},
  ],
)
def test_an_impossible_setting_is_refused_by_field_name(fields):
  with pytest.raises(ConfigError, match=next(iter(fields))):
    make(WordProblemConfig(**fields))
