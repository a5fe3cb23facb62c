"""ADPO's trust in a task, by how many of its answers agree (Agent0, 2511.16043)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from agentjax.config import Share, check
from agentjax.objectives.advantage_function import AdvantageInputs, AdvantageTerm
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.rewards.answers import normalise_number
from agentjax.schedules import Scheduled
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.record import Trajectory

AGREEMENT = register_column(
  Column(
    "agreement",
    "float32",
    "Share of the answers of the sequence's group that are its most frequent one.",
    level="sequence",
    in_loss=False,
  )
)
_CLIPS = ("ppo", "mask", "truncate", "gmpo")


@dataclasses.dataclass(unsafe_hash=True)
class AgreementTerm(AdvantageTerm):
  """Advantages and the upper clip bound by s, the share of a group's answers that agree.

  Advantages are multiplied by ``s_min + (1 - s_min) clip((s - .3) / .5, 0, 1)``, so that reliable
  labels count more; the bound gains ``.1 clip((.8 - s) / .5, 0, 1)``, so that unreliable ones allow
  larger updates. Agent0's s is that of the round in which a task was labelled; here it is the
  group's own.

  Attributes:
    minimum_scale: s_min; .6 in the script of Agent0.
  """

  minimum_scale: Scheduled[Share] = 0.6

  def check_run(self, experiment: Experiment, objective: ObjectiveConfig, path: str) -> None:
    """The upper clip bound must count."""
    clip, function = objective.policy_loss.clip, objective.function
    said = f"{' or '.join(map(repr, _CLIPS))} with {path}.advantage.terms 'agreement'"
    check(clip in _CLIPS, f"{path}.policy_loss.clip", clip, said)
    check(function is None, f"{path}.function", function, "None with the term 'agreement'")

  def signals(self, experiment: Experiment) -> Sequence[Signal]:
    return (Agreement(),)

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    sure = jnp.clip((inputs.column(AGREEMENT.name) - 0.3) / 0.5, 0, 1)
    return advantages * (self.minimum_scale + (1 - self.minimum_scale) * sure)

  def clip_high_bonus(self, inputs: AdvantageInputs) -> Array:
    return 0.1 * jnp.clip((0.8 - inputs.column(AGREEMENT.name)) / 0.5, 0, 1)


class Agreement(Signal):
  """Each episode carries the share of its group's episodes that gave its most frequent answer.

  Numbers are compared by value, other answers as text. Broken episodes do not count; one without an
  answer agrees with none. Metric: ``agreement/mean``, over groups.
  """

  name = "agreement"
  adds = (AGREEMENT,)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    answers: dict[tuple[int, int], list[Hashable]] = collections.defaultdict(list)
    for trajectory in episodes:
      if not trajectory.status.broken:
        answers[trajectory.address[:2]].append(_comparable(trajectory.answer))
    shares = {}
    for group, given in answers.items():
      counts = collections.Counter(answer for answer in given if answer is not None)
      shares[group] = max(counts.values(), default=0) / len(given)
    found = [shares.get(t.address[:2], 0.0) for t in episodes]
    marked = [
      dataclasses.replace(t, columns={**t.columns, AGREEMENT.name: np.array(s, np.float32)})
      for t, s in zip(episodes, found, strict=True)
    ]
    return marked, {"agreement/mean": float(np.mean(list(shares.values()) or [0.0]))}


def _comparable(answer: str | None) -> Hashable:
  if answer is None:
    return None
  number = normalise_number(answer)
  return answer.strip() if number is None else number
