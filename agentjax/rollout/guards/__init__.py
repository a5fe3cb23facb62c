"""Guards: rules, hooks, permissions and egress around what the policy does."""

from agentjax.rollout.guards.config import Guards, GuardsConfig, build_guards
from agentjax.rollout.guards.environment import GuardedEnvironment, guard_environments
from agentjax.rollout.guards.episode import Decision, EpisodeGuard, GuardError, Verdict
from agentjax.rollout.guards.hooks import HookAnswer, HookConfig, HookEvent
from agentjax.rollout.guards.permissions import (
  Answer,
  Channel,
  PermissionBridge,
  PermissionConfig,
  Question,
  TerminalChannel,
)
from agentjax.rollout.guards.predicates import PREDICATES, Situation, predicate
from agentjax.rollout.guards.rules import RuleSet, bind_rules
from agentjax.rollout.guards.syntax import Rule, RuleError, format_rules, parse_rules

__all__ = [
  "PREDICATES",
  "Answer",
  "Channel",
  "Decision",
  "EpisodeGuard",
  "GuardError",
  "GuardedEnvironment",
  "Guards",
  "GuardsConfig",
  "HookAnswer",
  "HookConfig",
  "HookEvent",
  "PermissionBridge",
  "PermissionConfig",
  "Question",
  "Rule",
  "RuleError",
  "RuleSet",
  "Situation",
  "TerminalChannel",
  "Verdict",
  "bind_rules",
  "build_guards",
  "format_rules",
  "guard_environments",
  "parse_rules",
  "predicate",
]
