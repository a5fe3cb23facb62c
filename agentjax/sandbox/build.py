"""Which sandbox a run has: one setting that names the back end, and the settings of each."""

from __future__ import annotations

import dataclasses
from typing import Literal

from agentjax.config import Config, check
from agentjax.sandbox.bubblewrap import BUBBLEWRAP, NSJAIL, JailerConfig, JailerSandbox
from agentjax.sandbox.container import ContainerConfig, ContainerSandbox, podman_config
from agentjax.sandbox.interface import Sandbox, SandboxLimits
from agentjax.sandbox.process import ProcessSandbox, ProcessSandboxConfig
from agentjax.sandbox.provider import HttpProvider, ProviderConfig, ProviderSandbox
from agentjax.sandbox.remote import FusionConfig, FusionSandbox

_REMOTE = ("fusion", "provider")


@dataclasses.dataclass(unsafe_hash=True)
class SandboxConfig(Config):
  """The back end of a run.

  Attributes:
    kind: which one; its settings are in the field of that name, and the others are not used.
    embedded: jailed processes of this machine; needs nothing installed.
    bubblewrap, nsjail: programs through that tool, where installed.
    docker, podman: containers; ``runtime="runsc"`` for gVisor.
    fusion: a SandboxFusion service.
    provider: sandboxes rented from a provider behind a JSON gateway.
  """

  kind: Literal["embedded", "bubblewrap", "nsjail", "docker", "podman", "fusion", "provider"] = (
    "embedded"
  )
  embedded: ProcessSandboxConfig = dataclasses.field(default_factory=ProcessSandboxConfig)
  bubblewrap: JailerConfig = dataclasses.field(default_factory=JailerConfig)
  nsjail: JailerConfig = dataclasses.field(default_factory=JailerConfig)
  docker: ContainerConfig = dataclasses.field(default_factory=ContainerConfig)
  podman: ContainerConfig = dataclasses.field(default_factory=podman_config)
  fusion: FusionConfig = dataclasses.field(default_factory=FusionConfig)
  provider: ProviderConfig = dataclasses.field(default_factory=ProviderConfig)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    if self.kind in _REMOTE:
      urls = getattr(self, self.kind).service.urls
      check(bool(urls), f"{path}.{self.kind}.service.urls", urls, "at least one, http://HOST:PORT")

  @property
  def limits(self) -> SandboxLimits:
    """Bounds of a run in the chosen back end."""
    return getattr(self, self.kind).limits

  @property
  def overhead_seconds(self) -> float:
    """What a run may take beyond its own wall clock; waiting for a place is no part of it."""
    return getattr(self, self.kind).service.overhead_seconds if self.kind in _REMOTE else 0.0


def build_sandbox(config: SandboxConfig) -> Sandbox:
  """The back end that ``config.kind`` names. Close it at the end of the run.

  Raises:
    ConfigError: a setting that cannot be used.
    SandboxError: a package that the back end needs is not installed; what it needs of the machine
      is found out by ``start``.
  """
  config.validate("sandbox")
  if config.kind == "embedded":
    return ProcessSandbox(config.embedded)
  if config.kind == "bubblewrap":
    return JailerSandbox(BUBBLEWRAP, config.bubblewrap)
  if config.kind == "nsjail":
    return JailerSandbox(NSJAIL, config.nsjail)
  if config.kind in ("docker", "podman"):
    return ContainerSandbox(config.docker if config.kind == "docker" else config.podman)
  if config.kind == "fusion":
    return FusionSandbox(config.fusion)
  return ProviderSandbox(HttpProvider(config.provider.service), config.provider)
