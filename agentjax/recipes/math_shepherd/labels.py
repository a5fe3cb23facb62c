"""A folder of labelled steps (``agentjax.data.synthesis_folder``).

  labels.jsonl    a row a solution: ``task``, ``steps``, for each step whether its completions
                  succeeded, and its labels ``hard`` and ``soft``
  train.jsonl     a conversation a step with a label: the question with the steps so far, and the
                  verdict; ``config.data.source=jsonl`` reads it with ``messages_field=messages``
  settings.json   what they were made with; a folder holds those of one setting

A row of labels.jsonl is on the disk before the next solution is begun, so a stopped command
continues where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from agentjax.config import Config, ConfigError, PositiveInt, check
from agentjax.data.synthesis_folder import (
  Report,
  Row,
  RowFile,
  claim,
  fill,
  plain_messages,
  unreported,
)
from agentjax.engine import Engine, Finish, SampleRequest
from agentjax.files import write_atomically
from agentjax.recipes.math_shepherd.solutions import (
  RIGHT,
  WRONG,
  Solution,
  read_solutions,
  solutions_of_episodes,
  step_messages,
)
from agentjax.recipes.math_shepherd.steps import monte_carlo_steps
from agentjax.rewards.judges import question_key, question_text
from agentjax.rewards.process import monte_carlo_labels
from agentjax.rollout import keys
from agentjax.rollout.program import ENVIRONMENT_REWARD
from agentjax.rollout.scoring import score
from agentjax.schedules import at_end
from agentjax.text.chat import Chat
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, Scoring, build_scoring
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool
from agentjax.training.rescoring import read_trajectories
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Task, Trajectory
from agentjax.world.environment import Action

LABELS, TRAIN = "labels.jsonl", "train.jsonl"


@dataclasses.dataclass(unsafe_hash=True)
class LabelConfig(Config):
  """How steps are labelled.

  Attributes:
    completions: N after each step but the last, whose label is the outcome; 8 in the source.
    success: a completion succeeds if its reward is at least this.
  """

  completions: PositiveInt = 8
  success: float = 1.0


@dataclasses.dataclass(frozen=True)
class Written:
  """What a call of ``label_solutions`` did.

  Attributes:
    solutions, steps: labelled, of the whole folder.
    right: of the steps, those with the hard label 1.
    kept: solutions that were there before.
  """

  solutions: int
  steps: int
  right: int
  kept: int


def label_solutions(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  checkpoint: str,
  solutions: str | None = None,
  trajectories: str | None = None,
  labels: LabelConfig,
  concurrency: int = 16,
  extensions: Extensions | None = None,
  report: Report = unreported,
) -> Written:
  """Plays completions after each step of solutions, and writes labels and data to train on.

  Args:
    experiment: validated and frozen here; its data, world and reward judge, ``rl.sampling``,
      ``rollout.max_tokens_per_turn``, engine and seed say how completions are drawn.
    output: new, empty, or of an earlier call that was stopped.
    checkpoint: of the policy that completes: RUN, RUN/checkpoints/STEP, or a Hugging Face folder.
    solutions: JSONL file of ``read_solutions``; or
    trajectories: a run, a journal or a store, whose episodes of one turn are the solutions. They
      have the policy's vocabulary.
    labels: settings.
    concurrency: completions under way at a time.
    extensions: may bring tasks and scorers, as in ``Run``.
    report: called with how many solutions are labelled.

  Raises:
    ConfigError: settings that cannot be, or an output of other settings or solutions.
    CheckpointError: no model to load.
    DataError: tasks, solutions or an earlier output that cannot be read.
  """
  experiment = at_end(resolve(experiment))
  labels.validate("labels")
  if (solutions is None) == (trajectories is None):
    raise ConfigError("give either --solutions=FILE or --trajectories=RUN.")
  scoring = build_scoring(experiment, extensions or Extensions())
  check(
    not scoring.world.tools,
    "config.tools.names",
    tuple(tool.name for tool in scoring.world.tools),
    "(), because steps are lines of one turn; config.rollout.sampler='monte_carlo' labels turns",
  )
  tasks = {task.id: task for task in (*scoring.tasks.train, *scoring.tasks.test)}
  pool, runner = ModelPool(experiment), LoopThread()
  try:
    found = [] if solutions is None else read_solutions(solutions, tasks)
    engine, chat, identity = pool.serve(checkpoint)
    if trajectories is not None:
      episodes = read_trajectories(pathlib.Path(trajectories))
      found = solutions_of_episodes(episodes, tasks, [_text(one, chat) for one in episodes])
    settings = {
      "labels": labels.to_dict(),
      "policy": identity,
      "sampling": experiment.rl.sampling.to_dict(),
      "max_tokens": experiment.rollout.max_tokens_per_turn,
      "seed": experiment.seed,
    }
    directory = claim(output, settings, (LABELS, TRAIN))
    folder = _Folder(directory, found)
    completer = Completer(experiment, engine, chat, scoring, labels)
    runner.run(scoring.start())
    return runner.run(folder.write(completer, concurrency, report))
  finally:
    runner.run(scoring.close())
    runner.close()
    pool.close()


def _text(episode: Trajectory, chat: Chat) -> str | None:
  """What the policy wrote in its only turn; None if there are several, or it called a tool."""
  drawn = [s for s in episode.segments if s.sampled.any()]
  if len(drawn) != 1:
    return None
  try:
    turn = chat.parse(drawn[0].token_ids.tolist())
  except ValueError:
    return None
  return None if turn.calls else turn.text


class Completer:
  """Plays completions of begun solutions by a policy, and judges them as a run does.

  Args:
    experiment: see ``label_solutions``.
    engine, chat: of the policy.
    scoring: world and reward.
    labels: settings.
  """

  def __init__(
    self,
    experiment: Experiment,
    engine: Engine,
    chat: Chat,
    scoring: Scoring,
    labels: LabelConfig,
  ):
    self._experiment, self._engine, self._chat = experiment, engine, chat
    self._scoring, self._labels = scoring, labels

  async def played(self, solution: Solution, concurrency: int) -> list[list[bool | None]]:
    """For each step whether its completions succeeded; None is without a verdict.

    The last step has no completions: its only entry is the outcome.
    """

    async def complete(steps: Sequence[str], key: int) -> bool | None:
      begun = "\n".join(steps) + "\n"
      drawn = await self._draw(solution.task, begun, key)
      if drawn is None:
        return None
      text, cut = drawn
      return await self._succeeds(solution.task, begun + text, cut, key)

    key = question_key(self._experiment.seed, solution.id)
    values = await monte_carlo_steps(
      solution.steps[:-1],
      complete,
      completions=self._labels.completions,
      key=key,
      concurrency=concurrency,
    )
    rows = [[None if np.isnan(v) else bool(v) for v in row] for row in values]
    return [*rows, [await self._succeeds(solution.task, solution.text, False, key)]]

  async def _draw(self, task: Task, begun: str, key: int) -> tuple[str, bool] | None:
    """How the policy continues its turn, and whether it was cut off; None if it does not fit."""
    chat = self._chat
    ids = [i for span in chat.prompt(task.prompt) for i in span.ids] + chat.begun(begun)
    if len(ids) >= self._engine.max_tokens:
      return None
    context = await self._engine.open_ids(ids)
    try:
      sample = await context.generate(
        SampleRequest(
          key_data=keys.derive(self._experiment.seed, keys.Stream.WRITER, key),
          max_tokens=self._experiment.rollout.max_tokens_per_turn,
          sampling=self._experiment.rl.sampling,
          stop_ids=chat.stop_ids,
        )
      )
    finally:
      context.close()
    stopped = sample.finish is Finish.STOP
    drawn = [int(i) for i in sample.token_ids]
    return chat.tokenizer.decode(drawn[:-1] if stopped else drawn), not stopped

  async def _succeeds(self, task: Task, text: str, cut: bool, key: int) -> bool | None:
    """Whether a whole solution has a reward of ``success``; None without a valid reward.

    Raises:
      ConfigError: the world does not end with an answer.
    """
    environment = self._scoring.world.environment(task)
    try:
      await environment.reset(task, key)
      step = await environment.step(Action(text, truncated=cut))
    finally:
      await environment.close()
    if not (step.terminated or step.truncated):
      raise ConfigError(
        f"config.world={self._experiment.world.chosen!r} goes on after an answer; allowed for "
        "labels of steps: a world that one answer ends, such as 'question'. For turns of others "
        "see config.rollout.sampler='monte_carlo'."
      )
    builder = TrajectoryBuilder(step=0, task_id=task.id, sample=key % 2**31, source=task.source)
    for span in self._chat.prompt(task.prompt):
      builder.append(span.owner, span.ids)
    ids = self._chat.begun(text)
    builder.append_sampled(ids, [0.0] * len(ids), [0.0] * len(ids), 0)
    answered = builder.build(status=step.status, answer=step.answer)
    if step.reward is not None:
      answered.reward_parts[ENVIRONMENT_REWARD] = step.reward
    timeout = self._experiment.rollout.reward_timeout
    await score(self._scoring.rewards, [answered], task, timeout=timeout)
    value = answered.reward.value
    return None if value is None else value >= self._labels.success


class _Folder:
  """The labels of solutions in a folder."""

  def __init__(self, directory: pathlib.Path, solutions: Sequence[Solution]):
    self._directory, self._solutions = directory, {s.id: s for s in solutions}
    self._labels = RowFile(directory / LABELS, {"task": int, "completions": list}, self._other)

  def _other(self, row: Row) -> str | None:
    solution = self._solutions.get(row["id"])
    if solution is None:
      return f"solution {row['id']} is not among the solutions"
    same = (row["task"], row.get("steps")) == (solution.task.id, list(solution.steps))
    return None if same else f"solution {row['id']} was another"

  async def write(self, completer: Completer, concurrency: int, report: Report) -> Written:
    """Labels the solutions that have no row yet, and writes all data to train on."""
    kept = len(self._labels.rows)

    async def work(solution: Solution) -> None:
      self._labels.append(_row(solution, await completer.played(solution, concurrency)))

    at_once = max(1, concurrency // 8)
    solutions = self._solutions.values()
    await fill(
      (self._labels,), solutions, work, what="solutions", report=report, concurrency=at_once
    )
    rows = [
      row
      for i in self._labels.rows
      for row in training_rows(self._solutions[i], self._labels.rows[i])
    ]
    write_atomically(self._directory / TRAIN, "".join(json.dumps(row) + "\n" for row in rows))
    right = sum(row["answer"] == RIGHT for row in rows)
    return Written(len(self._labels.rows), len(rows), right, kept)


def _row(solution: Solution, played: list[list[bool | None]]) -> Row:
  row: Row = {
    "id": solution.id,
    "task": solution.task.id,
    "steps": list(solution.steps),
    "completions": played,
  }
  kinds: tuple[Literal["hard", "soft"], ...] = ("hard", "soft")
  for kind in kinds:
    labels = [monte_carlo_labels(np.array([one], np.float64), kind)[0] for one in played]
    row[kind] = [None if np.isnan(label) else float(label) for label in labels]
  return row


def training_rows(solution: Solution, row: Row) -> list[dict[str, Any]]:
  """Conversations for the supervised stage, one for each step with a hard label."""
  question, rows = question_text(solution.task.prompt), []
  for count, label in enumerate(row["hard"], start=1):
    if label is None:
      continue
    verdict = RIGHT if label else WRONG
    messages = (*step_messages(question, solution.steps[:count]), Message("assistant", verdict))
    rows.append({"messages": plain_messages(messages), "answer": verdict})
  return rows
