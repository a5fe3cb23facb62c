"""Who plays a team that works."""

from __future__ import annotations

import dataclasses

from agentjax.config import Config, Table, check
from agentjax.rollout.seat_config import SeatConfig, SnapshotSeat, TrainedSeat


@dataclasses.dataclass(unsafe_hash=True)
class PlayersConfig(Config):
  """Who plays; each is "service", "checkpoint" or ``module:attribute``.

  Attributes:
    player: every agent that ``seats`` does not name.
    seats: agent -> its player; "orchestrator" is one of them.
    personas: name -> who the persona is.
  """

  player: SeatConfig | None = None
  seats: Table[SeatConfig] = dataclasses.field(default_factory=Table)
  personas: Table[str] = dataclasses.field(default_factory=Table)

  def validate(self, path: str = "team") -> None:
    super().validate(path)
    allowed = "'service', 'checkpoint' or 'module:attribute'; nothing is trained here"
    for name, seat in self.all.items():
      fits = not isinstance(seat, SnapshotSeat | TrainedSeat)
      check(fits, f"{path}.{name or 'player'}", seat.chosen, allowed)

  @property
  def all(self) -> dict[str, SeatConfig]:
    """Agent -> player; "" is all others."""
    return ({} if self.player is None else {"": self.player}) | dict(self.seats)
