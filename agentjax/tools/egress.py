"""Egress: which hosts, ports and addresses tools may reach. What is not allowed is denied.

A name is checked before it is resolved, and each address before the connection, which must use the
checked address. So a name that resolves differently the second time (DNS rebinding) gains nothing.
``adapters.tools.egress_http`` does both for aiohttp.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import urllib.parse
from collections.abc import Iterator

from agentjax.config import Config, ConfigError, check

_DEFAULT_PORTS = frozenset({80, 443})
_SCHEMES = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_URL = re.compile(r"(?i)\b[a-z][a-z0-9+.-]{0,30}://[^\s\"'<>`]+")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclasses.dataclass(unsafe_hash=True)
class EgressConfig(Config):
  """Hosts that may be reached. A pattern is ``host``, ``host:port`` or ``host:*``.

  The host of a pattern is a name, ``*.name`` for all names below it, ``*`` for any, or an address
  (IPv6 in brackets).

  Attributes:
    allow: patterns of hosts that may be reached; without a port they mean ports 80 and 443.
    deny: patterns that take precedence; without a port they mean every port.
    allow_addresses: ranges such as "10.1.0.0/16" that may be reached although they are not public.
      Loopback, private, link-local (cloud metadata), shared, multicast and reserved addresses are
      refused otherwise, for any name.
  """

  allow: tuple[str, ...] = ()
  deny: tuple[str, ...] = ()
  allow_addresses: tuple[str, ...] = ()

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in ("allow", "deny"):
      for pattern in getattr(self, name):
        try:
          _Pattern.parse(pattern, frozenset())
        except ValueError as error:
          raise ConfigError(
            f"{path}.{name}: {pattern!r}: {error}; allowed: host, host:port, host:*, where host is "
            "a name, *.name, * or an address."
          ) from error
    for text in self.allow_addresses:
      try:
        ipaddress.ip_network(text)
      except ValueError as error:
        raise ConfigError(f"{path}.allow_addresses: {text!r} is no range: {error}.") from error


class EgressDenied(Exception):
  """A place that may not be reached; the message says why, for the policy to read."""


@dataclasses.dataclass(frozen=True)
class _Pattern:
  host: str  # normalised; "*", "*.name", a name or an address
  ports: frozenset[int] | None  # None is any

  @classmethod
  def parse(cls, text: str, default_ports: frozenset[int] | None) -> _Pattern:
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\*|[0-9]+))?", text)
    if match is None:
      raise ValueError("not a pattern")
    host, port = match.groups()
    ports = default_ports
    if port == "*":
      ports = None
    elif port is not None:
      check(0 < int(port) < 65536, "port", int(port), "1 to 65535")
      ports = frozenset({int(port)})
    if host == "*":
      return cls(host, ports)
    name = host.removeprefix("*.")
    return cls(host[: len(host) - len(name)] + normal_host(name.strip("[]")), ports)

  def fits(self, host: str, port: int) -> bool:
    if self.ports is not None and port not in self.ports:
      return False
    if self.host.startswith("*."):
      return host.endswith(self.host[1:])
    return self.host in ("*", host)


class EgressPolicy:
  """Checks places against an ``EgressConfig``."""

  def __init__(self, config: EgressConfig):
    self._allow = [_Pattern.parse(text, _DEFAULT_PORTS) for text in config.allow]
    self._deny = [_Pattern.parse(text, None) for text in config.deny]
    self._networks = [ipaddress.ip_network(text) for text in config.allow_addresses]

  def check_host(self, host: str, port: int) -> None:
    """Raises EgressDenied unless the name or address ``host`` may be used at ``port``."""
    try:
      name = normal_host(host)
    except ValueError as error:
      raise EgressDenied(f"{host!r} is no host: {error}") from error
    if any(pattern.fits(name, port) for pattern in self._deny):
      raise EgressDenied(f"{name}:{port} is on the list of denied hosts")
    if not any(pattern.fits(name, port) for pattern in self._allow):
      raise EgressDenied(f"{name}:{port} is not among the allowed hosts")
    if (address := _address(name)) is not None:
      self._check_range(address, name, port)

  def check_address(self, host: str, port: int, address: str) -> None:
    """Raises EgressDenied unless ``address``, which ``host`` led to, may be connected to."""
    found = _address(address)
    if found is None:
      raise EgressDenied(f"{host} led to {address!r}, which is no address")
    if any(pattern.fits(str(found), port) for pattern in self._deny):
      raise EgressDenied(f"{host} leads to {found}:{port}, which is on the list of denied hosts")
    self._check_range(found, host, port)

  def check_url(self, url: str) -> None:
    """Raises EgressDenied unless ``url`` is http or https, has no password, and its host is
    allowed. The caller must check redirects and addresses."""
    try:
      parts = urllib.parse.urlsplit(url)
      host, port, scheme = parts.hostname, parts.port, parts.scheme.lower()
    except ValueError as error:
      raise EgressDenied(f"{url!r} is no address of the web: {error}") from error
    if scheme not in _SCHEMES:
      raise EgressDenied(f"{url!r} has scheme {scheme!r}; allowed: http, https")
    if not host or "\\" in url:
      raise EgressDenied(f"{url!r} names no host")
    if parts.username is not None or parts.password is not None:
      raise EgressDenied(f"{url!r} holds a user name or password")
    self.check_host(host, _SCHEMES[scheme] if port is None else port)

  def _check_range(self, address: Address, host: str, port: int) -> None:
    for inner in (address, *_embedded(address)):
      if not _public(inner) and not any(inner in network for network in self._networks):
        via = "" if host == str(address) else f"{host} leads to "
        raise EgressDenied(f"{via}{address}:{port}, which is no public address")


def urls(text: str) -> Iterator[str]:
  """The addresses with a scheme in ``text``."""
  for match in _URL.finditer(text):
    yield match.group().rstrip(".,;:!?)]}")


def normal_host(host: str) -> str:
  """A name in lower-case ASCII without its last dot, an address as Python writes it.

  Raises:
    ValueError: neither.
  """
  host = host.strip().rstrip(".").lower()
  address = _address(host)
  if address is not None:
    return str(address)
  if not host.isascii():
    host = host.encode("idna").decode("ascii")
  if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", host) or ".." in host:
    raise ValueError("not a host name")
  if re.fullmatch(r"0x[0-9a-f]*|[0-9]+", host.split(".")[-1]):  # 127.1, 0x7f000001
    raise ValueError("an address that is not written in full")
  return host


def _address(text: str) -> Address | None:
  try:
    return ipaddress.ip_address(text.split("%")[0])  # without an interface
  except ValueError:
    return None


def _embedded(address: Address) -> Iterator[Address]:
  """IPv4 addresses that are embedded in an IPv6 address."""
  if isinstance(address, ipaddress.IPv4Address):
    return
  if address.ipv4_mapped is not None:
    yield address.ipv4_mapped
  if address.sixtofour is not None:
    yield address.sixtofour
  if address.teredo is not None:
    yield from address.teredo
  if address in _NAT64:
    yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _public(address: Address) -> bool:
  if isinstance(address, ipaddress.IPv6Address):
    if address.ipv4_mapped is not None or address in _NAT64:
      return True  # the IPv4 address it stands for is looked at in its place
  return address.is_global and not address.is_multicast and not address.is_reserved
