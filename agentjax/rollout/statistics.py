"""Statistics of a batch of episodes: counts, shares, lengths and tool latencies."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from agentjax.faults import FAULT, Fault
from agentjax.rewards.monitor import SCREENED
from agentjax.rollout import keys
from agentjax.tools.protocol import ToolStatus
from agentjax.trajectory.record import Reward, Status, Trajectory

UNKNOWN_TOOL = "unknown"


@dataclasses.dataclass(frozen=True)
class ToolStatistics:
  """Calls of one tool. Latencies are wall seconds of a call as the environment measured it."""

  calls: int
  errors: int  # calls whose status is not ok
  mean_seconds: float
  median_seconds: float
  p95_seconds: float
  max_seconds: float


@dataclasses.dataclass(frozen=True)
class RolloutStatistics:
  """Figures of one batch of trajectories; means are over episodes unless said otherwise.

  Attributes:
    episodes: number of trajectories.
    statuses: count of every Status, zeros included.
    turns: mean number of model calls.
    tool_calls, tool_errors: mean number of calls, and of calls whose status is not ok.
    prompt_tokens, sampled_tokens, observation_tokens: mean tokens before the first model call,
      drawn by the policy, and appended after a model call.
    truncated_share, fault_share: share of episodes that ran out of tokens, turns or time; share
      masked because the environment or the verifier failed.
    no_verdict_share, screened_share: share of episodes whose verifier failed, and of those a
      monitor took out; both have the status VERIFIER_ERROR.
    reward: mean of the valid rewards; None where there is none. valid_share: share of valid ones.
    reward_parts: mean of the valid values of every named part.
    invalid_parts: share of episodes in which a part could not be computed; parts without any are
      left out.
    tools: latency and errors of every known tool that was called; calls of names the policy made
      up are counted together under "unknown".
    close_errors: episodes whose environment failed to close; they count normally.
    faults: distinct messages of environment faults with their counts, the most frequent first.
    masked: share of episodes masked, by cause (``masking_cause``).
    counted: share of episodes that failed by the policy's fault and count, by cause.
  """

  episodes: int
  statuses: dict[str, int]
  turns: float
  tool_calls: float
  tool_errors: float
  prompt_tokens: float
  sampled_tokens: float
  observation_tokens: float
  truncated_share: float
  fault_share: float
  no_verdict_share: float
  screened_share: float
  reward: float | None
  valid_share: float
  reward_parts: dict[str, float]
  invalid_parts: dict[str, float]
  tools: dict[str, ToolStatistics]
  close_errors: int
  faults: dict[str, int]
  masked: dict[str, float]
  counted: dict[str, float]

  def alarm(self, threshold: float) -> str | None:
    """A warning if more than the share ``threshold`` of the episodes got no verdict."""
    if self.no_verdict_share <= threshold:
      return None
    reasons = "; ".join(list(self.faults)[:3])
    return (
      f"the verifier gave no verdict on {100 * self.no_verdict_share:.1f}% of the episodes, which "
      f"are masked (config.reward.fault_alarm={threshold:g}). Most frequent faults: {reasons}"
    )

  def metrics(self) -> dict[str, float]:
    """Flat scalars under ``rollout/``, ``reward/`` and ``tool/<name>/``; unknown ones left out."""
    scalars = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
    flat = {"reward/valid_share": scalars.pop("valid_share")}
    if self.reward is not None:
      flat["reward/mean"] = scalars.pop("reward")
    flat |= {f"rollout/{name}": value for name, value in scalars.items()}
    named: dict[str, Mapping[str, float]] = {
      "rollout/status": self.statuses,
      "rollout/masked": self.masked,
      "rollout/counted": self.counted,
      "reward/part": self.reward_parts,
      "reward/invalid": self.invalid_parts,
    }
    for prefix, values in named.items():
      flat |= {f"{prefix}_{name}": value for name, value in values.items()}
    for tool, figures in self.tools.items():
      for name, value in dataclasses.asdict(figures).items():
        flat[f"tool/{tool}/{name}"] = value
    return {name: float(value) for name, value in flat.items()}


def apart(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
  """The sampled episodes, and the greedy baselines of groups; in the same order."""
  greedy = [t for t in trajectories if t.sample == keys.BASELINE]
  return [t for t in trajectories if t.sample != keys.BASELINE], greedy


def baseline_metrics(greedy: Sequence[Trajectory]) -> dict[str, float]:
  """Of the greedy episodes of a step: how many, how many without a reward, their mean reward."""
  if not greedy:
    return {}
  rewards = [t.reward.value for t in greedy if t.reward.value is not None]
  invalid = float(len(greedy) - len(rewards))
  values = {"baseline/episodes": float(len(greedy)), "baseline/invalid": invalid}
  return values | ({"baseline/reward": float(np.mean(rewards))} if rewards else {})


def rollout_statistics(
  trajectories: Sequence[Trajectory], *, tool_names: Collection[str]
) -> RolloutStatistics:
  """Summarises at least one trajectory; ``tool_names`` are the tools the policy was given."""
  if not trajectories:
    raise ValueError("statistics need at least one trajectory, got none")
  statuses = collections.Counter(str(t.status) for t in trajectories)
  rewards = [t.reward.value for t in trajectories if t.reward.value is not None]
  share = 1.0 / len(trajectories)
  screened = sum((t.reward.reason or "").startswith(SCREENED) for t in trajectories)
  counts = np.array([_token_counts(t) for t in trajectories], dtype=np.float64)
  prompt, sampled, observed = (float(c) for c in counts.mean(axis=0))
  return RolloutStatistics(
    episodes=len(trajectories),
    statuses={str(status): statuses[status] for status in Status},
    turns=share * sum(num_turns(t) for t in trajectories),
    tool_calls=share * sum(len(t.tools) for t in trajectories),
    tool_errors=share * sum(num_tool_errors(t) for t in trajectories),
    prompt_tokens=prompt,
    sampled_tokens=sampled,
    observation_tokens=observed,
    truncated_share=share * statuses[Status.TRUNCATED],
    fault_share=share * sum(n for s, n in statuses.items() if Status(s).masked),
    no_verdict_share=share * (statuses[Status.VERIFIER_ERROR] - screened),
    screened_share=share * screened,
    reward=float(np.mean(rewards)) if rewards else None,
    valid_share=share * len(rewards),
    reward_parts=_mean_parts([t.reward_parts for t in trajectories]),
    invalid_parts=_invalid_parts([t.reward_parts for t in trajectories]),
    tools=_tool_statistics(trajectories, tool_names),
    close_errors=sum("close_error" in t.metadata for t in trajectories),
    faults=_faults(trajectories),
    masked=_shares(trajectories, masking_cause),
    counted=_shares(trajectories, _counted_cause),
  )


def masking_cause(trajectory: Trajectory) -> str:
  """Why an episode is masked: the cause of its fault (``faults.Fault``), "screened" if a monitor
  removed it; "" if it counts."""
  if not trajectory.status.masked:
    return ""
  if (trajectory.reward.reason or "").startswith(SCREENED):
    return "screened"
  fault = _fault(trajectory)
  return fault.cause if fault is not None and fault.masks else _UNKNOWN[trajectory.status]


# Of episodes without a fault on record, as older runs wrote them.
_UNKNOWN = {
  Status.ENV_ERROR: "environment",
  Status.ENGINE_ERROR: "numbers",
  Status.VERIFIER_ERROR: "verifier",
}


def _counted_cause(trajectory: Trajectory) -> str:
  fault = _fault(trajectory)
  return fault.cause if fault is not None and not trajectory.status.masked else ""


def _fault(trajectory: Trajectory) -> Fault | None:
  known = trajectory.metadata.get(FAULT)
  return None if known is None else Fault.from_dict(known)


def _shares(
  trajectories: Sequence[Trajectory], cause: Callable[[Trajectory], str]
) -> dict[str, float]:
  counts = collections.Counter(filter(None, map(cause, trajectories)))
  return {name: counts[name] / len(trajectories) for name in sorted(counts)}


def group_diversity(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """How different the samples of one task in one round are; {} without a group of two.

  Samples without a token, whose episodes failed at once, are left out.

  Returns:
    ``diversity/groups``, those with two samples or more; ``diversity/distinct_share``, distinct
    sampled token sequences over group size, mean over groups (1 is best);
    ``diversity/first_token_distinct``, the share of the pairs of a group whose first tokens differ,
    mean over groups; ``diversity/identical_groups``, the share of groups all of whose samples are
    the same.
  """
  groups: dict[tuple[int, int, str], list[bytes]] = collections.defaultdict(list)
  for trajectory in trajectories:
    drawn = [s.token_ids[s.sampled] for s in trajectory.segments]
    if sum(map(len, drawn)):
      key = (*trajectory.address[:2], trajectory.group)
      groups[key].append(np.concatenate(drawn).astype(np.int32).tobytes())
  compared = [samples for samples in groups.values() if len(samples) > 1]
  if not compared:
    return {}
  distinct = [len(set(samples)) for samples in compared]
  first = [_differing_pairs([s[:4] for s in samples]) for samples in compared]
  return {
    "diversity/groups": float(len(compared)),
    "diversity/distinct_share": float(
      np.mean([n / len(s) for n, s in zip(distinct, compared, strict=True)])
    ),
    "diversity/first_token_distinct": float(np.mean(first)),
    "diversity/identical_groups": float(np.mean([n == 1 for n in distinct])),
  }


def _differing_pairs(values: Sequence[bytes]) -> float:
  """Share of the pairs whose members differ."""
  size = len(values)
  equal = sum(n * (n - 1) for n in collections.Counter(values).values())
  return 1.0 - equal / (size * (size - 1))


def staleness_statistics(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
  """How old the sampled tokens are that ``step`` trains on, in updates; all 0 without a token.

  Returns:
    ``schedule/staleness_mean`` and ``schedule/staleness_max`` over sampled tokens: step minus the
    version that sampled them; ``schedule/carried_share``, the share of episodes with tokens of more
    than one version; ``schedule/versions``, the number of versions among all tokens.
  """
  versions = [
    np.concatenate([s.versions[s.sampled] for s in t.segments] or [np.zeros(0, np.int32)])
    for t in trajectories
  ]
  every = np.concatenate([np.zeros(0, np.int32), *versions])
  if not every.size:
    return dict.fromkeys(_STALENESS, 0.0)
  carried = [len(set(v.tolist())) > 1 for v in versions]
  found = (step - every.mean(), step - every.min(), np.mean(carried), len(set(every.tolist())))
  return {name: float(value) for name, value in zip(_STALENESS, found, strict=True)}


_STALENESS = (
  "schedule/staleness_mean",
  "schedule/staleness_max",
  "schedule/carried_share",
  "schedule/versions",
)


def num_turns(trajectory: Trajectory) -> int:
  """Number of model calls."""
  return sum(bool(segment.sampled.any()) for segment in trajectory.segments)


def num_tool_errors(trajectory: Trajectory) -> int:
  """Number of tool calls that did not end with status ok."""
  return sum(record.status != ToolStatus.OK for record in trajectory.tools)


def num_sampled_tokens(trajectory: Trajectory) -> int:
  """Number of tokens the policy drew."""
  return sum(int(segment.sampled.sum()) for segment in trajectory.segments)


def _token_counts(trajectory: Trajectory) -> tuple[int, int, int]:
  """Tokens before the first model call, drawn by the policy, and appended later."""
  prompt = sampled = observed = 0
  for segment in trajectory.segments:
    drawn = int(segment.sampled.sum())
    if not sampled and not drawn:
      prompt += len(segment)
    else:
      observed += len(segment) - drawn
    sampled += drawn
  return prompt, sampled, observed


def _mean_parts(parts: Sequence[dict[str, Reward]]) -> dict[str, float]:
  values: dict[str, list[float]] = collections.defaultdict(list)
  for rewards in parts:
    for name, reward in rewards.items():
      if reward.value is not None:
        values[name].append(reward.value)
  return {name: float(np.mean(values[name])) for name in sorted(values)}


def _invalid_parts(parts: Sequence[dict[str, Reward]]) -> dict[str, float]:
  counts = collections.Counter(n for rewards in parts for n, r in rewards.items() if not r.valid)
  return {name: counts[name] / len(parts) for name in sorted(counts)}


def _tool_statistics(
  trajectories: Sequence[Trajectory], tool_names: Collection[str]
) -> dict[str, ToolStatistics]:
  seconds: dict[str, list[float]] = collections.defaultdict(list)
  errors: collections.Counter[str] = collections.Counter()
  for record in (r for t in trajectories for r in t.tools):
    name = record.name if record.name in tool_names else UNKNOWN_TOOL
    seconds[name].append(record.seconds)
    errors[name] += record.status != ToolStatus.OK
  return {
    name: ToolStatistics(
      calls=len(taken),
      errors=errors[name],
      mean_seconds=float(np.mean(taken)),
      median_seconds=float(np.median(taken)),
      p95_seconds=float(np.percentile(taken, 95)),
      max_seconds=max(taken),
    )
    for name, taken in sorted(seconds.items())
  }


def _faults(trajectories: Sequence[Trajectory]) -> dict[str, int]:
  messages = collections.Counter(
    t.metadata.get("reason") or t.reward.reason or str(t.status)
    for t in trajectories
    if t.status.masked
  )
  return dict(messages.most_common())
