"""Is the policy collapsing? Early signs in a run's metrics, and how much answers depend on prompts.

Entropy measures how much the answers Z vary, H(Z) = I(X; Z) + H(Z | X), but not whether they depend
on the prompt X. A policy whose answers vary but fit any prompt (template collapse, 2604.06268) has
I(X; Z) near 0; ``mutual_information`` estimates it from the log-probs of every answer after every
prompt. ``CollapseMonitor`` watches the signs of an echo trap (2504.20073): the spread of rewards in
a group falls first, then entropy moves oddly, then gradients spike.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from agentjax.config import AtLeastTwo, Config, NonNegativeInt, PositiveInt, Range, Share
from agentjax.training.selectors import SelectionConfig, drawn_entropy, group_scores
from agentjax.trajectory.record import Segment, Trajectory

_SMOOTHING = 0.9  # of the z-score, RAGEN-2
_Z_EPSILON = 1e-3  # likewise
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


# Mutual information.


@dataclasses.dataclass(frozen=True)
class MutualInformation:
  """How well answers identify their prompts.

  Attributes:
    per_token: mean of (log p(Z|X) - log p(Z)) / |Z|, nats; p(Z) is the mean over the prompts.
    sequence: mean of log p(Z|X) - log p(Z), nats; at most log(number of prompts).
    retrieval_accuracy: share of answers whose own prompt makes them likeliest.
    chance: the same share for answers that do not depend on prompts.
    z_score: ``per_token`` over the standard deviation of log p(Z) / |Z| among the answers.
  """

  per_token: float
  sequence: float
  retrieval_accuracy: float
  chance: float
  z_score: float

  def metrics(self, name: str) -> dict[str, float]:
    """Flat scalars under ``information/<name>_``."""
    return {f"information/{name}_{k}": v for k, v in dataclasses.asdict(self).items()}


def mutual_information(
  cross: Float[np.ndarray, "answers prompts"],
  own: Int[np.ndarray, "answers"],
  lengths: Int[np.ndarray, "answers"],
) -> MutualInformation:
  """The estimates of RAGEN-2 (2604.06268).

  Args:
    cross: log p(answer i | prompt j), summed over tokens, nats (``models.cross_log_probs``).
    own: the prompt that answer i was given to.
    lengths: tokens of answer i, at least one.
  """
  cross = np.asarray(cross, np.float64)
  number = cross.shape[1]
  matched = np.take_along_axis(cross, np.asarray(own)[:, None], axis=1)[:, 0]
  top = cross.max(axis=1)
  marginal = top + np.log(np.exp(cross - top[:, None]).sum(axis=1)) - np.log(number)
  gain = matched - marginal
  per_token, spread = gain / lengths, np.std(marginal / lengths)
  return MutualInformation(
    per_token=float(per_token.mean()),
    sequence=float(gain.mean()),
    retrieval_accuracy=float(np.mean(cross.argmax(axis=1) == own)),
    chance=1.0 / number,
    z_score=float(per_token.mean() / (spread + _Z_EPSILON)),
  )


class Pairs(NamedTuple):
  """Prompts, answers, and which prompt each answer was given to."""

  prompts: list[np.ndarray]
  answers: list[np.ndarray]
  own: np.ndarray


def answer_pairs(
  trajectories: Sequence[Trajectory],
  config: DiagnosticsConfig,
  *,
  turns: Literal["first", "any"],
  seed: int,
  decode: Callable[[Sequence[int]], str] | None = None,
) -> Pairs | None:
  """Token ids of prompts and answers to compare; None with fewer than two tasks.

  "first": the first turn of ``samples`` episodes of each task. "any": one random turn from one
  episode of each task; its prompt is everything before it.

  Args:
    trajectories: of one step; tasks and episodes are drawn from them.
    config: ``prompts``, ``samples``, ``reasoning_end``.
    turns: see above.
    seed: addresses the draws.
    decode: token ids to text, needed with ``reasoning_end``.
  """
  groups: dict[tuple[int, int], list[Trajectory]] = collections.defaultdict(list)
  for trajectory in trajectories:
    if any(s.sampled.any() for s in trajectory.segments):
      groups[trajectory.address[:2]].append(trajectory)
  random = np.random.default_rng([seed, turns == "any"])
  keys = sorted(groups)
  if len(keys) > config.prompts:
    keys = [keys[i] for i in sorted(random.choice(len(keys), config.prompts, replace=False))]
  prompts, answers, own = [], [], []
  for number, key in enumerate(keys):
    members = groups[key]
    wanted = min(len(members), 1 if turns == "any" else config.samples)
    chosen = sorted(random.choice(len(members), wanted, replace=False))
    for i in chosen:
      drawn = [j for j, s in enumerate(members[i].segments) if s.sampled.any()]
      place = drawn[int(random.integers(len(drawn)))] if turns == "any" else drawn[0]
      prefix, answer = _split(members[i].segments, place)
      if i == chosen[0]:
        prompts.append(prefix)
      answers.append(_until(answer, config.reasoning_end, decode))
      own.append(number)
  return Pairs(prompts, answers, np.array(own)) if len(prompts) > 1 else None


def _split(segments: Sequence[Segment], place: int) -> tuple[np.ndarray, np.ndarray]:
  """The tokens before the first drawn token of a segment, and the drawn tokens from there on."""
  before, at = [], segments[place].parent
  while at is not None:
    before.append(segments[at].token_ids)
    at = segments[at].parent
  segment = segments[place]
  start = int(np.argmax(segment.sampled))
  prefix = np.concatenate([*reversed(before), segment.token_ids[:start]])
  return prefix, segment.token_ids[segment.sampled]


def _until(
  answer: np.ndarray, end: str, decode: Callable[[Sequence[int]], str] | None
) -> np.ndarray:
  if not end:
    return answer
  if decode is None:
    raise ValueError(f"reasoning_end={end!r} needs decode, which turns ids into text")
  ids = answer.tolist()
  if end not in decode(ids):
    return answer
  low, high = 1, len(ids)  # the fewest tokens that spell it
  while low < high:
    middle = (low + high) // 2
    low, high = (low, middle) if end in decode(ids[:middle]) else (middle + 1, high)
  return answer[: max(low - 1, 1)]


# Signs of collapse.


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
    signs = [*self._jumps(values)]
    self._note(values)
    signs += [*self._drifts(values), *self._falls(values)]
    return sorted(signs, key=lambda sign: not sign.ends)

  def _note(self, row: Mapping[str, float | None]) -> None:
    for name, value in row.items():
      if isinstance(value, (int, float)) and np.isfinite(value):
        self._values[name].append(float(value))

  def _jumps(self, values: Mapping[str, float | None]) -> list[Sign]:
    signs = []
    for name, metric, factor in (
      ("entropy_jump", _ENTROPY, self._config.entropy_jump),
      ("gradient_spike", "grad_norm", self._config.gradient_spike),
    ):
      past, now = self._values[metric][-self._config.window :], values.get(metric)
      if now is None or len(past) < self._config.window:
        continue
      usual = float(np.median(past))
      if usual > 0 and now > factor * usual:
        text = f"{metric} is {now:.3g}, its median over the last {len(past)} steps is {usual:.3g}"
        signs.append(Sign(name, text, False))
    return signs

  def _drifts(self, values: Mapping[str, float | None]) -> list[Sign]:
    """Signs by comparison with the first steps of the run, so that slow changes are seen too."""
    signs = []
    first = self._values[_ENTROPY][: self._config.window]
    now = values.get(_ENTROPY)
    if now is not None and len(self._values[_ENTROPY]) > self._config.window:
      usual = float(np.median(first))
      if usual > 0 and now > self._config.entropy_rise * usual:
        text = (
          f"{_ENTROPY} is {now:.3g}, its median over the first {len(first)} steps was {usual:.3g}"
        )
        signs.append(Sign("entropy_rise", text, False))
    known = self._values[_INFORMATION]
    if values.get(_INFORMATION) is not None and len(known) > 1:
      if known[-1] < self._config.information_floor * known[0]:
        text = (
          f"answers tell {known[-1]:.3g} nats of their prompts and told {known[0]:.3g}: they may "
          "come to fit any prompt"
        )
        signs.append(Sign("information", text, False))
    return signs

  def _falls(self, values: Mapping[str, float | None]) -> list[Sign]:
    config, signs = self._config, []
    spread = self._values["collapse/reward_std"]
    if "collapse/reward_std" in values and len(spread) >= 2 * config.window:
      first = float(np.mean(spread[: config.window]))
      last = float(np.mean(spread[-config.window :]))
      if last < config.reward_std_floor * first:
        signs.append(
          Sign(
            "reward_std",
            f"rewards in a group spread by {last:.3g} over the last {config.window} steps and by "
            f"{first:.3g} over the first: little is left to learn from",
            config.stop,
          )
        )
    repeated = values.get("collapse/repetition") or 0.0
    if repeated > config.repetition:
      signs.append(
        Sign("repetition", f"{repeated:.0%} of what an episode says it said before", False)
      )
    success = self._values["eval/greedy"][-config.success_patience :]
    low = [s for s in success if s < config.success_floor]
    if "eval/greedy" in values and len(low) == config.success_patience:
      text = f"held-out success was below {config.success_floor} {len(low)} times in a row"
      signs.append(Sign("success", text, config.stop))
    groups = self._values["selection/groups"][-self._patience :]
    if "selection/groups" in values and len(groups) == self._patience and not any(groups):
      text = f"{self._patience} steps in a row had no group to train on (config.rl.selection)"
      signs.append(Sign("selection", text, True))
    return signs
