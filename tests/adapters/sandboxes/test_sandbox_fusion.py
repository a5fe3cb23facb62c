"""Remote back ends against local servers that fail in every way they can."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="remote back ends need agentjax[web]")

from agentjax.adapters.sandboxes.called import InfraError
from agentjax.adapters.sandboxes.sandbox_fusion import _RESULT, FusionConfig, FusionSandbox, _read
from agentjax.adapters.sandboxes.service_client import (
  CircuitBreaker,
  ServiceClient,
  ServiceConfig,
)
from agentjax.config import ConfigError
from agentjax.sandbox.interface import (
  Command,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
)
from tests.adapters.sandboxes.service import Service

QUICK: dict[str, Any] = {"retry_seconds": 0.01, "hedge_seconds": None, "overhead_seconds": 10.0}


@pytest.fixture
def service() -> Iterator[Service]:
  service = Service()
  yield service
  service.close()


def calling(
  urls: tuple[str, ...], body: Callable[[ServiceClient], Coroutine[Any, Any, Any]], **settings: Any
) -> Any:
  """Runs ``body`` with a client of these servers."""

  async def main() -> Any:
    client = ServiceClient(ServiceConfig(urls=urls, **{**QUICK, **settings}), "test")
    try:
      return await body(client)
    finally:
      await client.close()

  return asyncio.run(main())


async def create(client: ServiceClient, **settings: Any) -> str:
  """A call that the server of the tests answers at once."""
  options = {"affinity": "a", "body": {}, **settings}
  return await client.call("/echo", lambda answer: answer["id"], **options)


def run_fusion(service: Service, program: Any, **settings: Any) -> Any:
  """The result of one run on a started back end, and the client's counts."""
  config = FusionConfig(service=ServiceConfig(urls=(service.url,), **{**QUICK, **settings}))

  async def main() -> Any:
    sandbox = FusionSandbox(config)
    sandbox._started = True
    try:
      box = await sandbox.create()
      return await box.exec(program, limits=SandboxLimits(wall_seconds=5.0)), sandbox.client.counts
    finally:
      await sandbox.close()

  return asyncio.run(main())


@pytest.mark.parametrize("fault", ["500", "drop", "garbage", "wrong"])
def test_fault_of_the_service_is_tried_again(service: Service, fault: str) -> None:
  service.faults = [fault, fault]

  async def body(client: ServiceClient) -> Any:
    return await create(client), client.counts

  made, counts = calling((service.url,), body)
  assert made
  assert (counts.infra_failures, counts.retries, counts.infra_errors) == (2, 2, 0)


def test_attempts_are_bounded_and_the_last_failure_is_told(service: Service) -> None:
  service.faults = ["500"] * 10

  async def body(client: ServiceClient) -> Any:
    with pytest.raises(InfraError, match="HTTP status 500: as asked for"):
      await create(client)
    return client.counts

  counts = calling((service.url,), body, attempts=3)
  assert (len(service.requests), counts.infra_errors) == (3, 1)


def test_request_that_is_at_fault_itself_is_not_tried_again(service: Service) -> None:
  service.faults = ["404"]

  async def body(client: ServiceClient) -> None:
    with pytest.raises(InfraError, match="404"):
      await create(client)

  calling((service.url,), body)
  assert len(service.requests) == 1


def test_server_that_cannot_be_reached_fails_like_one_that_breaks() -> None:
  async def refused(client: ServiceClient) -> Any:
    with pytest.raises(InfraError, match="no connection"):
      await create(client)
    return client.counts

  counts = calling(("http://127.0.0.1:9",), refused)
  assert (counts.infra_failures, counts.retries, counts.infra_errors) == (3, 2, 1)


def test_failure_of_a_program_is_an_answer_and_never_repeated(service: Service) -> None:
  for program in (PythonScript("1 / 0"), Command(("sh", "-c", "kill -9 $$"))):
    result, counts = run_fusion(service, program, hedge_seconds=30.0)
    assert result.status in (RunStatus.ERROR, RunStatus.KILLED)
    assert (counts.task_failures, counts.infra_failures, counts.retries) == (1, 0, 0)
  assert len(service.requests) == 2


def test_fault_of_the_service_is_no_failure_of_the_program(service: Service) -> None:
  service.faults = ["refuse", "refuse"]
  result, counts = run_fusion(service, PythonScript("print(1)"))
  assert (result.status, result.stdout) == (RunStatus.OK, "1\n")
  assert (counts.infra_failures, counts.task_failures) == (2, 0)
  service.faults = ["refuse"] * 3
  result, counts = run_fusion(service, PythonScript("print(1)"))
  assert (result.status, "no room" in result.detail) == (RunStatus.INFRA_ERROR, True)
  assert (counts.infra_errors, counts.task_failures) == (1, 0)


def test_program_that_ends_its_watcher_is_not_excused(service: Service) -> None:
  source = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(os.getpid(), 9)"
  result, counts = run_fusion(service, PythonScript(source))
  assert (result.status, counts.retries) == (RunStatus.KILLED, 0), result


def test_silent_call_is_hedged_and_the_loser_cancelled(service: Service) -> None:
  service.faults = [30.0]

  async def body(client: ServiceClient) -> Any:
    start = time.monotonic()
    await create(client, own_seconds=0.1)
    took = time.monotonic() - start
    deadline = time.monotonic() + 5.0
    while not service.cancelled and time.monotonic() < deadline:
      await asyncio.sleep(0.01)
    return took, client.counts

  took, counts = calling((service.url,), body, hedge_seconds=0.1)
  assert 0.2 <= took < 10.0
  assert (counts.hedges, counts.infra_failures, service.cancelled) == (1, 0, 1)


def test_call_that_answers_within_the_programs_time_is_not_hedged(service: Service) -> None:
  service.faults = [0.4]
  calling((service.url,), lambda c: create(c, own_seconds=5.0), hedge_seconds=0.0)
  assert len(service.requests) == 1


def test_call_has_a_deadline_and_a_hanging_server_counts_as_failing(service: Service) -> None:
  service.faults = [30.0]

  async def body(client: ServiceClient) -> Any:
    with pytest.raises(InfraError, match="in time"):
      await create(client)
    return client.counts

  counts = calling((service.url,), body, overhead_seconds=0.3)
  assert (counts.infra_failures, len(service.requests)) == (1, 1)


def test_cancelled_call_is_cancelled_at_the_server(service: Service) -> None:
  service.faults = [30.0]

  async def body(client: ServiceClient) -> None:
    task = asyncio.create_task(create(client))
    while not service.requests:
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    while not service.cancelled:
      await asyncio.sleep(0.01)
    assert (client.counts.infra_failures, client.counts.infra_errors) == (0, 0)
    assert await create(client)  # its place is free again

  calling((service.url,), body, concurrency=1)


def test_queue_is_bounded_in_length_and_in_time(service: Service) -> None:
  service.faults = [0.6]

  async def body(client: ServiceClient) -> Any:
    calls = [asyncio.create_task(create(client)) for _ in range(4)]
    return await asyncio.gather(*calls, return_exceptions=True), client.counts

  results, counts = calling(
    (service.url,), body, concurrency=1, queue_size=2, queue_seconds=0.2, overhead_seconds=5.0
  )
  texts = [str(r) for r in results if isinstance(r, InfraError)]
  assert [isinstance(r, str) for r in results] == [True, False, False, False]
  assert sum("queue_size" in text for text in texts) == 1
  assert sum("within 0.2 s" in text for text in texts) == 2
  assert (counts.refused, counts.infra_failures, len(service.requests)) == (3, 0, 1)


def test_no_more_calls_than_places_are_in_flight(service: Service) -> None:
  service.faults = [0.1] * 6
  most = 0

  async def body(client: ServiceClient) -> None:
    nonlocal most
    flying = 0
    request = client._request

    async def counted(*arguments: Any) -> Any:
      nonlocal flying, most
      flying += 1
      most = max(most, flying)
      try:
        return await request(*arguments)
      finally:
        flying -= 1

    client._request = counted  # type: ignore[method-assign]
    await asyncio.gather(*(create(client) for _ in range(6)))

  calling((service.url,), body, concurrency=2)
  assert most == 2


def test_breaker_opens_probes_once_and_closes() -> None:
  now = [0.0]
  breaker = CircuitBreaker(failures=3, seconds=10.0, clock=lambda: now[0])
  assert [breaker.fail() for _ in range(2)] == [False, False]
  breaker.succeed()  # only failures in a row count
  assert [breaker.fail() for _ in range(3)] == [False, False, True]
  assert (breaker.open, breaker.admit()) == (True, False)
  now[0] = 10.0
  assert [breaker.admit(), breaker.admit()] == [True, False]  # one probe at a time
  assert breaker.fail() and not breaker.admit()
  now[0] = 20.0
  assert breaker.admit()
  breaker.forget()  # a cancelled probe says nothing
  assert breaker.admit()
  breaker.succeed()
  assert (breaker.open, breaker.admit(), breaker.admit()) == (False, True, True)


def test_server_that_keeps_failing_gets_no_calls_until_it_recovers(service: Service) -> None:
  service.faults = ["500", "500"]

  async def body(client: ServiceClient) -> Any:
    for _ in range(2):
      with pytest.raises(InfraError, match="500"):
        await create(client)
    with pytest.raises(InfraError, match="cut off after 2 failures in a row"):
      await create(client)
    assert len(service.requests) == 2
    await asyncio.sleep(0.35)
    assert await create(client)
    return client.counts

  settings = {"attempts": 1, "breaker_failures": 2, "breaker_seconds": 0.3}
  counts = calling((service.url,), body, **settings)
  assert (counts.circuits_opened, len(service.requests)) == (1, 3)


def test_box_keeps_to_its_server_and_leaves_it_only_when_that_fails(service: Service) -> None:
  other = Service()

  async def body(client: ServiceClient) -> None:
    for _ in range(4):
      await create(client, affinity="box")
    counts = sorted([len(service.requests), len(other.requests)])
    assert counts == [0, 4]
    home = service if service.requests else other
    home.faults = ["500"]
    await create(client, affinity="box")
    assert sorted([len(service.requests), len(other.requests)]) == [1, 5]
    for i in range(40):
      await create(client, affinity=str(i))
    assert min(len(service.requests), len(other.requests)) > 8

  try:
    calling((service.url, other.url), body)
  finally:
    other.close()


def test_client_serves_one_event_loop_after_another(service: Service) -> None:
  client = ServiceClient(ServiceConfig(urls=(service.url,), **QUICK), "test")

  async def several() -> None:
    await asyncio.gather(*(create(client) for _ in range(3)))

  for _ in range(2):
    asyncio.run(several())
  asyncio.run(client.close())
  assert len(service.requests) == 6


def test_token_comes_from_the_environment_and_nowhere_else(
  service: Service,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.delenv("SERVICE_TOKEN", raising=False)

  async def body(client: ServiceClient) -> None:
    with pytest.raises(SandboxError, match="SERVICE_TOKEN is not set"):
      await create(client)

  calling((service.url,), body, token_variable="SERVICE_TOKEN")
  monkeypatch.setenv("SERVICE_TOKEN", "t0k")
  calling((service.url,), create, token_variable="SERVICE_TOKEN")
  assert service.headers[-1]["Authorization"] == "Bearer t0k"


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, "aiohttp", None)
  with pytest.raises(SandboxError, match=r"agentjax\[web\]"):
    FusionSandbox(FusionConfig(service=ServiceConfig(urls=("http://127.0.0.1:1",))))


@pytest.mark.parametrize(
  ("settings", "field"),
  [({"urls": ("host:80",)}, "urls"), ({"attempts": 0}, "attempts"), ({"queue_size": -1}, "queue")],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
  with pytest.raises(ConfigError, match=field):
    ServiceConfig(**settings).validate("service")
  with pytest.raises(SandboxError, match=r"service\.urls is empty"):
    ServiceClient(ServiceConfig(), "test")


def test_run_code_is_asked_for_with_the_services_own_fields(service: Service) -> None:
  result, _ = run_fusion(service, PythonScript("print('ä')"))
  assert result.stdout == "ä\n"
  (body,) = service.requests
  assert set(body) == {
    *("code", "language", "compile_timeout", "run_timeout", "memory_limit_MB", "stdin"),
    *("files", "fetch_files"),
  }
  assert body["language"] == "python"
  assert body["run_timeout"] > 5.0
  assert all(base64.b64decode(content) for content in body["files"].values())
  assert set(body["files"]) <= set(body["fetch_files"])


def test_service_that_does_not_run_programs_is_found_out_at_start(service: Service) -> None:
  sandbox = FusionSandbox(FusionConfig(service=ServiceConfig(urls=(service.url,), **QUICK)))

  async def main() -> None:
    service.faults = ["refuse"] * 3
    with pytest.raises(SandboxError, match="does not run Python programs.*no room"):
      await sandbox.start()
    assert await sandbox.start() == frozenset()  # nothing is claimed for walls nobody here can see
    await sandbox.close()

  asyncio.run(main())


@pytest.mark.parametrize("forged", [b"{}", b"[" + b"{}," * 10**5 + b"1]", b"\xff", b'{"parts": 3}'])
def test_a_forged_report_is_the_programs_doing_and_not_the_services(forged: bytes) -> None:
  answer = {
    "status": "Success",
    "run_result": {"status": "Finished", "stdout": "seen"},
    "files": {_RESULT: base64.b64encode(forged).decode()},
  }
  result, files = _read(answer, SandboxLimits())
  assert (result.status, result.stdout, files) == (RunStatus.KILLED, "seen", None)
