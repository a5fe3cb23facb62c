"""Worked solutions as trajectories, so that a warm start uses the same code as episodes."""

from __future__ import annotations

from agentjax.config import ConfigError
from agentjax.tools.declared import declared_tools
from agentjax.training.build import Parts
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Task, Trajectory


def demonstration_trajectory(task: Task, parts: Parts) -> Trajectory:
  """A task's prompt and demonstration as tokens; weight 1 on what the assistant writes.

  Raises:
    ConfigError: longer than a training row.
  """
  tools = declared_tools(task.metadata) or parts.tools
  spans = parts.chat.conversation(task.prompt, task.demonstration, tools)
  builder = TrajectoryBuilder(step=0, task_id=task.id, sample=0, source=task.source)
  for span in spans:
    builder.append(span.owner, span.ids, weight=float(span.target))
  limit = parts.experiment.supervised.row_length
  length = sum(len(span.ids) for span in spans)
  if length > limit:
    raise ConfigError(
      f"the demonstration of task {task.id} of {task.source!r} has {length} tokens; "
      f"config.supervised.row_length={limit} allows {limit}."
    )
  return builder.build(reward=Reward(1.0))
