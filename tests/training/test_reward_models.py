import asyncio
import dataclasses
import math

import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.config import JsonlConfig
from agentjax.envs.environment import Action
from agentjax.files import CheckpointError
from agentjax.objectives import preset
from agentjax.objectives.objective import policy_objective
from agentjax.rewards.c2 import (
  PreferenceRow,
  Selection,
  Synthesis,
  arrange,
  generator_rows,
  verifier_tasks,
)
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Run
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.parts import Extensions, build_parts
from agentjax.training.reward_models import (
  SOURCE,
  C2Data,
  TooLongError,
  c2_generator,
  c2_verifier,
  preference_tasks,
  write_c2,
  write_preferences,
)
from agentjax.training.stored import StoredGroups, read_episodes
from agentjax.trajectory.record import Message, Task, Trajectory
from tests.training.smoke import quiet
from tests.training.stages import extensions as staged_extensions
from tests.training.stages import staged_experiment
from tests.training.teachers import MODEL

ROWS = [
  PreferenceRow(i, (Message("user", f"Q{i}?"),), f"good {word}", f"bad, {word} and long")
  for i, word in enumerate(["sky", "sea", "sun", "moon"])
]


def base(**stage):
  experiment = staged_experiment(ScheduleConfig())
  experiment.model = dataclasses.replace(MODEL)
  experiment.rl = dataclasses.replace(
    experiment.rl, tasks_per_step=4, microbatch_rows=2, row_length=128, **stage
  )
  return experiment


def generator(rollouts):
  experiment = c2_generator(base(steps=5), str(rollouts))
  experiment.rl.optimizer = OptimizerConfig(learning_rate=1e-2)
  return experiment


@pytest.fixture
def extensions():
  return Extensions(tasks=TaskSplits(preference_tasks(ROWS), ()))


def test_dpo_on_stored_pairs_makes_the_chosen_likelier_than_the_rejected(tmp_path, extensions):
  folder = tmp_path / "pairs"
  experiment = resolve(generator(folder))
  parts = build_parts(experiment, tmp_path, extensions)
  manifest = write_preferences(folder, ROWS, parts)
  pairs = read_episodes(folder)
  assert manifest.episodes == len(pairs) == 8
  assert [t.reward.value for t in pairs] == [1.0, 0.0] * 4
  assert manifest.tokens == sum(len(r.chosen) + len(r.rejected) + 2 for r in ROWS)  # with <|end|>

  learner = Learner(parts, policy_objective(experiment.rl.objective))
  state = learner.begin_rl(learner.initial_state("rl"))

  def gaps(policy):
    prompts = [[i for s in parts.chat.prompt(row.prompt) for i in s.ids] for row in ROWS]
    written = [
      [parts.chat.assistant(Message("assistant", getattr(row, name))) for row in ROWS]
      for name in ("chosen", "rejected")
    ]
    scores = [models.score_responses(policy, MODEL, prompts, texts) for texts in written]
    sums = [np.array([s.log_probs.sum() for s in each]) for each in scores]
    return sums[0] - sums[1]

  before = gaps(learner.policy(state))
  seen = []
  for step in range(1, 6):
    episodes = [dataclasses.replace(t, step=step) for t in pairs]
    state, metrics = learner.rl_step(state, episodes, step)
    seen.append(metrics)
  gained = gaps(learner.policy(state)) - before
  assert seen[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-5)
  assert seen[-1]["preference/loss"] < 0.6 and seen[-1]["preference/accuracy"] == 1.0
  assert (gained > 0).all()
  # The margin that is reported is that of the tokens themselves, a step before the last.
  assert 0 < seen[-1]["preference/margin"] < 0.1 * gained.mean() * 1.01
  assert not any("mismatch" in name for name in seen[0])


def test_preferences_that_cannot_be_stored_are_named(tmp_path, extensions):
  parts = build_parts(resolve(base()), tmp_path, extensions)
  with pytest.raises(ValueError, match="id of its own"):
    write_preferences(tmp_path / "a", [ROWS[0], ROWS[0]], parts)
  with pytest.raises(ValueError, match="at least one"):
    write_preferences(tmp_path / "a", [], parts)
  long = dataclasses.replace(ROWS[0], rejected="x" * 200)
  with pytest.raises(ValueError, match="row_length=128"):
    write_preferences(tmp_path / "a", [long], parts)
  assert not (tmp_path / "a").exists()
  write_preferences(tmp_path / "a", ROWS[:1], parts)
  with pytest.raises(CheckpointError, match="not empty"):
    write_preferences(tmp_path / "a", ROWS[:1], parts)


def test_settings_that_would_not_follow_the_gradient_of_dpo_are_refused():
  for changes, named in (
    ({"minibatches": 2}, "minibatches"),
    ({"epochs": 2}, "epochs"),
    ({"old_log_probs": "behaviour"}, "old_log_probs"),
  ):
    values = {"objective": preset("dpo"), "old_log_probs": "recomputed", **changes}
    with pytest.raises(ConfigError, match=named):
      resolve(base(**values))
  alone = base(objective=preset("dpo"), old_log_probs="recomputed")
  alone.rollout.group_size = 1
  with pytest.raises(ConfigError, match="group_size"):
    resolve(alone)


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
    experiment.data = DataConfig(
      source="jsonl", path=str(folder / name), train_size=None, jsonl=files
    )
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


@pytest.mark.slow
def test_a_run_of_dpo_trains_checkpoints_and_replays(tmp_path, extensions):
  folder = tmp_path / "pairs"
  write_preferences(folder, ROWS, build_parts(resolve(generator(folder)), tmp_path, extensions))
  directory = tmp_path / "run"
  Run(generator(folder), directory, extensions=extensions, console=quiet()).train()
  replayed = Run(generator(folder), directory, extensions=extensions, console=quiet()).replay(3)
  assert replayed.identical
