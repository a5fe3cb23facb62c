r"""Talks with an agent in the terminal: tools, permissions, memory; the transcript is a trajectory.

  python -m agentjax.agent --config=configs/semaclaw_chat.py --agent.player=service \
      --agent.player.endpoint.base_url=http://host:8000/v1 --agent.player.endpoint.model=NAME
  python -m agentjax.agent --config=runs/a/config.json --agent.player=checkpoint \
      --agent.player.path=runs/a --transcript=runs/talks.store
  python -m agentjax.agent --config=configs/semaclaw_chat.py --agent.player=... --say="What is 2+3?"

``--config`` gives tools (``tools``), guards and who is asked (``guards``), the system prompt
(``chat.system_prompt``), limits and the context manager (``rollout``), and for a policy on disk the
engine. An empty line says nothing; Ctrl-D, or Ctrl-C once, ends the conversation and keeps it.

``--transcript`` is a store of trajectories. Each conversation is appended to it, without a reward;
the tokens of a policy of ours have their log-probs.
"""

from __future__ import annotations

import dataclasses

from absl import flags

from agentjax.command import main
from agentjax.config import Config, check
from agentjax.names import load
from agentjax.rollout.seat_config import SeatConfig, SnapshotSeat, TrainedSeat
from agentjax.training.flags import define_config_flag, define_settings_flag

_TALK = "agentjax.adapters.terminal_agent:talk"


@dataclasses.dataclass(unsafe_hash=True)
class AgentConfig(Config):
  """Who the agent is.

  Attributes:
    player: "service", a model behind an endpoint; "checkpoint", a policy on disk; or
      ``module:attribute`` of one of your own.
  """

  player: SeatConfig | None = None

  def validate(self, path: str = "agent") -> None:
    super().validate(path)
    fits = self.player is not None and not isinstance(self.player, SnapshotSeat | TrainedSeat)
    name = None if self.player is None else self.player.chosen
    check(fits, f"{path}.player", name, "'service', 'checkpoint' or 'module:attribute'")


_CONFIG = define_config_flag()
_AGENT = define_settings_flag("agent", AgentConfig(), "Who the agent is.")
_TRANSCRIPT = flags.DEFINE_string("transcript", None, "Store that the conversation is added to.")
_SAY = flags.DEFINE_multi_string(
  "say", [], "Line to say instead of reading the terminal; may be given several times."
)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  _AGENT.value.validate("agent")
  talk = load(_TALK, "agent", "what holds the conversation")
  talk(_CONFIG.value, _AGENT.value.player, lines=_SAY.value, transcript=_TRANSCRIPT.value)


if __name__ == "__main__":
  main(run)
