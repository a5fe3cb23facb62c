"""Fixtures of the losses' tests, for a loss of a recipe."""

from tests.objectives.conftest import x64

__all__ = ["x64"]
