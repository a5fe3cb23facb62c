"""C2's two runs: their experiments, and the files that they read."""

import asyncio
import dataclasses

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.config import JsonlConfig
from agentjax.recipes.c2.rubrics import (
  Selection,
  Synthesis,
  arrange,
  verifier_tasks,
)
from agentjax.recipes.c2.runs import C2Data, c2_generator, c2_verifier, generator_rows, write_c2
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import resolve
from agentjax.training.preferences import SOURCE, TooLongError
from agentjax.training.stored import StoredGroups, read_episodes
from agentjax.trajectory.record import Message, Task, Trajectory
from agentjax.world.environment import Action
from tests.training.stages import extensions as staged_extensions
from tests.training.teachers import base


def test_the_verifier_of_c2_is_a_config_whose_answer_is_the_whole_reply(tmp_path):
  experiment = resolve(c2_verifier(base(steps=3)))
  assert experiment.rollout.group_size == 8
  assert experiment.rl.objective.policy_loss.kl_coefficient == 0.01
  asked = (Message("user", "A or B?"),)
  tasks = TaskSplits([Task(i, asked, "A helpful", "c2") for i in range(4)], ())
  parts = build_parts(experiment, tmp_path, Extensions(tasks=tasks))
  reply = "<analyze>x</analyze>\n<rubric>helpful</rubric>\n<answer>B</answer>"

  async def play(task):
    environment = parts.make_environment(task)
    await environment.reset(task, 0)
    step = await environment.step(Action(reply, ()))
    one = Trajectory(0, task.id, 0, task.source, segments=[], answer=step.answer)
    await parts.rewards.score(one, task)
    return one

  one = asyncio.run(play(tasks.train[0]))
  assert one.answer == reply
  assert one.reward.value == pytest.approx(-0.6 + 0.3 + 0.1)


def _synthesis(number, kept=True):
  pair = arrange(number, (Message("user", f"Q{number}?"),), f"good {number}", f"bad {number}")
  rubrics = tuple(
    f"<analyze>x</analyze>\n1. Safety: Is it {word} {number}?" for word in ("kind", "loud")
  )
  selection = Selection((0,), (1,), 0, 1) if kept else None
  return Synthesis(pair, rubrics, 0.1, (2.0, -2.0), selection)


def test_both_runs_of_c2_read_what_synthesis_wrote(tmp_path):
  def room(experiment):
    experiment.engine.max_length = experiment.rollout.max_total_tokens = 2048
    experiment.rl.row_length = 2048
    experiment.evaluation.tasks = 0
    return experiment

  found = [_synthesis(3), _synthesis(5, kept=False), _synthesis(8)]
  folder = tmp_path / "c2"
  parts = build_parts(resolve(room(base())), tmp_path, staged_extensions())
  assert write_c2(folder, found, parts, seed=0) == C2Data(2, 6, 0, 0)
  longer = dataclasses.replace(found[0], pair=dataclasses.replace(found[0].pair, first="x" * 500))
  two = [longer, found[2]]
  assert write_c2(tmp_path / "short", two, parts, seed=0, verifier_tokens=1000) == C2Data(
    2, 3, 0, 1
  )
  with pytest.raises(TooLongError, match="verifier_tokens=9 0 for"):
    write_c2(tmp_path / "short", found, parts, seed=0, verifier_tokens=9)

  def read(experiment, name, source):
    files = JsonlConfig(name=source, messages_field="messages", test_file="")
    experiment.data = DataConfig(path=str(folder / name), train_size=None, source=files)
    return build_parts(resolve(room(experiment)), tmp_path, Extensions())

  experiment = c2_generator(base(steps=40), str(folder / "episodes"))
  assert experiment.rl.optimizer.warmup_steps == 4
  experiment.rl = dataclasses.replace(experiment.rl, tasks_per_step=2)
  generator_parts = read(experiment, "generator", SOURCE)
  StoredGroups(read_episodes(folder / "episodes"), generator_parts, first=1)
  wanted = generator_rows(found, seed=0)
  assert [task.prompt for task in generator_parts.tasks.train] == [row.prompt for row in wanted]
  verifier = read(c2_verifier(base(steps=3)), "verifier", "c2").tasks.train
  assert [(t.prompt, t.answer) for t in verifier] == [
    (t.prompt, t.answer) for t in verifier_tasks(found, seed=0)
  ]
  with pytest.raises(ConfigError, match="warmup=1.0"):
    c2_generator(base(steps=40), "x", warmup=1.0)
