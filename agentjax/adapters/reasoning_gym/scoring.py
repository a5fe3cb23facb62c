"""reasoning-gym's verifiers as reward parts; they run in a box, one process an answer.

Some of the library's verifiers evaluate the answer as code. So answers are not read here: entry and
answer go to a box as data, ``boxed`` scores them there, and one number comes back. The answer is
not run in the box either, so it cannot change the number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.resources
import json
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

from agentjax.adapters.reasoning_gym.boxed import READY
from agentjax.config import NonNegativeInt, PositiveFloat
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import DEFAULT, Sandboxes
from agentjax.sandbox.interface import (
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxResult,
  run_once,
)
from agentjax.threads import LoopThread
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

_MOST_CHARACTERS = 2**16  # of an answer; the longest right ones have some thousands
_REPORT_BYTES = 4096


@dataclasses.dataclass(unsafe_hash=True)
class ReasoningGymScoring(ScorerConfig):
  """The part "reasoning_gym": where and how long answers are scored; the figures are ours.

  Attributes:
    cpu_seconds: CPU time for one answer; an answer that takes more earns 0.
    wall_seconds: the same on the clock, from its turn on.
    retries: further tries where the sandbox failed.
    sandbox: name of the box's sandbox, in ``config.sandboxes``; reasoning-gym must be in a
      container's image, and the embedded one loads it.
  """

  cpu_seconds: PositiveFloat = 5.0
  wall_seconds: PositiveFloat = 60.0
  retries: NonNegativeInt = 1
  sandbox: str = DEFAULT

  graded: ClassVar[bool] = False

  def build(self, sandboxes: Sandboxes) -> Scorer:
    verifier = ReasoningGymVerifier(self, sandboxes=sandboxes)
    return ReasoningGymScorer(verifier, graded=self.graded)


@dataclasses.dataclass(unsafe_hash=True)
class GradedReasoningGymScoring(ReasoningGymScoring):
  """The part "reasoning_gym_graded"."""

  graded: ClassVar[bool] = True


class ReasoningGymVerifier:
  """Scores answers in boxes. Safe to use from many threads and event loops.

  Args:
    config: see ReasoningGymScoring.
    sandbox: in the place of ``config.sandbox``; owned and closed by this.
    sandboxes: those of the run.
  """

  def __init__(
    self,
    config: ReasoningGymScoring,
    sandbox: Sandbox | None = None,
    sandboxes: Sandboxes | None = None,
  ):
    config.validate()
    self._config = config
    # The library is loaded once, so that an answer costs a fork.
    settings = (sandboxes or Sandboxes()).settings(config.sandbox, packages=("reasoning_gym",))
    self._limits = settings.limits
    self._sandbox = sandbox or settings.build()
    # Answers of all threads take turns in one loop: the sandbox counts its runs there.
    self._thread = LoopThread("reasoning-gym")

  async def score(self, answer: str, entry: Mapping[str, Any]) -> Reward:
    """1 for a right answer, else at most a half; see ``boxed.verifier``.

    0 where the answer takes too long or ends the process; invalid where the sandbox fails.
    """
    if len(answer) > _MOST_CHARACTERS:
      return Reward(0.0)
    return await self._thread.wait(self._score(answer, entry))

  async def close(self) -> None:
    """Ends the sandbox; closing twice is harmless."""
    if self._thread.alive:
      await self._thread.wait(self._sandbox.close())
      await asyncio.to_thread(self._thread.close)

  async def _score(self, answer: str, entry: Mapping[str, Any]) -> Reward:
    order = pickle.dumps((entry["metadata"]["source_dataset"], entry, answer))
    limits = dataclasses.replace(
      self._limits,
      cpu_seconds=self._config.cpu_seconds,
      wall_seconds=self._config.wall_seconds,
      output_bytes=_REPORT_BYTES,
      output_kill_bytes=16 * _REPORT_BYTES,
    )
    reason = ""
    for _ in range(self._config.retries + 1):
      try:
        result = await run_once(self._sandbox, PythonScript(_driver()), stdin=order, limits=limits)
      except (SandboxError, OSError) as error:
        return Reward.invalid(f"sandbox: {error}")
      if result.status is not RunStatus.INFRA_ERROR and _was_ready(result):
        return Reward(_read_score(result))
      reason = f"{result.status}: {result.detail} {result.stderr[-500:]}"
    return Reward.invalid(f"reasoning-gym's verifier did not start in the sandbox; {reason}")


class ReasoningGymScorer:
  """A part: "reasoning_gym" pays 1 for a right answer, else 0; "reasoning_gym_graded" pays 1, else
  half of what the library's verifier gives, 0 to 0.5.

  Both are 0 where there is no answer, or a policy error. ``task.metadata["entry"]`` holds the
  entry, see ``tasks``.
  """

  def __init__(self, verifier: ReasoningGymVerifier, *, graded: bool):
    self._verifier = verifier
    self._graded = graded

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
      return Reward(0.0)
    reward = await self._verifier.score(trajectory.answer, task.metadata["entry"])
    if reward.value is None or self._graded:
      return reward
    return Reward(float(reward.value == 1.0))

  async def close(self) -> None:
    """Closes the verifier."""
    await self._verifier.close()


@functools.cache
def _driver() -> str:
  source = importlib.resources.files("agentjax.adapters.reasoning_gym").joinpath("boxed.py")
  return source.read_text(encoding="utf-8") + "\nmain()\n"


def _was_ready(result: SandboxResult) -> bool:
  return result.stdout.startswith(f"{READY}\n")


def _read_score(result: SandboxResult) -> float:
  """The number after ``READY``; 0 where the run broke off, or says anything but 0..1."""
  if result.status is not RunStatus.OK:
    return 0.0
  try:
    value = json.loads(result.stdout.removeprefix(READY))
  except (ValueError, RecursionError):
    return 0.0
  known = type(value) in (int, float) and 0 <= value <= 1
  return float(value) if known else 0.0
