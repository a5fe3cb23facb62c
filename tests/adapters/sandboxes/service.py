"""A local server that stands for SandboxFusion, with faults on demand.

It runs programs on this machine without any wall, so tests give it harmless ones only.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from typing import Any

import pytest

web = pytest.importorskip("aiohttp.web", reason="remote back ends need agentjax[web]")


class Service:
  """A server on 127.0.0.1 in a thread of its own.

  Attributes:
    faults: taken from the front, one a request: None, "500", "404", "drop", "garbage", "wrong",
      "refuse" (what the service itself calls its failure), or seconds to wait before the answer.
    requests, headers: of the requests so far.
    cancelled: requests whose caller went away before the answer.
  """

  def __init__(self) -> None:
    self.faults: list[str | float | None] = []
    self.requests: list[Any] = []
    self.headers: list[Any] = []
    self.cancelled = 0
    self.url = ""
    self._folder = tempfile.mkdtemp(prefix="agentjax-service-")
    self._ready = threading.Event()
    self._loop = asyncio.new_event_loop()
    self._stop = asyncio.Event()
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()
    assert self._ready.wait(10.0)

  def close(self) -> None:
    self._loop.call_soon_threadsafe(self._stop.set)
    self._thread.join(10.0)
    shutil.rmtree(self._folder, ignore_errors=True)

  def _serve(self) -> None:
    asyncio.set_event_loop(self._loop)
    self._loop.run_until_complete(self._main())
    self._loop.close()

  async def _main(self) -> None:
    app = web.Application(middlewares=[self._with_faults], client_max_size=2**28)
    app.add_routes(
      [
        web.post("/run_code", self._run_code),
        web.post("/echo", self._echo),
      ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    self._ready.set()
    await self._stop.wait()
    await runner.cleanup()

  @property
  def _with_faults(self) -> Any:
    @web.middleware
    async def middleware(request: Any, handler: Any) -> Any:
      self.requests.append(await request.json() if request.can_read_body else None)
      self.headers.append(request.headers)
      fault = self.faults.pop(0) if self.faults else None
      if fault in ("500", "404"):
        return web.Response(status=int(str(fault)), text="as asked for")
      if fault == "drop":
        request.transport.abort()
        return web.Response()
      if fault == "garbage":
        return web.Response(text="<html>{")
      if fault == "wrong":
        return web.json_response({"unexpected": 1})
      if fault == "refuse":
        return web.json_response({"status": "SandboxError", "message": "no room", "files": {}})
      try:
        if fault is not None:
          await asyncio.sleep(float(fault))
        return await handler(request)
      except asyncio.CancelledError:
        self.cancelled += 1
        raise

    return middleware

  # -- SandboxFusion

  async def _run_code(self, request: Any) -> Any:
    body = await request.json()
    with tempfile.TemporaryDirectory(dir=self._folder) as folder:
      for name, content in body["files"].items():
        _below(folder, name).write_bytes(base64.b64decode(content))
      script = _below(folder, f"tmp{uuid.uuid4().hex}.py")
      script.write_text(body["code"])
      run = await _run([sys.executable, str(script)], folder, body["run_timeout"], body["stdin"])
      timed_out = run["return_code"] is None
      files = {
        name: base64.b64encode(_below(folder, name).read_bytes()).decode()
        for name in body["fetch_files"]
        if _below(folder, name).is_file()
      }
    return web.json_response(
      {
        "status": "Success" if run["return_code"] == 0 else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
          "status": "TimeLimitExceeded" if timed_out else "Finished",
          "execution_time": 0.1,
          **run,
        },
        "executor_pod_name": None,
        "files": files,
      }
    )

  async def _echo(self, request: Any) -> Any:
    return web.json_response({"id": uuid.uuid4().hex})


def _below(folder: str, name: str) -> pathlib.Path:
  path = pathlib.Path(folder, name)
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


async def _run(argv: list[str], folder: str, seconds: float, stdin: str) -> dict[str, Any]:
  pipe = asyncio.subprocess.PIPE
  process = await asyncio.create_subprocess_exec(
    *argv, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
    env={"PATH": os.environ["PATH"]},
  )  # fmt: skip
  code: int | None = None
  try:
    async with asyncio.timeout(seconds):
      out, err = await process.communicate(stdin.encode())
      code = process.returncode
  except TimeoutError:
    out, err = b"", b""
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
  if code is not None and code < 0:
    code = 128 - code
  return {
    "return_code": code,
    "stdout": out.decode(errors="backslashreplace"),
    "stderr": err.decode(errors="backslashreplace"),
  }
