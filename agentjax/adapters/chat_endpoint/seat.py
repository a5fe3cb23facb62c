"""A seat of an episode played by a model behind an endpoint."""

from __future__ import annotations

import dataclasses

from agentjax.adapters.chat_endpoint.agent import HttpAgent
from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
from agentjax.rollout.seat_config import Bank, SeatConfig
from agentjax.rollout.seats import SeatPlayer


@dataclasses.dataclass(unsafe_hash=True)
class ServiceSeat(SeatConfig):
  """A model behind an endpoint, which may call the tools of its seat.

  The journal keeps its text, so a step is replayed without it. If it fails, the episode is masked.

  Attributes:
    endpoint: where it is, and how it samples.
  """

  endpoint: HttpJudgeConfig = dataclasses.field(default_factory=HttpJudgeConfig)

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    return SeatPlayer(name, bank.chat, service=HttpAgent(self.endpoint))
