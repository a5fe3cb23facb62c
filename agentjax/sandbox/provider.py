"""Programs in sandboxes that a provider rents out: Kubernetes, E2B, Daytona, Modal and the like.

``Provider`` is what such a service has to offer; ``ProviderSandbox`` makes a back end of it. One
provider is here, ``HttpProvider``, for a plain JSON API that a thin gateway before any service can
speak. Another is a subclass of a few lines around the service's own client.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import dataclasses
import logging
import secrets
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from agentjax.config import Config, NonNegativeInt, PositiveFloat, Range, check
from agentjax.sandbox import archive, guest
from agentjax.sandbox.box import CalledBox
from agentjax.sandbox.client import InfraError, ServiceClient, ServiceConfig, ServiceCounts
from agentjax.sandbox.config import RemoteSandboxConfig
from agentjax.sandbox.files import checked_parts
from agentjax.sandbox.interface import (
  Capabilities,
  Command,
  Program,
  Protection,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
)
from agentjax.sandbox.measure import Output
from agentjax.sandbox.result import Ended, as_result, infra_error
from agentjax.sandbox.supervise import surely

_log = logging.getLogger(__name__)
_SNAPSHOT_BYTES = 256 * 2**20
_POLL_SECONDS = 0.2  # between looks at a sandbox that is starting


@dataclasses.dataclass(unsafe_hash=True)
class SandboxSpec(Config):
  """What is asked of a provider; the figures are ours.

  Attributes:
    image: container image; needs sh, tar, and Python for Python code.
    ttl_seconds: after this the provider ends the sandbox by itself.
    ready_seconds: longest time to wait until it runs.
    workdir: absolute path of the work directory.
    env: NAME=value.
    metadata: name=value, for the provider's records.
    cpu: cores.
    memory_mib, disk_gib, gpu: of the sandbox.
    entrypoint: arguments of its first process; empty is the image's.
    ports: to be reachable from outside.
  """

  image: str = "python:3.11-slim"
  ttl_seconds: PositiveFloat = 3600.0
  ready_seconds: PositiveFloat = 120.0
  workdir: str = "/work"
  env: tuple[str, ...] = ("PYTHONHASHSEED=0",)
  metadata: tuple[str, ...] = ()
  cpu: PositiveFloat = 1.0
  memory_mib: Annotated[int, Range(16)] = 1024
  disk_gib: PositiveFloat = 1.0
  gpu: NonNegativeInt = 0
  entrypoint: tuple[str, ...] = ()
  ports: tuple[int, ...] = ()

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.image != "", f"{path}.image", self.image, "the name of an image")
    check(self.workdir.startswith("/"), f"{path}.workdir", self.workdir, "an absolute path")
    for name in ("env", "metadata"):
      for pair in getattr(self, name):
        check("=" in pair, f"{path}.{name}", getattr(self, name), "NAME=value")


@dataclasses.dataclass(frozen=True)
class Executed:
  """How a command ended.

  Attributes:
    stdout, stderr: all of it, or as much as the provider keeps.
    return_code: None when it was ended.
    error_type: None, "timeout", "memory", or "infra" where the provider failed.
  """

  stdout: str
  stderr: str
  return_code: int | None
  error_type: str | None = None


class Provider(abc.ABC):
  """A service that rents out sandboxes.

  Every method raises InfraError where the service fails; nothing else is the service's failure.
  ``handle`` is what ``create`` returned.
  """

  @abc.abstractmethod
  async def create(self, spec: SandboxSpec) -> str:
    """Asks for a sandbox; it need not run yet."""

  @abc.abstractmethod
  async def status(self, handle: str) -> str:
    """ "starting", "running", "stopped" or "failed"."""

  @abc.abstractmethod
  async def exec(
    self,
    handle: str,
    command: str,
    *,
    cwd: str,
    env: Mapping[str, str],
    timeout_seconds: float,
    user: str | None = None,
  ) -> Executed:
    """Runs a shell command, and ends it with all that it started when its time is over."""

  @abc.abstractmethod
  async def upload_file(self, handle: str, path: str, content: bytes) -> None:
    """Writes the file at an absolute path, with the directories that lack."""

  @abc.abstractmethod
  async def download_file(self, handle: str, path: str, max_bytes: int) -> bytes:
    """Reads the file at an absolute path.

    Raises:
      SandboxError: no such regular file, or larger.
    """

  @abc.abstractmethod
  async def close(self, handle: str) -> None:
    """Ends the sandbox; harmless where it has ended."""

  @abc.abstractmethod
  async def aclose(self) -> None:
    """Lets go of connections."""

  def count(self, result: SandboxResult) -> SandboxResult:
    """Told of every result, to keep failures of programs apart from the service's."""
    return result


@dataclasses.dataclass(unsafe_hash=True)
class ProviderConfig(RemoteSandboxConfig):
  """Settings of a provider's back end.

  What shuts programs in is the provider's, so no protection is claimed.

  Attributes:
    service: the gateway's addresses, and how it is called.
    spec: what is asked for each box.
    limits: bounds of a run: those that a shell sets, the wall clock, and what is kept of outputs.
      Memory and disk are the spec's.
    python: the image's interpreter, 3.8 or later.
    user: who programs run as; None is the provider's choice.
  """

  spec: SandboxSpec = dataclasses.field(default_factory=SandboxSpec)
  python: str = "python3"
  user: str | None = None

  def build(self) -> Sandbox:
    return ProviderSandbox(HttpProvider(self.service), self)


class ProviderSandbox:
  """A back end over any provider, which it owns and closes. See the Sandbox protocol."""

  capabilities = Capabilities(files=True, snapshot=True, commands=True)

  def __init__(self, provider: Provider, config: ProviderConfig):
    config.validate("provider")
    self.provider, self.config = provider, config
    self._boxes: set[ProviderBox] = set()

  async def start(self) -> frozenset[Protection]:
    return frozenset()

  async def create(self, snapshot: bytes | None = None) -> ProviderBox:
    files = None if snapshot is None else archive.normalised(snapshot)
    spec = self.config.spec
    box = ProviderBox(self, await self.provider.create(spec))
    self._boxes.add(box)
    try:
      await self._until_running(box.handle)
      if files is not None:
        await box._unpack(files)
    except BaseException:
      await box.close()
      raise
    return box

  async def close(self) -> None:
    for box in list(self._boxes):
      await box.close()
    await self.provider.aclose()

  async def _until_running(self, handle: str) -> None:
    seconds = self.config.spec.ready_seconds
    try:
      async with asyncio.timeout(seconds):
        while (status := await self.provider.status(handle)) != "running":
          if status != "starting":
            raise InfraError(f"provider: sandbox {handle} is {status} and will not run")
          await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
      raise InfraError(f"provider: sandbox {handle} does not run after {seconds:g} s") from None


class ProviderBox(CalledBox):
  """One rented sandbox; made by ``ProviderSandbox.create``. See the Box protocol."""

  def __init__(self, sandbox: ProviderSandbox, handle: str):
    super().__init__("provider")
    self._sandbox, self.handle = sandbox, handle

  async def exec(
    self,
    program: Program,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits | None = None,
  ) -> SandboxResult:
    limits = limits or self._sandbox.config.limits
    if isinstance(program, Command):
      argv = guest.as_request(program)["argv"]
    else:
      argv = [self._sandbox.config.python, *guest.BOOT_ARGUMENTS]
      stdin = guest.framed(guest.plain(program), stdin)
    async with self._turn():
      return await self._await_call(self._run(argv, stdin, files or {}, limits))

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    inside = self._inside(path)
    async with self._turn():
      return await self._sandbox.provider.download_file(self.handle, inside, max_bytes)

  async def snapshot(self) -> bytes:
    async with self._turn():
      tar = _scratch("tar")
      workdir = shlex.quote(self._sandbox.config.spec.workdir)
      await self._command(f"tar -c -f {tar} -C {workdir} .")
      held = await self._sandbox.provider.download_file(self.handle, tar, _SNAPSHOT_BYTES)
      await self._command(f"rm -f {tar}")
      return archive.normalised(held)

  async def close(self) -> None:
    if self._closed:
      return
    self._closed = True
    self._cancel_call()
    await surely(self._end())
    async with self._busy:
      self._sandbox._boxes.discard(self)

  async def _end(self) -> None:
    try:
      await self._sandbox.provider.close(self.handle)
    except InfraError as error:
      _log.warning("provider: sandbox %s lives on until its time is over: %s", self.handle, error)

  def _inside(self, path: str) -> str:
    return "/".join([self._sandbox.config.spec.workdir.rstrip("/"), *checked_parts(path)])

  async def _put(self, path: str, content: bytes) -> None:
    await self._sandbox.provider.upload_file(self.handle, self._inside(path), content)

  async def _unpack(self, files: bytes) -> None:
    tar = _scratch("tar")
    workdir = shlex.quote(self._sandbox.config.spec.workdir)
    await self._sandbox.provider.upload_file(self.handle, tar, files)
    await self._command(f"tar -x -f {tar} -C {workdir} && rm -f {tar}")

  async def _command(self, command: str, seconds: float = 60.0) -> None:
    """A command of ours, which must succeed."""
    done = await self._sandbox.provider.exec(
      self.handle, command, cwd="/", env={}, timeout_seconds=seconds, user=self._sandbox.config.user
    )
    if done.error_type is not None or done.return_code != 0:
      raise SandboxError(
        f"provider: {command!r} failed: {done.error_type or done.return_code} "
        f"{done.stderr.strip()[-500:]}".rstrip()
      )

  async def _run(
    self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: SandboxLimits
  ) -> SandboxResult:
    config, provider = self._sandbox.config, self._sandbox.provider
    loop = asyncio.get_running_loop()
    try:
      for path, content in files.items():
        await self._put(path, content)
      source = "/dev/null"
      if stdin:
        source = _scratch("stdin")
        await provider.upload_file(self.handle, source, stdin)
      start = loop.time()
      # The shell opens the file before it is removed, so nothing is left behind.
      remove = f"rm -f {source}; " if stdin else ""
      command = f"exec < {source}; {remove}exec {shlex.join(guest.limited(argv, limits))}"
      executed = await provider.exec(
        self.handle,
        command,
        cwd=config.spec.workdir,
        env=_environment(config.spec),
        timeout_seconds=limits.wall_seconds,
        user=config.user,
      )
    except InfraError as error:
      return infra_error(str(error))
    return provider.count(_result(executed, loop.time() - start, limits))


class HttpProvider(Provider):
  """A gateway with a plain JSON API; paths below the service's address, bodies and answers in JSON.

      POST   /sandboxes               the spec's fields            -> {"id"}
      GET    /sandboxes/ID                                         -> {"status"}
      POST   /sandboxes/ID/exec       {"command", "cwd", "env", "timeout_s", "user"}
                                      -> {"stdout", "stderr", "return_code", "error_type"}
      POST   /sandboxes/ID/files      {"path", "content": base64}  -> {}
      GET    /sandboxes/ID/files?path=PATH                         -> {"content": base64 or null}
      DELETE /sandboxes/ID                                         -> {}

  A box keeps to the server that made it. Only calls that do the same when made twice are repeated;
  a command and a creation are, only where no connection came about.
  """

  def __init__(self, config: ServiceConfig):
    self._client = ServiceClient(config, "provider")

  @property
  def counts(self) -> ServiceCounts:
    return self._client.counts

  async def create(self, spec: SandboxSpec) -> str:
    affinity = secrets.token_hex(8)
    made = await self._call(
      "POST",
      affinity,
      "/sandboxes",
      lambda answer: str(answer["id"]),
      body=_spec_body(spec),
      own_seconds=spec.ready_seconds,
      repeatable=False,
    )
    return f"{affinity}:{made}"

  async def status(self, handle: str) -> str:
    return await self._of(handle, "GET", "", lambda answer: str(answer["status"]), repeatable=True)

  async def exec(
    self,
    handle: str,
    command: str,
    *,
    cwd: str,
    env: Mapping[str, str],
    timeout_seconds: float,
    user: str | None = None,
  ) -> Executed:
    body = {
      "command": command,
      "cwd": cwd,
      "env": dict(env),
      "timeout_s": timeout_seconds,
      "user": user,
    }
    return await self._of(
      handle, "POST", "/exec", _read_executed, body=body, own_seconds=timeout_seconds
    )

  async def upload_file(self, handle: str, path: str, content: bytes) -> None:
    body = {"path": path, "content": base64.b64encode(content).decode()}
    await self._of(handle, "POST", "/files", lambda answer: None, body=body, repeatable=True)

  async def download_file(self, handle: str, path: str, max_bytes: int) -> bytes:
    encoded = await self._of(
      handle, "GET", "/files", lambda a: a["content"], query={"path": path}, repeatable=True
    )
    if encoded is None:
      raise SandboxError(f"{path!r} in the sandbox is not a regular file")
    content = base64.b64decode(encoded)
    if len(content) > max_bytes:
      raise SandboxError(
        f"{path!r} in the sandbox has {len(content)} bytes, at most {max_bytes} are read; raise "
        "max_bytes"
      )
    return content

  async def close(self, handle: str) -> None:
    await self._of(handle, "DELETE", "", lambda answer: None, repeatable=True)

  async def aclose(self) -> None:
    await self._client.close()

  def count(self, result: SandboxResult) -> SandboxResult:
    return self._client.count(result)

  async def _of(
    self, handle: str, method: str, path: str, read: Any, *, repeatable: bool = False, **rest: Any
  ) -> Any:
    affinity, _, made = handle.partition(":")
    return await self._call(
      method, affinity, f"/sandboxes/{made}{path}", read, repeatable=repeatable, **rest
    )

  async def _call(self, method: str, affinity: str, path: str, read: Any, **rest: Any) -> Any:
    return await self._client.call(method, path, read, affinity=affinity, pinned=True, **rest)


def _read_executed(answer: Any) -> Executed:
  code, error_type = answer["return_code"], answer.get("error_type")
  executed = Executed(
    str(answer["stdout"]),
    str(answer["stderr"]),
    None if code is None else int(code),
    None if error_type is None else str(error_type),
  )
  if executed.error_type not in (None, "timeout", "memory"):
    raise InfraError(f"provider: {executed.error_type}: {executed.stderr.strip()[-500:]}")
  return executed


def _result(executed: Executed, seconds: float, limits: SandboxLimits) -> SandboxResult:
  outputs = [Output(limits.output_bytes) for _ in range(2)]
  for output, said in zip(outputs, (executed.stdout, executed.stderr), strict=True):
    output.add(said.encode(errors="backslashreplace"))
  reason, detail, code = "exit", "", executed.return_code
  if executed.error_type == "infra":
    return infra_error(f"provider: {executed.stderr.strip()[-500:]}")
  if executed.error_type == "timeout":
    reason, detail, code = "wall", f"did not end within {limits.wall_seconds:.1f} s", -9
  elif executed.error_type == "memory":
    reason, detail, code = "memory", "needs more memory than the sandbox has", -9
  elif max(output.total for output in outputs) > limits.output_kill_bytes:
    reason, detail = "output", f"wrote more than {limits.output_kill_bytes} bytes"
  elif code is not None and 128 < code <= 192:
    code = 128 - code  # as shells report a signal
  return as_result(Ended(reason, detail, code, seconds, outputs[0], outputs[1]), limits)


def _spec_body(spec: SandboxSpec) -> dict[str, Any]:
  return {
    "image": spec.image,
    "ttl_s": spec.ttl_seconds,
    "ready_timeout_s": spec.ready_seconds,
    "workdir": spec.workdir,
    "env": _environment(spec),
    "metadata": dict(pair.split("=", 1) for pair in spec.metadata),
    "resources": {
      "cpu": spec.cpu,
      "memory_mib": spec.memory_mib,
      "disk_gib": spec.disk_gib,
      "gpu": spec.gpu,
    },
    "entrypoint": list(spec.entrypoint),
    "ports": list(spec.ports),
  }


def _environment(spec: SandboxSpec) -> dict[str, str]:
  return dict(pair.split("=", 1) for pair in spec.env)


def _scratch(kind: str) -> str:
  return f"/tmp/.agentjax-{secrets.token_hex(8)}.{kind}"
