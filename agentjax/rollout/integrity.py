"""Gates of an environment: a right answer must be paid in full, an empty one or a cheat nothing.

An environment that fails a gate teaches the wrong thing with any method. So the gates run before
training (``python -m agentjax.check``), and in the tests for bundled worlds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.program import ENVIRONMENT_REWARD, MakeEnvironment
from agentjax.rollout.scoring import score
from agentjax.trajectory.record import Message, Reward, Status, Task, Trajectory
from agentjax.world.environment import Action

Attempts = Callable[[Task], Mapping[str, Sequence[Message]]]

REFERENCE, EMPTY = "reference", "empty"


@dataclasses.dataclass(frozen=True)
class GateResult:
  """One attempt at one task.

  Attributes:
    task_id, source: of the task.
    attempt: "reference", "empty", or the name of a cheat.
    reward: what it got.
    detail: what the scorers noted.
    at_most: what an empty answer or a cheat may get.
  """

  task_id: int
  source: str
  attempt: str
  reward: Reward
  detail: str
  at_most: float = 0.0

  @property
  def held(self) -> bool:
    """Whether the reference got 1 or more, and anything else ``at_most`` or less."""
    if self.reward.value is None:
      return False
    return (
      self.reward.value >= 1 if self.attempt == REFERENCE else self.reward.value <= self.at_most
    )


def demonstration(task: Task) -> Sequence[Message]:
  """The task's worked solution, as its data show it."""
  return task.demonstration


async def check_environment(
  tasks: Sequence[Task],
  *,
  make_environment: MakeEnvironment,
  rewards: RewardGraph,
  cheats: Attempts,
  reference: Callable[[Task], Sequence[Message]] = demonstration,
  at_most: float = 0.0,
  timeout: float = 300.0,
) -> list[GateResult]:
  """Plays the reference, an empty answer and every cheat.

  Args:
    tasks: each needs a reference.
    make_environment, rewards: as in a run.
    cheats: task -> name -> the policy's turns (see ``World.cheats``).
    reference: task -> the turns that must be paid in full.
    at_most: what all other attempts may get: more than 0 if the reward pays for form.
    timeout: seconds to score one attempt.

  Returns:
    One result an attempt, by task.

  Raises:
    ValueError: a task without a reference, so that it may be unsolvable.
  """
  results = []
  for task in tasks:
    if not (right := reference(task)):
      raise ValueError(f"task {task.id} of {task.source!r} has no demonstration to check it with")
    attempts = {REFERENCE: right, EMPTY: (Message("assistant", ""),), **cheats(task)}
    for name, turns in attempts.items():
      trajectory = await play_turns(task, turns, make_environment)
      await score(rewards, [trajectory], task, timeout=timeout)
      notes = [f"{k}: {v}" for k, v in trajectory.metadata.items()]
      reason = trajectory.reward.reason
      detail = "; ".join([reason, *notes] if reason else notes)
      results.append(GateResult(task.id, task.source, name, trajectory.reward, detail, at_most))
  return results


async def play_turns(
  task: Task, turns: Sequence[Message], make_environment: MakeEnvironment
) -> Trajectory:
  """An episode in which the policy says the assistant messages of ``turns``.

  With several agents each says the message of its turn; the reward is that of the agent who acts
  first.
  """
  environment = make_environment(task)
  trajectory = Trajectory(step=0, task_id=task.id, sample=0, source=task.source, segments=[])
  paid = []
  try:
    seen = await environment.reset(task, 0)
    first = seen.next
    for message in turns:
      if message.role != "assistant":
        continue
      action = Action(message.content, message.tool_calls, agent=seen.next)
      step = await environment.step(action)
      seen = step.observation
      trajectory.tools.extend(step.tools)
      trajectory.answer, trajectory.status = step.answer, step.status
      if step.reward is not None and action.agent == first:
        paid.append(step.reward)
      if first in step.rewards:
        paid.append(step.rewards[first])
      if step.terminated or step.truncated:
        break
    else:
      trajectory.status = Status.TRUNCATED
  finally:
    await environment.close()
  if paid:
    invalid = [r for r in paid if not r.valid]
    total = sum(r.value for r in paid if r.value is not None)
    trajectory.reward_parts[ENVIRONMENT_REWARD] = invalid[0] if invalid else Reward(total)
  return trajectory
