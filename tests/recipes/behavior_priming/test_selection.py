"""Trajectories are chosen by what they show, not by whether they are right."""

import asyncio
import json
import subprocess
import sys

import pytest

from agentjax.recipes.behavior_priming import BEHAVIOURS, select
from agentjax.recipes.behavior_priming.selection import read_behaviours
from tests.rewards.judging import Scripted

ALL = list(BEHAVIOURS)


def row(answer, **fields):
  messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]
  return {"messages": messages, **fields}


def chosen(rows, judge=None, **settings):
  kept = asyncio.run(select(rows, judge, **settings))
  return [one["messages"][-1]["content"] for one in kept]


def test_a_wrong_answer_with_all_behaviours_is_learnt_and_a_right_one_without_is_not():
  """A filter by reward, as before plain GRPO, would keep the other one."""
  rows = [row("5", behaviours=ALL, reward=0), row("4", behaviours=ALL[:3], reward=1)]
  assert chosen(rows) == ["5"]
  assert chosen(rows, wanted=ALL[:2]) == ["5", "4"]


def test_a_judge_names_the_behaviours_of_the_others():
  said = {"good": f'{{"shown": {ALL}}}'.replace("'", '"'), "poor": '{"shown": ["adaptive_search"]}'}
  judge = Scripted(
    lambda messages, key: said["good" if "careful" in messages[-1].content else "poor"]
  )
  assert chosen([row("careful"), row("hasty"), row("given", behaviours=ALL)], judge) == [
    "careful",
    "given",
  ]
  assert len(judge.asked) == 2


@pytest.mark.parametrize("reply", ["", '{"shown": "all"}', '{"shown": ["charm"]}', "[]"])
def test_a_reply_without_known_names_shows_nothing(reply):
  assert read_behaviours(reply) == []


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([row("4")], "no judge"),
    ([row("4", behaviours=["charm"])], "charm"),
    ([{"messages": [{"role": "user", "content": "2+2?"}], "behaviours": ALL}], "no assistant"),
  ],
)
def test_what_cannot_be_chosen_from_is_refused(rows, message):
  with pytest.raises(ValueError, match=message):
    chosen(rows)


def test_the_command_asks_for_a_judge_by_its_flag_where_rows_need_one(tmp_path):
  def command(*rows):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return subprocess.run(
      [sys.executable, "-m", "agentjax.recipes.behavior_priming.prime", "--input=in.jsonl",
       "--output=out/train.jsonl"],
      cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

  known = row("4", behaviours=ALL)
  done = command(known, row("5", behaviours=ALL[:1]))
  assert done.returncode == 0, done.stderr
  assert json.loads((tmp_path / "out" / "train.jsonl").read_text()) == known
  done = command(known, row("5"))
  assert done.returncode == 2 and "judge.base_url=''" in done.stderr
