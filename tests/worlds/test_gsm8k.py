import asyncio
import json
import os

import pytest

from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, ToolCall
from agentjax.world.environment import Action
from agentjax.world.question import QuestionEnvironment
from agentjax.worlds.question.gsm8k import load_gsm8k, read_gsm8k

DATA = os.environ.get("AGENTJAX_DATA")


def write(tmp_path, *rows, name="train.jsonl"):
  path = tmp_path / name
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def row(solution, question="How many?"):
  return {"question": question, "answer": solution}


def calculator(expression):
  return (ToolCall("calculator", {"expression": expression}),)


def test_annotations_become_calls_and_the_text_goes_on_behind_them(tmp_path):
  path = write(tmp_path, row("He has 2*3=<<2*3=6>>6.\nHalf is $<<6/4=1.50>>1.50 each\n#### 1,006"))
  [task] = read_gsm8k(path)
  assert task.demonstration == (
    Message("assistant", "He has 2*3=", calculator("2*3")),
    Message("tool", "6"),
    Message("assistant", "6.\nHalf is $", calculator("6/4")),
    Message("tool", "1.5"),  # as our calculator writes it
    Message("assistant", "1.50 each\n#### 1,006"),
  )
  assert task.answer == "1006"
  assert task.prompt == (Message("user", "How many?"),)
  assert task.metadata["level"] == 2


def test_a_solution_without_annotations_is_one_message(tmp_path):
  [task] = read_gsm8k(write(tmp_path, row("It is -7.\n#### -7")))
  assert task.demonstration == (Message("assistant", "It is -7.\n#### -7"),)
  assert task.answer == "-7"


@pytest.mark.parametrize(
  ("bad", "reason"),
  [
    (row("no answer"), "must end in '#### N'"),
    (row("#### many"), "must end in '#### N'"),
    (row("####"), "must end in '#### N'"),
    (row(""), "'answer' is empty"),
    ({"question": "How many?"}, "no 'answer'"),
    ({"answer": "#### 1"}, "no 'question'"),
    (row("<<2*3=7>>7\n#### 7"), "<<2\\*3=7>> is wrong: the calculator gives 6"),
    (row("<<2*3>>6\n#### 6"), "has no '='"),
    (row("<<2*apples=6>>6\n#### 6"), "not part of an expression"),
    (row("<<1/3=0.5>>0.5\n#### 1"), "is wrong"),
  ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_line(tmp_path, bad, reason):
  path = write(tmp_path, row("#### 1"), row("#### 2"), bad)
  with pytest.raises(DataError, match=reason) as caught:
    read_gsm8k(path)
  assert (caught.value.path, caught.value.line) == (str(path), 3)


@pytest.mark.parametrize("stated", ["0.33", ".3333", "0.34"])
def test_rounded_results_are_accepted(tmp_path, stated):
  [task] = read_gsm8k(write(tmp_path, row(f"<<1/3={stated}>>\n#### 1")))
  assert task.demonstration[1].content == "0.3333333333"


def test_both_files_are_read_with_limits_and_separate_ids(tmp_path):
  write(tmp_path, *[row(f"#### {i}") for i in range(5)])
  with pytest.raises(DataError, match="test.jsonl: no such file"):
    load_gsm8k(tmp_path)
  write(tmp_path, *[row(f"#### {i}") for i in range(3)], name="test.jsonl")
  splits = load_gsm8k(tmp_path, train_limit=4)
  assert [t.id for t in splits.train] == [0, 1, 2, 3]
  assert [t.id - FIRST_TEST_ID for t in splits.test] == [0, 1, 2]
  assert load_gsm8k(tmp_path, test_limit=0).test == []


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")
def test_all_of_gsm8k_reads_and_replays_through_the_calculator():
  splits = load_gsm8k(os.path.join(DATA, "gsm8k"))
  assert (len(splits.train), len(splits.test)) == (7473, 1319)
  calls = [
    sum(len(m.tool_calls) for t in ts for m in t.demonstration)
    for ts in (splits.train, splits.test)
  ]
  assert calls == [23716, 4282]
  registry = ToolRegistry([CalculatorTool()])

  async def replay(task):
    environment = QuestionEnvironment(registry, max_turns=20)
    await environment.reset(task, 0)
    for spoken, told in zip(task.demonstration[::2], task.demonstration[1::2], strict=False):
      step = await environment.step(Action(spoken.content, spoken.tool_calls))
      assert step.observation.messages == (told,), task
    last = task.demonstration[-1]
    step = await environment.step(Action(last.content))
    assert step.answer.replace(",", "") == task.answer

  async def run():
    for task in (*splits.train[::10], *splits.test[::10]):
      await replay(task)

  asyncio.run(run())
