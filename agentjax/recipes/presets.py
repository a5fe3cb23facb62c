"""Published methods as values: ``preset("dapo")`` is a config like any other.

A preset holds what a method says about credit and loss. What it says about data (dynamic sampling,
length shaping) or about the number of optimiser steps belongs to other settings. Bounds and
coefficients are those of the paper or of its released scripts; where neither gives one, the comment
says so.
"""

from __future__ import annotations

from agentjax.objectives.advantage_function import AdvantageChoice, AdvantageTerm
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.distillation import CandidateLoss, DistillationConfig
from agentjax.objectives.mismatch import MismatchConfig
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preference import PreferenceConfig
from agentjax.objectives.value_loss import ValueLossConfig

# DeepSeekMath, 2402.03300: z-score a group, a mean a sequence, k3 at .04.
GRPO = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(kl_coefficient=0.04, aggregation="sequence_mean_token_mean"),
)
# 2503.20783: no division by deviation or length. 4096 tokens is our default of their L_max.
DR_GRPO = ObjectiveConfig(
  AdvantageConfig(scale="none"),
  PolicyLossConfig(aggregation="constant", aggregation_constant=4096.0),
)
# 2503.14476: clip-higher, token mean, no KL; dual clip 10 as in its scripts.
DAPO = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28, dual_clip=10.0))
# 2507.18071: sequence ratios, tight bounds.
GSPO = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(
    ratio_level="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
    aggregation="sequence_mean_token_mean",
  ),
)
# 2506.13585 (MiniMax-M1): truncated weight on the score function, upper bound only. The paper gives
# no bound; 1.28 is ours, after clip-higher.
CISPO = ObjectiveConfig(
  AdvantageConfig(), PolicyLossConfig(gradient_form="score", clip="truncate", clip_high=0.28)
)
# 2507.20673: geometric mean of clipped ratios, log bounds .4.
GMPO = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(
    ratio_level="sequence",
    clip="gmpo",
    clip_low=0.4,
    clip_high=0.4,
    aggregation="sequence_mean_token_mean",
  ),
)
# 2511.20347: soft gate, temperatures 1.0 and 1.05.
SAPO = ObjectiveConfig(
  AdvantageConfig(), PolicyLossConfig(clip="sapo", aggregation="sequence_mean_token_mean")
)
# GDPO, as in verl and NeMo-RL: each part of the reward a z-score in its group, their sum whitened
# over the batch.
GDPO = ObjectiveConfig(
  AdvantageConfig(function=AdvantageChoice.from_name("parts", "preset"), whiten=True),
  PolicyLossConfig(),
)
# 2402.14740: leave-one-out baseline, plain REINFORCE on sequences.
RLOO = ObjectiveConfig(
  AdvantageConfig(centre="leave_one_out", scale="none"),
  PolicyLossConfig(clip="none", aggregation="sequence_mean_token_sum"),
)
# 2501.03262: discounted reward with k1 inside, whitened over the batch. beta .01 is ours.
REINFORCE_PP = ObjectiveConfig(
  AdvantageConfig(
    centre="none", scale="none", credit="reward_to_go", kl_in_reward=0.01, whiten=True
  ),
  PolicyLossConfig(),
)
# 2501.03262, baseline variant: group mean, then whitened over the batch.
REINFORCE_PP_BASELINE = ObjectiveConfig(
  AdvantageConfig(scale="none", whiten=True), PolicyLossConfig()
)
# 2310.10505: the greedy rollout's reward is the baseline.
REMAX = ObjectiveConfig(
  AdvantageConfig(centre="baseline", scale="none"),
  PolicyLossConfig(clip="none", aggregation="sequence_mean_token_sum"),
)
# 2502.01456 (PRIME): outcomes against the others of the group, and process rewards to go beside
# them, which config.rl.process gives; PPO's clip.
PRIME = ObjectiveConfig(
  AdvantageConfig(centre="leave_one_out", scale="none", credit="reward_to_go"),
  PolicyLossConfig(),
)
# 2505.23585: length-weighted baseline, exactly on policy.
OPO = ObjectiveConfig(
  AdvantageConfig(centre="length_weighted", scale="none"), PolicyLossConfig(clip="none")
)
# 2504.02546: score function, rescaled by the fraction of sequences that carry a gradient.
GPG = ObjectiveConfig(
  AdvantageConfig(scale="nonzero_advantages"),
  PolicyLossConfig(gradient_form="score", clip="unit"),
)
# 1707.06347 with the usual language-model settings (gamma 1, lambda .95).
PPO = ObjectiveConfig(
  AdvantageConfig(centre="none", scale="none", credit="gae", gae_lambda=0.95, whiten=True),
  PolicyLossConfig(),
  ValueLossConfig(clip=0.2),
)
# 2504.05118: length-adaptive lambda, value targets at lambda 1, clip-higher, mu .1 on positives.
VAPO = ObjectiveConfig(
  AdvantageConfig(centre="none", scale="none", credit="gae", length_adaptive_lambda=0.05),
  PolicyLossConfig(clip_high=0.28, positive_nll_coefficient=0.1),
)
# 2504.20073: bi-level GAE with a value head, StarPO-S: no KL, clip-higher. lambda .95 is ours: the
# paper's is 1 for plain GAE.
RAGEN = ObjectiveConfig(
  AdvantageConfig(
    centre="none",
    scale="none",
    credit="gae",
    index_set="turn_then_token",
    gae_lambda=0.95,
    whiten=True,
  ),
  PolicyLossConfig(clip_high=0.28),
  ValueLossConfig(clip=0.2),
)
# 2604.08865, sequence-level PPO: one rollout a task, reward less the chance of success at the
# prompt, clip .2, mean over tokens. The paper's critic is a network of its own; ours is a head on
# the policy, so that the coefficient is ours too.
SPPO = ObjectiveConfig(
  AdvantageConfig(centre="prompt_value", scale="none"),
  PolicyLossConfig(),
  ValueLossConfig(kind="bernoulli"),
)
# 2405.00675, which is called SPPO as well: log-ratios of sequences to eta (win rate - 1/2), eta
# 1000 as in its experiments. Rewards of the group take the place of its preference model.
SELF_PLAY_PREFERENCE = ObjectiveConfig(
  AdvantageConfig(centre="win_rate", scale="none", multiplier=1000.0),
  PolicyLossConfig(aggregation="sequence_mean_token_mean"),
  function="agentjax.recipes.squared_loss:squared_log_ratio",
)
# 2501.12599 and 2507.20534 (Kimi k1.5, K2): tau times the log-ratio goes to r - mean r. Our sources
# have no tau; .1 is ours.
KIMI = ObjectiveConfig(
  AdvantageConfig(scale="none", multiplier=10.0),
  PolicyLossConfig(aggregation="sequence_mean_token_mean"),
  function="agentjax.recipes.squared_loss:squared_log_ratio",
)
# Truncated importance weights on the score function, [0, 1] (ROLL).
TIS = ObjectiveConfig(
  AdvantageConfig(), PolicyLossConfig(gradient_form="score", clip="truncate", clip_high=0.0)
)
# 2503.14286: as TIS, positives at weight 1.
TOPR = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(gradient_form="score", clip="truncate", clip_high=0.0, positive_weight_one=True),
)
# AgentCPM-Explore, 2602.06485: masked score function, sum over tokens, advantages times 2.
MINIRL = ObjectiveConfig(
  AdvantageConfig(multiplier=2.0),
  PolicyLossConfig(
    gradient_form="score", clip="mask", clip_high=0.28, aggregation="sequence_mean_token_sum"
  ),
)
# LongCat-Flash-Thinking, 2509.18883: dual clip (for A < 0), weight min(rho, C), constant T_max. The
# bounds, C and T_max are not published; these are ours.
LONGCAT = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(
    clip_high=0.28,
    dual_clip=3.0,
    mismatch=MismatchConfig(weight_level="token"),
    aggregation="constant",
    aggregation_constant=4096.0,
  ),
)
# Agent0, 2511.16043: advantages and upper clip bound by how far the answers to a task agree. Its
# agreement is that of an earlier round's answers; a run's is that of the group itself.
ADPO = ObjectiveConfig(
  AdvantageConfig(terms=(AdvantageTerm.from_name("agreement", "preset"),)),
  PolicyLossConfig(kl_coefficient=0.01),
)
# ROME, 2512.24873: chunk ratios and chunk mismatch filter, discounted chunk returns. gamma and H
# are not published; these are ours. Means are over the chunks that the filter keeps.
IPA = ObjectiveConfig(
  AdvantageConfig(centre="none", scale="none", credit="reward_to_go", index_set="turn", gamma=0.95),
  PolicyLossConfig(
    ratio_level="turn",
    gradient_form="score",
    clip="truncate",
    clip_high=0.0,
    positive_weight_one=True,
    mismatch=MismatchConfig(filter_level="turn", filter_high=1.2, dropped="exclude"),
  ),
)
# Ling Team 2025: token weights inside [.5, 5], tokens outside dropped. Here and below they stay in
# the denominators, as in NeMo-RL and verl.
ICEPOP = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(
    mismatch=MismatchConfig(
      weight_level="token",
      weight_cap=None,
      filter_level="token",
      filter_low=0.5,
      filter_high=5.0,
    )
  ),
)
# Rejection of whole sequences by the mean k3 of their ratios; .01 is the upper end of what verl's
# notes on rollout correction name, the veto at 1e-4 likewise.
K3_REJECTION = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(
    mismatch=MismatchConfig(
      filter_level="sequence", filter_statistic="k3", filter_high=0.01, veto_below=1e-4
    )
  ),
)
# Rejection by the geometric mean of the ratios, bounds .999 and 1.001.
GEOMETRIC_REJECTION = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(
    mismatch=MismatchConfig(filter_level="sequence", filter_low=0.999, filter_high=1.001)
  ),
)
# Sequence importance weights min(prod rho, C), C 2.
SEQUENCE_TIS = ObjectiveConfig(
  AdvantageConfig(),
  PolicyLossConfig(mismatch=MismatchConfig(weight_level="sequence", weight_statistic="product")),
)
# Decoupled PPO (2505.24298): the ratio to the policy at the start of the update, clipped; the
# weight from there to the sampler, outside, truncated at 2 (ours).
DECOUPLED_PPO = ObjectiveConfig(
  AdvantageConfig(), PolicyLossConfig(mismatch=MismatchConfig(weight_level="token"))
)
# 2505.22617: |log r| on the tokens that cost most entropy.
KL_COV = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip="none", covariance="kl"))
CLIP_COV = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(covariance="clip"))
# pass@k training: the best of a group learns against the second best.
PASS_AT_K = ObjectiveConfig(AdvantageConfig(centre="runner_up"), PolicyLossConfig())

# No reward is looked at: a teacher gives the credit.
_UNREWARDED = AdvantageConfig(centre="none", scale="none")
# 2604.13016 and Thinking Machines 2025: log q - log p of the sampled token in PPO's loss.
OPD = ObjectiveConfig(
  _UNREWARDED, PolicyLossConfig(dual_clip=3.0), distillation=DistillationConfig()
)
# 2601.02780 (MOPD), as in NeMo-RL: REINFORCE, IcePop's gate on the mismatch.
MOPD = ObjectiveConfig(
  _UNREWARDED,
  PolicyLossConfig(
    gradient_form="score",
    clip="unit",
    mismatch=MismatchConfig(
      weight_level="token", weight_cap=None, filter_level="token", filter_low=0.5, filter_high=5.0
    ),
  ),
  distillation=DistillationConfig(),
)
# 2604.13010: the objective is OPD's, on stored episodes with stored log-probs of the teacher; no
# bound tau is published and its configs set none.
LIGHTNING_OPD = ObjectiveConfig(_UNREWARDED, PolicyLossConfig(), distillation=DistillationConfig())
# The same with log-probs of 16 candidates a token stored in the place of one: a divergence has none
# of the noise of a sampled log-ratio, so that fewer episodes do. Ours, the bucket as well.
LIGHTNING_OPD_TOP_K = ObjectiveConfig(
  _UNREWARDED,
  PolicyLossConfig(),
  distillation=DistillationConfig(form="top_k", rest="bucket"),
)
# 2604.13016: KL on the student's 16 most likely tokens.
OPD_TOP_K = ObjectiveConfig(
  _UNREWARDED, PolicyLossConfig(), distillation=DistillationConfig(form="top_k")
)
# The same candidates in its code: PPO's clip .2 and a dual clip of 3 on the ratio of each.
OPD_TOP_K_CLIPPED = ObjectiveConfig(
  _UNREWARDED,
  PolicyLossConfig(dual_clip=3.0),
  distillation=DistillationConfig(
    form="top_k", candidate_loss=CandidateLoss.from_name("clipped", "preset")
  ),
)
# NeMo-RL's distillation: half forward, half reverse KL on the teacher's 64 most likely tokens, the
# rest of its vocabulary at a log-prob of -100.
OPD_MIXED = ObjectiveConfig(
  _UNREWARDED,
  PolicyLossConfig(),
  distillation=DistillationConfig(
    form="top_k", divergence="mixed", top_k=64, candidates="teacher", rest="floor"
  ),
)
# 2306.13649 (on-policy GKD): exact KL(student || teacher).
OPD_FULL = ObjectiveConfig(
  _UNREWARDED, PolicyLossConfig(), distillation=DistillationConfig(form="full")
)
# 2604.14084: exact KL on the half of the tokens with the highest soft-OR of entropy and divergence.
TIP = ObjectiveConfig(
  _UNREWARDED, PolicyLossConfig(), distillation=DistillationConfig(form="full", keep=0.5)
)
# 2604.14142: the first phase of DSRL, on log P(y) without the prompt (config.rl.phases): wrong
# answers alone, centred and not scaled; .01 is its pretrain_loss_coef, dual clip 10 as in its code.
NSR_PRERL = ObjectiveConfig(
  AdvantageConfig(scale="none", learn_from="negative", multiplier=0.01),
  PolicyLossConfig(dual_clip=10.0),
)

_LIKELIHOOD = PolicyLossConfig(
  gradient_form="score", clip="unit", aggregation="sequence_mean_token_sum"
)
# 2305.18290: on stored pairs, or on sampled groups by their rewards.
DPO = ObjectiveConfig(_UNREWARDED, _LIKELIHOOD, preference=PreferenceConfig())
# 2502.01456 (PRIME): a reward model learns outcomes; its log-ratios are then process rewards. beta
# .05 is ours.
IMPLICIT_PRM = ObjectiveConfig(
  _UNREWARDED, _LIKELIHOOD, preference=PreferenceConfig(form="outcome", beta=0.05)
)

PRESETS: dict[str, ObjectiveConfig] = {
  name.lower(): value.freeze()
  for name, value in list(globals().items())
  if isinstance(value, ObjectiveConfig)
}
