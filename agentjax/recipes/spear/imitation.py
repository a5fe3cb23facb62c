r"""SPEAR's steps before an update: rewards the use of tools, keeps successes, and replays them.

At training step t, counted from 0:

    reward <- reward + cosine_down(t) min(1, .1 turns with a tool call) an episode with A = R - mean
    of its group > 0 is kept once ``capacity`` are kept, those with A~ = R - median of the group
    means >= 0 are trained on with the step's own, at the weight cosine_up(t), and the memory is
    emptied

Kept episodes are forgotten after ``tolerate_steps``. Reference: 2509.22601 and its code
(TencentYoutuResearch/SPEAR).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from agentjax.config import NonNegativeFloat, PositiveInt, check
from agentjax.recipes.spear.advantages import (
  CLIP_DRAW,
  IMITATION_ADVANTAGE,
  IMITATION_WEIGHT,
  SpearAdvantages,
  draw_tokens,
)
from agentjax.schedules import CosineSchedule, Scheduled
from agentjax.signals.signal import (
  BatchContext,
  Metrics,
  Result,
  Signal,
  SignalConfig,
  SignalTools,
  StepContext,
)
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import get_column
from agentjax.trajectory.episode_groups import value_of
from agentjax.trajectory.record import Reward, Trajectory
from agentjax.trajectory.store import from_texts, to_texts

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

FUNCTION = "agentjax.recipes.spear:SpearAdvantages"
PART = "tool_calls"  # name of the intrinsic reward among the parts of a reward


@dataclasses.dataclass(unsafe_hash=True)
class SpearConfig(SignalConfig):
  """The schedule of exploration and imitation. The defaults are those for ALFWorld.

  Attributes:
    capacity: episodes that are kept before they are trained on, and at most.
    tolerate_steps: training steps after which a kept episode is forgotten; 5 for ALFWorld, 10
      elsewhere.
    history: group means that the median is of, the latest.
    imitation_weight: weight of the loss of replayed episodes. It rises along half a cosine, over
      100 steps for ALFWorld, 200 for WebShop. Its final value is not in our sources; 1 is ours.
    tool_reward: paid for a turn with a tool call, up to 1 an episode; 0 pays nothing.
    tool_weight: factor of that. It falls along half a cosine, over as many steps.
    calls: what counts as a call: turns with a "tool" call, or every "turn", for worlds whose
      actions are text. Ours.
    seed: of the draw of those tokens. Ours.
  """

  capacity: PositiveInt = 2048
  tolerate_steps: PositiveInt = 5
  history: PositiveInt = 10240
  imitation_weight: Scheduled[NonNegativeFloat] = dataclasses.field(  # type: ignore[assignment]
    default_factory=lambda: CosineSchedule(start=0.0, end=1.0, steps=100)
  )
  tool_reward: NonNegativeFloat = 0.1
  tool_weight: Scheduled[NonNegativeFloat] = dataclasses.field(  # type: ignore[assignment]
    default_factory=lambda: CosineSchedule(start=1.0, end=0.0, steps=100)
  )
  calls: Literal["tool", "turn"] = "tool"
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """A replayed episode is alone in its group, so other advantage functions would give it 0."""
    for phase in experiment.rl.all_phases:
      credit, loss = phase.objective.advantage, phase.objective.policy_loss
      check(
        credit.function is not None,
        "config.rl.objective.advantage.function",
        credit.function,
        f"{FUNCTION!r}, in phases too, with {path}",
      )
      check(
        not isinstance(credit.function, SpearAdvantages) or loss.aggregation != "token_mean",
        "config.rl.objective.policy_loss.aggregation",
        loss.aggregation,
        f"one that divides by sequences, with {FUNCTION!r}",
      )

  def build(self, tools: SignalTools) -> SelfImitation:
    """See ``SignalConfig.build``."""
    return SelfImitation(self, tools)


class SelfImitation(Signal):
  """Keeps the episodes of earlier steps that were better than their group.

  Kept episodes, with their tokens, are part of the run's state.

  Metrics: ``spear/kept`` and ``spear/replayed`` (episodes), ``spear/refused`` (those that the
  median refused), ``spear/median``, ``spear/imitation_weight``, ``spear/tool_reward`` (mean).

  Args:
    config: see SpearConfig.
    tools: what signals are built with.
  """

  name = "spear"
  keeps_episodes = True
  adds = (IMITATION_ADVANTAGE, IMITATION_WEIGHT, CLIP_DRAW)

  def __init__(self, config: SpearConfig, tools: SignalTools):
    self._config, self._mesh = config, tools.mesh
    self._steps = 0  # before the present one
    self._kept: list[tuple[int, Trajectory]] = []  # with the step that they are of
    self._means: collections.deque[float] = collections.deque(maxlen=config.history)
    self._batches = 0  # of the present step
    self._draw = jax.jit(draw_tokens, static_argnums=(0, 3))

  def get_state(self) -> dict[str, Any]:
    texts = to_texts(one for _, one in self._kept)
    kept = [[step, text] for (step, _), text in zip(self._kept, texts, strict=True)]
    return {"steps": self._steps, "kept": kept, "means": list(self._means)}

  def set_state(self, state: Any) -> None:
    self._steps = int(state["steps"])
    self._kept = [(int(step), from_texts([text])[0]) for step, text in state["kept"]]
    self._means = collections.deque(state["means"], self._config.history)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    """The step's episodes with the intrinsic reward, followed by the replayed ones."""
    settings, step = context.at(self._config), self._steps
    self._batches = 0
    self._kept = [one for one in self._kept if step - one[0] <= settings.tolerate_steps]
    weight = settings.imitation_weight
    median = float(np.median(self._means)) if self._means else 0.0
    replayed: list[Trajectory] = []
    refused = 0
    if len(self._kept) >= settings.capacity:
      found = [recalibrate(one, median) for _, one in self._kept]
      replayed = [self._replayed(*one, weight) for one in found if one is not None]
      refused, self._kept = len(found) - len(replayed), []
    shaped = [self._with_tool_reward(one, settings.tool_weight) for one in episodes]
    self._keep(shaped)
    self._steps += 1
    bonuses = [one.reward_parts[PART].value or 0.0 for one in shaped if PART in one.reward_parts]
    return shaped + replayed, {
      "spear/kept": float(len(self._kept)),
      "spear/replayed": float(len(replayed)),
      "spear/refused": float(refused),
      "spear/median": median,
      "spear/imitation_weight": weight,
      "spear/tool_reward": float(np.mean(bonuses)) if bonuses else 0.0,
    }

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    del networks
    shape = tuple(batch.token_ids.shape)
    with jax.set_mesh(self._mesh):
      draws = self._draw(self._config.seed, context.step, self._batches, shape)
    self._batches += 1
    return Result({CLIP_DRAW.name: draws})

  def _with_tool_reward(self, episode: Trajectory, weight: float) -> Trajectory:
    settings, value = self._config, episode.reward.value
    if value is None or not settings.tool_reward:
      return episode
    if settings.calls == "tool":
      calls = len({record.turn for record in episode.tools})
    else:
      calls = len({s.turn for s in episode.segments if s.sampled.any()})
    paid = weight * min(1.0, settings.tool_reward * calls)
    parts = {**episode.reward_parts, PART: Reward(paid)}
    return dataclasses.replace(episode, reward=Reward(value + paid), reward_parts=parts)

  def _keep(self, episodes: Sequence[Trajectory]) -> None:
    """Remembers the mean of every group, and the episodes above it."""
    groups: dict[tuple[int, str, str], list[Trajectory]] = {}
    for one in episodes:
      if one.usable:
        groups.setdefault(one.advantage_group, []).append(one)
    for members in groups.values():
      mean = float(np.mean([value_of(one) for one in members]))
      self._means.append(mean)
      self._kept += [(self._steps, one) for one in members if value_of(one) > mean]
    self._kept = self._kept[-self._config.capacity :]

  def _replayed(self, episode: Trajectory, advantage: float, weight: float) -> Trajectory:
    return with_columns(
      episode,
      {
        "replayed": True,
        IMITATION_ADVANTAGE.name: advantage,
        IMITATION_WEIGHT.name: weight,
      },
    )


def recalibrate(episode: Trajectory, median: float) -> tuple[Trajectory, float] | None:
  """The episode and ``A~ = R - median``; None where that is below 0."""
  advantage = value_of(episode) - median
  return (episode, advantage) if advantage >= 0 else None


def with_columns(episode: Trajectory, values: Mapping[str, Any]) -> Trajectory:
  """A copy with columns of sequences."""
  cast = {name: get_column(name).cast(value) for name, value in values.items()}
  return dataclasses.replace(episode, columns={**episode.columns, **cast})
