"""Settings of guards, and the guards of a run."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from agentjax.config import Config, check
from agentjax.names import load
from agentjax.rollout.guards.hooks import Hook, HookConfig, build_hook
from agentjax.rollout.guards.interface import Rules, RulesConfig
from agentjax.rollout.guards.permissions import (
  Channel,
  PermissionBridge,
  PermissionConfig,
  TerminalChannel,
)
from agentjax.tools.egress import EgressConfig, EgressPolicy
from agentjax.tools.protocol import Tool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Status

_log = logging.getLogger(__name__)

HOOK_MOMENTS = ("episode_start", "before_tool", "after_tool", "stop")


@dataclasses.dataclass(unsafe_hash=True)
class GuardsConfig(Config):
  """Rules before and after an action; without rules, hooks and egress nothing is guarded.

  Attributes:
    rules: settings of the rules, whose class is their language, such as
      ``agentjax.recipes.agentspec:AgentSpecConfig``.
    hooks: in their order.
    permissions: who is asked.
    egress: hosts that tools may reach; None leaves this to the tools.
    egress_tools: globs of tools whose arguments are searched for addresses that ``egress`` denies.
    stop_status: status of an episode that a guard stops. "policy_error": the policy did something
      forbidden; "truncated": a budget is used up; "ok": it ends normally, without an answer.
  """

  rules: RulesConfig | None = None
  hooks: tuple[HookConfig, ...] = ()
  permissions: PermissionConfig = dataclasses.field(default_factory=PermissionConfig)
  egress: EgressConfig | None = None
  egress_tools: tuple[str, ...] = ()
  stop_status: Literal["policy_error", "truncated", "ok"] = "policy_error"

  def validate(self, path: str = "config.guards") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      not self.egress_tools or self.egress is not None,
      "egress_tools",
      f"nothing while {path}.egress is None",
    )


@dataclasses.dataclass(frozen=True)
class Guards:
  """The guards of a run, shared by its episodes.

  Attributes:
    config: settings.
    rules: bound to the run's tools; None where there are none.
    hooks: by event.
    egress: what may be reached; None if it is not checked here.
    egress_tools: names of the tools whose arguments are checked.
  """

  config: GuardsConfig
  rules: Rules | None
  hooks: Mapping[str, Sequence[Hook]]
  egress: EgressPolicy | None
  egress_tools: re.Pattern[str]

  @property
  def stop_status(self) -> Status:
    """How an episode ends that was stopped."""
    return Status(self.config.stop_status)

  def __bool__(self) -> bool:
    return self.rules is not None or any(self.hooks.values()) or bool(self.config.egress_tools)


def build_guards(
  config: GuardsConfig,
  registry: ToolRegistry,
  *,
  offered: Sequence[Tool] = (),
  channels: Sequence[Channel] = (),
) -> Guards:
  """Makes the guards of ``config``.

  Args:
    config: validated.
    registry: the run's tools, which rules are checked against and invoke.
    offered: tools that environments bring along, which rules may be about.
    channels: further ways to people, after those the config names.

  Raises:
    ConfigError: rules that the run's tools do not fit; hooks or channels that do not exist.
  """
  path = "config.guards"
  hooks = [build_hook(hook, f"{path}.hooks[{i}]") for i, hook in enumerate(config.hooks)]
  if commands := sorted({hook.run for hook in config.hooks if hook.kind == "command"}):
    _log.warning("hooks that run on this machine, outside every sandbox: %s", "; ".join(commands))
  bridge = build_bridge(config.permissions, f"{path}.permissions", channels)
  rules = config.rules
  return Guards(
    config,
    None
    if rules is None
    else rules.bind(registry, offered=offered, bridge=bridge, path=f"{path}.rules"),
    {moment: [h for h in hooks if h.config.event == moment] for moment in HOOK_MOMENTS},
    None if config.egress is None else EgressPolicy(config.egress),
    re.compile("|".join(map(fnmatch.translate, config.egress_tools)) or r"(?!)"),
  )


def build_bridge(
  config: PermissionConfig, path: str, channels: Sequence[Channel] = ()
) -> PermissionBridge:
  """The bridge to the people that the settings name, then to those behind ``channels``.

  Raises:
    ConfigError: a channel that does not exist.
  """
  named = [_channel(name, f"{path}.channels") for name in config.channels]
  return PermissionBridge(config, [*named, *channels])


def _channel(name: str, path: str) -> Channel:
  if name == "terminal":
    return TerminalChannel()
  found = load(name, path, "a channel, or its class")
  channel = found() if isinstance(found, type) else found
  check(
    hasattr(channel, "ask") and hasattr(channel, "can_ask") and hasattr(channel, "name"),
    path,
    name,
    "an object with name, can_ask and an async ask, or a class of such objects",
  )
  return channel
