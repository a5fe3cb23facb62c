"""AgentSpec (2503.18666): a language of rules before and after what an agent does."""

from agentjax.recipes.agentspec.config import AgentSpecConfig
from agentjax.recipes.agentspec.predicates import predicate
from agentjax.rollout.guards.interface import Situation, Step

__all__ = ["AgentSpecConfig", "Situation", "Step", "predicate"]
