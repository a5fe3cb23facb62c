"""A readable file of trajectories: what the policy saw, wrote, called and earned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from agentjax.files import write_atomically
from agentjax.rewards.formula import TERMS
from agentjax.rewards.monitor import FINDINGS
from agentjax.rollout.statistics import num_sampled_tokens, num_turns
from agentjax.text.tokenizer import Tokenizer
from agentjax.trajectory.artifacts import FOLDER, relative_path
from agentjax.trajectory.record import GUARDS, Flag, Reward, Segment, Task, Trajectory

_RULE = "=" * 80


def write_trajectories(
  path: str | os.PathLike[str],
  trajectories: Sequence[Trajectory],
  *,
  tasks: Iterable[Task],
  tokenizer: Tokenizer,
  title: str,
) -> None:
  """Writes trajectories as text, in the order of their addresses; an old file is replaced whole.

  Files that tools made are named by their place in the run's directory.

  Args:
    path: text file, UTF-8.
    trajectories: what to show.
    tasks: tasks they belong to, for the expected answers.
    tokenizer: turns ids into text, markup included.
    title: first line of the file.
  """
  answers = {task.id: task.answer for task in tasks}
  lines = [title, ""]
  for trajectory in sorted(trajectories, key=lambda t: t.address):
    lines += render(trajectory, tokenizer=tokenizer, expected=answers.get(trajectory.task_id))
  write_atomically(path, "\n".join(lines) + "\n")


def render(trajectory: Trajectory, *, tokenizer: Tokenizer, expected: str | None) -> Iterator[str]:
  """The lines of one trajectory; ``expected`` is the right answer where it is known."""
  yield _RULE
  yield (
    f"{trajectory.source}, task {trajectory.task_id}, sample {trajectory.sample}, "
    f"step {trajectory.step}"
  )
  parts = ", ".join(f"{n} {_show(r)}" for n, r in sorted(trajectory.reward_parts.items()))
  yield f"status {trajectory.status}, reward {_show(trajectory.reward)}" + (
    f" ({parts})" if parts else ""
  )
  for agent, outcome in trajectory.agents.items():
    known = ", ".join(f"{n} {_show(r)}" for n, r in sorted(outcome.parts.items()))
    yield f"{agent}: reward {_show(outcome.reward)}" + (f" ({known})" if known else "")
  yield f"answer {trajectory.answer!r}, expected {expected!r}"
  sampled = num_sampled_tokens(trajectory)
  yield f"{num_turns(trajectory)} turns, {len(trajectory.tools)} tool calls, {sampled} tokens drawn"
  for name in ("reason", "close_error", *sorted(trajectory.reward_parts), FINDINGS, TERMS):
    if name in trajectory.metadata:
      yield f"{name}: {trajectory.metadata[name]}"
  yield ""
  for segment in trajectory.segments:
    seat = f"{segment.agent} ({segment.policy}): " if trajectory.agents else ""
    yield f"--- {seat}{_describe(segment)}"
    yield tokenizer.decode(segment.token_ids.tolist())
  for record in trajectory.tools:
    yield f"--- call in turn {record.turn}: {record.name} {dict(record.arguments)}"
    yield f"{record.status} in {1000 * record.seconds:.1f} ms: {record.output}"
    for name, digest in record.artifacts.items():
      yield f"{name}: {FOLDER}/{relative_path(name, digest)}"
  for guard in trajectory.metadata.get(GUARDS, ()):
    about = f"{guard['event']} {guard['tool']}".strip()
    yield f"--- guard in turn {guard['turn']}: {guard['guard']} at {about}"
    changed = "" if guard["arguments"] is None else f"; arguments now {dict(guard['arguments'])}"
    yield f"{guard['decision']}: {guard['reason']}{changed}"
  yield ""


def _describe(segment: Segment) -> str:
  if not segment.sampled.any():
    return f"{segment.owner}, {len(segment)} tokens"
  drawn = int(segment.sampled.sum())
  entropy = float(segment.entropies[segment.sampled].mean())
  flags = "".join(f", {flag}" for flag in Flag if flag in segment.flags)
  return (
    f"{segment.owner}, turn {segment.turn}: {drawn} tokens drawn, "
    f"mean entropy {entropy:.2f} nats{flags}"
  )


def _show(reward: Reward) -> str:
  return f"invalid ({reward.reason})" if reward.value is None else f"{reward.value:.3g}"
