"""Writing functions: tools while there are turns left, then code in a final block.

The episode's answer is the code; what it is worth, the scorer "unit_tests" finds out when the
episode is over and whatever it ran is dead (``rewards.unit_tests``).
"""

from __future__ import annotations

import dataclasses

from agentjax.config import Config, check
from agentjax.envs.question import QuestionEnvironment
from agentjax.text.code import read_code
from agentjax.tools.registry import ToolRegistry


@dataclasses.dataclass(unsafe_hash=True)
class CodeEnvironmentConfig(Config):
  """Settings of function writing; the figures are ours.

  Attributes:
    max_characters: longer code is no answer.
  """

  max_characters: int = 50_000

  def validate(self, path: str = "config.environment.code") -> None:
    super().validate(path)
    check(self.max_characters >= 1, f"{path}.max_characters", self.max_characters, ">= 1")


def build_code_environment(
  config: CodeEnvironmentConfig,
  registry: ToolRegistry,
  *,
  max_turns: int = 16,
  tool_timeout: float = 10.0,
) -> QuestionEnvironment:
  """One episode's environment: a question whose answer is the last code block of the final turn.

  Args:
    config: see CodeEnvironmentConfig.
    registry, max_turns, tool_timeout: as in QuestionEnvironment; ``python`` is the tool that lets
      the policy try its code.
  """

  def read(text: str) -> str | None:
    code = read_code(text)
    return code if code is not None and len(code) <= config.max_characters else None

  return QuestionEnvironment(
    registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=read
  )
