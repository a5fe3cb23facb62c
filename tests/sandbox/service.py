"""Local servers that stand for remote sandbox services, with faults on demand.

They run programs on this machine without any wall, so tests give them harmless ones only.
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
        web.post("/sandboxes", self._create),
        web.get("/sandboxes/{id}", self._status),
        web.post("/sandboxes/{id}/exec", self._exec),
        web.post("/sandboxes/{id}/files", self._upload),
        web.get("/sandboxes/{id}/files", self._download),
        web.delete("/sandboxes/{id}", self._delete),
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

  # -- the gateway of HttpProvider; the work directory /work is a folder for each sandbox

  def _box(self, request: Any) -> pathlib.Path:
    return pathlib.Path(self._folder, request.match_info["id"])

  async def _create(self, request: Any) -> Any:
    name = uuid.uuid4().hex
    pathlib.Path(self._folder, name).mkdir()
    return web.json_response({"id": name})

  async def _status(self, request: Any) -> Any:
    return web.json_response({"status": "running" if self._box(request).is_dir() else "stopped"})

  async def _exec(self, request: Any) -> Any:
    body, box = await request.json(), str(self._box(request))
    command = body["command"].replace("/work", box)
    folder = body["cwd"].replace("/work", box)
    run = await _run(["sh", "-c", command], folder, body["timeout_s"], "", body["env"])
    error_type = "timeout" if run["return_code"] is None else None
    return web.json_response({**run, "error_type": error_type})

  async def _upload(self, request: Any) -> Any:
    body = await request.json()
    path = _below("/", body["path"].replace("/work", str(self._box(request))))
    path.write_bytes(base64.b64decode(body["content"]))
    return web.json_response({})

  async def _download(self, request: Any) -> Any:
    path = pathlib.Path(request.query["path"].replace("/work", str(self._box(request))))
    content = base64.b64encode(path.read_bytes()).decode() if path.is_file() else None
    return web.json_response({"content": content})

  async def _delete(self, request: Any) -> Any:
    shutil.rmtree(self._box(request), ignore_errors=True)
    return web.json_response({})


def _below(folder: str, name: str) -> pathlib.Path:
  path = pathlib.Path(folder, name)
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


async def _run(
  argv: list[str], folder: str, seconds: float, stdin: str, env: dict[str, str] | None = None
) -> dict[str, Any]:
  pipe = asyncio.subprocess.PIPE
  process = await asyncio.create_subprocess_exec(
    *argv, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
    env={"PATH": os.environ["PATH"], **(env or {})},
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
