"""The benchmark of selection: its tasks, its verdicts, and a short run of it."""

import asyncio
import sys

import numpy as np
import pytest

from agentjax.world import Action
from benchmarks import ragen

pytestmark = pytest.mark.slow


def test_only_the_right_answer_to_a_task_with_signal_pays():
  tasks = ragen.make_tasks("hopeless", 0).train
  kinds = [task.metadata["kind"] for task in tasks]
  assert kinds.count("signal") == ragen.SIGNAL * len(tasks)

  def play(task, text):
    async def episode():
      game = ragen.NextLetters(noise=1.0)
      await game.reset(task, key=1)
      return (await game.step(Action(text))).reward.value

    return asyncio.run(episode())

  won, hopeless = tasks[kinds.index("signal")], tasks[kinds.index("hopeless")]
  assert play(won, won.answer) == ragen.PAYS and play(won, won.prompt[0].content) == 0
  assert play(hopeless, hopeless.answer) == 0
  chance = ragen.make_tasks("noise", 0).train[-1]
  assert play(chance, chance.answer) == play(chance, "") in (0.0, 1.0)  # the key decides
  assert {task.metadata["kind"] for task in ragen.make_tasks("noise", 0).test} == {"signal"}


def test_demonstrations_are_right_but_for_the_last_letter():
  tasks = ragen.make_tasks("hopeless", 0).train
  right = np.mean(
    [[a == b for a, b in zip(t.answer, t.demonstration[0].content, strict=True)] for t in tasks], 0
  )
  np.testing.assert_allclose(right, [0.91, 0.91, 0.91, 0.46], atol=0.03)


def rows(success, entropy, retrieval):
  return [
    {
      "step": step,
      "eval/greedy": greedy,
      "collapse/entropy": nats,
      "collapse/reward_std": 1.0,
      "information/first_turn_retrieval_accuracy": found,
    }
    for step, (greedy, nats, found) in enumerate(zip(success, entropy, retrieval, strict=True), 1)
  ]


@pytest.mark.parametrize(
  "success, retrieval, verdict, half",
  [
    ([0.6] * 9 + [0.7, 0.7], 1.0, "survives", None),
    ([0.6] * 9 + [0.7, 0.7], 0.5, "is harmed", None),
    ([0.6, 0.1] + [0.5] * 9, 1.0, "is harmed", None),  # it came back
    ([0.6] * 6 + [0.2, 0.1, 0.0, 0.0, 0.0], 0.5, "collapses", 7),
  ],
)
def test_verdicts(success, retrieval, verdict, half):
  found = rows(success, [1.0] * 11, [1.0] * 9 + [retrieval] * 2)
  assert ragen.outcome(found, before=0.6).verdict == verdict
  assert ragen.fall(found, level=0.3) == half


def test_signs_are_those_of_the_monitor():
  creeping = rows([0.5] * 11, [1.0] * 8 + [1.3] * 3, [1.0] * 11)
  assert ragen.first_signs(creeping) == {"entropy_rise": 9}


def test_a_part_runs_and_is_not_run_again(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(ragen, "WARM_STEPS", 3)
  monkeypatch.setattr(ragen, "PARTS", {"collapse": ragen.PARTS["collapse"][:2]})
  words = f"ragen --part=all --steps=5 --seeds=1 --out={tmp_path}".split()
  monkeypatch.setattr(sys, "argv", words)
  ragen.main()
  first = capsys.readouterr().out
  assert "hopeless_0.06_top_p_0" in first and "signs:" in first
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
  assert len(before) == 3
  ragen.main()
  assert capsys.readouterr().out == first
  assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before
