"""Settings of guards, and the guards of a run made of them."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import logging
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from agentjax.config import Config, ConfigError, FilePath, check
from agentjax.names import load
from agentjax.rollout.guards.hooks import Hook, HookConfig, build_hook
from agentjax.rollout.guards.permissions import (
  Channel,
  PermissionBridge,
  PermissionConfig,
  TerminalChannel,
)
from agentjax.rollout.guards.rules import RuleSet, bind_rules
from agentjax.rollout.guards.syntax import parse_rules
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
    rules: text of rules (``guards.syntax``); after those of ``rules_file`` where both are set.
    rules_file: file of rules, UTF-8.
    predicates: modules that register predicates when they are imported.
    triggers: names that may trigger a rule besides events and known tools: tools of environments of
      your own, and beginnings of inputs, with "_" for a blank.
    hooks: in their order.
    permissions: who is asked.
    egress: which hosts may be reached by tools that reach the network; None leaves that to them.
    egress_tools: globs of tools whose arguments are searched for addresses that ``egress`` denies.
    max_reflections: turns in a row that ``llm_self_reflect`` sends back; then the action is
      skipped. 3 in AgentSpec (2503.18666).
    reflection: what the policy is told then, with the rule's name for ``{rule}``; ours.
    stop_status: how an episode ends that a guard stops. "policy_error": the policy did what it must
      not; "truncated": it had enough; "ok": as if it had ended by itself, without an answer.
    tool_timeout: seconds a tool may take that a rule invokes.
  """

  rules: str = ""
  rules_file: FilePath | None = None
  predicates: tuple[str, ...] = ()
  triggers: tuple[str, ...] = ()
  hooks: tuple[HookConfig, ...] = ()
  permissions: PermissionConfig = dataclasses.field(default_factory=PermissionConfig)
  egress: EgressConfig | None = None
  egress_tools: tuple[str, ...] = ()
  max_reflections: int = 3
  reflection: str = "not done: rule {rule} objects. Think again, and choose another way."
  stop_status: Literal["policy_error", "truncated", "ok"] = "policy_error"
  tool_timeout: float = 30.0

  def validate(self, path: str = "config.guards") -> None:
    super().validate(path)
    for i, hook in enumerate(self.hooks):
      hook.validate(f"{path}.hooks[{i}]")
    for name in self.triggers:
      check(
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name) is not None,
        f"{path}.triggers",
        name,
        "a letter or '_', then letters, digits, '_', '.', '-'",
      )
    check(
      not self.egress_tools or self.egress is not None,
      f"{path}.egress_tools",
      self.egress_tools,
      f"nothing while {path}.egress is None",
    )
    check(self.max_reflections >= 0, f"{path}.max_reflections", self.max_reflections, ">= 0")
    check(self.tool_timeout > 0, f"{path}.tool_timeout", self.tool_timeout, "seconds > 0")
    for source, text in self.read_rules(path):
      parse_rules(text, source)

  def read_rules(self, path: str = "config.guards") -> list[tuple[str, str]]:
    """(name, text) of the rules, those of the file first.

    Raises:
      ConfigError: a file that cannot be read.
    """
    texts = []
    if self.rules_file is not None:
      try:
        texts.append((self.rules_file, pathlib.Path(self.rules_file).read_text("utf-8")))
      except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
          f"{path}.rules_file={self.rules_file!r} cannot be read: {error}."
        ) from error
    if self.rules:
      texts.append((f"{path}.rules", self.rules))
    return texts


@dataclasses.dataclass(frozen=True)
class Guards:
  """The guards of a run, shared by its episodes.

  Attributes:
    config: settings.
    rules: bound to the run's tools.
    hooks: by event.
    bridge: to people.
    egress: what may be reached; None where that is not checked here.
    egress_tools: names of the tools whose arguments are.
    registry: runs what rules invoke.
  """

  config: GuardsConfig
  rules: RuleSet
  hooks: Mapping[str, Sequence[Hook]]
  bridge: PermissionBridge
  egress: EgressPolicy | None
  egress_tools: re.Pattern[str]
  registry: ToolRegistry

  @property
  def stop_status(self) -> Status:
    """How an episode ends that was stopped."""
    return Status(self.config.stop_status)

  def __bool__(self) -> bool:
    return bool(self.rules) or any(self.hooks.values()) or bool(self.config.egress_tools)


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
    RuleError: rules that the run's tools and predicates do not fit.
    ConfigError: hooks, channels or modules that do not exist.
  """
  path = "config.guards"
  for module in config.predicates:
    try:
      importlib.import_module(module)
    except ImportError as error:
      raise ConfigError(f"{path}.predicates: {module!r} cannot be imported ({error}).") from error
  sets = [
    bind_rules(
      parse_rules(text, source),
      tools=registry.schemas,
      triggers=[*config.triggers, *(tool.name for tool in offered)],
      source=source,
      text=text,
    )
    for source, text in config.read_rules(path)
  ]
  hooks = [build_hook(hook, f"{path}.hooks[{i}]") for i, hook in enumerate(config.hooks)]
  if commands := sorted({hook.run for hook in config.hooks if hook.kind == "command"}):
    _log.warning("hooks that run on this machine, outside every sandbox: %s", "; ".join(commands))
  named = [_channel(name, f"{path}.permissions.channels") for name in config.permissions.channels]
  return Guards(
    config,
    RuleSet([bound for rules in sets for bound in rules.rules]),
    {moment: [h for h in hooks if h.config.event == moment] for moment in HOOK_MOMENTS},
    PermissionBridge(config.permissions, [*named, *channels]),
    None if config.egress is None else EgressPolicy(config.egress),
    re.compile("|".join(map(fnmatch.translate, config.egress_tools)) or r"(?!)"),
    registry,
  )


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
