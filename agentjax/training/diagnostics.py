"""Is the policy collapsing? Early signs in a run's metrics.

``CollapseMonitor`` watches the signs of an echo trap (2504.20073): the spread of rewards in a group
falls first, then entropy moves oddly, then gradients spike. How much answers depend on prompts is
estimated in ``recipes.information``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from agentjax.config import AtLeastTwo, Config, NonNegativeInt, PositiveInt, Range, Share
from agentjax.training.selectors import SelectionConfig, drawn_entropy, group_scores
from agentjax.trajectory.record import Trajectory

_SMOOTHING = 0.9  # of the z-score, RAGEN-2
_NGRAM = 4  # tokens; ours

_ENTROPY = "collapse/entropy"  # of all groups: that of those trained on depends on which they are
_INFORMATION = "information/first_turn_sequence"


@dataclasses.dataclass(unsafe_hash=True)
class DiagnosticsConfig(Config):
  """What is watched in reinforcement learning, and what ends a run.

  Attributes:
    information_every: steps between estimates of the mutual information of prompts and answers; 0
      makes none. RAGEN-2 has 5. Each costs ``prompts * samples * prompts`` scored answers.
    prompts, samples: tasks compared, and answers to each; at most what a step has.
    reasoning_end: only the part of a turn up to this text is used, such as "</think>"; "" uses
      whole turns.
    window: steps that are averaged.
    reward_std_floor: warns once the mean spread of rewards in a group, over the last ``window``
      steps, is below this share of that over the first ``window`` (RAGEN: 10 steps, 10%).
    entropy_jump, gradient_spike: warns where the entropy of what was sampled, or the norm of the
      gradient, is above this multiple of its median over the last ``window`` steps. Ours.
    entropy_rise: warns where that entropy is above this multiple of its median over the first
      ``window`` steps, even if it rose slowly. Ours.
    information_floor: warns where the information of first turns is below this share of its first
      estimate. Ours.
    repetition: warns where the mean share of repeated runs of 4 tokens is above this. Ours.
    success_floor, success_patience: warns where this many held-out evaluations in a row show a
      success below the floor (RAGEN: 5, 1%).
    stop: ends the run after a checkpoint when ``reward_std_floor`` or ``success_floor`` warns.
  """

  information_every: NonNegativeInt = 0
  prompts: AtLeastTwo = 8
  samples: PositiveInt = 8
  reasoning_end: str = ""
  window: PositiveInt = 10
  reward_std_floor: Share = 0.1
  entropy_jump: Annotated[float, Range(1, above=True)] = 2.0
  entropy_rise: Annotated[float, Range(1, above=True)] = 1.25
  information_floor: Share = 0.5
  gradient_spike: Annotated[float, Range(1, above=True)] = 10.0
  repetition: Share = 0.5
  success_floor: Share = 0.01
  success_patience: PositiveInt = 5
  stop: bool = False


def repetition(trajectories: Sequence[Trajectory]) -> float:
  """Share of runs of 4 drawn tokens that occurred earlier in the episode, mean over episodes."""
  shares = []
  for trajectory in trajectories:
    drawn = [s.token_ids[s.sampled].tolist() for s in trajectory.segments]
    runs = [tuple(d[i : i + _NGRAM]) for d in drawn for i in range(len(d) - _NGRAM + 1)]
    if runs:
      shares.append(1.0 - len(set(runs)) / len(runs))
  return float(np.mean(shares)) if shares else 0.0


def collapse_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Flat scalars under ``collapse/`` of everything that was sampled for a step.

  ``reward_std`` is the mean over groups of the deviation of rewards in a group, ``silent_groups``
  the share of groups without any; ``entropy`` is that of a drawn token in nats, also of groups that
  are not trained on.
  """
  _, scores = group_scores(trajectories, "reward_std")
  entropies = [drawn_entropy(t) for t in trajectories if t.segments]
  return {
    "collapse/reward_std": float(scores.mean()) if len(scores) else 0.0,
    "collapse/silent_groups": float(np.mean(scores == 0)) if len(scores) else 0.0,
    "collapse/repetition": repetition(trajectories),
    "collapse/entropy": float(np.mean(entropies)) if entropies else 0.0,
  }


class Sign(NamedTuple):
  """A sign of a collapse; ``ends`` says whether the run must stop."""

  name: str
  message: str
  ends: bool


class CollapseMonitor:
  """Compares each step's metrics with those before.

  Args:
    diagnostics, selection: bounds and patience.
    rows: metrics of the steps that an earlier process did, in order.
  """

  def __init__(
    self,
    diagnostics: DiagnosticsConfig,
    selection: SelectionConfig,
    rows: Sequence[Mapping[str, float | None]] = (),
  ):
    self._config, self._patience = diagnostics, selection.patience
    self._values: dict[str, list[float]] = collections.defaultdict(list)
    for row in rows:
      self._note(row)

  def smoothed(self, name: str, value: float) -> float:
    """Moving average of a metric, its last value being that of ``name``."""
    known = self._values[name]
    return value if not known else _SMOOTHING * known[-1] + (1 - _SMOOTHING) * value

  def observe(self, values: Mapping[str, float | None]) -> list[Sign]:
    """Notes a step of reinforcement learning; the signs it shows, the worst first."""
    signs = [*self._rises(values)]
    self._note(values)
    signs += self._falls(values)
    return sorted(signs, key=lambda sign: not sign.ends)

  def _note(self, row: Mapping[str, float | None]) -> None:
    for name, value in row.items():
      if isinstance(value, (int, float)) and np.isfinite(value):
        self._values[name].append(float(value))

  def _rises(self, values: Mapping[str, float | None]) -> Iterator[Sign]:
    """By comparison with the last steps, and with the first, so that slow rises are seen too."""
    window = self._config.window
    entropies, norms = self._values[_ENTROPY], self._values["grad_norm"]
    for name, metric, past, when in (
      ("entropy_jump", _ENTROPY, entropies[-window:], f"last {window} steps is"),
      ("gradient_spike", "grad_norm", norms[-window:], f"last {window} steps is"),
      ("entropy_rise", _ENTROPY, entropies[:window], f"first {window} steps was"),
    ):
      now = values.get(metric)
      if now is None or len(past) < window:
        continue
      usual = float(np.median(past))
      if usual > 0 and now > getattr(self._config, name) * usual:
        text = f"{metric} is {now:.3g}, its median over the {when} {usual:.3g}"
        yield Sign(name, text, False)

  def _falls(self, values: Mapping[str, float | None]) -> Iterator[Sign]:
    config = self._config
    known = self._values[_INFORMATION]
    if values.get(_INFORMATION) is not None and len(known) > 1:
      if known[-1] < config.information_floor * known[0]:
        text = (
          f"answers tell {known[-1]:.3g} nats of their prompts and told {known[0]:.3g}: they may "
          "come to fit any prompt"
        )
        yield Sign("information", text, False)
    spread = self._values["collapse/reward_std"]
    if "collapse/reward_std" in values and len(spread) >= 2 * config.window:
      first = float(np.mean(spread[: config.window]))
      last = float(np.mean(spread[-config.window :]))
      if last < config.reward_std_floor * first:
        text = (
          f"rewards in a group spread by {last:.3g} over the last {config.window} steps and by "
          f"{first:.3g} over the first: little is left to learn from"
        )
        yield Sign("reward_std", text, config.stop)
    repeated = values.get("collapse/repetition") or 0.0
    if repeated > config.repetition:
      text = f"{repeated:.0%} of what an episode says it said before"
      yield Sign("repetition", text, False)
    success = self._values["eval/greedy"][-config.success_patience :]
    low = [s for s in success if s < config.success_floor]
    if "eval/greedy" in values and len(low) == config.success_patience:
      text = f"held-out success was below {config.success_floor} {len(low)} times in a row"
      yield Sign("success", text, config.stop)
    groups = self._values["selection/groups"][-self._patience :]
    if "selection/groups" in values and len(groups) == self._patience and not any(groups):
      text = f"{self._patience} steps in a row had no group to train on (config.rl.selection)"
      yield Sign("selection", text, True)
