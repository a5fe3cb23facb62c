"""Calls to a remote sandbox service: bounded queue, deadline, retries, hedges, circuit breakers.

Only failures of the service are tried again. A failure of a program is a normal answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

from agentjax.adapters.http_client import NoAnswerError, NoTokenError, exchange, load_aiohttp
from agentjax.adapters.sandboxes.called import InfraError
from agentjax.config import (
  Config,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Range,
  check,
)
from agentjax.places import Places, QueueTimeout
from agentjax.sandbox.interface import RunStatus, SandboxError, SandboxResult

Answer = TypeVar("Answer")
_TRY_AGAIN = frozenset((408, 425, 429))  # of the client's errors; all 5xx are tried again
_KEEP_ALIVE_SECONDS = 3.0  # less than servers keep an idle connection (uvicorn: 5)


@dataclasses.dataclass(unsafe_hash=True)
class ServiceConfig(Config):
  """How a remote service is called; the figures are ours.

  Attributes:
    urls: base addresses of equal servers. A box keeps to one of them, chosen by its id; its calls
      go to the next one where that fails.
    token_variable: environment variable with a bearer token; None sends none.
    concurrency: calls in flight at once, from this process.
    queue_size: calls that may wait for a place; further ones fail at once.
    queue_seconds: longest wait for a place; then the run ends as INFRA_ERROR.
    overhead_seconds: what a call may take, with all retries, beyond the program's own time.
    attempts: requests for one call at most, the first and hedges included.
    retry_seconds: pause before the first retry; it doubles with each.
    hedge_seconds: a call with no answer so long after the program's own time is over is sent once
      more beside the first; the first answer counts, the other is cancelled. None never does.
    breaker_failures: failures of a server in a row after which it gets no calls.
    breaker_seconds: for so long; then one call probes it.
    answer_bytes: size of an answer at most.
  """

  urls: tuple[str, ...] = ()
  token_variable: str | None = None
  concurrency: PositiveInt = 32
  queue_size: NonNegativeInt = 4096
  queue_seconds: PositiveFloat = 600.0
  overhead_seconds: PositiveFloat = 30.0
  attempts: PositiveInt = 3
  retry_seconds: NonNegativeFloat = 0.2
  hedge_seconds: NonNegativeFloat | None = 5.0
  breaker_failures: PositiveInt = 5
  breaker_seconds: PositiveFloat = 10.0
  answer_bytes: Annotated[int, Range(2**20)] = 512 * 2**20

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for url in self.urls:
      known = url.startswith(("http://", "https://"))
      check(known, f"{path}.urls", self.urls, "http://HOST:PORT or https://HOST")


@dataclasses.dataclass
class ServiceCounts:
  """What happened so far; failures of the service are apart from failures of programs.

  Attributes:
    calls: calls made.
    task_failures: runs whose program failed, in any way; never tried again.
    infra_failures: requests that the service failed.
    infra_errors: calls that failed for good.
    retries, hedges: further requests, after a failure and beside a silent one.
    refused: calls that got no place in the queue.
    circuits_opened: times that a server was cut off.
  """

  calls: int = 0
  task_failures: int = 0
  infra_failures: int = 0
  infra_errors: int = 0
  retries: int = 0
  hedges: int = 0
  refused: int = 0
  circuits_opened: int = 0


class CircuitBreaker:
  """Cuts a server off after failures in a row; after a pause one call at a time probes it.

  Args:
    failures: in a row, to open.
    seconds: pause before a probe.
    clock: seconds, monotonic.
  """

  def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic):
    self._most, self._seconds, self._clock = failures, seconds, clock
    self._failures = 0
    self._opened: float | None = None
    self._probing = False

  @property
  def open(self) -> bool:
    return self._opened is not None

  def admit(self) -> bool:
    """Whether a call may go; a True must be followed by succeed, fail or forget."""
    if self._opened is None:
      return True
    if self._probing or self._clock() - self._opened < self._seconds:
      return False
    self._probing = True
    return True

  def succeed(self) -> None:
    self._failures, self._opened, self._probing = 0, None, False

  def fail(self) -> bool:
    """Whether this failure cut the server off."""
    self._failures += 1
    if not self._probing and (self.open or self._failures < self._most):
      return False
    self._opened, self._probing = self._clock(), False
    return True

  def forget(self) -> None:
    """The call was cancelled, which says nothing about the server."""
    self._probing = False


class ServiceClient:
  """Calls to equal servers of one service, each of which may be made twice without harm.

  May be used from one event loop after another.

  Raises:
    SandboxError: no server named, or aiohttp is not installed.
  """

  def __init__(self, config: ServiceConfig, name: str):
    config.validate(f"{name}.service")
    if not config.urls:
      raise SandboxError(
        f"{name}.service.urls is empty; name at least one server, http://HOST:PORT"
      )
    self.config = config
    self.counts = ServiceCounts()
    try:
      self._aiohttp = load_aiohttp(f"the {name} back end")
    except ImportError as error:
      raise SandboxError(str(error)) from error
    self._places = Places(config.concurrency, config.queue_seconds)
    self._waiting = 0
    self._servers = [
      (url.rstrip("/"), CircuitBreaker(config.breaker_failures, config.breaker_seconds))
      for url in config.urls
    ]
    self._session: tuple[asyncio.AbstractEventLoop, Any] | None = None

  async def call(
    self,
    path: str,
    read: Callable[[Any], Answer],
    *,
    affinity: str,
    body: Mapping[str, Any],
    own_seconds: float = 0.0,
  ) -> Answer:
    """Posts a request as JSON and reads the answer.

    Args:
      path: of the request.
      read: makes the result of the answer's JSON; LookupError, TypeError and ValueError mean that
        the answer is not what it should be, which is the service's failure; InfraError too.
      affinity: calls with the same one go to the same server while that answers.
      body: sent as JSON.
      own_seconds: the time that the service is asked to spend.

    Raises:
      InfraError: no place in the queue, no answer in time, or the last of all attempts failed.
    """
    self.counts.calls += 1

    async def send(url: str) -> Answer:
      return await self._request(url + path, read, body)

    try:
      async with self._place():
        return await self._first_answer(self._ordered(affinity), send, own_seconds)
    except InfraError:
      self.counts.infra_errors += 1
      raise

  def count(self, result: SandboxResult) -> SandboxResult:
    """Counts a program's failure, and returns the result."""
    self.counts.task_failures += result.status not in (RunStatus.OK, RunStatus.INFRA_ERROR)
    return result

  async def close(self) -> None:
    if self._session is not None:
      await self._session[1].close()
      self._session = None

  @contextlib.asynccontextmanager
  async def _place(self) -> Any:
    if self._waiting >= self.config.concurrency + self.config.queue_size:
      self.counts.refused += 1
      raise InfraError(f"{self.config.queue_size} calls wait already (service.queue_size)")
    self._waiting += 1
    try:
      async with self._places.one():
        yield
    except QueueTimeout as error:
      self.counts.refused += 1
      raise InfraError(str(error)) from None
    finally:
      self._waiting -= 1

  def _ordered(self, affinity: str) -> list[tuple[str, CircuitBreaker]]:
    first = zlib.crc32(affinity.encode()) % len(self._servers)
    return [*self._servers[first:], *self._servers[:first]]

  async def _first_answer(
    self,
    servers: list[tuple[str, CircuitBreaker]],
    send: Callable[[str], Awaitable[Answer]],
    own_seconds: float,
  ) -> Answer:
    start_time = asyncio.get_running_loop().time()
    deadline = start_time + own_seconds + self.config.overhead_seconds
    turns = itertools.cycle(servers)
    running: set[asyncio.Task[Answer]] = set()
    left, pause = self.config.attempts, self.config.retry_seconds
    hedge = self.config.hedge_seconds
    hedge_at = None if hedge is None else start_time + own_seconds + hedge

    def start() -> bool:
      """Sends to the next server that takes calls; False when none does."""
      nonlocal left
      for url, breaker in itertools.islice(turns, len(servers)):
        if breaker.admit():
          left -= 1
          running.add(asyncio.ensure_future(self._attempt(send, url, breaker, deadline)))
          return True
      return False

    try:
      if not start():
        raise self._cut_off(servers)
      while True:
        wait = None
        if hedge_at is not None and left > 0:
          wait = max(0.0, hedge_at - asyncio.get_running_loop().time())
        done, running = await asyncio.wait(
          running, timeout=wait, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
          hedge_at = None
          self.counts.hedges += start()
          continue
        for task in done:
          if task.exception() is None:
            return task.result()
        if running:
          continue
        error = next(iter(done)).exception()
        assert error is not None
        if not (isinstance(error, InfraError) and error.again and left > 0):
          raise error
        if asyncio.get_running_loop().time() + pause >= deadline:
          raise error
        await asyncio.sleep(pause)
        pause *= 2
        if not start():
          raise error
        self.counts.retries += 1
    finally:
      for task in running:
        task.cancel()
      await asyncio.gather(*running, return_exceptions=True)

  async def _attempt(
    self,
    send: Callable[[str], Awaitable[Answer]],
    url: str,
    breaker: CircuitBreaker,
    deadline: float,
  ) -> Answer:
    try:
      try:
        async with asyncio.timeout_at(deadline):
          answer = await send(url)
      except TimeoutError:
        raise InfraError(f"{url}: no answer in time") from None
    except InfraError:
      self.counts.infra_failures += 1
      self.counts.circuits_opened += breaker.fail()
      raise
    except BaseException:
      breaker.forget()
      raise
    breaker.succeed()
    return answer

  def _cut_off(self, servers: list[tuple[str, CircuitBreaker]]) -> InfraError:
    names = ", ".join(url for url, _ in servers)
    return InfraError(
      f"{names}: cut off after {self.config.breaker_failures} failures in a row, for "
      f"{self.config.breaker_seconds:g} s at a time"
    )

  async def _request(
    self, url: str, read: Callable[[Any], Answer], body: Mapping[str, Any]
  ) -> Answer:
    session = await self._open_session()
    try:
      status, data = await exchange(
        session,
        "POST",
        url,
        body=body,
        token_variable=self.config.token_variable,
        most_bytes=self.config.answer_bytes,
      )
    except NoTokenError as error:
      raise SandboxError(f"{error} (service.token_variable)") from None
    except NoAnswerError as error:
      raise InfraError(str(error)) from error
    if status >= 400:
      said = data[:300].decode(errors="replace")
      again = status >= 500 or status in _TRY_AGAIN
      raise InfraError(f"{url}: HTTP status {status}: {said}", again=again)
    try:
      # In a thread: an answer may hold all that a program wrote.
      return await asyncio.to_thread(lambda: read(json.loads(data)))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
      said = data[:300].decode(errors="replace")
      raise InfraError(f"{url}: not the answer expected ({error!r}): {said}") from error

  async def _open_session(self) -> Any:
    loop = asyncio.get_running_loop()
    if self._session is None or self._session[0] is not loop:
      connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
      # Deadlines are the call's; a time-out of the library would cut off long runs.
      timeout = self._aiohttp.ClientTimeout(total=None)
      session = self._aiohttp.ClientSession(connector=connector, timeout=timeout)
      former, self._session = self._session, (loop, session)
      if former is not None:
        await former[1].close()  # its loop has ended, and with it the connections
      return session
    return self._session[1]
