"""The protocol of signals, which compute columns of tokens before training on them.

A signal names the columns that it needs and those that it adds. A training step packs its episodes,
runs the signals in the order of their needs, prepares and updates; it knows no signal by name. A
signal of your own is a class and its settings::

  class Surprise(Signal):
    name = "surprise"
    adds = (Column("surprise", "float32", "Nats above the mean of the run so far."),)

    def __init__(self):
      self.mean = 0.0

    def __call__(self, context, networks, batch):
      found = Result({"surprise": -batch.behaviour_log_probs - self.mean})
      self.mean = -float(context.packed.behaviour_log_probs.mean())
      return found

    def get_state(self): return {"mean": self.mean}
    def set_state(self, state): self.mean = state["mean"]

  class SurpriseConfig(SignalConfig):
    def build(self, tools): return Surprise()

``config.rl.signals = (SurpriseConfig(),)`` chooses it; a loss reads ``inputs.column("surprise")``.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from agentjax.config import ConfigError
from agentjax.models import ModelConfig, Params
from agentjax.names import Choice
from agentjax.text.chat import Chat
from agentjax.text.tool_calls import DescribedTool
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column, get_column, register_column
from agentjax.trajectory.packing import PackedSequence
from agentjax.trajectory.record import Trajectory

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment
  from agentjax.training.optimizer import OptimizerConfig
  from agentjax.training.rows import MeshRows
  from agentjax.training.state import NetworkSpec

Metrics = Mapping[str, Any]
"""Scalars by name, on the host or on the mesh."""


@dataclasses.dataclass(frozen=True)
class SignalTools:
  """What a run provides to a signal when it is built.

  Attributes:
    model: the policy.
    token_bytes: bytes of every token, None for control tokens.
    mesh: that of the updates.
    pack: sequences to a batch on the host.
    rows: rows a forward pass, of which a batch is a multiple.
    temperature: divides logits before log-probs, as in sampling.
    updates: batches of the whole stage, for the schedules of networks that learn from each.
    chat: how conversations are written, for signals that read turns or ask another policy.
    tools: those of the run, as the policy sees them.
  """

  model: ModelConfig
  token_bytes: Sequence[bytes | None]
  mesh: jax.sharding.Mesh
  pack: Callable[[Sequence[PackedSequence]], Batch]
  rows: int
  temperature: float = 1.0
  updates: int = 1
  chat: Chat | None = None
  tools: Sequence[DescribedTool] = ()


@dataclasses.dataclass(frozen=True)
class StepContext:
  """Context of the episodes of a training step.

  Attributes:
    step: number of the training step.
    policy: returns the policy at the start of the step, with adapters added in.
    beside: episodes of the step that serve as baselines and are not trained on.
    at: settings with the numbers that their schedules have at this step.
  """

  step: int
  policy: Callable[[], Params]
  beside: Sequence[Trajectory] = ()
  at: Callable[[Any], Any] = lambda settings: settings


@dataclasses.dataclass(frozen=True)
class BatchContext:
  """Context of a batch.

  Attributes:
    step: number of the training step.
    policy: returns the policy at this moment, with adapters added in.
    sequences: what was packed, in the order of the batch.
    packed: the batch as it was packed, on the host, without columns of signals.
    score: log-probs and values [B, T] of a batch under ``state.Weights``, on the mesh.
    rows: how batches are placed on the mesh and cut into micro-batches.
    notes: values that a signal keeps from ``__call__`` for its ``for_update``.
  """

  step: int
  policy: Callable[[], Params]
  sequences: Sequence[PackedSequence]
  packed: Batch
  score: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]
  rows: MeshRows
  notes: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a signal on a batch.

  Attributes:
    columns: by name: [B, T, ...] of tokens and turns, [N, ...] of sequences; on the mesh, or on the
      host where it was computed there. A core column replaces the batch's.
    networks: those that have changed, by name.
    metrics: of the batch.
  """

  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  networks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: Metrics = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ForUpdate:
  """Further inputs of an update, besides the batch and the result of ``prepare``.

  Attributes:
    fields: of ``update.UpdateBatch``, arrays [B, ...].
    head: output projection of a teacher.
    metrics: of the batch.
  """

  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  head: Any = None
  metrics: Metrics = dataclasses.field(default_factory=dict)


class Signal:
  """Base of signals, which does nothing; override the methods that you need.

  Attributes:
    name: unique among the signals of a run; the key of its state in checkpoints.
    needs: columns of other signals that it reads, if such signals run.
    adds: columns that it adds. They are registered when the run is built.
    networks: its own, by name; they are part of ``TrainState.networks`` while the stage of
      reinforcement learning lasts, and of its checkpoints.
    keeps_episodes: it trains on episodes of earlier steps again. Every process then holds all
      columns of all episodes.
  """

  name: ClassVar[str]
  keeps_episodes: ClassVar[bool] = False
  needs: tuple[str, ...] = ()
  adds: tuple[Column, ...] = ()
  networks: Mapping[str, NetworkSpec] = types.MappingProxyType({})

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    """A step's episodes as they are trained on, and metrics. On the host.

    They are copies with rewards or columns changed; some may be left out, and earlier ones added.

    Args:
      context: see there.
      episodes: scored, in the order of addresses.
    """
    del context
    return list(episodes), {}

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    """Columns of a batch.

    Args:
      context: see there.
      networks: of the run, by name.
      batch: on the mesh, with the columns of the signals before.
    """
    del context, networks, batch
    return Result()

  def learn(
    self, context: BatchContext, networks: Mapping[str, Any], batch: Batch, prepared: Any
  ) -> Result:
    """Its networks after learning from the result of ``prepare`` on a batch, and metrics.

    Args:
      context, networks, batch: as in ``__call__``; the batch has all columns.
      prepared: ``objectives.Prepared`` of the first pass.
    """
    del context, networks, batch, prepared
    return Result()

  def for_update(self, context: BatchContext, prepared: Any) -> ForUpdate:
    """Further inputs of the update, once ``objectives.Prepared`` is known."""
    del context, prepared
    return ForUpdate()

  def get_state(self) -> Any:
    """JSON-able state, which ``set_state`` takes. None is not saved."""
    return None

  def set_state(self, state: Any) -> None:
    """Restores the state of ``get_state``."""
    raise NotImplementedError(f"the signal {self.name!r} has a state and no set_state()")


@dataclasses.dataclass(unsafe_hash=True)
class SignalConfig(Choice):
  """Settings of a signal that ``config.rl.signals`` or ``config.rl.process`` chooses."""

  group = "agentjax.signals"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {"prime": "agentjax.recipes.prime:ProcessConfig"}

  @property
  def needs_reference(self) -> bool:
    """Whether the run has to keep its reference policy for the signal."""
    return False

  def check_model(self, model: ModelConfig, path: str) -> None:
    """Raises ConfigError for a model that the signal cannot read; ``path`` names these settings."""

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Raises ConfigError for a run that the signal does not fit; ``path`` names these settings.

    A signal that rewards tokens refuses here objectives that pay only at the end.
    """

  def networks(self, model: ModelConfig, updates: int) -> Mapping[str, NetworkSpec]:
    """Its networks by name, for memory plans and for ``Signal.networks``.

    Args:
      model: the policy.
      updates: batches of the whole stage, for schedules of learning rates.
    """
    return {}

  def optimizers(self) -> Mapping[str, tuple[OptimizerConfig, str, str]]:
    """By field: an optimiser, the name in words of what it trains, and the metric of its
    ``max_bad_steps``."""
    return {}

  def build(self, tools: SignalTools) -> Signal:
    """The signal of a run."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")


def order_signals(signals: Sequence[Signal]) -> tuple[Signal, ...]:
  """Signals in the order of their needs, otherwise in the given order; registers the columns that
  they add.

  Raises:
    ConfigError: two have one name or add one column, or they need each other.
    ColumnError: a needed column is not registered.
  """
  owner: dict[str, Signal] = {}
  named: set[str] = set()
  for signal in signals:
    if signal.name in named:
      raise ConfigError(f"two signals are called {signal.name!r}; allowed: one of each name.")
    named.add(signal.name)
    for column in signal.adds:
      if not column.core:
        register_column(column)
      first = owner.setdefault(column.name, signal)
      if first is not signal:
        raise ConfigError(
          f"the signals {first.name!r} and {signal.name!r} both add the column {column.name!r}; "
          "allowed: one signal a column."
        )
  waits = {
    signal.name: {owner[need].name for need in map(_known, signal.needs) if need in owner}
    for signal in signals
  }
  ordered: list[Signal] = []
  left = list(signals)
  while left:
    done = {signal.name for signal in ordered}
    ready = next((s for s in left if waits[s.name] - {s.name} <= done), None)
    if ready is None:
      circle = ", ".join(repr(signal.name) for signal in left)
      raise ConfigError(
        f"the signals {circle} need columns of each other; allowed: needs without a circle."
      )
    ordered.append(ready)
    left.remove(ready)
  return tuple(ordered)


def _known(need: str) -> str:
  return get_column(need).name


def own_networks(signals: Sequence[Signal]) -> dict[str, NetworkSpec]:
  """The networks of signals, by name.

  Raises:
    ConfigError: two signals have a network of one name, or one has a name of the run's own.
  """
  found: dict[str, NetworkSpec] = {}
  for signal in signals:
    for name, spec in signal.networks.items():
      if name in found or name in ("policy", "reference"):
        raise ConfigError(
          f"the signal {signal.name!r} has a network {name!r}, and so has the run; allowed: "
          "another name."
        )
      found[name] = spec
  return found


def get_states(signals: Mapping[str, Signal]) -> dict[str, Any]:
  """The states of the signals that have one, by name."""
  states = {name: signal.get_state() for name, signal in signals.items()}
  return {name: state for name, state in states.items() if state is not None}


def set_states(signals: Mapping[str, Signal], states: Mapping[str, Any]) -> None:
  """Restores the states of ``get_states``.

  Raises:
    ConfigError: a state of a signal that the run does not have.
  """
  unknown = sorted(set(states) - set(signals))
  if unknown:
    raise ConfigError(
      f"the checkpoint holds the state of the signals {', '.join(unknown)} and the run has "
      f"{', '.join(signals) or 'none'}; allowed: the config.rl.signals that the run began with."
    )
  for name, state in states.items():
    signals[name].set_state(state)
