"""Settings of a run's sandboxes: each has a name and is a choice of a back end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Self

from agentjax.config import ConfigError, PositiveFloat, PositiveInt, check
from agentjax.names import Choice
from agentjax.sandbox.interface import Protection, Sandbox, SandboxError, SandboxLimits

DEFAULT = "default"
_log = logging.getLogger(__name__)
_ADAPTERS = "agentjax.adapters.sandboxes"


@dataclasses.dataclass(unsafe_hash=True)
class SandboxConfig(Choice):
  """Settings of a back end.

  Built in are "embedded" (jailed processes of this machine; needs nothing installed), "bubblewrap"
  and "nsjail" (programs through that tool), "docker" and "podman" (containers), "fusion" (a
  SandboxFusion service), "e2b" and "daytona" (sandboxes that these services rent out). All but the
  first are adapters, in ``agentjax.adapters.sandboxes``.

  Attributes:
    limits: bounds of a run unless the caller gives its own.
  """

  group = "agentjax.sandboxes"

  limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "embedded": "agentjax.sandbox.process:ProcessSandboxConfig",
      "bubblewrap": f"{_ADAPTERS}.bubblewrap:BubblewrapConfig",
      "nsjail": f"{_ADAPTERS}.bubblewrap:NsjailConfig",
      "docker": f"{_ADAPTERS}.container:ContainerConfig",
      "podman": f"{_ADAPTERS}.container:PodmanConfig",
      "fusion": f"{_ADAPTERS}.sandbox_fusion:FusionConfig",
      "e2b": f"{_ADAPTERS}.e2b:E2bConfig",
      "daytona": f"{_ADAPTERS}.daytona:DaytonaConfig",
    }

  @property
  def overhead_seconds(self) -> float:
    """Seconds that a run may take beyond its own wall clock, without waiting for a place."""
    return 0.0

  def with_packages(self, packages: tuple[str, ...]) -> Self:
    """These settings for programs that import ``packages``.

    Only the embedded back end loads packages. For the others the image or the machine has them, and
    this changes nothing.
    """
    del packages
    return self

  def build(self) -> Sandbox:
    """The back end; close it at the end of the run.

    Raises:
      ConfigError: a setting that cannot be used.
      SandboxError: a package that the back end needs is not installed. ``start`` checks the
        machine.
    """
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class LocalSandboxConfig(SandboxConfig):
  """Settings of a back end that runs programs on this machine; the figures are ours.

  Attributes:
    limits: bounds of a run unless the caller gives its own.
    concurrency: runs at once; further ones wait their turn, and their clock starts with the turn.
    queue_seconds: longest wait for a turn; then the run ends as INFRA_ERROR, never as TIMEOUT. The
      wait is no part of a call's or a verdict's time (``places.Clock``).
    require: protections without which the sandbox refuses to start.
    allow_unisolated: start even where some of ``require`` are missing, and only warn. Untrusted
      code may then read or change the machine's files, or reach its processes or network.
  """

  concurrency: PositiveInt = 4
  queue_seconds: PositiveFloat = 600.0
  require: tuple[str, ...] = ("limits", "descendants", "network", "processes", "filesystem")
  allow_unisolated: bool = False

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    known = [p.value for p in Protection]
    for name in self.require:
      check(name in known, f"{path}.require", self.require, ", ".join(known))

  def check_protections(self, found: Collection[str], name: str, by: str = "") -> None:
    """Logs the protections of back end ``name``, and their mechanisms.

    Raises:
      SandboxError: a required protection is missing, and ``allow_unisolated`` is False.
    """
    listed = ", ".join(sorted(found)) or "nothing"
    missing = [p for p in self.require if p not in found]
    if missing and not self.allow_unisolated:
      raise SandboxError(
        f"{name} does not grant here: {', '.join(missing)} (it grants {listed}). Use another back "
        "end or machine (the embedded one needs user namespaces or Landlock), or accept that code "
        f"of the policy may do harm, with {type(self).__name__}.allow_unisolated=True."
      )
    _log.info("%s: sandbox protections: %s%s", name, listed, by and f" (by {by})")
    if absent := sorted(set(Protection) - set(found) - {Protection.USER}):
      _log.warning("%s: sandbox protections missing: %s", name, ", ".join(absent))


class Sandboxes:
  """The sandboxes of a run by name.

  Args:
    settings: name -> settings of its back end. None is one with all defaults, "default".
  """

  def __init__(self, settings: Mapping[str, SandboxConfig] | None = None):
    self._settings = default_sandboxes() if settings is None else settings

  def settings(
    self, name: str, path: str = "sandbox", *, packages: tuple[str, ...] = ()
  ) -> SandboxConfig:
    """Settings of the sandbox that ``name`` names.

    Args:
      name: which.
      path: dotted name of the setting that holds ``name``, for the message.
      packages: what programs there must be able to import.

    Raises:
      ConfigError: there is none of that name.
    """
    if name not in self._settings:
      raise ConfigError(
        f"{path}={name!r}; allowed: a name in config.sandboxes, which has "
        f"{', '.join(self._settings) or 'none'}. Add one with --config.sandboxes.{name}=embedded."
      )
    return self._settings[name].with_packages(packages)


def default_sandboxes() -> dict[str, SandboxConfig]:
  """The default: one embedded sandbox with default settings, called "default"."""
  return {DEFAULT: SandboxConfig.from_name("embedded", "config.sandboxes.default")}
