"""How much of a step's episodes was read as packets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.recipes.kv_packets.contexts import PACKET_VERSIONS
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class PacketReportConfig(SignalConfig):
  """Reports how much was read as packets; for ``config.rl.signals``.

  Metrics, over the episodes of a step: ``packets/tokens``, tokens an episode that packets stood
  for; ``packets/share``, of the tokens that the policy did not write; ``packets/stale``, share of
  these packet tokens that other weights computed than the newest of the step. How far the sampler
  is then from the trainer is in ``mismatch/``.
  """

  def build(self, tools: SignalTools) -> Signal:
    return PacketReport()


class PacketReport(Signal):
  """See ``PacketReportConfig``."""

  name = "packets"

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    read = known = stale = 0
    paths = [path for one in episodes for path in token_paths(one)]
    newest = max((int(path.versions.max(initial=-1)) for path in paths), default=-1)
    for path in paths:
      versions = path.column(PACKET_VERSIONS.name)
      read += int((~path.sampled).sum())
      known += int((versions >= 0).sum())
      stale += int(((versions >= 0) & (versions != newest)).sum())
    return list(episodes), {
      "packets/tokens": known / max(1, len(episodes)),
      "packets/share": known / max(1, read),
      "packets/stale": stale / max(1, known),
    }
