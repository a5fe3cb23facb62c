"""Programs on a SandboxFusion service, by its ``POST /run_code``.

The service keeps nothing from call to call, so a box's files live here: each run sends them as one
tar and fetches them back. A small supervisor of ours travels with the program and tells exactly how
it ended, which the service itself does not.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from agentjax.adapters.sandboxes import archive, guest
from agentjax.adapters.sandboxes.base import StartedSandbox
from agentjax.adapters.sandboxes.called import CalledBox, InfraError
from agentjax.adapters.sandboxes.reports import bounded_json
from agentjax.adapters.sandboxes.service_client import ServiceClient, ServiceConfig
from agentjax.config import check
from agentjax.sandbox.config import SandboxConfig
from agentjax.sandbox.interface import (
  Program,
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
)
from agentjax.sandbox.measure import Output
from agentjax.sandbox.result import Ended, Kept, as_result, infra_error

_log = logging.getLogger(__name__)
_RESULT, _FILES = ".agentjax-result.json", ".agentjax-files.tar"
_SUPERVISOR_SECONDS = 5.0  # for it to start, end the program and pack the files


@dataclasses.dataclass(unsafe_hash=True)
class FusionConfig(SandboxConfig):
  """Settings of the SandboxFusion back end.

  How well programs are shut in is decided by the service's own settings (its isolation is off by
  default), so no protection is claimed; run it where a program that breaks out does no harm.

  Attributes:
    limits: bounds of a run. Processes are not bounded; disk_bytes bounds the box's files after a
      run, and no file count does.
    service: the servers and how they are called.
  """

  service: ServiceConfig = dataclasses.field(default_factory=ServiceConfig)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    urls = self.service.urls
    check(bool(urls), f"{path}.service.urls", urls, "at least one, http://HOST:PORT")

  @property
  def overhead_seconds(self) -> float:
    return self.service.overhead_seconds

  def build(self) -> Sandbox:
    return FusionSandbox(self)


class FusionSandbox(StartedSandbox):
  """Runs programs on SandboxFusion servers. See the Sandbox protocol.

  A run whose time is over, or that wrote too much, still returns its output and files.
  """

  def __init__(self, config: FusionConfig | None = None):
    super().__init__()
    self.config = config or FusionConfig()
    self.config.validate("fusion")
    self.client = ServiceClient(self.config.service, "fusion")

  async def create(self, snapshot: bytes | None = None) -> FusionBox:
    await self.start()
    box = FusionBox(self, None if snapshot is None else archive.normalised(snapshot))
    self.boxes.add(box)
    return box

  async def close(self) -> None:
    await super().close()
    await self.client.close()

  async def _start(self) -> None:
    result = await FusionBox(self, None).exec(PythonScript("print('ready')"))
    if (result.status, result.stdout) != (RunStatus.OK, "ready\n"):
      raise SandboxError(
        f"fusion: the service does not run Python programs as it should: {result.status} "
        f"{result.detail} {result.stderr.strip()[-500:]}".rstrip()
      )
    _log.warning("fusion: what shuts programs in is the service's own; no protection is claimed")


class FusionBox(CalledBox):
  """Files kept here and runs made there; made by ``FusionSandbox.create``. See the Box protocol."""

  def __init__(self, sandbox: FusionSandbox, files: bytes | None):
    super().__init__("fusion")
    self._sandbox = sandbox
    self._files = files or archive.of_files({})
    self._id = secrets.token_hex(8)

  async def exec(
    self,
    program: Program,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits | None = None,
  ) -> SandboxResult:
    limits = limits or self._sandbox.config.limits
    body = _request(program, stdin, limits)
    async with self.turn():
      if files:
        self._files = archive.normalised(self._files, archive.of_files(files))
      body["files"] = {_FILES: base64.b64encode(self._files).decode()}
      return await self._await_call(self._run(body, limits))

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    async with self.turn():
      return archive.content_of(self._files, path, max_bytes)

  async def snapshot(self) -> bytes:
    async with self.turn():
      return archive.normalised(self._files)

  async def _wipe(self) -> None:
    self._sandbox.boxes.discard(self)
    self._files = b""

  async def _put(self, path: str, content: bytes) -> None:
    self._files = archive.normalised(self._files, archive.of_files({path: content}))

  async def _run(self, body: dict[str, Any], limits: SandboxLimits) -> SandboxResult:
    client = self._sandbox.client
    try:
      # It starts from the files that are kept here, so a second request does no harm.
      result, files = await client.call(
        "/run_code",
        lambda answer: _read(answer, limits),
        affinity=self._id,
        body=body,
        own_seconds=limits.wall_seconds + _SUPERVISOR_SECONDS,
      )
    except InfraError as error:
      return infra_error(str(error))
    if files is not None:
      self._files = files
    return client.count(result)


def _request(program: Program, stdin: bytes, limits: SandboxLimits) -> dict[str, Any]:
  settings = {
    "limits": limits.to_dict(),
    "stdin": base64.b64encode(stdin).decode(),
    "result": _RESULT,
    "archive": _FILES,
  }
  return {
    "code": guest.captured(program, settings),
    "language": "python",
    "compile_timeout": limits.wall_seconds,
    "run_timeout": limits.wall_seconds + _SUPERVISOR_SECONDS,
    "memory_limit_MB": -1,  # it would bound the supervisor as well, which bounds the program itself
    "stdin": "",
    "fetch_files": [_RESULT, _FILES],
  }


def _read(answer: Any, limits: SandboxLimits) -> tuple[SandboxResult, bytes | None]:
  """The result, and the box's files after the run where they came back."""
  if answer["status"] == "SandboxError":
    raise InfraError(f"fusion: SandboxError: {str(answer.get('message', ''))[-500:]}")
  run, files = answer["run_result"], answer["files"]
  if _RESULT not in files:
    return _without_supervisor(run, limits), None
  try:
    report = bounded_json(
      base64.b64decode(files[_RESULT]).decode(),
      max_characters=4 * limits.output_bytes + 2**16,
      max_values=64,
      max_depth=2,
    )
    parts = [base64.b64decode(part) for part in report["parts"]]
    ended = Ended(
      str(report["reason"]),
      str(report["detail"]),
      int(report["exit_code"]),
      float(report["seconds"]),
      Kept(parts[0], parts[1], int(report["totals"][0])),
      Kept(parts[2], parts[3], int(report["totals"][1])),
      cpu_seconds=float(report["cpu_seconds"]),
    )
  except (LookupError, TypeError, ValueError):  # the program wrote it in the supervisor's place
    return _without_supervisor(run, limits), None
  held = base64.b64decode(files[_FILES]) if _FILES in files else None
  return as_result(ended, limits), None if held is None else archive.normalised(held)


def _without_supervisor(run: Mapping[str, Any], limits: SandboxLimits) -> SandboxResult:
  """The program ended or blocked its supervisor, which is the program's fault."""
  outputs = [Output(limits.output_bytes) for _ in range(2)]
  for output, name in zip(outputs, ("stdout", "stderr"), strict=True):
    output.add(str(run.get(name) or "").encode())
  seconds = float(run.get("execution_time") or 0.0)
  if run["status"] == "TimeLimitExceeded":
    reason, detail = "wall", f"did not end within {limits.wall_seconds:.1f} s"
  else:
    reason, detail = "cancelled", "it ended the process that watches it"
  return as_result(Ended(reason, detail, -9, seconds, outputs[0], outputs[1]), limits)
