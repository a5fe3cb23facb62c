"""Unit tests as environments ask for them, by the verifier of the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentjax.rewards.unit_tests import UnitTestConfig, UnitTests, build_verifier
from agentjax.sandbox.config import Sandboxes


class VerifiedTests:
  """Runs a task's unit tests against files that a policy wrote; see ``rewards.unit_tests``.

  Its sandbox starts with the first use.
  """

  def __init__(self, config: UnitTestConfig, sandboxes: Sandboxes | None = None):
    self._verifier = build_verifier(config, sandboxes)

  async def __call__(self, code: Mapping[str, str], tests: Mapping[str, Any]) -> tuple[int, int]:
    """How many of the tests pass, and how many there are.

    Raises:
      VerifierFault: there is no verdict, and the code is not to blame.
    """
    verdict = await self._verifier.verify(code, UnitTests.from_metadata(tests))
    return verdict.passed, len(verdict.cases)

  async def close(self) -> None:
    """Ends the sandbox."""
    await self._verifier.close()
