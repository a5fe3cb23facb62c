"""Parts of the reward that many methods share: lengths, answers, form, sources. No jax."""

from agentjax.recipes.scorers.answers import TextMatchConfig
from agentjax.recipes.scorers.calls import UsedConfig
from agentjax.recipes.scorers.form import TagsConfig
from agentjax.recipes.scorers.lengths import OverlongConfig, RelativeConfig, seconds, tool_calls
from agentjax.recipes.scorers.renorm import RenormConfig
from agentjax.recipes.scorers.sources import CitationsConfig, EvidenceConfig

__all__ = [
  "CitationsConfig",
  "EvidenceConfig",
  "OverlongConfig",
  "RelativeConfig",
  "RenormConfig",
  "TagsConfig",
  "TextMatchConfig",
  "UsedConfig",
  "seconds",
  "tool_calls",
]
