"""Which sandboxes a run has: the settings of a back end are the choice, and each has a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

from agentjax.config import ConfigError
from agentjax.names import Choice
from agentjax.sandbox.interface import Sandbox, SandboxLimits

DEFAULT = "default"
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
    """What a run may take beyond its own wall clock; waiting for a place is no part of it."""
    return 0.0

  def with_packages(self, packages: tuple[str, ...]) -> Self:
    """These settings for programs that import ``packages``.

    Only the embedded back end loads packages. In the others they are a matter of the image or of
    the machine, and this changes nothing.
    """
    del packages
    return self

  def build(self) -> Sandbox:
    """The back end; close it at the end of the run.

    Raises:
      ConfigError: a setting that cannot be used.
      SandboxError: a package that the back end needs is not installed; what it needs of the machine
        is found out by ``start``.
    """
    raise NotImplementedError(f"{type(self).__name__} must define build()")


class Sandboxes:
  """The sandboxes of a run by name; whatever needs one is given the name.

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
  """What a run has that names no sandbox: the embedded one with its defaults, "default"."""
  return {DEFAULT: SandboxConfig.from_name("embedded", "config.sandboxes.default")}
