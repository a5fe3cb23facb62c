"""Advantages of NeMo-RL's GRPO as Nemotron 3 Super sets it: leave-one-out, messages with faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import ConfigError, check
from agentjax.objectives.advantage_function import (
  AdvantageChoice,
  AdvantageInputs,
  AdvantageTerm,
)
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.text.chat import Chat
from agentjax.text.tool_calls import DescribedTool
from agentjax.training.experiment import Experiment
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.record import Trajectory

_EPSILON = 1e-6  # NeMo-RL's
_ROUNDING = 1e-3  # of the group's deviation; below it the others' rewards are equal

MESSAGE_ADVANTAGE = register_column(
  Column(
    "message_advantage",
    "float32",
    "Advantage in the place of the episode's, of a turn with a fault; 0 where it has none.",
    level="turn",
    in_loss=False,
  )
)


@dataclasses.dataclass(unsafe_hash=True)
class LeaveOneOut(AdvantageChoice):
  """``A_i = (R_i - mean of the others) / (std of the others + 1e-6)``, on all tokens.

  The deviation is that of a sample (ddof 1). Where the others are equal, or only one, nothing is
  divided; a member without others has 0. For ``objective.advantage.function``.
  """

  def __call__(self, inputs: AdvantageInputs) -> Float[Array, "batch time"]:
    advantages = leave_one_out(inputs.rewards, inputs.valid, inputs.groups)
    return broadcast_to_tokens(advantages, inputs.segment_ids)


def leave_one_out(
  rewards: Float[Array, "sequences"],
  valid: Bool[Array, "sequences"],
  groups: Int[Array, "sequences"],
) -> Float[Array, "sequences"]:
  """See ``LeaveOneOut``; 0 for members that are not valid."""
  number = rewards.shape[0]
  groups = jnp.where(valid, groups, number)

  def of_group(values: Array) -> Array:
    return jax.ops.segment_sum(jnp.where(valid, values, 0), groups, number + 1)[groups]

  size = of_group(jnp.ones_like(rewards))
  others = jnp.maximum(size - 1, 1)
  # About the group's mean, so that equal rewards of any size leave nothing behind.
  centred = jnp.where(valid, rewards - of_group(rewards) / jnp.maximum(size, 1), 0)
  squares = of_group(centred**2)
  mean = -centred / others
  spread = jnp.maximum(squares - centred**2 - others * mean**2, 0)
  deviation = jnp.sqrt(spread / jnp.maximum(others - 1, 1))
  differ = (others > 1) & (deviation > _ROUNDING * jnp.sqrt(squares / jnp.maximum(size, 1)))
  advantages = (centred - mean) / jnp.where(differ, deviation + _EPSILON, 1)
  return jnp.where(valid & (size > 1), advantages, 0)


@dataclasses.dataclass(unsafe_hash=True)
class MessageFaultsConfig(SignalConfig):
  """Which turns have a fault, for ``MessageTerm``: a call that cannot be read, or tags of thinking
  in a wrong place.

  Thinking may open the turn (``<think>`` itself may stand at the end of the prompt) and ends once;
  any further tag is a fault. A turn that never closes it has none: it was cut off.

  Attributes:
    call_advantage: of a turn with a call that cannot be read; 0 is off.
    thinking_advantage: of a turn with misplaced tags; 0 is off. Both are -5 in the public configs.
    tags: that open and close thinking.
  """

  call_advantage: float = -5.0
  thinking_advantage: float = -5.0
  tags: tuple[str, ...] = ("<think>", "</think>")

  def validate(self, path: str = "message_faults") -> None:
    super().validate(path)
    said = "two different texts, the opening tag and the closing one"
    two = len(self.tags) == 2 and len(set(self.tags)) == 2 and all(self.tags)
    check(two, f"{path}.tags", self.tags, said)

  def build(self, tools: SignalTools) -> Signal:
    """See ``SignalConfig.build``."""
    if tools.chat is None:
      raise ConfigError("MessageFaultsConfig reads turns, and this run has no chat.")
    return MessageFaults(self, tools.chat, tools.tools)


@dataclasses.dataclass(unsafe_hash=True)
class MessageTerm(AdvantageTerm):
  """What ``MessageFaultsConfig`` gives a turn stands in the place of its episode's advantage."""

  def check_run(self, experiment: Experiment, objective: ObjectiveConfig, path: str) -> None:
    """The run must have the signal."""
    chosen = experiment.rl.signals
    there = any(isinstance(signal, MessageFaultsConfig) for signal in chosen)
    said = "MessageFaultsConfig among them, with the term MessageTerm"
    check(there, "config.rl.signals", chosen, said)

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    given = inputs.column(MESSAGE_ADVANTAGE.name)
    return jnp.where(given != 0, given, advantages)


class MessageFaults(Signal):
  """See MessageFaultsConfig. Metrics: ``message/bad_calls`` and ``message/bad_thinking``, shares of
  the turns."""

  name = "message_advantage"
  adds = (MESSAGE_ADVANTAGE,)

  def __init__(self, config: MessageFaultsConfig, chat: Chat, tools: Sequence[DescribedTool]):
    self._config, self._chat, self._tools = config, chat, tools

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    turns = calls = thoughts = 0
    result = []
    for one in episodes:
      segments = []
      for segment in one.segments:
        advantage = 0.0
        if segment.sampled.any():
          bad_call, bad_thought = self._faults(segment.token_ids[segment.sampled].tolist())
          turns, calls, thoughts = turns + 1, calls + bad_call, thoughts + bad_thought
          advantage = min(
            self._config.call_advantage * bad_call, self._config.thinking_advantage * bad_thought
          )
        column = {MESSAGE_ADVANTAGE.name: np.array(advantage, np.float32)}
        segments.append(segment.with_columns(column))
      result.append(dataclasses.replace(one, segments=segments))
    total = max(turns, 1)
    return result, {"message/bad_calls": calls / total, "message/bad_thinking": thoughts / total}

  def _faults(self, turn: Sequence[int]) -> tuple[bool, bool]:
    """Whether a call cannot be read, and whether thinking has tags in a wrong place."""
    read = self._chat.parse(turn, self._tools)
    start, end = self._config.tags
    return any(call.error for call in read.calls), misplaced(read.text, start, end)


def misplaced(text: str, start: str, end: str) -> bool:
  """Whether tags of thinking stand where they must not; see ``MessageFaultsConfig``."""
  thought, closed, said = text.lstrip().removeprefix(start).partition(end)
  return start in thought or start in said or end in said
