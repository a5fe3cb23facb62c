r"""Advantages of whole sequences: centre, scale, weight, from rewards and integer group ids.

The operator of most published methods is ``A_i = (R_i - centre) / scale`` with four independent
choices: the group key (``groups``), the centre, the scale, and how much a member counts in the
statistics (``counts``). Invalid members are excluded from every statistic and get 0. All members of
a group of equal rewards also get 0: such a group teaches nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import Config, ConfigError, NonNegativeFloat, PositiveFloat, Share, check
from agentjax.objectives.advantage_function import AdvantageChoice
from agentjax.objectives.kl import KlEstimator

Centre = Literal[
  "none",
  "group_mean",
  "group_median",
  "group_unique_mean",
  "leave_one_out",
  "length_weighted",
  "runner_up",
  "batch_mean",
  "baseline",
  "prompt_value",
  "win_rate",
]
Scale = Literal["none", "group_std", "batch_std", "nonzero_rewards", "nonzero_advantages"]

EVERY_PART = "*"

_GROUP_CENTRES = (
  "group_mean",
  "group_median",
  "group_unique_mean",
  "leave_one_out",
  "length_weighted",
  "runner_up",
  "win_rate",
)


@dataclasses.dataclass(unsafe_hash=True)
class AdvantageConfig(Config):
  """From rewards to one advantage a token: centre -> scale -> credit -> merge -> whiten -> clip.

  Attributes:
    centre: what is subtracted from the reward of a sequence.
      "none"; "group_mean" (GRPO); "group_median"; "group_unique_mean" (mean of the distinct
      rewards, MARS); "leave_one_out" (mean of the others, RLOO); "length_weighted"
      (sum L R / sum L, OPO);
      "runner_up" (only the best member learns, against the second best: pass@k training);
      "batch_mean"; "baseline" (a baseline a sequence given by the caller; in a run the reward of
      one greedy episode a group: ReMax); "prompt_value" (what the value head expects at the last
      token before the policy's first: sequence-level PPO, 2604.08865); "win_rate" (nothing is
      subtracted: the reward itself is replaced by the share of the group that it beats, ties and
      itself counting half, less a half: self-play preference, 2405.00675).
    scale: what the centred reward is divided by.
      "none"; "group_std"; "batch_std" (std of all valid rewards); "nonzero_rewards" and
      "nonzero_advantages" (fraction of sequences whose reward, or centred reward, is not 0: GPG).
    parts: named parts of the reward that are centred and scaled one by one, instead of the whole
      reward, and then summed with ``part_weights``, so that no part dominates (GDPO, which whitens
      the sum over the batch). () takes the reward; ("*",) all parts that have a weight in
      ``config.reward``, with that weight.
    part_weights: one per part; () gives all the same weight.
    ddof: 1 = sample, 0 = population standard deviation, for scale and whitening.
    epsilon: added to the standard deviation.
    credit: how a sequence's advantage reaches its tokens. "broadcast": the same on all;
      "reward_to_go": discounted sum of later rewards; "gae": with a value head.
    index_set: "token" or "turn", the step of discounting and of the GAE recursion;
      "turn_then_token" is RAGEN's bi-level GAE (``returns.bilevel_gae``): over turns with
      ``turn_gamma``, then over the tokens of each with ``gamma``.
    turn_gamma: see ``index_set``; .95 in RAGEN (2504.20073).
    branches: the advantage of a token that several branches of one episode share (the column
      ``branches``); the batch has every copy of it. "soft": each copy the advantage of its own
      branch; "hard": all copies the mean of their branches (ARPO, 2507.19849, with "soft" as its
      default). On policy both have one gradient; once ratios are clipped they differ.
    gamma: discount a step, for "reward_to_go" and "gae".
    gae_lambda: lambda of the policy's GAE; value_lambda: of the value targets (VAPO: 1).
    length_adaptive_lambda: alpha of VAPO's ``lambda = 1 - 1 / (alpha length)``, replaces
      gae_lambda; None = off.
    turn_rewards: named parts of the reward that are paid at the end of the turns that earned them
      (``Trajectory.turn_rewards``), with their weight in the reward. The same amount is subtracted
      from the reward at the end, so the sum does not change. () pays everything at the end. Needs
      credit "reward_to_go" or "gae", and no centre or scale, which are over whole sequences.
    kl_in_reward: beta of ``-beta KL`` added to every token's reward; 0 = off.
    kl_in_reward_estimator: of that KL (``kl.kl_estimate``); only its value counts.
    whiten: standardise over all weighted tokens of the batch at the end.
    clip: bound on the absolute value at the end; None = off.
    multiplier: constant factor at the end (AgentCPM-Explore: 2).
    function: your own advantages by name (``advantage_function.AdvantageChoice``), instead of
      centre, scale and credit, which are then not used; merge, whitening, clip and multiplier
      follow it. None uses those settings.
    learn_from: sequences that keep their weight: "all", or only those whose advantage (before
      credit) is "negative" or "positive". Means are then over their tokens only.
  """

  centre: Centre = "group_mean"
  scale: Scale = "group_std"
  parts: tuple[str, ...] = ()
  part_weights: tuple[float, ...] = ()
  ddof: Literal[0, 1] = 1
  epsilon: NonNegativeFloat = 1e-6
  credit: Literal["broadcast", "reward_to_go", "gae"] = "broadcast"
  index_set: Literal["token", "turn", "turn_then_token"] = "token"
  turn_gamma: Share = 0.95
  branches: Literal["soft", "hard"] = "soft"
  gamma: Share = 1.0
  gae_lambda: Share = 1.0
  value_lambda: Share = 1.0
  length_adaptive_lambda: PositiveFloat | None = None
  turn_rewards: tuple[str, ...] = ()
  kl_in_reward: NonNegativeFloat = 0.0
  kl_in_reward_estimator: KlEstimator = "k1"
  whiten: bool = False
  clip: PositiveFloat | None = None
  multiplier: float = 1.0
  learn_from: Literal["all", "negative", "positive"] = "all"
  function: AdvantageChoice | None = None

  @property
  def needs_group(self) -> bool:
    """Whether a group of one sequence would give zero advantage."""
    return self.function is None and self.centre in _GROUP_CENTRES

  @property
  def needs_reference(self) -> bool:
    """Whether reference log-probs must be computed for the advantages."""
    return self.kl_in_reward > 0

  @property
  def needs_values(self) -> bool:
    """Whether a value head must be trained."""
    return self.credit == "gae" or self.centre == "prompt_value"

  def validate(self, path: str = "advantage") -> None:
    super().validate(path)
    require = self.requirements(path)
    if self.function is not None:
      self.check_own_function(path)
    alpha = self.length_adaptive_lambda
    if self.scale == "group_std" and self.centre in (
      "none",
      "baseline",
      "batch_mean",
      "prompt_value",
      "win_rate",
    ):
      raise ConfigError(
        f"{path}.scale='group_std' with {path}.centre={self.centre!r} divides by the spread of a "
        "group that is not centred on itself; use a group centre, or scale='batch_std' | 'none'."
      )
    if self.scale == "nonzero_advantages" and self.centre == "none":
      raise ConfigError(
        f"{path}.scale='nonzero_advantages' needs a centre; got {path}.centre='none'. Use "
        "scale='nonzero_rewards'."
      )
    if self.credit == "gae" and (self.centre != "none" or self.scale != "none"):
      raise ConfigError(
        f"{path}.credit='gae' takes its baseline from the value head; got {path}.centre="
        f"{self.centre!r} and {path}.scale={self.scale!r}. Set both to 'none' (whiten=True "
        "standardises the result)."
      )
    if self.index_set == "turn_then_token":
      require(self.credit == "gae", "credit", "'gae' with index_set 'turn_then_token'")
      if alpha is not None:
        raise ConfigError(
          f"{path}.length_adaptive_lambda={alpha} has no meaning over turns; got {path}.index_set="
          "'turn_then_token'. Set it to None."
        )
    require(len(set(self.parts)) == len(self.parts), "parts", "distinct names")
    require(
      len(self.part_weights) in (0, len(self.parts)),
      "part_weights",
      f"one number for each of {path}.parts, or ()",
    )
    alone = EVERY_PART not in self.parts or (len(self.parts) == 1 and not self.part_weights)
    require(alone, "parts", f"{EVERY_PART!r} alone, without part_weights")
    paid = self.turn_rewards
    check(len(set(paid)) == len(paid), f"{path}.turn_rewards", paid, "distinct names")
    for name in ("centre", "scale") if paid and self.function is None else ():
      value = getattr(self, name)
      check(value == "none", f"{path}.{name}", value, f"'none' with {path}.turn_rewards={paid}")
    require(not (paid and self.parts), "parts", f"() with {path}.turn_rewards")
    if self.credit != "gae":
      self._only_with("gae", path, gae_lambda=1.0, value_lambda=1.0, length_adaptive_lambda=None)
    if self.credit == "broadcast" and self.function is None:
      self._only_with(
        "reward_to_go' | 'gae",
        path,
        gamma=1.0,
        index_set="token",
        turn_rewards=(),
        kl_in_reward=0.0,
      )
    elif self.credit != "broadcast":
      self._only_with("broadcast", path, branches="soft")
    if alpha is not None and self.gae_lambda != 1.0:
      raise ConfigError(
        f"{path}.length_adaptive_lambda={alpha} replaces {path}.gae_lambda={self.gae_lambda}; "
        "set gae_lambda=1.0 or length_adaptive_lambda=None."
      )

  def check_own_function(self, path: str) -> None:
    """Raises ConfigError for settings that need inputs which an advantage function does not get."""
    for name, unused in (
      ("centre", ("baseline", "prompt_value")),
      ("credit", ("gae",)),
      ("learn_from", ("negative", "positive")),
    ):
      value = getattr(self, name)
      said = f"another than {' or '.join(map(repr, unused))} with an advantage function"
      check(value not in unused, f"{path}.{name}", value, said)
    for name, off in (("parts", ()), ("kl_in_reward", 0)):
      value = getattr(self, name)
      check(value == off, f"{path}.{name}", value, f"{off!r} with an advantage function")

  def _only_with(self, credit: str, path: str, **defaults: object) -> None:
    for name, default in defaults.items():
      if getattr(self, name) != default:
        raise ConfigError(
          f"{path}.{name}={getattr(self, name)!r} has no effect with {path}.credit="
          f"{self.credit!r}; set credit='{credit}' or {name}={default!r}."
        )


def check_group_size(config: AdvantageConfig, group_size: int, size_path: str, path: str) -> None:
  """Raises ConfigError where groups of ``group_size`` cannot give this config an advantage."""
  if group_size < 2 and config.needs_group:
    raise ConfigError(
      f"{size_path}={group_size} with {path}.centre={config.centre!r} gives zero advantage "
      f"everywhere. Use {size_path} >= 2, or {path}.centre='none' | 'batch_mean' | 'baseline' | "
      "'prompt_value'."
    )


def check_rewards(rewards: np.ndarray, valid: np.ndarray, groups: np.ndarray) -> None:
  """On the host: refuses values that only a sentinel or a fault can produce, before training on
  them.

  Args:
    rewards: [N] concrete; NaN or inf is refused where valid.
    valid: bool [N].
    groups: int [N], 0..N-1 where valid.

  Raises:
    ValueError: naming the first offending sequences.
  """
  rewards, valid, groups = np.asarray(rewards), np.asarray(valid), np.asarray(groups)
  bad = np.flatnonzero(valid & ~np.isfinite(rewards))
  if bad.size:
    raise ValueError(
      f"rewards of valid sequences must be finite, got {rewards[bad[:5]].tolist()} at "
      f"{bad[:5].tolist()} ({bad.size} in all); mark them invalid with a reason "
      "(trajectory.record.Reward.invalid)."
    )
  lost = np.flatnonzero(valid & ((groups < 0) | (groups >= len(rewards))))
  if lost.size:
    raise ValueError(
      f"groups of valid sequences must lie in 0..{len(rewards) - 1}, got "
      f"{groups[lost[:5]].tolist()} at {lost[:5].tolist()}; number the groups of a batch densely."
    )


def check_outcomes(rewards: np.ndarray, valid: np.ndarray, setting: str, other: str) -> None:
  """On the host: refuses rewards that are not probabilities, before they enter a Bernoulli loss.

  Args:
    rewards: [N] concrete.
    valid: bool [N]; others are not looked at.
    setting: field and value that asks for outcomes.
    other: what may be set instead.

  Raises:
    ConfigError: naming the first rewards outside 0..1.
  """
  rewards, valid = np.asarray(rewards), np.asarray(valid)
  bad = np.flatnonzero(valid & ((rewards < 0) | (rewards > 1)))
  if bad.size:
    raise ConfigError(
      f"{setting} with rewards {rewards[bad[:5]].tolist()} ({bad.size} of {int(valid.sum())}); "
      f"allowed: rewards in 0..1. Map them with config.reward, or {other}."
    )


def sequence_advantages(
  rewards: Float[Array, "sequences"],
  valid: Bool[Array, "sequences"],
  groups: Int[Array, "sequences"],
  config: AdvantageConfig,
  *,
  lengths: Float[Array, "sequences"] | None = None,
  baselines: Float[Array, "sequences"] | None = None,
  counts: Float[Array, "sequences"] | None = None,
) -> Float[Array, "sequences"]:
  r"""``A_i = (R_i - centre_i) / scale_i`` of every sequence; the first two steps of the pipeline.

  Args:
    rewards: outcome of each sequence; read only where valid.
    valid: False for invalid rewards and unused places: out of all statistics, advantage 0.
    groups: the group key, ids in 0..N-1 where valid (prompt, prompt and role, ...).
    config: ``centre``, ``scale``, ``ddof``, ``epsilon``; the rest is for ``prepare``.
    lengths: weighted tokens a sequence, for centre "length_weighted".
    baselines: for centre "baseline" and "prompt_value".
    counts: how much a sequence counts in the statistics, default 1. With 1 / k for each of the k
      sequences of one trajectory every trajectory counts once.

  Returns:
    Float [N]; 0 for invalid members, lone members and groups without spread.

  References:
    GRPO 2402.03300; RLOO 2402.14740; Dr.GRPO 2503.20783; OPO 2505.23585; GPG 2504.02546; ReMax
    2310.10505; MARS (unique mean); Flow-GRPO (one count a trajectory).
  """
  places = rewards.shape[0]
  counts = jnp.ones_like(rewards) if counts is None else counts
  counts = jnp.where(valid, counts, 0)
  rewards = jnp.where(valid, rewards, 0)
  groups = jnp.where(valid, groups, places)
  whole_batch = jnp.where(valid, 0, places)

  key = whole_batch if config.centre == "batch_mean" else groups
  if config.centre == "win_rate":
    centred = _win_rate(rewards, counts, groups) - 0.5
  else:
    centred = rewards - _centre(rewards, counts, key, config.centre, lengths, baselines)
  learns = valid
  if config.centre not in ("none", "baseline", "prompt_value"):
    learns = learns & _spread(rewards, key)
  if config.centre == "runner_up":
    learns = learns & _is_first_best(rewards, groups)
  centred = jnp.where(learns, centred, 0)

  if config.scale in ("group_std", "batch_std"):
    over = groups if config.scale == "group_std" else whole_batch
    deviation = _std(rewards, counts, over, config.ddof)
    scaled = centred / (deviation + config.epsilon)
    return jnp.where(learns & (deviation > 0), scaled, 0)
  if config.scale == "nonzero_rewards":
    return centred / _fraction(rewards != 0, counts)
  if config.scale == "nonzero_advantages":
    return centred / _fraction(centred != 0, counts)
  return centred


def multi_reward_advantages(
  rewards: Float[Array, "sequences parts"],
  part_weights: Float[Array, "parts"],
  valid: Bool[Array, "sequences"],
  groups: Int[Array, "sequences"],
  config: AdvantageConfig,
  **options: Float[Array, "sequences"] | None,
) -> Float[Array, "sequences"]:
  """Advantages of each reward part, then their weighted sum, so that no part dominates (GDPO).

  ``options`` are those of ``sequence_advantages``.
  """
  parts = jax.vmap(
    lambda part: sequence_advantages(part, valid, groups, config, **options),
    in_axes=1,
    out_axes=1,
  )(rewards)
  return parts @ part_weights


def merge_branches(
  advantages: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  branches: Int[Array, "batch time"],
) -> Float[Array, "batch time"]:
  """The mean over all copies of a shared segment on each of them; other tokens keep theirs.

  Args:
    advantages: constant on the tokens of a segment in one sequence.
    weights: copies without weight, such as those of a masked sequence, do not count.
    branches: as in ``Batch``, ids up to the number of tokens.
  """
  places = branches.size + 1
  inside = (weights > 0).astype(advantages.dtype)
  ids = branches.ravel()
  total = jax.ops.segment_sum((inside * advantages).ravel(), ids, places)
  count = jax.ops.segment_sum(inside.ravel(), ids, places)
  mean = total / jnp.where(count > 0, count, 1)
  return jnp.where(branches > 0, mean[branches], advantages)


@dataclasses.dataclass(unsafe_hash=True)
class AmbiguityConfig(Config):
  """ADPO's trust in a task, by how many of its answers agree (``ambiguity_terms``).

  Attributes:
    minimum_scale: s_min, factor on the advantages where the answers agree least; .6 in the script
      of Agent0.
  """

  minimum_scale: Share = 0.6


def ambiguity_terms(
  scores: Float[Array, "sequences"], *, minimum_scale: float = 0.6
) -> tuple[Float[Array, "sequences"], Float[Array, "sequences"]]:
  """ADPO's factor on the advantage and its bonus on the upper clip bound, from self-consistency.

  ``scale = s_min + (1 - s_min) clip((s - .3) / .5, 0, 1)`` gives reliable labels more weight;
  ``bonus = .1 clip((.8 - s) / .5, 0, 1)`` allows larger updates for unreliable ones. Agent0,
  2511.16043.

  Args:
    scores: s, the share of the answers to the sequence's task that are its most frequent one.
    minimum_scale: s_min.
  """
  sure = jnp.clip((scores - 0.3) / 0.5, 0, 1)
  return minimum_scale + (1 - minimum_scale) * sure, 0.1 * jnp.clip((0.8 - scores) / 0.5, 0, 1)


def _centre(
  rewards: Array,
  counts: Array,
  groups: Array,
  centre: Centre,
  lengths: Array | None,
  baselines: Array | None,
) -> Array:
  if centre == "none":
    return jnp.zeros_like(rewards)
  if centre in ("baseline", "prompt_value"):
    if baselines is None:
      raise ValueError(f"centre={centre!r} needs baselines [N]; pass them or choose another.")
    return baselines
  if centre in ("group_mean", "batch_mean"):
    return _group_mean(rewards, counts, groups)
  if centre == "leave_one_out":
    others = _group_sum(counts, groups) - 1
    total = _group_sum(counts * rewards, groups) - rewards
    return jnp.where(others > 0, total / jnp.where(others > 0, others, 1), rewards)
  if centre == "length_weighted":
    if lengths is None:
      raise ValueError('centre="length_weighted" needs lengths [N], weighted tokens each.')
    return _group_mean(rewards, counts * lengths, groups)
  if centre == "group_median":
    return _group_median(rewards, counts, groups)
  if centre == "group_unique_mean":
    return _group_mean(rewards, _is_first_of_value(rewards, groups).astype(rewards.dtype), groups)
  if centre == "runner_up":
    return _runner_up(rewards, groups)
  raise ValueError(f"centre={centre!r}; allowed: see AdvantageConfig.centre.")


# Reductions over groups. ``groups`` is N for members that count nowhere.


def _group_sum(values: Array, groups: Array) -> Array:
  return jax.ops.segment_sum(values, groups, groups.shape[0] + 1)[groups]


def _group_mean(values: Array, counts: Array, groups: Array) -> Array:
  total = _group_sum(counts, groups)
  return _group_sum(counts * values, groups) / jnp.where(total > 0, total, 1)


def _win_rate(rewards: Array, counts: Array, groups: Array) -> Array:
  """Share of the group, itself included, whose reward is lower; equal ones count half."""
  order = jnp.sign(rewards[:, None] - rewards[None, :])
  together = jnp.where(groups[:, None] == groups[None, :], counts[None, :], 0)
  total = together.sum(1)
  return (together * (0.5 + 0.5 * order)).sum(1) / jnp.where(total > 0, total, 1)


def _std(values: Array, counts: Array, groups: Array, ddof: int) -> Array:
  deviation = values - _group_mean(values, counts, groups)
  freedom = _group_sum(counts, groups) - ddof
  squares = _group_sum(counts * jnp.square(deviation), groups)
  return jnp.sqrt(jnp.where(freedom > 0, squares / jnp.where(freedom > 0, freedom, 1), 0))


def _spread(values: Array, groups: Array) -> Array:
  # Compared exactly: the rounded mean of equal rewards need not equal them.
  places = groups.shape[0] + 1
  high = jax.ops.segment_max(values, groups, places)[groups]
  low = jax.ops.segment_min(values, groups, places)[groups]
  return high > low


def _fraction(chosen: Array, counts: Array) -> Array:
  total, part = jnp.sum(counts), jnp.sum(jnp.where(chosen, counts, 0))
  return jnp.where(part > 0, part / jnp.where(total > 0, total, 1), 1)


def _sorted_by_group(values: Array, groups: Array) -> tuple[Array, Array]:
  """Order by (group, value) and the flag of a new group or value in that order."""
  order = jnp.lexsort((values, groups))
  v, g = values[order], groups[order]
  fresh = jnp.concatenate([jnp.ones((1,), bool), (v[1:] != v[:-1]) | (g[1:] != g[:-1])])
  return order, fresh


def _is_first_of_value(values: Array, groups: Array) -> Array:
  order, fresh = _sorted_by_group(values, groups)
  return jnp.zeros(values.shape, bool).at[order].set(fresh)


def _is_first_best(values: Array, groups: Array) -> Array:
  places = groups.shape[0]
  best = values == jax.ops.segment_max(values, groups, places + 1)[groups]
  index = jnp.where(best, jnp.arange(places), places)
  return index == jax.ops.segment_min(index, groups, places + 1)[groups]


def _runner_up(values: Array, groups: Array) -> Array:
  rest = jnp.where(_is_first_best(values, groups), -jnp.inf, values)
  second = jax.ops.segment_max(rest, groups, groups.shape[0] + 1)[groups]
  return jnp.where(jnp.isfinite(second), second, values)


def _group_median(values: Array, counts: Array, groups: Array) -> Array:
  order, _ = _sorted_by_group(values, groups)
  v, c, g = values[order], counts[order], groups[order]
  places = groups.shape[0] + 1
  total = jax.ops.segment_sum(c, g, places)
  before = jnp.cumsum(total) - total
  reached = jnp.cumsum(c) - before[g]  # weight of this group up to and with this member
  half, slack = total[g] / 2, 1e-3  # counts are 1 / k: far coarser than the slack
  lower = jax.ops.segment_min(jnp.where(reached >= half - slack, v, jnp.inf), g, places)
  upper = jax.ops.segment_min(jnp.where(reached > half + slack, v, jnp.inf), g, places)
  return ((lower + upper) / 2)[groups]
