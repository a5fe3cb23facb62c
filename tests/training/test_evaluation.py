"""Held-out evaluation in a run of several processes."""

import dataclasses

from agentjax.rollout.evaluation import Episodes
from agentjax.threads import LoopThread
from agentjax.training import evaluation, processes
from agentjax.training.build import Extensions, build_parts
from agentjax.trajectory.record import Reward, Trajectory
from tests.training.smoke import smoke_experiment


def verdict(task):
  """Every other task is solved."""
  solved = Reward(float(task.id % 2))
  return Trajectory(0, task.id, 0, task.source, [], reward_parts={"exact_match": solved})


def test_each_process_plays_its_share_and_all_report_on_all_tasks(tmp_path, monkeypatch):
  experiment = smoke_experiment()
  experiment.validate()
  parts = build_parts(experiment, tmp_path, Extensions())
  tasks = parts.tasks.test[: experiment.evaluation.tasks]
  played, reports, runner = [], [], LoopThread()

  async def play(some, **settings):
    played.append([task.id for task in some])
    return Episodes([verdict(task) for task in some], [])

  monkeypatch.setattr(evaluation, "play", play)
  plan = dataclasses.replace(experiment.evaluation, samples=0, success_part="exact_match")
  try:
    for index in range(2):
      monkeypatch.setattr(processes, "share", lambda items, _, i=index: list(items[i::2]))
      monkeypatch.setattr(
        processes, "gather_outcomes", lambda own: [verdict(t) for t in tasks] if own else []
      )
      reports.append(evaluation.Evaluation(parts, None, runner, 7, plan).report())
  finally:
    runner.close()
  assert sorted(played[0] + played[1]) == sorted(task.id for task in tasks)
  assert abs(len(played[0]) - len(played[1])) <= 1
  solved = sum(task.id % 2 for task in tasks) / len(tasks)
  assert [r.overall.greedy.mean for r in reports] == [solved] * 2
  assert [r.overall.greedy.count for r in reports] == [len(tasks)] * 2
