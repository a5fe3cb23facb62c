"""Settings of AgentSpec's rules; chosen by ``config.guards.rules``."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
from collections.abc import Sequence

from agentjax.config import ConfigError, FilePath, NonNegativeInt, PositiveFloat, check
from agentjax.recipes.agentspec.binding import RuleSet, bind_rules
from agentjax.recipes.agentspec.episode import AgentSpecRules
from agentjax.recipes.agentspec.syntax import parse_rules
from agentjax.rollout.guards.interface import RulesConfig
from agentjax.rollout.guards.permissions import PermissionBridge
from agentjax.tools.protocol import Tool
from agentjax.tools.registry import ToolRegistry


@dataclasses.dataclass(unsafe_hash=True)
class AgentSpecConfig(RulesConfig):
  """Rules of AgentSpec's language (``agentspec.syntax``).

  Attributes:
    text: rules; after those of ``file`` where both are set.
    file: file of rules, UTF-8.
    predicates: modules that register predicates when they are imported.
    triggers: names that may trigger a rule besides events and known tools: tools of environments of
      your own, and beginnings of inputs, with "_" for a blank.
    max_reflections: turns in a row that ``llm_self_reflect`` sends back; then the action is
      skipped. 3 in AgentSpec (2503.18666).
    reflection: message to the policy, with the rule's name for ``{rule}``; ours.
    tool_timeout: seconds that a tool invoked by a rule may take.
  """

  text: str = ""
  file: FilePath | None = None
  predicates: tuple[str, ...] = ()
  triggers: tuple[str, ...] = ()
  max_reflections: NonNegativeInt = 3
  reflection: str = "not done: rule {rule} objects. Think again, and choose another way."
  tool_timeout: PositiveFloat = 30.0

  def validate(self, path: str = "config.guards.rules") -> None:
    super().validate(path)
    for name in self.triggers:
      check(
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name) is not None,
        f"{path}.triggers",
        name,
        "a letter or '_', then letters, digits, '_', '.', '-'",
      )
    for source, text in self._sources(path):
      parse_rules(text, source)

  def bind(
    self,
    registry: ToolRegistry,
    *,
    offered: Sequence[Tool] = (),
    bridge: PermissionBridge,
    path: str,
  ) -> AgentSpecRules | None:
    """See ``RulesConfig.bind``.

    Raises:
      RuleError: rules that the run's tools and predicates do not fit.
      ConfigError: modules of predicates, or a file, that do not exist.
    """
    for module in self.predicates:
      try:
        importlib.import_module(module)
      except ImportError as error:
        raise ConfigError(f"{path}.predicates: {module!r} cannot be imported ({error}).") from error
    sets = [
      bind_rules(
        parse_rules(text, source),
        tools=registry.schemas,
        triggers=[*self.triggers, *(tool.name for tool in offered)],
        source=source,
        text=text,
      )
      for source, text in self._sources(path)
    ]
    rules = RuleSet([bound for each in sets for bound in each.rules])
    if not rules:
      return None
    return AgentSpecRules(
      rules,
      registry,
      bridge,
      max_reflections=self.max_reflections,
      reflection=self.reflection,
      tool_timeout=self.tool_timeout,
    )

  def _sources(self, path: str) -> list[tuple[str, str]]:
    """(name, text) of the rules, those of the file first.

    Raises:
      ConfigError: a file that cannot be read.
    """
    texts = []
    if self.file is not None:
      try:
        texts.append((self.file, pathlib.Path(self.file).read_text("utf-8")))
      except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}.file={self.file!r} cannot be read: {error}.") from error
    if self.text:
      texts.append((f"{path}.text", self.text))
    return texts
