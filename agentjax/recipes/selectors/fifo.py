r"""Successes of earlier steps stand in for failures where a whole group fails.

Every task has a first-in-first-out buffer of its successes. Where the rewards of a group have a
deviation below ``deviation`` and a mean below ``mean``, no success among them, and the task has a
stored one, a random stored success takes the place of the group's first episode. Without it all
advantages of the group are 0. Log-probs of its tokens are those under which they were sampled, so
that ratios are not 1.

Reference: ARPO for GUI agents (dvlab-research/ARPO) and its code; the experience pool of DART
injects successes in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentjax.config import PositiveFloat, PositiveInt
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.episode_groups import generator, replayed, usable_groups, value_of
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import from_texts, to_texts


@dataclasses.dataclass(unsafe_hash=True)
class SuccessesConfig(SignalConfig):
  """Settings of the buffers; the defaults are those of ARPO's code.

  Attributes:
    capacity: successes that are kept of each task, the latest.
    above: an episode with more reward than this is a success.
    deviation, mean: a group below both has failed.
    seed: of the choice among stored successes. Ours.
  """

  capacity: PositiveInt = 8
  above: float = 0.1
  deviation: PositiveFloat = 0.05
  mean: float = 0.2
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """A band would drop failed groups before this signal sees them."""
    require = experiment.requirements("config")
    stage = experiment.rl
    require(stage.selection.rule == "all", "rl.selection.rule", f"'all' with {path}")
    corrected = all(p.objective.policy_loss.mismatch.active for p in stage.all_phases)
    require(
      stage.old_log_probs == "behaviour" or corrected,
      "rl.old_log_probs",
      f"'behaviour', or an active policy_loss.mismatch, with {path}: the policy has "
      "changed since a stored success was sampled",
    )

  def build(self, tools: SignalTools) -> Successes:
    """See ``SignalConfig.build``."""
    del tools
    return Successes(self)


class Successes(Signal):
  """Keeps successes by task, and gives them to groups that failed. They are state of the run.

  Metrics: ``successes/kept``, ``successes/given`` (episodes) and ``successes/failed`` (groups).

  Args:
    config: see SuccessesConfig.
  """

  name = "successes"
  keeps_episodes = True

  def __init__(self, config: SuccessesConfig):
    self._config = config
    self._kept: dict[tuple[str, int], list[Trajectory]] = {}

  def get_state(self) -> list[str]:
    return to_texts(one for own in self._kept.values() for one in own)

  def set_state(self, state: Any) -> None:
    self._kept = {}
    for one in from_texts(state):
      self._kept.setdefault((one.source, one.task_id), []).append(one)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    given: dict[int, Trajectory] = {}  # by the episode whose place it takes
    failed = 0
    groups = usable_groups(episodes)
    for key, members in groups.items():
      if not self._failed(members):
        continue
      failed += 1
      first = members[0]
      stored = self._kept.get((first.source, first.task_id))
      if stored:
        chosen = stored[generator(self._config.seed, key).integers(len(stored))]
        here = {"step": first.step, "sample": first.sample, "group": first.group}
        given[id(first)] = dataclasses.replace(replayed(chosen), **here)  # type: ignore[arg-type]
    for one in (one for members in groups.values() for one in members):
      if value_of(one) > self._config.above:
        own = self._kept.setdefault((one.source, one.task_id), [])
        own.append(one)
        del own[: -self._config.capacity]
    return [given.get(id(one), one) for one in episodes], {
      "successes/kept": float(sum(map(len, self._kept.values()))),
      "successes/given": float(len(given)),
      "successes/failed": float(failed),
    }

  def _failed(self, members: Sequence[Trajectory]) -> bool:
    values, settings = np.array([value_of(one) for one in members]), self._config
    spread = float(values.std()) < settings.deviation
    return spread and float(values.mean()) < settings.mean and values.max() <= settings.above
