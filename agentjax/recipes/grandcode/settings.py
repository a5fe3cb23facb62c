"""Settings of seats and stages, and their names."""

from __future__ import annotations

import dataclasses

from agentjax.config import (
  Config,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Share,
  check,
)

HYPOTHESIS, SOLVER, SUMMARISER, TESTER = "hypothesis", "solver", "summariser", "tester"
AGENTS = (HYPOTHESIS, SOLVER, SUMMARISER, TESTER)


@dataclasses.dataclass(unsafe_hash=True)
class SeatsConfig(Config):
  """What the seats may do, and what they are paid. None of the figures is published: all are ours.

  Attributes:
    conjectures: tries of the hypothesis seat.
    checks: small cases of a conjecture.
    beta: of ``rewards.joint_reward``, paid to the hypothesis seat in episodes of all stages; 0 pays
      it for its checks alone. without: share of these episodes, evaluations among them, in which
      the solver sees no conjecture, if beta > 0.
    solutions: tries of the solver; each is run on the examples.
    summarise_after: failed tries of the solver after which its history is replaced by a summary; 0
      never.
    generators: tries of the test generator.
    invalid_cost: see ``rewards.generator_reward``.
    trace_characters: of a trace that the summariser is shown, the latest.
    trace_attempts: wrong attempts in the trace of a stage "summariser".
    summary_words, summary_cost: length of a summary that costs nothing, and the cost beyond.
    speed: whether right solutions are paid for their speed beside the reference.
    full_speedup: what is worth the full reward. late: reward of a time-out (published).
    wrong: mutants of the reference that a test generator has to separate.
  """

  conjectures: PositiveInt = 2
  checks: PositiveInt = 8
  beta: NonNegativeFloat = 0.0
  without: Share = 0.25
  solutions: PositiveInt = 3
  summarise_after: NonNegativeInt = 0
  generators: PositiveInt = 2
  invalid_cost: Share = 0.5
  trace_characters: PositiveInt = 8_000
  trace_attempts: PositiveInt = 4
  summary_words: PositiveInt = 120
  summary_cost: NonNegativeFloat = 0.2
  speed: bool = False
  full_speedup: PositiveFloat = 10.0
  late: Share = 0.1
  wrong: PositiveInt = 6

  def validate(self, path: str = "seats") -> None:
    super().validate(path)
    check(self.full_speedup > 1, f"{path}.full_speedup", self.full_speedup, "> 1")


def check_stages(stages: tuple[str, ...], path: str) -> None:
  """Raises ConfigError for stages that cannot follow one another."""
  known = all(stage in AGENTS for stage in stages)
  check(
    bool(stages) and known and len(set(stages)) == len(stages),
    path,
    stages,
    f"at least one of {', '.join(AGENTS)}, each once",
  )
