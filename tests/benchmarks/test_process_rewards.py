"""The benchmark of process rewards: its tasks, and a short run of every kind."""

import asyncio
import sys

import numpy as np
import pytest
from absl import logging

from agentjax.world import Action
from benchmarks import process_rewards

pytestmark = pytest.mark.slow


def test_only_the_whole_answer_pays_and_demonstrations_leave_some_letters():
  tasks = process_rewards.make_tasks(0, left=0.25)
  assert not {t.prompt for t in tasks.train} & {t.prompt for t in tasks.test}

  def play(task, text):
    async def episode():
      game = process_rewards.NextLetters()
      await game.reset(task, key=1)
      return (await game.step(Action(text))).reward.value

    return asyncio.run(episode())

  task = tasks.train[0]
  assert play(task, task.answer) == 1 and play(task, task.answer[:-1]) == 0
  right = [
    a == b for t in tasks.train for a, b in zip(t.answer, t.demonstration[0].content, strict=True)
  ]
  assert np.mean(right) == pytest.approx(0.75, abs=0.01)


def test_every_kind_is_run_and_kept(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(process_rewards, "WARM_STEPS", 2)
  arguments = ["process_rewards.py", "--steps=2", "--seeds=1", f"--out={tmp_path}"]
  monkeypatch.setattr(sys, "argv", arguments)
  told = logging.get_verbosity()
  process_rewards.main()
  assert logging.get_verbosity() == told  # else whoever calls it hears no warning any more
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(":")[0].strip() for line in lines[1:]] == [
    "none", "frozen", "double", "single",
  ]  # fmt: skip
  assert ["accuracy" in line for line in lines[1:]] == [False, False, True, True]
  process_rewards.main()  # what is finished is read
  assert capsys.readouterr().out.splitlines() == lines
