"""Single parts of the reward, and turns that are paid them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.config import ConfigError, check
from agentjax.objectives.columns import TURN_REWARDS
from agentjax.signals.signal import BatchContext, Metrics, Result, Signal, StepContext
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import at_turn_ends
from agentjax.trajectory.record import Reward, Status, Trajectory

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment


class TurnRewards(Signal):
  """Rewards of turns as a part of the outcome, for ``advantage.turn_rewards``.

  It stands on the turn's last token with weight or, where a turn has none, on the last one before
  it. What was earned before the first token with weight stays where it is: nobody is paid for it.

  Args:
    shares: weight in the reward of each part that turns earn.
  """

  name = "turn_rewards"
  needs = ("selected",)
  adds = (TURN_REWARDS,)

  def __init__(self, shares: Mapping[str, float]):
    self._shares = dict(shares)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    check_turn_rewards(episodes, tuple(self._shares))
    started = need_parts(episodes, tuple(self._shares))
    return [at_turn_ends(one, TURN_REWARDS.name, self._paid(one)) for one in started], {}

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    del context, networks
    return Result({TURN_REWARDS.name: move_to_weights(batch)})

  def _paid(self, episode: Trajectory) -> list[float]:
    total = np.zeros(len(episode.segments), np.float32)
    for name, share in self._shares.items():
      paid = [0.0 if p is None else p for p in episode.turn_rewards.get(name, total)]
      total += np.float32(share) * np.array(paid, np.float32)
    return total.tolist()


def check_pays_turns(experiment: Experiment, path: str) -> None:
  """Raises ConfigError where turns are paid and the advantage has no place for that."""
  for phase in experiment.rl.all_phases:
    credit = phase.objective.advantage
    check(
      credit.credit != "broadcast" or credit.function is not None,
      "config.rl.objective.advantage.credit",
      credit.credit,
      f"'gae' or 'reward_to_go', in phases too, with {path}, which pays turns",
    )


@jax.jit
def move_to_weights(batch: Batch) -> jax.Array:
  """float32 [B, T]: ``turn_rewards`` of a batch where an advantage can find them; see TurnRewards.

  Tokens that a signal has not ``selected`` have no weight.
  """
  kept = (batch.weights > 0) & batch.columns.get("selected", True)
  places = jnp.broadcast_to(jnp.arange(kept.shape[1]), kept.shape)
  last = jax.lax.cummax(jnp.where(kept, places, -1), axis=1)
  target = jnp.where(last >= places - batch.positions, last, places)  # of its own sequence
  paid = batch.column(TURN_REWARDS.name)
  rows = jnp.arange(kept.shape[0])[:, None]
  return jnp.zeros_like(paid).at[rows, target].add(paid)


def need_parts(episodes: Sequence[Trajectory], names: Sequence[str]) -> list[Trajectory]:
  """Copies in which an episode without a value of one of the parts has no valid reward."""
  result = []
  for one in episodes:
    absent = [name for name in names if counted_part(one, name) is None]
    if absent and one.reward.valid:
      invalid = Reward.invalid(f"no value of the parts {', '.join(absent)}")
      one = dataclasses.replace(one, reward=invalid)
    result.append(one)
  return result


def check_turn_rewards(episodes: Sequence[Trajectory], names: Sequence[str]) -> None:
  """Refuses parts of the reward that no turn has earned.

  Raises:
    ConfigError: the sum of the turns' rewards differs from the part.
  """
  for trajectory in episodes:
    for name in names:
      whole = _value(trajectory, name)
      if whole is None:
        continue
      paid = sum(p for p in trajectory.turn_rewards.get(name, ()) if p is not None)
      if abs(paid - whole) > 1e-6 * max(1.0, abs(whole)):
        raise ConfigError(
          f"config.rl.objective takes {name!r} as a part of the reward that turns earn, and it is "
          f"{whole:g} for the episode {trajectory.address} and {paid:g} for its turns "
          "together; allowed in advantage.turn_rewards, and as the part that stages earn: parts "
          "that are earned turn by turn, such as 'environment'."
        )


def counted_part(trajectory: Trajectory, name: str) -> float | None:
  """A part of the reward; not above 0 after a breach of the policy. None where it has no value."""
  value = _value(trajectory, name)
  if trajectory.status is Status.POLICY_ERROR:  # as ``RewardGraph`` has it of the whole
    return min(value or 0.0, 0.0)
  return value


def _value(trajectory: Trajectory, name: str) -> float | None:
  part = trajectory.reward_parts.get(name)
  return None if part is None else part.value
