"""What a run costs on TPUs that are not there: compiled ahead of time, read off the program."""

from agentjax.planning.chips import CHIPS, Chip, parse_topology
from agentjax.planning.hlo import ProgramCost, program_cost

__all__ = ["CHIPS", "Chip", "ProgramCost", "parse_topology", "program_cost"]
