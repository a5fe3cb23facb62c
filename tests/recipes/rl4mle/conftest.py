"""The collection loop that the rollout tests have."""

from tests.rollout.conftest import run

__all__ = ["run"]
