"""The world "negotiation"; see README.md."""

from agentjax.worlds.negotiation.game import AGENTS, Negotiation, NegotiationConfig

Settings = NegotiationConfig

__all__ = ["AGENTS", "Negotiation", "NegotiationConfig", "Settings"]
