"""Worked solutions as trajectories, so that a warm start uses the same code as episodes."""

from __future__ import annotations

from collections.abc import Sequence

from agentjax.config import ConfigError
from agentjax.text.chat import TargetSpan
from agentjax.tools.declared import declared_tools
from agentjax.training.build import Parts
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Task, Trajectory
from agentjax.trajectory.weights import apply_weight_rules


def demonstration_trajectory(task: Task, parts: Parts) -> Trajectory:
  """A task's prompt and demonstration as tokens, weighted by ``supervised.weights``."""
  builder = TrajectoryBuilder(step=0, task_id=task.id, sample=0, source=task.source)
  append_spans(builder, _spans(task, parts))
  return apply_weight_rules(builder.build(reward=Reward(1.0)), parts.experiment.supervised.weights)


def check_lengths(tasks: Sequence[Task], parts: Parts) -> None:
  """Raises ConfigError if a demonstration is longer than a training row."""
  limit = parts.experiment.supervised.row_length
  lengths = [sum(len(span.ids) for span in _spans(task, parts)) for task in tasks]
  longest = max(lengths, default=0)
  if longest > limit:
    task, over = tasks[lengths.index(longest)], sum(length > limit for length in lengths)
    raise ConfigError(
      f"config.supervised.row_length={limit}: {over} of {len(tasks)} demonstrations are longer, "
      f"that of task {task.id} of {task.source!r} has {longest} tokens; allowed: at least "
      f"{longest}, or leave these tasks out."
    )


def _spans(task: Task, parts: Parts) -> Sequence[TargetSpan]:
  tools = declared_tools(task.metadata) or parts.tools
  return parts.chat.conversation(task.prompt, task.demonstration, tools)


def append_spans(builder: TrajectoryBuilder, spans: Sequence[TargetSpan]) -> int:
  """Appends a conversation, one segment a span; returns its tokens."""
  for span in spans:
    builder.append(span.owner, span.ids, weight=span.weight, flags=span.flags)
  return sum(len(span.ids) for span in spans)
