"""The scorer "unit_tests": assertions, ``unittest`` and ``pytest`` against code of the policy."""

from agentjax.adapters.unit_tests.scorer import UnitTestConfig, UnitTests, UnitTestScorer

__all__ = ["UnitTestConfig", "UnitTestScorer", "UnitTests"]
