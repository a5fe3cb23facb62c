"""Advantage terms and advantages that many methods share, each with the signal that it reads."""

from agentjax.recipes.credit.agreement import AgreementTerm
from agentjax.recipes.credit.branches import SharedTerm
from agentjax.recipes.credit.entropy import EntropyTerm
from agentjax.recipes.credit.medians import OthersMedian
from agentjax.recipes.credit.parts import PartsAdvantage
from agentjax.recipes.credit.turns import DurationTerm, StepsTerm, ToolSuccessTerm

__all__ = [
  "AgreementTerm",
  "DurationTerm",
  "EntropyTerm",
  "OthersMedian",
  "PartsAdvantage",
  "SharedTerm",
  "StepsTerm",
  "ToolSuccessTerm",
]
