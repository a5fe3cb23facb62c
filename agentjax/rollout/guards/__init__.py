"""Guards: rules, hooks, permissions and egress around what the policy does."""

from agentjax.rollout.guards.config import GuardsConfig, build_guards
from agentjax.rollout.guards.environment import guard_environments
from agentjax.rollout.guards.episode import EpisodeGuard, GuardError
from agentjax.rollout.guards.hooks import HookAnswer, HookConfig, HookEvent
from agentjax.rollout.guards.interface import (
  Decision,
  Entry,
  Judgement,
  RulesConfig,
  Situation,
  Step,
  Verdict,
)
from agentjax.rollout.guards.permissions import (
  Answer,
  PermissionBridge,
  PermissionConfig,
  TerminalChannel,
)

__all__ = [
  "Answer",
  "Decision",
  "Entry",
  "EpisodeGuard",
  "GuardError",
  "GuardsConfig",
  "HookAnswer",
  "HookConfig",
  "HookEvent",
  "Judgement",
  "PermissionBridge",
  "PermissionConfig",
  "RulesConfig",
  "Situation",
  "Step",
  "TerminalChannel",
  "Verdict",
  "build_guards",
  "guard_environments",
]
