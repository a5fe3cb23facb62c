"""Settings of episodes."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from agentjax.config import Config, check
from agentjax.names import check_name


@dataclasses.dataclass(unsafe_hash=True)
class BranchConfig(Config):
  r"""When an episode is branched after a tool result, and how a group shares its places.

  Of the ``group_size`` = M episodes of a task, N start at the prompt. The others branch off where
  the policy became unsure. With H the mean entropy (nats) of the first ``probe_tokens`` tokens of a
  turn, and ``dH = probe_tokens (H_turn - H_first turn) / log(vocabulary)``, a turn after a tool
  result is drawn again by up to ``copies`` further episodes with

      P = (base + weight * dH) * max(0, 1 - penalty * n)

  where n counts the turns right before this one, on the same path, that were branched. What is left
  of M when all have ended goes to fresh episodes, which are not branched.

  The defaults are those of ARPO's code (2507.19849), with two differences: it sums the
  entropies of up to 20 tokens, of the 10 likeliest ids each, so that a short turn looks sure of
  itself; we take the mean of exact entropies, times 20. ``penalty`` is of AEPO (2510.14545), whose
  form and numbers here are those of a third-party port, as the paper's own are not published.

  Attributes:
    roots: N with the budget "fixed"; ARPO has 8 for M = 16.
    budget: "fixed", or AEPO's "entropy":
      ``N = int(M sigmoid(sensitivity (H_first - H_tool))) + 1``, at most M, where H_tool is the
      mean of H over the turns after tool results of the first episode, which runs alone to find
      out; without tool results N = M.
    sensitivity: of the budget "entropy".
    rule: "draw" branches with probability P (ARPO), "threshold" where P > ``threshold`` (AEPO).
    base, weight, penalty, threshold: of the formula; AEPO has penalty 0.05 and threshold 0.5.
    copies: further episodes a branched turn gives.
    probe_tokens: tokens that H looks at.
  """

  roots: int = 8
  budget: Literal["fixed", "entropy"] = "fixed"
  sensitivity: float = 0.5
  rule: Literal["draw", "threshold"] = "draw"
  base: float = 0.5
  weight: float = 0.2
  penalty: float = 0.0
  threshold: float = 0.5
  copies: int = 1
  probe_tokens: int = 20

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in ("roots", "copies", "probe_tokens"):
      check(getattr(self, name) >= 1, f"{path}.{name}", getattr(self, name), ">= 1")
    for name in ("penalty", "sensitivity"):
      check(getattr(self, name) >= 0, f"{path}.{name}", getattr(self, name), ">= 0")


@dataclasses.dataclass(unsafe_hash=True)
class OversampleConfig(Config):
  """More episodes than a group needs, for the first of them.

  Attributes:
    factor: ``ceil(factor * group_size)`` episodes start.
    rule: which ones make the group. "shortest": those with the fewest tokens, prompt included, then
      the lowest sample number; it does not depend on time, and whoever can no longer be among them
      is abandoned. "first": those that end first, whereupon the others are abandoned; what that
      gives depends on the machine, and favours quick tools. Both favour short episodes. One whose
      environment failed is taken only where too few others are left.
  """

  factor: float = 1.5
  rule: Literal["shortest", "first"] = "shortest"

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.factor >= 1, f"{path}.factor", self.factor, ">= 1")


@dataclasses.dataclass(unsafe_hash=True)
class MonteCarloConfig(Config):
  r"""What a turn is worth by completions from before and after it; the part "monte_carlo".

  With V_k the value of the state before turn k, turn k of n is paid

      progress   V_{k+1} - V_k,  V_n = 0
      label      V_{k+1}, and the last turn nothing

  Progress is a potential: with weight 1 an episode earns its outcome less V_0, and the rewards to
  go of turn k are its outcome less V_k, which is what VinePPO (2410.01679) compares with. Labels
  are Math-Shepherd's (2312.08935), where the last step's is the outcome itself; they pay for every
  turn taken.

  Attributes:
    completions: N from every state; 8 in Math-Shepherd. An episode of n turns costs about
      N (n + 1) / 2 further ones.
    form: see above.
    value: V from the rewards of the N: "mean"; or of those at ``success`` and above "soft", their
      share, or "hard", 1 where there is one.
    success: see ``value``.
  """

  completions: int = 8
  form: Literal["progress", "label"] = "progress"
  value: Literal["mean", "soft", "hard"] = "mean"
  success: float = 1.0

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.completions >= 1, f"{path}.completions", self.completions, ">= 1")


SamplerName = Literal["independent", "branch", "oversample", "monte_carlo"]


@dataclasses.dataclass(unsafe_hash=True)
class RolloutConfig(Config):
  """How episodes run. All defaults are ours; no paper fixes them.

  Attributes:
    group_size: episodes a task gets in one step.
    max_turns: model calls in an episode; one that needs more is truncated.
    max_tokens_per_turn: tokens drawn in one model call.
    max_total_tokens: tokens of the whole episode, prompt and observations included; at most the
      engine's max_length and the trainer's row length.
    episode_timeout: seconds the environment of one episode may take in all, tools included; then
      the episode is truncated. The policy's own turns are bounded by their tokens and do not count,
      so that waiting for a slot of the engine truncates nobody.
    environment_timeout: seconds one reset, step or close of an environment may take; then the
      episode is an environment error. It must exceed what the tools are allowed together.
    reward_timeout: seconds the scoring of one trajectory or group may take; then the reward is
      invalid.
    cancel_grace: seconds an environment that is cancelled may take to stop before it is abandoned.
    concurrency: episodes at work at the same time; more than the engine's slots keeps the device
      busy while some of them wait for tools.
    answer: what of the last turn of a question is its answer. "marked": the line after ``####``;
      "text": all of it, for rewards that judge it as it stands.
    grammar: what the policy may write. "none", anything; "tool_calls", free text and calls that are
      well formed, with arguments that satisfy the schema of an offered tool. The recorded log-probs
      stay those of the unmasked policy. Needs ``engine.grammar_states``.
    sampler: how a group comes about. "independent": every episode from the start; "branch": some go
      on from where another was unsure (``branch``; ARPO, AEPO); "oversample": the first of more
      (``oversample``); "monte_carlo": independent, and every turn is rewarded by completions from
      before and after it (``monte_carlo``, the part "monte_carlo" of the reward). Evaluations are
      always independent, and have no completions. "module:attribute": a ``group.Sampler`` of your
      own, or a class or function that makes one.
    branch, oversample, monte_carlo: settings of those samplers.
    rotate_seats: whether the players of several seats (``config.seats``) change places, one agent
      on each time: "never", with every further "sample" of a group, or with every "step".
  """

  group_size: int = 8
  max_turns: int = 8
  max_tokens_per_turn: int = 128
  max_total_tokens: int = 512
  episode_timeout: float = 600.0
  environment_timeout: float = 120.0
  reward_timeout: float = 120.0
  cancel_grace: float = 1.0
  concurrency: int = 64
  answer: Literal["marked", "text"] = "marked"
  grammar: Literal["none", "tool_calls"] = "none"
  sampler: SamplerName | str = "independent"
  branch: BranchConfig = dataclasses.field(default_factory=BranchConfig)
  oversample: OversampleConfig = dataclasses.field(default_factory=OversampleConfig)
  monte_carlo: MonteCarloConfig = dataclasses.field(default_factory=MonteCarloConfig)
  rotate_seats: Literal["never", "sample", "step"] = "never"

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in ("group_size", "max_turns", "max_tokens_per_turn", "concurrency"):
      check(getattr(self, name) >= 1, f"{path}.{name}", getattr(self, name), ">= 1")
    check(self.max_total_tokens >= 2, f"{path}.max_total_tokens", self.max_total_tokens, ">= 2")
    for name in ("episode_timeout", "environment_timeout", "reward_timeout", "cancel_grace"):
      check(getattr(self, name) > 0, f"{path}.{name}", getattr(self, name), "seconds > 0")
    check_name(self.sampler, f"{path}.sampler", get_args(SamplerName))
    if self.sampler == "branch" and self.branch.budget == "fixed":
      check(
        self.branch.roots <= self.group_size,
        f"{path}.branch.roots",
        self.branch.roots,
        f"at most {path}.group_size ({self.group_size}); the rest of the group are branches",
      )
