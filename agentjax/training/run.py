"""A run: warm start, then reinforcement learning; resumable at any instant, replayable by step."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from rich.console import Console

from agentjax.config import ConfigError, check
from agentjax.data import TaskIterator
from agentjax.engine import SamplingConfig
from agentjax.files import write_atomically
from agentjax.models import cross_log_probs
from agentjax.models.lora import merge_adapters
from agentjax.models.spec import count
from agentjax.names import load
from agentjax.objectives.advantage_function import AdvantageFunction, check_own
from agentjax.objectives.custom_loss import LossFunction
from agentjax.objectives.objective import policy_objective
from agentjax.rewards.samples import write_samples
from agentjax.rollout import keys
from agentjax.rollout.evaluation import EvaluationReport
from agentjax.rollout.loop import GroupPlayer
from agentjax.rollout.masking import MaskingWatch
from agentjax.rollout.program import Player
from agentjax.rollout.statistics import (
  apart,
  baseline_metrics,
  group_diversity,
  num_sampled_tokens,
  rollout_statistics,
  staleness_statistics,
)
from agentjax.rollout.stream import GroupStream
from agentjax.rollout.viewer import write_trajectories
from agentjax.sharding import dispatching, fingerprint, in_order
from agentjax.signals.signal import get_states, set_states
from agentjax.threads import LoopThread
from agentjax.training import compilation, processes
from agentjax.training.bank import PolicyBank
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import CheckpointStore
from agentjax.training.demonstrations import check_lengths
from agentjax.training.diagnostics import CollapseMonitor, collapse_metrics
from agentjax.training.evaluation import Evaluation, build_engines
from agentjax.training.experiment import Experiment, own_names, resolve
from agentjax.training.extended import ALL_PARTS, Extended, describe, use_recorded
from agentjax.training.interrupt import Interrupt
from agentjax.training.journal import JOURNAL_FILE, Journal, StepRecord
from agentjax.training.learner import Learner
from agentjax.training.metrics import (
  MetricsWriter,
  finite_or_null,
  memory_in_use,
  plot_rewards,
  read_metrics,
)
from agentjax.training.nonfinite import broken_update, describe_nonfinite
from agentjax.training.policies import policy_metrics
from agentjax.training.progress import ProgressDisplay, print_line, print_table
from agentjax.training.selectors import group_scores, keep_groups, select_groups
from agentjax.training.state import TrainState, network_specs
from agentjax.training.stored import (
  WRITTEN_BY,
  StoredGroups,
  check_manifest,
  read_episodes,
  read_manifest,
  warn_of_other_policy,
)
from agentjax.training.wide_columns import WideColumns
from agentjax.training.workdir import keep_settings, keep_sources, open_workdir
from agentjax.trajectory.record import POLICY, Task, Trajectory
from agentjax.trajectory.recordlog import decode_record, encode_record
from agentjax.trajectory.seats import agent_metrics, learning_views, policy_of
from agentjax.trajectory.store import from_record, to_record
from agentjax.world.world import World

_INFORMATION = "agentjax.recipes.information:information"
_COLUMNS = {
  "reward/mean": "reward",
  "eval/greedy": "held-out success",
  "nll": "loss (nats a token)",
  "rollout/tool_calls": "tool calls an episode",
  "policy/entropy": "entropy (nats a token)",
  "mismatch/max": "sampler-trainer gap (nats)",
  "time/tokens_per_second": "tokens/s",
}


class TrainingError(RuntimeError):
  """Training cannot go on; the message says at which step and what to change."""


@dataclasses.dataclass(frozen=True)
class RunReport:
  """What a finished run found.

  Attributes:
    directory: where everything stands.
    before, after: held-out metrics at the start and the end of reinforcement learning, as of
      ``EvaluationReport.metrics``; empty where evaluation is off.
    steps: training steps done, over all stages.
    finished: False where the run was interrupted; the same command goes on.
  """

  directory: pathlib.Path
  before: dict[str, float]
  after: dict[str, float]
  steps: int
  finished: bool


@dataclasses.dataclass(frozen=True)
class ReplayReport:
  """Result of executing a recorded step again."""

  step: int
  recorded: str
  replayed: str

  @property
  def identical(self) -> bool:
    return self.recorded == self.replayed


class Run:
  """Trains one experiment in one directory.

  ``Run(experiment, "runs/a").train()`` starts or resumes; ``replay(step)`` executes a recorded step
  again from checkpoint and journal and compares the parameters' hash. What the run was extended
  with is written down (``training.extended``); a later Run is given the same, or imports it.

  Args:
    experiment: what to do; validated and frozen here.
    workdir: the run's directory.
    objective: your own loss, as ``config.rl.objective.function`` names one (see
      ``objectives.policy_objective``); advantages still come from the config.
    advantage: your own advantages, as ``config.rl.objective.advantage.function`` names them.
    extensions: tools, tasks, environments, scorers or a program of your own.
    console: where progress is shown; None shows it on standard output.
    allow_changes: goes on where objective or extensions are not those that the run began with.
  """

  def __init__(
    self,
    experiment: Experiment,
    workdir: str | os.PathLike[str],
    *,
    objective: LossFunction | None = None,
    advantage: AdvantageFunction | None = None,
    extensions: Extensions | None = None,
    console: Console | None = None,
    allow_changes: bool = False,
  ):
    self.experiment = resolve(experiment)
    check(
      (objective is None and advantage is None) or experiment.rl.passes is None,
      "config.rl.passes",
      experiment.rl.passes,
      "none with an objective or advantages of your own, which are of one update",
    )
    self.directory = pathlib.Path(workdir).absolute()
    policy_objective(experiment.rl.objective, objective)  # a fault shows at once
    if advantage is not None:
      experiment.rl.objective.check_own_advantage("config.rl.objective")
      check_own(advantage)
    self._extended = Extended(extensions or Extensions(), objective, advantage)
    self._console = console or Console()
    self._allow_changes = allow_changes

  def train(self) -> RunReport:
    """Runs all stages to their end, from wherever an earlier process got to.

    SIGTERM and Ctrl-C stop it after saving a checkpoint and the episodes finished so far.

    Raises:
      ConfigError: settings, extensions or a directory that cannot be used.
      TrainingError: gradients stayed non-finite, an update was not finite, no group was left to
        train on for several steps, or the policy collapsed and ``config.rl.diagnostics.stop`` is
        set.
      CheckpointError: a checkpoint could not be written, earlier ones are whole; or none is whole.
      ProcessLostError: another process of the run has ended.
    """
    with self._session() as session:
      if processes.is_first():
        keep_settings(self.directory, self.experiment, describe(session.extended))
      return session.train()

  def replay(self, step: int) -> ReplayReport:
    """Executes a recorded step again from the nearest earlier checkpoint and the journal.

    No tool is called and nothing is sampled; nothing in the directory changes.

    Raises:
      ConfigError: the step was never recorded, the journal has lost a record of it, or the
        directory holds another run.
      CheckpointError: no earlier checkpoint is whole.
    """
    with self._session() as session:
      return session.replay(step)

  @contextlib.contextmanager
  def _session(self) -> Iterator[_Session]:
    with processes.failing_together(), contextlib.ExitStack() as stack:
      if processes.is_first():
        description = describe(self._extended)
        stack.enter_context(open_workdir(self.directory, self.experiment, description))
      processes.wait("directory")
      console = self._console if processes.is_first() else Console(quiet=True)
      session = _Session(self.experiment, self.directory, self._complete_extensions(), console)
      if processes.is_first():  # now that what the config names is imported
        keep_sources(self.directory, own_names(self.experiment))
      yield stack.enter_context(session)

  def _complete_extensions(self) -> Extended:
    """What the run is extended with; refused where that has changed and must not."""
    call = f"Run(experiment, {str(self.directory)!r}, extensions=..., objective=...)"
    extended, differing = use_recorded(self.directory, self._extended, call=call, needed=ALL_PARTS)
    if differing and not self._allow_changes:
      raise ConfigError(
        f"--workdir={self.directory} is extended with {'; '.join(differing)}. Pass what the run "
        "began with, give another --workdir, or go on all the same with --allow_changes "
        "(Run(..., allow_changes=True)): replays of earlier steps need not agree then."
      )
    for words in differing:
      logging.warning("%s goes on with %s", self.directory, words)
    return extended


class _Session:
  """One process's work on a run: built parts, current state, open files."""

  def __init__(
    self,
    experiment: Experiment,
    directory: pathlib.Path,
    extended: Extended,
    console: Console,
  ):
    self.experiment, self.directory, self.console = experiment, directory, console
    self.extended = extended
    if not processes.is_first():
      processes.wait("tokenizer")  # the first process may have to train it
    self.parts = build_parts(experiment, directory, extended.extensions)
    if processes.is_first():
      processes.wait("tokenizer")
    demonstrated = [task for task in self.parts.tasks.train if task.demonstration]
    if experiment.supervised.steps:
      check_lengths(demonstrated, self.parts)
    every = experiment.rl.diagnostics.information_every
    check(
      not every or jax.process_count() == 1,
      "config.rl.diagnostics.information_every",
      every,
      f"0 with {jax.process_count()} processes, none of which holds the whole policy",
    )
    objective = policy_objective(experiment.rl.objective, extended.objective)
    self.learner = Learner(self.parts, objective, extended.advantage)
    self.checkpoints = CheckpointStore(
      directory / "checkpoints",
      experiment.checkpoint.keep,
      self.parts.identity,
      tuple(self.learner.trained),
    )
    self.journal = Journal(directory / JOURNAL_FILE)
    if self.journal.torn is not None:
      logging.warning("dropped the torn end of the journal: %s", self.journal.torn.reason)
    for name, faults in self.journal.faults.items():
      logging.warning(
        "%s was damaged (%s): the file is kept as %s.damaged, its whole records were written anew",
        directory / name,
        faults,
        name,
      )
    self.engine, further = build_engines(self.parts)
    self.runner = LoopThread()
    self.bank = PolicyBank(self.parts, self.first_rl_step, further)
    self.interrupt = Interrupt()
    self.evaluations: dict[str, dict[str, float]] = {}
    self.evaluating: tuple[str, Evaluation] | None = None  # beside a step; "before", or ""
    self._masking = MaskingWatch()
    # What an earlier process recorded; what is appended from now on does not matter to a resume.
    self.recorded = dict(self.journal.steps)
    self._tell_of_lost_records()
    self.demonstrations = self._iterator(demonstrated, "supervised")
    self.stream = self._make_stream()
    self.recovered = False  # whether ``stream`` has the journal's episodes
    self.runner.run(self.parts.start())
    self.engine_totals = (0.0,) * 4  # up to the latest row of metrics
    self.handed_over = time.monotonic()  # when the latest batch was
    self.ended: int | None = None  # step after which the policy was too far from stored episodes

  def __enter__(self) -> _Session:
    return self

  def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
    with contextlib.ExitStack() as stack:
      stack.callback(self.runner.close)
      stack.callback(self.journal.close)
      if kind is None or jax.process_count() == 1:  # others may be gone, and it would wait for them
        stack.callback(self.checkpoints.wait)
      stack.callback(self.engine.close)
      stack.callback(self.bank.close)
      stack.callback(lambda: self.runner.run(self.parts.close()))
      if self.stream is not None:
        stack.callback(self.runner.run, self.stream.close())
      if self.evaluating is not None:
        stack.callback(self.evaluating[1].cancel)

  @property
  def first_rl_step(self) -> int:
    return self.experiment.supervised.steps + 1

  @property
  def last_step(self) -> int:
    if self.ended is not None:
      return self.ended
    return self.experiment.supervised.steps + self.experiment.rl.steps

  def stage_of(self, step: int) -> str:
    return "supervised" if step <= self.experiment.supervised.steps else "rl"

  def _iterator(self, tasks: Sequence[Task], stage: str) -> TaskIterator | None:
    settings = getattr(self.experiment, stage)
    if not settings.steps:
      return None
    return TaskIterator(tasks, batch_size=settings.tasks_per_step, seed=self.experiment.seed)

  def _make_stream(self) -> GroupStream | StoredGroups | None:
    rollouts = self.experiment.rl.rollouts
    if rollouts is not None and self.experiment.rl.steps:
      check_manifest(read_manifest(rollouts), self.parts)
      return StoredGroups(read_episodes(rollouts), self.parts, self.first_rl_step)
    tasks = self._iterator(self.parts.tasks.train, "rl")
    if tasks is None:
      return None
    playing = GroupPlayer(
      self._player(self.experiment.rl.sampling),
      self.parts.make_environment,
      self.parts.rewards,
      self.journal.add_trajectory,
      self.parts.program,
      self.parts.sampler,
      self._baseline_player(),
      self.learner.scheduled.at,
    )
    stage = self.experiment.rl
    refill = stage.selection.refill * len(self._share(range(stage.tasks_per_step)))
    return GroupStream(
      playing,
      tasks,
      first=self.first_rl_step,
      group_size=self.experiment.rollout.group_size,
      schedule=stage.schedule,
      share=self._share,
      accept=self._accept if refill else None,
      refill=refill,
    )

  def _share(self, items: Sequence[Any]) -> list[Any]:
    """Those of this process to play."""
    return processes.share(items, self.experiment.engine.processes)

  def _baseline_player(self) -> Player | None:
    """Plays the greedy episode of each group, where an objective compares with one."""
    stage = self.experiment.rl
    if not any(phase.objective.needs_baseline for phase in stage.all_phases):
      return None
    greedy = dataclasses.replace(stage.sampling, temperature=0.0)
    return self._player(greedy)

  def _player(self, sampling: SamplingConfig) -> Player:
    player = self.parts.player(self.engine, sampling, self.experiment.seed, self.bank.seats)
    return dataclasses.replace(player, config=self.experiment.rollout, sampling=sampling)

  def _accept(self, members: list[Trajectory], version: int) -> bool:
    """Whether a group is to be trained on; called from the event loop's thread."""
    selection = self.learner.scheduled.at(self.experiment.rl.selection, version)
    trained = apart(members)[0]
    return bool(keep_groups(group_scores(trained, selection.score)[1], selection).all())

  def _tell_of_lost_records(self) -> None:
    """Warns of steps that were done and that the journal knows too little of.

    A step is synced to the journal before its checkpoint and its row of metrics are written.
    """
    rows = read_metrics(self.directory / "metrics.jsonl")
    steps = [*self.journal.steps, *self.checkpoints.steps(), *(row["step"] for row in rows)]
    lost = self.journal.lost_steps(max(steps, default=0))
    for step in lost:
      self.recorded.pop(step, None)  # it cannot be taken from the journal
    if lost:
      logging.warning(
        "the journal of %s has lost records of %s: they cannot be replayed; those after the "
        "checkpoint that training goes on from are done again%s",
        self.directory,
        _ranges(lost),
        "" if self.experiment.rl.schedule.repeatable else ", with other episodes (rl.schedule)",
      )

  # Training.

  def train(self) -> RunReport:
    state, step = self._restore()
    progress = ProgressDisplay(self.console, _COLUMNS, clock=compilation.clock)
    self.interrupt.tell = progress.note
    monitor = self._make_monitor(step)
    with contextlib.ExitStack() as stack:
      metrics = None
      if processes.is_first():
        metrics = stack.enter_context(MetricsWriter(self.directory, resume_step=step))
      stack.enter_context(self.interrupt)
      stack.enter_context(progress)
      progress.note(self._describe(step))
      if step == 0 and not self.checkpoints.steps():
        stops = self.last_step and not self.experiment.evaluation.interleaved
        if stops and self.stage_of(1) == "rl":
          self._evaluate_into("before", state, 0, progress)
        self._save(0, state)
      saved = 0.0  # seconds, of the checkpoint before a step
      while step < self.last_step and not processes.any_asks(self.interrupt.requested):
        step += 1
        stage = self.stage_of(step)
        first = 1 if stage == "supervised" else self.experiment.supervised.steps + 1
        if step == first or progress.stage_name != stage:
          progress.stage(stage, getattr(self.experiment, stage).steps, done=step - first)
        compiling = compilation.seconds()
        try:
          state, values = self._step(step, stage, state, progress, monitor)
        except asyncio.CancelledError:
          step -= 1
          break
        values["time/compilation"] = compilation.seconds() - compiling
        values["time/save"], saving = saved, time.monotonic()
        if metrics is not None:
          metrics.write(step, stage, values | memory_in_use() | self._engine_work())
        last_of_stage = step in (self.experiment.supervised.steps, self.last_step)
        if last_of_stage or step % self.experiment.checkpoint.every == 0:
          self._save(step, state)
        saved = time.monotonic() - saving
        progress.update(step - first + 1, values)
        if stage == "rl":
          self._watch(step, values, state, monitor)
      finished = step == self.last_step
      if not finished:
        self._save(step, state, waiting=False)
        progress.note(f"interrupted after step {step}; the same command goes on from here")
      self.checkpoints.wait()
    report = RunReport(
      self.directory,
      self.evaluations.get("before", {}),
      self.evaluations.get("after", {}),
      step,
      finished,
    )
    if finished and processes.is_first():
      self._write_report(report)
    return report

  def _make_monitor(self, step: int) -> CollapseMonitor:
    stage = self.experiment.rl
    rows = read_metrics(self.directory / "metrics.jsonl")
    past = [r for r in rows if r["step"] <= step and r["stage"] == "rl"]
    return CollapseMonitor(stage.diagnostics, stage.selection, past)

  def _watch(
    self, step: int, values: dict[str, float], state: TrainState, monitor: CollapseMonitor
  ) -> None:
    """Warns of signs of collapse, and ends the run for those that say so."""
    for sign in monitor.observe(values):
      if sign.ends:
        self._save(step, state, waiting=False)
        raise TrainingError(
          f"step {step}: {sign.message}. Go on from an earlier checkpoint with another "
          "config.rl.selection, a lower learning rate or more varied tasks; "
          "config.rl.diagnostics and config.rl.selection.patience hold the bounds."
        )
      logging.warning("step %d: sign of collapse (%s): %s", step, sign.name, sign.message)

  def _step(
    self,
    step: int,
    stage: str,
    state: TrainState,
    progress: ProgressDisplay,
    monitor: CollapseMonitor,
  ) -> tuple[TrainState, dict[str, float]]:
    started = time.monotonic()
    episodes: tuple[keys.Address, ...] = ()
    schedules: Mapping[str, Any] = {}
    if stage == "supervised":
      assert self.demonstrations is not None
      state, values = self.learner.supervised_step(state, next(self.demonstrations))
      values["time/update"] = time.monotonic() - started
    else:
      if step == self.first_rl_step:
        state = self.learner.begin_rl(state)
        if self.experiment.rl.rollouts is not None:
          policy = fingerprint(merge_adapters(self.learner.policy(state)))
          warn_of_other_policy(read_manifest(self.experiment.rl.rollouts), policy)
      state = self.learner.take_snapshots(state, self.bank.due(step))
      everything, used, selected = self._rollout(step, state)
      (sampled, greedy), (trajectories, _) = apart(everything), apart(used)
      # An evaluation sees the world as it was when it began.
      remembers = type(self.parts.world).learn is not World.learn
      held_out = self._finish_evaluation() if remembers else {}
      self.runner.run(self.parts.world.learn(sorted(sampled, key=lambda t: t.address)))
      self._write_samples(step, sampled)
      episodes = tuple(t.address for t in used)
      by_agent = agent_metrics(sampled)
      sampled, greedy = learning_views(sampled), learning_views(greedy)
      rollout_seconds = time.monotonic() - started
      trained = self.learner.trained
      own = [t for t in sampled if policy_of(t) == POLICY] if trained else sampled
      found = self._information(step, state, own, monitor)
      values = held_out | {"bad_steps": 0.0}
      if trajectories:
        if self.experiment.samples_in_turn:
          self.runner.run(self.engine.release_weights())
        with self._alone_on_devices():
          state, learnt = self.learner.rl_step(state, used, step)
          in_order(state)
        values |= learnt
        self._end_if_left_behind(step, values, progress)
      else:
        logging.warning("step %d: no group was selected (config.rl.selection); skipped", step)
      drawn = sum(num_sampled_tokens(t) for t in everything)
      values |= self._rollout_metrics(step, sampled, drawn, rollout_seconds) | selected | found
      if trained:
        by_agent |= policy_metrics(sampled, (POLICY, *trained))
      values |= baseline_metrics(greedy) | by_agent
      values |= staleness_statistics(learning_views(trajectories), step)
      values |= collapse_metrics(sampled)
      values["time/update"] = time.monotonic() - started - rollout_seconds
      values |= self.learner.scheduled.metrics(step)
      known = self.recorded.get(step)
      schedules = known.schedules if known else self.learner.scheduled.observe(step, values)
      self.learner.scheduled.note(step, schedules)
    # Before anything can be sampled with the new weights.
    self._record(step, stage, state, values, episodes, schedules)
    recorded = time.monotonic()
    values |= self._finish_evaluation()
    due = self._due(step)
    if due is not None and step != self.last_step and not self.experiment.evaluation.interleaved:
      values |= self._evaluate_into(due, state, step, progress)
    if step == self.last_step and self.experiment.rl.steps:
      values |= self._evaluate_into("after", state, step, progress)
      values.pop("eval/step", None)
    values["learning_rate"] = self.learner.learning_rate(stage, state)
    for name in self.learner.trained if stage == "rl" else ():
      rate = self.learner.learning_rate(stage, state, name)
      values[f"policies/{name}/learning_rate"] = rate
    values["time/evaluation"] = time.monotonic() - recorded
    values["time/step"] = time.monotonic() - started
    return state, values

  def _alone_on_devices(self) -> contextlib.AbstractContextManager[None]:
    """Keeps lanes of several devices waiting that train as well: one order of all programs.

    Within a process all its devices get programs in the order in which this is held. Programs of
    several processes are dispatched by their main threads alone, everywhere in one order.
    """
    devices, lane = self.experiment.devices, self.experiment.engine.mesh
    shared = lane.size > 1 and not (devices.training or devices.rollout)
    return dispatching() if shared else contextlib.nullcontext()

  def _end_if_left_behind(
    self, step: int, values: dict[str, float], progress: ProgressDisplay
  ) -> None:
    """Makes ``step`` the last where the policy has moved too far from stored episodes."""
    limit, moved = self.experiment.rl.stop_above_kl, values.get("mismatch/kl")
    if limit is not None and moved is not None and moved > limit:
      self.ended = step
      progress.note(
        f"ended after step {step}: mismatch/kl={moved:.3g} is above config.rl.stop_above_kl="
        f"{limit:g}. To go on, play again: {WRITTEN_BY} "
        f"--checkpoint={self.directory}"
      )

  def _rollout(
    self, step: int, state: TrainState
  ) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
    """What was sampled for ``step``, what of it the update takes, and how that was selected.

    Both hold the greedy episodes of their groups. Other groups may stay under way.
    """
    stream, stage = self.stream, self.experiment.rl
    assert stream is not None
    schedule, count = stage.schedule, len(self._share(range(stage.tasks_per_step)))
    left = self.last_step - step  # steps after this one
    settled = step in self.recorded and not schedule.repeatable
    if settled:
      # Which groups it took cannot be sampled again: what was done stays done.
      trajectories = self._recorded_episodes(step)
      self._begin_evaluation(step, state)
    else:
      if not self.recovered:
        stream.remember(self.journal.trajectories(stream.awaits).values())
        self.recovered = True
      if schedule.mode == "one_step_off":
        # Later steps' episodes are there, but for those of a run that had ended and goes on.
        if step == self.first_rl_step or self.engine.version < 0:
          self._publish(step, state)
        self.runner.run(stream.fill(step, count))
        trajectories = self._take(step, count)
        self._begin_evaluation(step, state)
        self._publish(step, state)
        self.runner.run(stream.fill(step, min(left, 1) * count))
      else:
        self._publish(step, state)
        self.runner.run(stream.fill(step, min(left, schedule.bound) * count + count))
        self._begin_evaluation(step, state)
        trajectories = self._take(step, count)
    refused = self.runner.run(stream.take_refused())
    if stage.selection.refill:
      refused = WideColumns().gather(refused, step)  # which is not trained on
    self.runner.run(stream.consume({t.address[:2] for t in (*trajectories, *refused)}))
    sampled = [*trajectories, *refused]
    if settled or stage.selection.rule == "all":
      return sampled, trajectories, {}
    trained, greedy = apart(trajectories)
    selection = self.learner.scheduled.at(stage.selection, step)
    selected, metrics = select_groups(trained, selection)
    kept = {t.address[:2] for t in selected}
    selected = sorted(
      [*selected, *(t for t in greedy if t.address[:2] in kept)], key=lambda t: t.address
    )
    metrics["selection/refused_groups"] = float(len({t.address[:2] for t in refused}))
    return sampled, selected, metrics

  def _information(
    self, step: int, state: TrainState, sampled: Sequence[Trajectory], monitor: CollapseMonitor
  ) -> dict[str, float]:
    """How much the answers depend on the prompts, where ``step`` is one that asks."""
    config = self.experiment.rl.diagnostics
    if not config.information_every or (step - self.first_rl_step) % config.information_every:
      return {}
    estimate = load(_INFORMATION, "config.rl.diagnostics.information_every", "what estimates it")
    with self._alone_on_devices(), jax.set_mesh(self.learner.mesh):
      score = functools.partial(
        cross_log_probs,
        self.learner.policy(state),
        self.parts.model,
        temperature=self.experiment.rl.sampling.temperature or 1.0,
      )
      seed, decode = self.experiment.seed + step, self.parts.tokenizer.decode
      metrics: dict[str, float] = estimate(sampled, config, seed=seed, decode=decode, score=score)
    for name in [name for name in metrics if name.endswith("_z_score")]:
      metrics[f"{name}_smoothed"] = monitor.smoothed(f"{name}_smoothed", metrics[name])
    return metrics

  def _take(self, step: int, count: int) -> list[Trajectory]:
    assert self.stream is not None
    own: list[Trajectory] | None = None
    with contextlib.suppress(asyncio.CancelledError):
      work = self.stream.take(step, count)
      own = self.runner.run(self.interrupt.cancellable(work))
    if not processes.all_agree(own is not None) or own is None:
      raise asyncio.CancelledError
    for trajectory in own:  # those that were not played here, but stored or in a checkpoint
      self.journal.add_trajectory(trajectory)
    return self.learner.gather(own, step)

  def _publish(self, step: int, state: TrainState) -> None:
    """Gives the engines the weights that ``step`` begins with."""
    with self._alone_on_devices():
      self.bank.publish(step, lambda name: self.learner.snapshot(state, name))
      if self.engine.version != step and self.experiment.rl.rollouts is None:
        self.engine.publish(self.learner.policy(state), step)

  def _engine_work(self) -> dict[str, float]:
    """What this process's engines were sent and did since the latest row."""
    before, engines = self.engine_totals, (self.engine, *self.bank.engines)
    stats = {id(engine.stats): engine.stats for engine in engines}.values()  # some share one
    self.engine_totals = (
      sum(s.published_bytes for s in stats) / 2**30,
      sum(s.publish_seconds for s in stats),
      sum(s.device_seconds for s in stats),
      sum(s.idle_seconds for s in stats),
    )
    names = ("memory/published", "time/publish", "time/lanes", "time/lanes_idle")
    values = zip(self.engine_totals, before, strict=True)
    return dict(zip(names, (now - then for now, then in values), strict=True))

  def _recorded_episodes(self, step: int) -> list[Trajectory]:
    """What the journal says that ``step`` was trained on."""
    order = self.journal.steps[step].episodes
    own = self.journal.trajectories(set(processes.share(order)).__contains__)
    episodes = {t.address: t for t in self.learner.gather(list(own.values()), step)}
    return [episodes[address] for address in order]

  def _record(
    self,
    step: int,
    stage: str,
    state: TrainState,
    values: dict[str, float],
    episodes: tuple[keys.Address, ...],
    schedules: Mapping[str, Any],
  ) -> None:
    """Notes a step as done, unless its updates kept failing."""
    settings = getattr(self.experiment, stage).optimizer
    optimizers = []
    for name in (POLICY, *self.learner.trained):
      prefix = "" if name == POLICY else f"policies/{name}/"
      own = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
      culprit = describe_nonfinite(own)
      if culprit:
        logging.warning("step %d: %s%s", step, prefix, culprit)
      why = prefix + (culprit or "inputs and loss were finite, so it is the gradient itself")
      optimizers.append((f"config.{stage}.optimizer", own.get("bad_steps", 0.0), settings, why))
      for where, signal in self.experiment.rl.named_signals:
        for field, (optimizer, moved, metric) in signal.optimizers().items():
          path, why = f"config.rl.{where}.{field}", f"{prefix}those of {moved}"
          optimizers.append((path, own.get(metric, 0.0), optimizer, why))
    for path, bad, optimizer, why in optimizers:
      if bad >= optimizer.max_bad_steps:
        raise TrainingError(
          f"step {step}: {int(bad)} updates in a row had non-finite gradients and were skipped "
          f"({path}.max_bad_steps={optimizer.max_bad_steps}): {why}. Lower {path}.learning_rate or "
          "resume from an earlier checkpoint."
        )
    if broken := broken_update(values):
      raise TrainingError(
        f"step {step}: {broken}: the update is not finite. Updates with non-finite gradients are "
        "skipped, so the optimiser's state or the parameters had such numbers before. Nothing of "
        f"this step is saved; checkpoints: {self.checkpoints.steps()}. The same command goes on "
        "from the last of them; if it stops here again, remove that one, or lower "
        f"config.{stage}.optimizer.learning_rate."
      )
    if jax.process_count() > 1:
      self.journal.sync()  # before what all compute together: a recorded step has its episodes
    record = StepRecord(step, stage, episodes, fingerprint(state.trained), schedules)
    known = self.journal.steps.get(step)
    if known is not None and known.fingerprint != record.fingerprint:
      logging.warning(
        "step %d was executed before with another result (%s, now %s): this machine computes other "
        "bits than the one that recorded it",
        step,
        known.fingerprint,
        record.fingerprint,
      )
    self.journal.finish_step(record)

  # Saving and restoring.

  def _save(self, step: int, state: TrainState, *, waiting: bool = True) -> None:
    """Saves a checkpoint, with the episodes that are finished and not trained on.

    One step off, the next step's episodes must all be there, as the weights that sample them are
    not in the checkpoint: it waits for them, or, where it must not, leaves the earlier checkpoint
    to go on from, and the journal.
    """
    if self._one_step_off_under_way(step):
      if not waiting:
        return
      self._settle()
    stream = None if self.stream is None else self.runner.run(self.stream.get_state())
    host = {
      "demonstrations": None if self.demonstrations is None else self.demonstrations.get_state(),
      "stream": None if stream is None else stream.plain,
      "evaluations": self.evaluations,
      "ended": self.ended,
      "signals": get_states(self.learner.signals),
      "schedules": list(self.learner.scheduled.states.items()),
      "world": base64.b64encode(self.parts.world.get_state()).decode(),
    }
    # Of several processes each has its own in the journal.
    pending = [] if stream is None or jax.process_count() > 1 else stream.episodes
    records = encode_record({"trajectories": [to_record(t) for t in pending]})
    self.journal.sync()
    # One that is there already holds the same state; the journal holds the finished episodes.
    if step not in self.checkpoints.steps():
      self.checkpoints.begin_save(step, state, host, records)

  def _one_step_off_under_way(self, step: int) -> bool:
    """Whether the next step's episodes are sampled with the weights that ``step`` began with."""
    begun = self.first_rl_step <= step < self.last_step
    return begun and self.experiment.rl.schedule.mode == "one_step_off"

  def _settle(self) -> None:
    """Waits for all episodes under way."""
    if self.stream is not None:
      self.runner.run(self.stream.settle())

  def _restore(self, at_most: int | None = None) -> tuple[TrainState, int]:
    """State and step to go on from: the newest whole checkpoint, or the start.

    With ``at_most``, for a replay, later ones are not looked at and nothing is renamed.
    """
    found = self.checkpoints.restore_newest(
      lambda step: self.learner.abstract_state(self.stage_of(max(step, 1))),
      {step: record.fingerprint for step, record in self.journal.steps.items()},
      at_most=at_most,
      set_aside=at_most is None,
    )
    if found is None:
      return self.learner.first_state(self.stage_of(1)), 0
    newest, (state, host, pending) = found
    if self.demonstrations is not None:
      self.demonstrations.set_state(host["demonstrations"])
    if self.stream is not None:
      self.stream.set_state(host["stream"])
    missing = [name for name in ("signals", "world") if name not in host]
    if missing:
      raise ConfigError(
        f"checkpoint {newest} of {self.directory} has no state of {' and '.join(missing)}: it was "
        "made by an earlier release; go on with that one, or begin anew in another --workdir, with "
        "the checkpoint as config.start_from."
      )
    set_states(self.learner.signals, host["signals"])
    done = max(newest - self.experiment.supervised.steps, 0)  # older checkpoints have no schedules
    self.learner.scheduled.states = dict(host.get("schedules", [[done, {}]]))
    self.parts.world.set_state(base64.b64decode(host["world"]))
    self.evaluations = host["evaluations"]
    self.ended = host.get("ended")
    if pending and self.stream is not None:
      self.stream.remember(from_record(r) for r in decode_record(pending)["trajectories"])
    return state, newest

  def replay(self, step: int) -> ReplayReport:
    recorded = self.journal.steps.get(step)
    if recorded is None:
      known = sorted(self.journal.steps)
      raise ConfigError(
        f"--replay_step={step} is not in the journal of {self.directory}; recorded: "
        + (f"{known[0]} to {known[-1]}." if known else "none.")
      )
    state, done = self._restore(at_most=step - 1)
    lost = [each for each in self.journal.lost_steps(step) if each > done]
    if lost:
      raise ConfigError(
        f"--replay_step={step} begins after step {done}, the nearest checkpoint, and the journal "
        f"of {self.directory} has lost records of {_ranges(lost)}; allowed: steps whose way from "
        "a checkpoint is whole."
      )
    for current in range(done + 1, step + 1):
      stage = self.stage_of(current)
      if current == self.experiment.supervised.steps + 1:
        state = self.learner.begin_rl(state)
      if stage == "supervised":
        assert self.demonstrations is not None
        state, _ = self.learner.supervised_step(state, next(self.demonstrations))
      elif episodes := self._recorded_episodes(current):
        state, _ = self.learner.rl_step(state, episodes, current)
      if stage == "rl":
        self.learner.scheduled.note(current, self.journal.steps[current].schedules)
    return ReplayReport(step, recorded.fingerprint, fingerprint(state.trained))

  # Evaluation and reports.

  def _due(self, step: int) -> str | None:
    """Which evaluation the policy after ``step`` gets beside the last one: "before", or ""."""
    settings, done = self.experiment.evaluation, step - self.experiment.supervised.steps
    if not settings.tasks or not self.experiment.rl.steps or done < 0:
      return None
    if done == 0:
      return "before"
    return "" if settings.every and done % settings.every == 0 else None

  def _begin_evaluation(self, step: int, state: TrainState) -> None:
    """Starts what is to run beside ``step``: the evaluation of the policy it begins with.

    So one that a killed process had under way is begun again by whoever does the step again.
    """
    name, settings = self._due(step - 1), self.experiment.evaluation
    if name == "" and step == self.last_step:  # whose own evaluation has the row
      return
    if name is not None and settings.interleaved:
      self._publish(step, state)
      if self.engine.version != step:  # nothing is sampled: stored episodes
        self.engine.publish(self.learner.policy(state), step)
      self.evaluating = (name, self._make_evaluation(name, step - 1))

  def _finish_evaluation(self) -> dict[str, float]:
    """Metrics of the evaluation beside a step, where there is one."""
    if self.evaluating is None:
      return {}
    (name, running), self.evaluating = self.evaluating, None
    return self._keep_report(name, running.step, running.report()) | {"eval/step": running.step}

  def _make_evaluation(self, name: str, step: int) -> Evaluation:
    settings = self.experiment.evaluation
    return Evaluation(
      self.parts,
      self.engine,
      self.runner,
      step,
      settings if name else dataclasses.replace(settings, samples=0),
      self.bank.seats,
      background=settings.interleaved,
    )

  def _evaluate_into(
    self, name: str, state: TrainState, step: int, progress: ProgressDisplay
  ) -> dict[str, float]:
    """Measures the policy after ``step``; episodes under way go on with it, or have ended first.

    It is a full evaluation where it has a name, under which it is kept.
    """
    settings = self.experiment.evaluation
    if not settings.tasks:
      return {}
    if name:
      progress.note(
        f"evaluating on {settings.tasks} held-out tasks ({name} reinforcement learning)"
      )
    if self._one_step_off_under_way(step):
      self._settle()
    with self._alone_on_devices():
      policy = self.learner.policy(state)
      if step < self.first_rl_step:  # the others are still as it is
        self.bank.publish(step, lambda _: policy)
      else:
        self.bank.publish(step, lambda n: self.learner.snapshot(state, n), version=step + 1)
      self.engine.publish(policy, step + 1)
    return self._keep_report(name, step, self._make_evaluation(name, step).report())

  def _keep_report(self, name: str, step: int, report: EvaluationReport) -> dict[str, float]:
    """Metrics of an evaluation; one with a name is kept, and written as readable episodes."""
    if None in report.estimates(report.overall).values():
      logging.warning(
        "step %d: the evaluation has no verdict: %d episodes failed in environment, verifier or "
        "engine, and too few are left to say how often the policy succeeds",
        step,
        report.masked,
      )
    if name:
      self.evaluations[name] = report.metrics()
    if name and processes.is_first():
      write_trajectories(
        self.directory / f"samples_{name}.txt",
        report.greedy_trajectories or report.sampled_trajectories,
        tasks=self.parts.tasks.test,
        tokenizer=self.parts.tokenizer,
        title=f"{self.experiment.name}: held-out episodes {name} reinforcement learning",
      )
    return {f"eval/{k}": v for k, v in report.metrics().items() if "/" not in k}

  def _write_samples(self, step: int, sampled: Sequence[Trajectory]) -> None:
    """Writes down what earned most, where it is time to."""
    config, done = self.experiment.reward.samples, step - self.experiment.supervised.steps
    if processes.is_first() and config.every and done % config.every == 0:
      tasks, tokenizer = self.parts.tasks.train, self.parts.tokenizer
      write_samples(self.directory, step, sampled, tasks=tasks, tokenizer=tokenizer, config=config)

  def _rollout_metrics(
    self, step: int, trajectories: Sequence[Trajectory], drawn: int, seconds: float
  ) -> dict[str, float]:
    """Of the episodes sampled for ``step``; ``drawn`` counts the tokens of greedy ones as well."""
    statistics = rollout_statistics(
      trajectories, tool_names=[tool.name for tool in self.parts.tools]
    )
    values: dict[str, float] = {}
    if alarm := statistics.alarm(self.experiment.reward.fault_alarm):
      logging.warning("step %d: %s", step, alarm)
    if warning := self._masking.add(trajectories):
      logging.warning("step %d: %s", step, warning)
    values |= self._masking.metrics()
    for name, value in statistics.metrics().items():
      values[f"time/{name}" if name.endswith("_seconds") else name] = value
    stage, stream, now = self.experiment.rl, self.stream, time.monotonic()
    assert stream is not None
    values |= (diversity := group_diversity(trajectories))
    identical = diversity.get("diversity/identical_groups") == 1.0
    if identical and stage.sampling.temperature > 0:
      logging.warning(
        "step %d: in each of its %d groups all samples are the same, so that nothing can be "
        "learnt from comparing them; look at config.rl.sampling and at the keys of the draws",
        step,
        diversity["diversity/groups"],
      )
    values["schedule/dropped_groups"] = float(stream.dropped)
    # With episodes under way during updates, the time of updates counts as well.
    if stage.schedule.bound:
      seconds, values["time/rollout"] = now - self.handed_over, seconds
    else:
      values["time/rollout"] = seconds
    self.handed_over = now
    return values | {"time/tokens_per_second": drawn / seconds}

  def _describe(self, step: int) -> str:
    size = count(network_specs(self.parts.model, False))
    begun = f"resuming after step {step}" if step else "starting"
    return (
      f"{self.experiment.name}: {begun} in {self.directory}, {size:,} parameters, "
      f"{len(self.parts.tasks.train):,} training tasks, {len(self.parts.tasks.test):,} held out, "
      f"{jax.device_count()} {jax.default_backend()} device(s)"
    )

  def _write_report(self, report: RunReport) -> None:
    write_atomically(
      self.directory / "report.json",
      json.dumps(
        {
          "before": finite_or_null(report.before),
          "after": finite_or_null(report.after),
          "steps": report.steps,
        },
        indent=2,
      ),
    )
    rows = read_metrics(self.directory / "metrics.jsonl")
    if self.experiment.rl.steps:
      plot_rewards(rows, self.directory / "rewards.png", self.experiment.name)
    if not report.after:
      return
    table = []
    for name in [n for n in report.after if f"{n}_low" in report.after and "/" not in n]:
      table.append((name, *(_interval(result, name) for result in (report.before, report.after))))
    for name, label in (
      ("greedy/rollout/tool_calls", "tool calls an episode"),
      ("greedy/rollout/sampled_tokens", "tokens drawn an episode"),
    ):
      table.append((label, *(f"{r.get(name, 0.0):.2f}" for r in (report.before, report.after))))
    title = f"{self.experiment.evaluation.tasks} held-out tasks, seed {self.experiment.seed}"
    print_table(self.console, title, ("", "before RL", "after RL"), table)
    for label, file in (
      ("reward plot", "rewards.png"),
      ("sample trajectories", "samples_after.txt"),
      ("metrics", "metrics.jsonl"),
      ("TensorBoard", "tensorboard"),
      ("checkpoint", f"checkpoints/{report.steps}"),
    ):
      print_line(self.console, f"{label:>20}  {self.directory / file}")


def _ranges(steps: Sequence[int]) -> str:
  """Ascending numbers in words: "step 3", "steps 3 to 5, 9"."""
  runs: list[list[int]] = []
  for step in steps:
    if runs and runs[-1][-1] == step - 1:
      runs[-1].append(step)
    else:
      runs.append([step])
  words = [str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs]
  return ("step " if len(steps) == 1 else "steps ") + ", ".join(words)


def _interval(values: dict[str, float], name: str) -> str:
  if name not in values:
    return "-"
  if math.isnan(values[name]):
    return "no verdict"
  mean, low, high = (100 * values[n] for n in (name, f"{name}_low", f"{name}_high"))
  return f"{mean:.1f}% [{low:.1f}, {high:.1f}]"
