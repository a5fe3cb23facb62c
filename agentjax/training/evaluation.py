"""Held-out evaluation of a policy, inside a run or of a checkpoint on disk."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from agentjax.config import ConfigError
from agentjax.engine import Engine
from agentjax.models import Params, param_specs
from agentjax.models.huggingface import is_folder, load_pretrained
from agentjax.models.spec import abstract
from agentjax.rollout.evaluation import (
  Episodes,
  EvaluationReport,
  HeldOutConfig,
  play,
  summarise,
)
from agentjax.rollout.seat_config import SnapshotSeat, TrainedSeat, policy_names, trained_seats
from agentjax.rollout.seats import SeatPlayer
from agentjax.rollout.viewer import write_trajectories
from agentjax.sharding import make_mesh, shardings, with_shardings
from agentjax.threads import LoopThread
from agentjax.training import processes
from agentjax.training.bank import PolicyBank
from agentjax.training.build import Extensions, Parts, build_parts
from agentjax.training.checkpoint import (
  load_further,
  load_networks,
  load_newest,
  load_reference,
  newest_first,
)
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.extended import extensions_of_run
from agentjax.training.placement import place
from agentjax.training.pretrained import runtime_overrides
from agentjax.training.state import Network, Weights, full_policy, network_specs
from agentjax.trajectory.record import POLICY


def build_engine(parts: Parts, policies: int = 1) -> Engine:
  """A sampling engine of a run; it draws no id that the tokenizer does not have.

  Raises:
    ConfigError: its pages cannot hold an episode.
  """
  engine = parts.experiment.likelihood.engine(
    parts.model,
    parts.experiment.sampling_engine,
    parts.chat,
    decode=parts.tokenizer.decode,
    vocab_limit=parts.tokenizer.vocab_size,
    devices=place(parts.experiment.devices, together=parts.experiment.engine.processes).rollout,
    policies=policies,
  )
  held, longest = engine.max_tokens, parts.experiment.rollout.max_total_tokens
  if held < longest:
    engine.close()
    raise ConfigError(
      f"config.engine.cache_tokens={parts.experiment.engine.cache_tokens}: a lane holds a context "
      f"of {held} tokens; allowed: room for config.rollout.max_total_tokens={longest} in each of "
      "its parts (engine.lanes * mesh.data * mesh.expert of them), or 0."
    )
  return engine


def build_engines(parts: Parts) -> tuple[Engine, Callable[[Parts], Engine]]:
  """The engine of "policy", and what gives those of further policies of the run's model.

  With adapters all share one engine, its slots and the weights that nobody changes.
  """
  seats = parts.experiment.seats
  if parts.experiment.lora is None:
    return build_engine(parts), build_engine
  names = policy_names(seats)
  own = {names[a] for a, seat in seats.items() if isinstance(seat, TrainedSeat | SnapshotSeat)}
  engine = build_engine(parts, 1 + len(own))
  others = iter(engine.others)
  return engine, lambda _: next(others)


class Evaluation:
  """Measures a policy on the first ``config.evaluation.tasks`` held-out tasks.

  The episodes begin at once and run in the loop of ``runner``. Each process plays its share of the
  tasks, and all get the report on all of them. The engines must keep the policy's weights until
  ``report`` is there.

  Args:
    parts: host-side parts of the run.
    engine: has the policy of after training step ``step`` published.
    runner: where the episodes are played.
    step: whose policy it is.
    plan: what to measure.
    seats: of a ``training.bank.PolicyBank``; None where ``config.seats`` names nobody.
    measured: name of the policy whose rewards count.
    background: whether its episodes stand behind all others.

  Attributes:
    step: as given.
  """

  def __init__(
    self,
    parts: Parts,
    engine: Engine,
    runner: LoopThread,
    step: int,
    plan: HeldOutConfig,
    seats: Mapping[str, SeatPlayer] | None = None,
    measured: str = POLICY,
    *,
    background: bool = False,
  ):
    experiment = parts.experiment
    settings = experiment.evaluation
    sampling = dataclasses.replace(experiment.rl.sampling, temperature=settings.temperature)
    player = parts.player(engine, sampling, experiment.seed, seats)
    self._parts, self._runner, self._plan = parts, runner, plan
    self.step = step
    self._tasks = parts.tasks.test[: settings.tasks]

    async def begin() -> asyncio.Task[Episodes]:
      playing = play(
        processes.share(self._tasks, experiment.engine.processes),
        player=dataclasses.replace(player, only=measured, background=background),
        make_environment=parts.make_environment,
        rewards=parts.rewards,
        plan=plan,
        step=step,
        program=parts.program,
      )
      return asyncio.ensure_future(playing)

    self._playing = runner.run(begin())

  def report(self) -> EvaluationReport:
    """Waits until all episodes have ended."""

    async def end() -> Episodes:
      return await self._playing

    own = self._runner.run(end())
    return summarise(
      self._tasks,
      *(processes.gather_outcomes(episodes) for episodes in own),
      plan=self._plan,
      tool_names=[tool.name for tool in self._parts.tools],
      seed=self._parts.experiment.seed,
      step=self.step,
    )

  def cancel(self) -> None:
    """Ends the episodes; every environment is closed."""

    async def end() -> None:
      self._playing.cancel()
      await asyncio.wait([self._playing])

    self._runner.run(end())


def evaluate_checkpoint(
  experiment: Experiment,
  checkpoint: str | os.PathLike[str],
  *,
  extensions: Extensions | None = None,
  samples_file: str | os.PathLike[str] | None = None,
  measured: str = POLICY,
) -> EvaluationReport:
  """Loads a checkpoint's policies and measures one as ``config.evaluation`` says.

  Snapshots and trained policies of ``config.seats`` play with what the checkpoint has of them;
  where it has none, as in a folder, "policy" plays those seats too.

  Args:
    experiment: validated and frozen here.
    checkpoint: RUN/checkpoints/STEP, or RUN for its newest; or a Hugging Face folder, which is then
      ``experiment.pretrained``.
    extensions: as in ``Run``; what the run was extended with is used beside it.
    samples_file: text file to write readable episodes to.
    measured: name of the policy, "policy" or one that ``config.seats`` trains.

  Raises:
    ConfigError: ``evaluation.tasks`` is 0, no such policy is trained, the checkpoint is of another
      config, or the run was extended with something that is not given and cannot be imported.
    CheckpointError: there is no checkpoint, or none that is whole.
  """
  folder = is_folder(checkpoint)
  if folder:  # its weights are whole: adapters and another run's networks have no part in them
    experiment = dataclasses.replace(
      experiment, pretrained=os.fspath(checkpoint), start_from=None, lora=None
    )
  resolve(experiment)
  settings = experiment.evaluation
  if not settings.tasks:
    raise ConfigError("config.evaluation.tasks=0 measures nothing; allowed: at least 1.")
  known = (POLICY, *trained_seats(experiment.seats))
  if measured not in known:
    raise ConfigError(f"--policy={measured}; allowed: a trained policy, {', '.join(known)}.")
  path, step = pathlib.Path(checkpoint), 0
  if folder:
    parts = build_parts(experiment, None, extensions or Extensions())
    policy = load_folder(parts, path)
  else:
    # A tokenizer trained on the tasks stands in the run's directory.
    directory = newest_first(path)[0].parents[1]
    call = f"evaluate_checkpoint(experiment, {str(checkpoint)!r}, extensions=Extensions(...))"
    parts = build_parts(experiment, directory, extensions_of_run(directory, extensions, call=call))
    path, policy = load_newest(path, lambda found: (found, load_policy(parts, found)))
    step = int(path.name)
  with contextlib.ExitStack() as stack:
    runner = LoopThread()
    stack.callback(runner.close)
    engine, further = build_engines(parts)
    stack.callback(engine.close)
    bank = PolicyBank(parts, 0, further)
    stack.callback(bank.close)
    bank.publish(0, lambda name: policy if folder else load_snapshot(parts, path, name, policy))
    stack.callback(lambda: runner.run(parts.close()))
    runner.run(parts.start())
    engine.publish(policy, step + 1)
    report = Evaluation(parts, engine, runner, step, settings, bank.seats, measured).report()
  if samples_file is not None and processes.is_first():
    write_trajectories(
      samples_file,
      report.greedy_trajectories or report.sampled_trajectories,
      tasks=parts.tasks.test,
      tokenizer=parts.tokenizer,
      title=f"{experiment.name}: held-out episodes of {path}",
    )
  return report


def load_folder(parts: Parts, folder: pathlib.Path) -> Params:
  """Policy of a Hugging Face folder on the experiment's mesh.

  Raises:
    CheckpointError: its weights are damaged or not those that its ``config.json`` asks for.
  """
  experiment = parts.experiment
  mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
  return load_pretrained(folder, mesh=mesh, overrides=runtime_overrides(parts.model))[0]


def load_policy(parts: Parts, path: pathlib.Path) -> Params:
  """Policy of a checkpoint on the experiment's mesh, with its adapters beside it.

  Raises:
    ConfigError: the checkpoint is of another config.
    CheckpointError: it is none.
  """
  specs = network_specs(parts.model, parts.experiment.rl.has_value_head, parts.experiment.lora)
  return _whole(parts, path, load_networks(path, _target(parts, specs), parts.identity))


def load_snapshot(parts: Parts, path: pathlib.Path, name: str, policy: Params) -> Params:
  """What a snapshot or a further policy plays with, its adapters beside it.

  Args:
    parts: host-side parts.
    path: of a checkpoint.
    name: of the snapshot or the policy.
    policy: of the checkpoint; in the place of one that the checkpoint does not have.
  """
  experiment = parts.experiment
  critic = experiment.rl.has_value_head and name in trained_seats(experiment.seats)
  specs = network_specs(parts.model, critic, experiment.lora)
  found = load_further(path, name, Network(_target(parts, specs)))
  return policy if found is None else _whole(parts, path, found.weights)


def _target(parts: Parts, specs: Any) -> Any:
  """What parameters of these specs are restored to: the mesh of the updates."""
  experiment = parts.experiment
  mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
  return with_shardings(abstract(specs), shardings(specs, mesh))


def _whole(parts: Parts, path: pathlib.Path, networks: Weights) -> Params:
  """The policy of a checkpoint's networks, with its adapters beside it."""
  lora = parts.experiment.lora
  if lora is None:
    return networks.policy
  reference = load_reference(path, _target(parts, param_specs(parts.model)))
  return full_policy(networks, reference, lora)
