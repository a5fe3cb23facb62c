"""How much answers depend on their prompts: the estimates of RAGEN-2 (2604.06268).

Entropy measures how much the answers Z vary, H(Z) = I(X; Z) + H(Z | X), but not whether they depend
on the prompt X. A policy whose answers vary but fit any prompt (template collapse) has I(X; Z) near
0; ``mutual_information`` estimates it from the log-probs of every answer after every prompt.
``config.rl.diagnostics.information_every`` asks for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from agentjax.training.diagnostics import DiagnosticsConfig
from agentjax.trajectory.record import Segment, Trajectory

_Z_EPSILON = 1e-3  # of the z-score, RAGEN-2


def information(
  trajectories: Sequence[Trajectory],
  config: DiagnosticsConfig,
  *,
  seed: int,
  decode: Callable[[Sequence[int]], str],
  score: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], np.ndarray],
) -> dict[str, float]:
  """Flat scalars under ``information/first_turn_`` and ``information/any_turn_``.

  Args:
    trajectories: of one step.
    config: see ``answer_pairs``.
    seed, decode: see ``answer_pairs``.
    score: prompts and answers to log p(answer i | prompt j).
  """
  metrics: dict[str, float] = {}
  turns: tuple[Literal["first", "any"], ...] = ("first", "any")
  for which in turns:
    pairs = answer_pairs(trajectories, config, turns=which, seed=seed, decode=decode)
    if pairs is not None:
      lengths = np.array([len(answer) for answer in pairs.answers])
      found = mutual_information(score(pairs.prompts, pairs.answers), pairs.own, lengths)
      metrics |= found.metrics(f"{which}_turn")
  return metrics


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
