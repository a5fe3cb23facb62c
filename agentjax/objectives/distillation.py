r"""On-policy distillation: a teacher gives log-probs of every token that the student wrote.

With ``p = pi_theta(. | s_t)`` the student, ``q = pi_T(. | s_t)`` the teacher and ``y ~ pi_theta``,
the aim is ``min E sum_t KL(p || q)``. Three forms, which differ in what is asked of the teacher:

=========  ================================  =======================================================
form       asked of the teacher              enters as
=========  ================================  =======================================================
sampled    log q(y_t)                        advantage ``sg[log q(y_t) - log p(y_t)]``, one-sample
                                             estimate of the exact gradient
top_k      log q of k candidates             divergence of the two on the candidates
full       its hidden state                  exact divergence over the vocabulary
=========  ================================  =======================================================

All functions are of log-probs; ``models.over_vocabulary`` makes those of a few tokens at a time.
``sum_v sg[p_v] (log q_v - log p_v) grad log p_v`` over all v is minus the exact gradient of
KL(p || q), so "sampled" is its estimate and "full" its limit.

Where released code differs from the formula: thunlp/OPD weights un-renormalised log-ratios by
probabilities renormalised on the candidates (``softmax_k(log p) (log q - log p)``), which is
neither the gradient of the renormalised KL nor that of the full one; HJSang/OPSD draws tokens at
random by weight where the paper of TIP keeps the best.

References: Lu, "On-Policy Distillation" (Thinking Machines, 2025); Agarwal et al., 2306.13649 (GKD,
JSD); 2604.13016 (forms and diagnostics); 2604.13010 (Lightning OPD); 2604.14084 (TIP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import (
  Config,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  PositiveShare,
  Range,
  Share,
)
from agentjax.names import Choice
from agentjax.schedules import Scheduled

Candidates = Literal["student", "teacher", "intersection", "union", "difference"]
DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd", "mixed"]
Rest = Literal["renormalise", "bucket", "drop", "floor"]
Selection = Literal["soft_or", "entropy", "divergence"]

_ABSENT = -1e9  # log-prob of a place of a candidate that is not in the set: its probability is 0
_LEAST_REST = 1e-7  # of probability outside the candidates: fp32 sums may reach 1
FLOOR = -100.0  # log-prob of every token outside the candidates with rest "floor"; NeMo-RL's


@flax.struct.dataclass(kw_only=True)
class CandidateInputs:
  """What a loss over candidates sees: arrays [..., k], fp32 log-probs of the same k tokens, not
  renormalised.

  Attributes:
    log_probs: of the current policy, differentiable.
    old_log_probs: of the policy at the start of the step.
    teacher_log_probs: of the teacher.
    inside: False on places that are not in the set, where the numbers mean nothing.
  """

  log_probs: Float[Array, "*lead k"]
  old_log_probs: Float[Array, "*lead k"]
  teacher_log_probs: Float[Array, "*lead k"]
  inside: Bool[Array, "*lead k"]


@dataclasses.dataclass(unsafe_hash=True)
class CandidateLoss(Choice):
  """A loss over the candidates of a token with its settings, in the place of a divergence."""

  group = "agentjax.candidate_losses"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {"clipped": "agentjax.recipes.opd:ClippedCandidates"}

  def __call__(
    self, inputs: CandidateInputs
  ) -> tuple[Float[Array, "*lead"], dict[str, Float[Array, "*lead"]]]:
    """The loss of every token, and metrics of every token by name; finite for any input."""
    raise NotImplementedError(f"{type(self).__name__} must define __call__()")


@dataclasses.dataclass(unsafe_hash=True)
class DistillationConfig(Config):
  """What a teacher adds to an objective.

  Attributes:
    form: "sampled", "top_k" or "full", see the module.
    divergence: of "top_k", "full" and the selection. "reverse_kl": KL(student || teacher);
      "forward_kl": KL(teacher || student); "jsd" and "mixed": see ``divergence``.
    jsd_beta: weight of the student in the mixture of "jsd", 0 to 1.
    forward_weight: weight of "forward_kl" in "mixed", 0 to 1; .5 in NeMo-RL.
    top_k: candidates a token; 16 in 2604.13016.
    candidates: whose k most likely tokens they are: of the "student" at the start of the step (on
      stored episodes: of the policy that they were stored with), of the "teacher", in both sets
      ("intersection"), in one at least ("union"), or in exactly one ("difference").
    candidate_loss: a loss over the candidates, for form "top_k"; None is ``candidate_divergence``.
    rest: how the probability outside the candidates enters, see ``candidate_divergence``.
    clip: bound on the absolute sampled advantage; None is off. Lightning OPD names one without a
      value.
    centre: "batch_mean" subtracts the mean over the weighted tokens from the sampled advantages,
      after the clip. Ours. On policy this only changes the noise of the gradient, as E grad log
      p(y_t) = 0. On stored tokens the mean is minus the divergence: without centring all stored
      tokens become less likely; with it the gradient is that of half the variance of log q - log p
      instead of half its mean square.
    coefficient: weight of the teacher's term.
    outcome_weight: factor on the advantages from rewards; with 0 only the teacher counts, and a
      divergence is then the whole loss.
    keep: share of the weighted tokens that is trained on, the best by ``select_by``; the others get
      weight 0, and their logits and (form "full") the teacher's hidden states are not computed.
    select_by: "soft_or" of entropy and divergence (TIP), or one of the two.
    entropy_quantile: entropies are cut off here before they are scaled, for "soft_or"; .98 in TIP.
    overlap_top_k: k of the diagnostics of ``compare``, which need the logits of both models for all
      tokens; 0 is off.
  """

  form: Literal["sampled", "top_k", "full"] = "sampled"
  divergence: DivergenceKind = "reverse_kl"
  jsd_beta: Annotated[float, Range(0, 1, above=True, below=True)] = 0.5
  forward_weight: Share = 0.5
  top_k: PositiveInt = 16
  candidates: Candidates = "student"
  candidate_loss: CandidateLoss | None = None
  rest: Rest = "renormalise"
  clip: PositiveFloat | None = None
  centre: Literal["none", "batch_mean"] = "none"
  coefficient: Scheduled[PositiveFloat] = 1.0
  outcome_weight: Scheduled[NonNegativeFloat] = 0.0
  keep: PositiveShare = 1.0
  select_by: Selection = "soft_or"
  entropy_quantile: PositiveShare = 0.98
  overlap_top_k: NonNegativeInt = 0

  @property
  def beta(self) -> float:
    """The number that ``divergence`` takes."""
    return self.forward_weight if self.divergence == "mixed" else self.jsd_beta

  @property
  def needs_comparison(self) -> bool:
    """Whether both distributions of every token are needed before the update."""
    of_student = self.candidates != "teacher" or self.candidate_loss is not None
    return self.keep < 1 or self.overlap_top_k > 0 or (self.form == "top_k" and of_student)

  @property
  def needs_live_teacher(self) -> bool:
    """Whether stored log-probs do not suffice."""
    compared = self.keep < 1 or self.overlap_top_k > 0
    of_candidates = self.form == "top_k" and self.compares_candidates
    return self.form == "full" or compared or of_candidates

  @property
  def compares_candidates(self) -> bool:
    """Whether form "top_k" needs more of candidates than one model's choice and the teacher's
    log-probs."""
    return self.of_both or self.candidate_loss is not None

  @property
  def of_both(self) -> bool:
    """Whether the candidates are a set of both models, in which places may be empty."""
    return self.candidates not in ("student", "teacher")

  @property
  def places(self) -> int:
    """Places a token for its candidates; some are empty in sets of both models."""
    return self.top_k * (2 if self.candidates in ("union", "difference") else 1)

  @property
  def stored(self) -> DistillationConfig:
    """The settings that matter when a teacher scores stored episodes."""
    if self.form == "sampled":
      return DistillationConfig()
    return DistillationConfig(form=self.form, top_k=self.top_k, candidates=self.candidates)

  def validate(self, path: str = "distillation") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.rest != "floor" or self.divergence != "jsd",
      "rest",
      f"'renormalise', 'bucket' or 'drop' with {path}.divergence='jsd'",
    )
    require(
      self.clip is None or self.form == "sampled",
      "clip",
      f"none with {path}.form={self.form!r}, which has no sampled advantage",
    )
    require(
      self.centre == "none" or self.form == "sampled",
      "centre",
      f"'none' with {path}.form={self.form!r}, which has no sampled advantage",
    )
    if self.candidate_loss is not None:
      require(self.form == "top_k", "form", f"'top_k' with {path}.candidate_loss")
      require(
        self.rest == "renormalise",
        "rest",
        f"'renormalise', the default, with {path}.candidate_loss, which does not read it",
      )


def teacher_advantages(
  teacher_log_probs: Float[Array, "*shape"],
  log_probs: Float[Array, "*shape"],
  clip: float | None = None,
) -> Float[Array, "*shape"]:
  """``sg[log q(y_t) - log p(y_t)]``, nats: each token gets its own value; nothing is summed or
  normalised.

  Args:
    teacher_log_probs, log_probs: of the tokens that the student sampled.
    clip: bound on the absolute value.
  """
  advantages = jax.lax.stop_gradient(teacher_log_probs - log_probs)
  return advantages if clip is None else jnp.clip(advantages, -clip, clip)


def divergence(
  log_p: Float[Array, "*lead outcomes"],
  log_q: Float[Array, "*lead outcomes"],
  kind: DivergenceKind,
  beta: float = 0.5,
) -> Float[Array, "*lead"]:
  """Divergence of student p and teacher q over the last axis, nats >= 0, differentiable.

  ``reverse_kl`` is KL(p || q), ``forward_kl`` KL(q || p), ``jsd``
  ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``, at most ln 2, and
  ``mixed`` ``beta KL(q || p) + (1 - beta) KL(p || q)`` (NeMo-RL).

  Args:
    log_p, log_q: log-probs that sum to 1 over the last axis.
    kind: which.
    beta: of "jsd" and "mixed".
  """
  if kind == "reverse_kl":
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
  if kind == "forward_kl":
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
  if kind == "jsd":
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    of_p = jnp.sum(jnp.exp(log_p) * (log_p - log_m), axis=-1)
    of_q = jnp.sum(jnp.exp(log_q) * (log_q - log_m), axis=-1)
    return beta * of_p + (1 - beta) * of_q
  if kind == "mixed":
    forward = divergence(log_p, log_q, "forward_kl")
    return beta * forward + (1 - beta) * divergence(log_p, log_q, "reverse_kl")
  raise ValueError(f'kind={kind!r}; allowed: "reverse_kl", "forward_kl", "jsd", "mixed".')


def candidate_divergence(
  log_p: Float[Array, "*lead k"],
  log_q: Float[Array, "*lead k"],
  kind: DivergenceKind,
  rest: Rest,
  beta: float = 0.5,
  entropies: Float[Array, "*lead"] | None = None,
) -> Float[Array, "*lead"]:
  """``divergence`` where only k candidates of the vocabulary are known.

  Args:
    log_p, log_q: log-probs of the same k tokens, not renormalised.
    kind, beta: of the divergence.
    rest: "renormalise": both are normalised on the candidates, and the student's probability
      outside has no gradient (2604.13016). "bucket": all other tokens are one more outcome; a lower
      bound of the divergence over the vocabulary (ours). "drop": terms are summed without
      normalisation, which is not a divergence and may be negative. "floor": the teacher is
      normalised on the candidates and has the log-prob -100 on every other token, the student is
      not changed; the student's probability outside costs ``sum_rest p (log p + 100)`` in the
      reverse direction and nothing in the forward one (NeMo-RL's ``zero_outside_topk``). Not for
      "jsd".
    entropies: of the student over the whole vocabulary, nats, differentiable; for rest "floor".
  """
  if rest == "floor":
    if entropies is None or kind == "jsd":
      raise ValueError(
        f"rest='floor' with kind={kind!r} needs entropies, and another kind than jsd."
      )
    log_q = jax.nn.log_softmax(log_q)
    p = jnp.exp(log_p)
    # sum over the others of p log p, and of p.
    others = -entropies - jnp.sum(p * log_p, axis=-1), 1 - jnp.sum(p, axis=-1)
    reverse_share = {"reverse_kl": 1.0, "forward_kl": 0.0, "mixed": 1 - beta}[kind]
    outside = others[0] - FLOOR * others[1]
    return divergence(log_p, log_q, kind, beta) + reverse_share * outside
  if rest == "renormalise":
    log_p, log_q = jax.nn.log_softmax(log_p), jax.nn.log_softmax(log_q)
  elif rest == "bucket":
    log_p, log_q = _with_rest(log_p), _with_rest(log_q)
  elif rest != "drop":
    raise ValueError(f'rest={rest!r}; allowed: "renormalise", "bucket", "drop", "floor".')
  return divergence(log_p, log_q, kind, beta)


def candidate_set(
  log_p: Float[Array, "*lead vocab"], log_q: Float[Array, "*lead vocab"], k: int, which: Candidates
) -> tuple[Int[Array, "*lead n"], Bool[Array, "*lead n"]]:
  """Ids of candidates, and which of the places are in the set; no id is in it twice.

  ``n`` is 2 k for "union" and "difference", the student's k most likely tokens before the
  teacher's, and k otherwise. References: 2604.13016.

  Args:
    log_p, log_q: of student and teacher over the vocabulary.
    k: most likely tokens of each.
    which: see ``DistillationConfig.candidates``.
  """
  if which in ("student", "teacher"):
    ids = jax.lax.top_k(log_p if which == "student" else log_q, k)[1]
    return ids, jnp.ones(ids.shape, bool)
  of_p, of_q = jax.lax.top_k(log_p, k)[1], jax.lax.top_k(log_q, k)[1]
  same = of_p[..., :, None] == of_q[..., None, :]
  p_shared, q_shared = same.any(axis=-1), same.any(axis=-2)
  if which == "intersection":
    return of_p, p_shared
  if which not in ("union", "difference"):
    raise ValueError(f"which={which!r}; allowed: {', '.join(map(repr, get_args(Candidates)))}.")
  first = jnp.ones_like(p_shared) if which == "union" else ~p_shared
  return jnp.concatenate([of_p, of_q], -1), jnp.concatenate([first, ~q_shared], -1)


def without_absent(
  log_p: Float[Array, "*lead k"], inside: Bool[Array, "*lead k"]
) -> Float[Array, "*lead k"]:
  """Log-probs with probability 0 on places outside the set, and no gradient there."""
  return jnp.where(inside, log_p, _ABSENT)


def soft_or(
  entropies: Float[Array, "*shape"],
  divergences: Float[Array, "*shape"],
  inside: Bool[Array, "*shape"],
  entropy_quantile: float = 0.98,
) -> Float[Array, "*shape"]:
  """TIP's score ``h + d - h d`` of min-max scaled entropy and divergence, 0 to 1; 0 outside.

  High if the student is unsure or the teacher disagrees. So it also finds tokens on which the
  student is sure and wrong, which entropy misses.

  Args:
    entropies, divergences: of the tokens, nats.
    inside: tokens that count, in the scales as well.
    entropy_quantile: entropies above this quantile of those inside count as that.

  References:
    2604.14084.
  """
  counted = jnp.where(inside, entropies, jnp.nan)
  limit = jnp.nan_to_num(jnp.nanquantile(counted, entropy_quantile))
  h = _min_max(jnp.minimum(entropies, limit), inside)
  d = _min_max(divergences, inside)
  return jnp.where(inside, h + d - h * d, 0)


def keep_best(
  scores: Float[Array, "*shape"], inside: Bool[Array, "*shape"], share: float
) -> Bool[Array, "*shape"]:
  """The ``ceil(share n)`` tokens of highest score among the n inside; ties go by place."""
  flat, within = scores.reshape(-1), inside.reshape(-1)
  count = jnp.ceil(share * jnp.sum(within) - 1e-6).astype(jnp.int32)
  order = jnp.argsort(jnp.where(within, -flat, jnp.inf), stable=True)
  rank = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
  return (within & (rank < count)).reshape(scores.shape)


def select_tokens(
  entropies: Float[Array, "*shape"],
  divergences: Float[Array, "*shape"],
  inside: Bool[Array, "*shape"],
  config: DistillationConfig,
) -> Bool[Array, "*shape"]:
  """The tokens that ``config.keep`` and ``config.select_by`` leave."""
  if config.select_by == "soft_or":
    scores = soft_or(entropies, divergences, inside, config.entropy_quantile)
  else:
    scores = entropies if config.select_by == "entropy" else divergences
  return keep_best(scores, inside, config.keep)


def compare(
  log_p: Float[Array, "*lead vocab"], log_q: Float[Array, "*lead vocab"], k: int
) -> dict[str, Float[Array, "*lead"]]:
  """Early signs of whether a student can follow a teacher (2604.13016), one number per token.

  With S_p, S_q the k most likely tokens of student and teacher and O what they share:
  ``overlap`` ``|O| / k`` (rises when it goes well); ``overlap_advantage`` the mean over O of
  ``p' (log q' - log p')``, both renormalised on S_p (towards 0 from below); ``overlap_mass`` the
  probability that the student gives O; ``entropy_gap`` ``|H(q) - H(p)|``, nats.
  """
  top_p, ids = jax.lax.top_k(log_p, k)
  top_q, _ = jax.lax.top_k(log_q, k)
  q_there = jnp.take_along_axis(log_q, ids, axis=-1)
  shared = (q_there >= top_q[..., -1:]).astype(log_p.dtype)
  p_norm, q_norm = jax.nn.log_softmax(top_p), jax.nn.log_softmax(q_there)
  terms = jnp.exp(p_norm) * (q_norm - p_norm)
  return {
    "overlap": jnp.mean(shared, axis=-1),
    "overlap_advantage": jnp.sum(shared * terms, -1) / jnp.maximum(jnp.sum(shared, -1), 1),
    "overlap_mass": jnp.sum(shared * jnp.exp(top_p), axis=-1),
    "entropy_gap": jnp.abs(entropy(log_q) - entropy(log_p)),
  }


def entropy(log_p: Float[Array, "*lead vocab"]) -> Float[Array, "*lead"]:
  """``-sum p log p`` over the last axis, nats."""
  return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def at(log_p: Float[Array, "*lead vocab"], ids: Int[Array, "*lead k"]) -> Float[Array, "*lead k"]:
  """Log-probs of the candidates ``ids``."""
  return jnp.take_along_axis(log_p, ids, axis=-1)


def _with_rest(log_p: Array) -> Array:
  inside = jnp.sum(jnp.exp(log_p), axis=-1, keepdims=True)
  return jnp.concatenate([log_p, jnp.log(jnp.maximum(1 - inside, _LEAST_REST))], axis=-1)


def _min_max(values: Array, inside: Array) -> Array:
  low = jnp.min(jnp.where(inside, values, jnp.inf))
  spread = jnp.max(jnp.where(inside, values, -jnp.inf)) - low
  scaled = (values - low) / jnp.where(spread > 0, spread, 1)
  return jnp.where(inside & (spread > 0), scaled, 0)
