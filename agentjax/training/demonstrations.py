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
  """A task's prompt and demonstration as tokens, weighted by ``supervised.weights``.

  Raises:
    ConfigError: longer than a training row.
  """
  tools = declared_tools(task.metadata) or parts.tools
  spans = parts.chat.conversation(task.prompt, task.demonstration, tools)
  builder = TrajectoryBuilder(step=0, task_id=task.id, sample=0, source=task.source)
  length, settings = append_spans(builder, spans), parts.experiment.supervised
  if length > settings.row_length:
    raise ConfigError(
      f"the demonstration of task {task.id} of {task.source!r} has {length} tokens; "
      f"config.supervised.row_length={settings.row_length} allows {settings.row_length}."
    )
  return apply_weight_rules(builder.build(reward=Reward(1.0)), settings.weights)


def append_spans(builder: TrajectoryBuilder, spans: Sequence[TargetSpan]) -> int:
  """Appends a conversation, one segment a span; returns its tokens."""
  for span in spans:
    builder.append(span.owner, span.ids, weight=span.weight, flags=span.flags)
  return sum(len(span.ids) for span in spans)
