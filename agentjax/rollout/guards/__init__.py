"""Guards: rules, hooks, permissions and egress around what the policy does."""

from agentjax.rollout.guards.config import Guards, GuardsConfig, build_guards
from agentjax.rollout.guards.environment import GuardedEnvironment, guard_environments
from agentjax.rollout.guards.episode import EpisodeGuard, GuardError
from agentjax.rollout.guards.hooks import HookAnswer, HookConfig, HookEvent
from agentjax.rollout.guards.interface import (
  Decision,
  Entry,
  EpisodeRules,
  Judgement,
  Rules,
  RulesConfig,
  Situation,
  Step,
  Verdict,
)
from agentjax.rollout.guards.permissions import (
  Answer,
  Channel,
  PermissionBridge,
  PermissionConfig,
  Question,
  TerminalChannel,
)

__all__ = [
  "Answer",
  "Channel",
  "Decision",
  "Entry",
  "EpisodeGuard",
  "EpisodeRules",
  "GuardError",
  "GuardedEnvironment",
  "Guards",
  "GuardsConfig",
  "HookAnswer",
  "HookConfig",
  "HookEvent",
  "Judgement",
  "PermissionBridge",
  "PermissionConfig",
  "Question",
  "Rules",
  "RulesConfig",
  "Situation",
  "Step",
  "TerminalChannel",
  "Verdict",
  "build_guards",
  "guard_environments",
]
