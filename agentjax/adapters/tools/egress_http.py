"""An aiohttp connector that only reaches hosts that an egress policy allows. Extra: [web]."""

from __future__ import annotations

from typing import Any

from agentjax.tools.egress import EgressDenied, EgressPolicy

try:
  import aiohttp
  import aiohttp.abc
except ImportError as error:
  raise ImportError("guarded sessions need aiohttp: pip install 'agentjax[web]'") from error


class GuardedResolver(aiohttp.abc.AbstractResolver):
  """Resolves allowed names only, and to nothing but allowed addresses.

  If one address of a name is refused, the name is refused: a legitimate name does not have both
  public and private addresses.
  """

  def __init__(self, policy: EgressPolicy, inner: aiohttp.abc.AbstractResolver | None = None):
    self._policy = policy
    self._inner = aiohttp.ThreadedResolver() if inner is None else inner

  async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[Any]:
    self._policy.check_host(host, port)
    found = await self._inner.resolve(host, port, family)
    for entry in found:
      self._policy.check_address(host, port, entry["host"])
    return found

  async def close(self) -> None:
    await self._inner.close()


class GuardedConnector(aiohttp.TCPConnector):
  """Checks every request, redirects among them, and connects to the addresses it has checked."""

  def __init__(
    self,
    policy: EgressPolicy,
    *,
    resolver: aiohttp.abc.AbstractResolver | None = None,
    **settings: Any,
  ):
    super().__init__(resolver=GuardedResolver(policy, resolver), **settings)
    self._policy = policy

  async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
    # Here and not only in the resolver, which is not asked for addresses and kept connections.
    if req.proxy is not None:
      raise EgressDenied("requests through a proxy cannot be checked")
    if req.url.scheme not in ("http", "https", "ws", "wss"):
      raise EgressDenied(f"scheme {req.url.scheme!r}; allowed: http, https, ws, wss")
    self._policy.check_host(req.url.host or "", req.url.port or 0)
    return await super().connect(req, traces, timeout)


def guarded_session(
  policy: EgressPolicy, *, resolver: aiohttp.abc.AbstractResolver | None = None, **settings: Any
) -> aiohttp.ClientSession:
  """A session whose requests raise ``EgressDenied`` for what ``policy`` does not allow.

  Proxies and passwords of the environment are not used, and cookies are not kept.

  Args:
    policy: what may be reached.
    resolver: finds addresses of names; the system's by default.
    settings: of ``aiohttp.ClientSession``, but ``connector``, ``trust_env`` and ``cookie_jar``.
  """
  return aiohttp.ClientSession(
    connector=GuardedConnector(policy, resolver=resolver),
    trust_env=False,
    cookie_jar=aiohttp.DummyCookieJar(),
    **settings,
  )
