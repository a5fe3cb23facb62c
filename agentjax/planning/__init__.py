"""Costs of a run on TPUs that are not there: its programs are compiled ahead and read."""

from agentjax.planning.chips import CHIPS, Chip, parse_topology
from agentjax.planning.hlo import ProgramCost, program_cost

__all__ = ["CHIPS", "Chip", "ProgramCost", "parse_topology", "program_cost"]
