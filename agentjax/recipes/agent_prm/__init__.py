"""AgentPRM (2511.08325): a model of the promise of turns, whose differences pay the policy."""

from agentjax.recipes.agent_prm.signal import AgentPrmConfig

__all__ = ["AgentPrmConfig"]
