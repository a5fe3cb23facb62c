"""Rendering a web page with headless Chromium as a tool: its text, and a screenshot.

Chromium is driven by its debugging protocol over a pipe: JSON messages, each ended by a NUL byte.
Every request of the page comes to us first; those of its own site are answered from the workspace,
all others fail. One browser renders one page and is killed.

References:
  Chrome DevTools Protocol, domains Target, Page, Fetch, Runtime, Emulation.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import mimetypes
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from agentjax.config import AtLeastTwo, ConfigError, PositiveFloat, PositiveInt, Range
from agentjax.faults import Fault, Owner
from agentjax.places import Places, QueueTimeout
from agentjax.sandbox.interface import SandboxError
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.output import clip, is_unicode
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.workspace import Workspaces

_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_SITE = "http://workspace.test"
_ICON = f"{_SITE}/favicon.ico"
_START_OF_TIME = 1_600_000_000  # what Date says when a page begins; ours
_MAX_MESSAGE = 2**26
_MAX_FILE = 2**24
_SHOWN = 5  # script errors and blocked addresses told to the policy
_FIRST_UID, _UIDS = 1 << 30, 1 << 29  # nobody's
_FLAGS = (
  "--headless",
  "--remote-debugging-pipe",
  "--disable-gpu",
  "--disable-extensions",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--disable-breakpad",
  "--no-first-run",
  "--mute-audio",
  "--hide-scrollbars",
  "--run-all-compositor-stages-before-draw",
  "--force-color-profile=srgb",
  "--font-render-hinting=none",
  "--host-resolver-rules=MAP * ~NOTFOUND",
)
# A linear congruential generator in place of Math.random (constants of Numerical Recipes).
_SEEDED = """(() => {
  let state = %d >>> 0;
  Math.random = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 4294967296;
})()"""
_READ = """[document.title, document.body ? document.body.innerText.slice(0, 1000000) : ""]"""


@dataclasses.dataclass(unsafe_hash=True)
class WebPageConfig(ToolConfig):
  """Settings of the web page tool; the figures are ours.

  Attributes:
    browser: path of Chromium; None takes the first of chromium-headless-shell, chromium,
      chromium-browser, google-chrome on the PATH.
    width, height: size of the window in CSS pixels, and of the screenshot.
    full_page: the screenshot shows all of the page, up to 16384 pixels, not just the window.
    virtual_seconds: time that passes for the page's timers and animations before it is looked at;
      it takes less of the wall clock where the page waits.
    seconds: wall clock of one page, start of the browser included.
    memory_bytes: data each process of the browser may hold.
    concurrency: browsers at once; further calls wait their turn.
    queue_seconds: longest wait for a turn; then the call ends as INFRA_ERROR.
    max_characters: characters of text the policy sees, half from the head and half from the tail.
  """

  browser: str | None = None
  width: Annotated[int, Range(1, 16384)] = 1280
  height: Annotated[int, Range(1, 16384)] = 720
  full_page: bool = False
  virtual_seconds: PositiveFloat = 2.0
  seconds: PositiveFloat = 15.0
  memory_bytes: Annotated[int, Range(2**28)] = 2**30
  concurrency: PositiveInt = 2
  queue_seconds: PositiveFloat = 600.0
  max_characters: AtLeastTwo = 4000

  def call_seconds(self, bench: Workbench) -> tuple[float, float]:
    return self.seconds, 0.0

  def build(self, bench: Workbench) -> Tool:
    return WebPageTool(bench.workspaces, self)


class WebPageTool:
  """Renders HTML, given as text or as a file of the workspace, and shows the text one would see.

  The result's ``artifacts`` hold ``screenshot.png``. Scripts run, in virtual time that begins at a
  fixed date, with ``Math.random`` seeded by the call's context; pictures, styles and scripts named
  by relative addresses come from the workspace, nothing comes from a network: the browser has a
  network namespace without one. It also has a user id, process namespace and data limit of its
  own, and Chromium's own sandbox around each page. How a page looks depends on the machine's fonts.

  Args:
    workspaces: where files are read; None renders text only.
    config: see WebPageConfig.

  Raises:
    ConfigError: no Chromium here, or this machine does not let it be shut off from the network.
  """

  name = "web_page"

  def __init__(self, workspaces: Workspaces | None = None, config: WebPageConfig | None = None):
    self.workspaces = workspaces
    self._config = config or WebPageConfig()
    self._config.validate("web_page")
    self._browser = _find_browser(self._config.browser)
    _probe_isolation()
    self._places = Places(
      self._config.concurrency, self._config.queue_seconds, "web_page.concurrency"
    )
    properties = {"html": {"type": "string", "description": "source of the page"}}
    of_file = ""
    if workspaces is not None:
      properties["path"] = {"type": "string", "description": "HTML file of the work directory"}
      of_file = " or the HTML file at path"
    self.description = (
      f"Renders html{of_file} in a browser of {self._config.width}x{self._config.height} pixels "
      "without network, and returns the visible text and script errors."
    )
    self.parameters: Mapping[str, Any] = {
      "type": "object",
      "properties": properties,
      "additionalProperties": False,
    }

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    if len(arguments) != 1:
      return ToolResult(
        ToolStatus.ERROR,
        "error: give either html or path" if self.workspaces else "error: html is missing",
      )
    if not is_unicode("".join(arguments.values())):
      return ToolResult(ToolStatus.ERROR, "error: the argument holds half of a surrogate pair")
    try:
      async with self._places.one():
        return await self._render(arguments, context)
    except QueueTimeout as error:
      fault = Fault(Owner.INFRASTRUCTURE, "queue", str(error))
      return ToolResult(ToolStatus.INFRA_ERROR, str(error), fault=fault)

  async def end_episode(self, episode: str) -> None:
    if self.workspaces is not None:
      await self.workspaces.end(episode)

  async def close(self) -> None:
    if self.workspaces is not None:
      await self.workspaces.close()

  async def _render(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    if "html" in arguments:
      start, page = f"{_SITE}/", arguments["html"].encode()
    else:
      path = arguments["path"]
      content = await self._read(path, context.episode)
      if content is None:
        return ToolResult(ToolStatus.ERROR, f"error: there is no file {path!r}, or it is too large")
      start, page = f"{_SITE}/{urllib.parse.quote(os.path.normpath(path))}", content

    async def answer(url: str) -> tuple[str, bytes] | None:
      if url.partition("?")[0] == start:
        return "text/html; charset=utf-8", page
      path = urllib.parse.unquote(urllib.parse.urlsplit(url).path).lstrip("/")
      content = await self._read(path, context.episode)
      if content is None:
        return None
      return mimetypes.guess_type(path)[0] or "application/octet-stream", content

    seconds = min(self._config.seconds, 0.9 * context.timeout)
    shown = False
    try:
      async with asyncio.timeout(seconds), _started(self._browser, self._config) as browser:
        view = _View(browser, answer)
        await view.open(self._config, context.seed)
        shown = True
        return await self._look(view, start)
    except TimeoutError:
      return ToolResult(ToolStatus.TIMEOUT, f"error: the page was not ready within {seconds:.1f} s")
    except _BrowserGone as error:
      if shown:
        return ToolResult(ToolStatus.KILLED, f"error: the page crashed ({error})")
      return ToolResult(ToolStatus.INFRA_ERROR, f"Chromium did not start: {error}")

  async def _look(self, view: _View, start: str) -> ToolResult:
    await view.show(start, self._config.virtual_seconds)
    title, text = await view.evaluate(_READ)
    png = await view.screenshot(full_page=self._config.full_page)
    lines = [f"title: {title}"] if title else []
    lines += [text.strip() or "(no visible text)"]
    lines += [f"script error: {error}" for error in view.errors[:_SHOWN]]
    lines += [f"not loaded: {url}" for url in view.blocked[:_SHOWN]]
    return ToolResult(
      ToolStatus.OK,
      clip("\n".join(lines), self._config.max_characters),
      artifacts={"screenshot.png": png},
    )

  async def _read(self, path: str, episode: str) -> bytes | None:
    if self.workspaces is None or not path:
      return None
    async with self.workspaces.use(episode) as box:
      try:
        return await box.download(path, max_bytes=_MAX_FILE)
      except SandboxError:
        return None


class _BrowserGone(Exception):
  """The browser or its page ended; the message says what is known."""


class _Browser:
  """The protocol's client: commands with their replies, and events by session."""

  def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
    self._reader, self._writer = reader, writer
    self._ids = itertools.count(1)
    self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
    self.on_event: Callable[[str, dict[str, Any]], None] = lambda method, values: None
    self._listening = asyncio.ensure_future(self._listen())
    self._gone: _BrowserGone | None = None

  async def ask(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
    """Result of a command.

    Raises:
      _BrowserGone: it ended first, or refused the command.
    """
    reply = await self.send(method, session, **values)
    answer = await reply
    if "error" in answer:
      raise _BrowserGone(f"{method}: {answer['error'].get('message')}")
    return answer["result"]

  async def send(
    self, method: str, session: str | None = None, **values: Any
  ) -> asyncio.Future[dict[str, Any]]:
    if self._gone is not None:
      raise self._gone
    number = next(self._ids)
    reply = asyncio.get_running_loop().create_future()
    self._replies[number] = reply
    message: dict[str, Any] = {"id": number, "method": method, "params": values}
    if session is not None:
      message["sessionId"] = session
    self._writer.write(json.dumps(message).encode() + b"\0")
    with contextlib.suppress(ConnectionError):  # the reader's side says that it is gone
      await self._writer.drain()
    return reply

  def end(self, reason: str) -> None:
    """Fails every command that waits, and all later ones."""
    self._gone = self._gone or _BrowserGone(reason)
    for reply in self._replies.values():
      if not reply.done():
        reply.set_exception(self._gone)
        reply.exception()  # whoever waits is told; a reply that nobody awaits is no loss

  async def close(self) -> None:
    self.end("closed")
    self._listening.cancel()
    await asyncio.wait({self._listening})

  async def _listen(self) -> None:
    try:
      while True:
        message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
        if (reply := self._replies.pop(message.get("id"), None)) is not None:
          if not reply.done():
            reply.set_result(message)
        elif "method" in message:
          self.on_event(message["method"], message.get("params", {}))
    except (asyncio.IncompleteReadError, ConnectionError):
      self.end("the browser ended")
    except asyncio.LimitOverrunError:
      self.end(f"it sent more than {_MAX_MESSAGE} bytes at once")


class _View:
  """One page: what it asks for is answered, what goes wrong in it is kept."""

  def __init__(
    self, browser: _Browser, answer: Callable[[str], Awaitable[tuple[str, bytes] | None]]
  ):
    self.errors: list[str] = []
    self.blocked: list[str] = []
    self._browser = browser
    self._answer = answer
    self._session = ""
    self._time_is_up = asyncio.Event()
    self._answering: set[asyncio.Task[None]] = set()
    browser.on_event = self._on_event

  async def open(self, config: WebPageConfig, seed: int) -> None:
    browser = self._browser
    target = (await browser.ask("Target.createTarget", url="about:blank"))["targetId"]
    attached = await browser.ask("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    await self._ask("Page.enable")
    await self._ask("Runtime.enable")
    await self._ask("Fetch.enable", patterns=[{"urlPattern": "*"}])
    await self._ask(
      "Emulation.setDeviceMetricsOverride",
      width=config.width, height=config.height, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    await self._ask("Page.addScriptToEvaluateOnNewDocument", source=_SEEDED % (seed % 2**32))

  async def show(self, url: str, virtual_seconds: float) -> None:
    """Goes to ``url`` and lets the time of the page pass."""
    policy = "Emulation.setVirtualTimePolicy"
    await self._ask(policy, policy="pause", initialVirtualTime=_START_OF_TIME)
    await self._ask("Page.navigate", url=url)
    await self._ask(
      policy,
      policy="pauseIfNetworkFetchesPending",
      budget=1000 * virtual_seconds,
      maxVirtualTimeTaskStarvationCount=9999,
    )
    await self._time_is_up.wait()
    await self._ask("Runtime.evaluate", expression="0")  # raises where it crashed

  async def evaluate(self, expression: str) -> Any:
    answer = await self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
    if "value" not in answer["result"]:
      return "", "(the page broke the reading of its text)"
    return answer["result"]["value"]

  async def screenshot(self, *, full_page: bool) -> bytes:
    values: dict[str, Any] = {}
    if full_page:
      size = (await self._ask("Page.getLayoutMetrics"))["cssContentSize"]
      clip_ = {"x": 0, "y": 0, "width": min(size["width"], 16384), "scale": 1,
               "height": min(size["height"], 16384)}  # fmt: skip
      values = {"captureBeyondViewport": True, "clip": clip_}
    answer = await self._ask("Page.captureScreenshot", format="png", **values)
    return base64.b64decode(answer["data"])

  async def _ask(self, method: str, **values: Any) -> dict[str, Any]:
    return await self._browser.ask(method, self._session, **values)

  def _on_event(self, method: str, values: dict[str, Any]) -> None:
    if method == "Fetch.requestPaused":
      task = asyncio.ensure_future(self._reply(values))
      self._answering.add(task)
      task.add_done_callback(self._answering.discard)
    elif method == "Emulation.virtualTimeBudgetExpired":
      self._time_is_up.set()
    elif method == "Runtime.exceptionThrown" and len(self.errors) < _SHOWN:
      details = values["exceptionDetails"]
      said = details.get("exception", {}).get("description") or details.get("text", "")
      self.errors.append(f"{said.partition(chr(10))[0][:300]} (line {details['lineNumber'] + 1})")
    elif method in ("Inspector.targetCrashed", "Target.targetCrashed"):
      self._browser.end("it ran out of memory, or broke the browser")
      self._time_is_up.set()

  async def _reply(self, paused: dict[str, Any]) -> None:
    request, url = paused["requestId"], paused["request"]["url"]
    with contextlib.suppress(_BrowserGone):
      found = await self._answer(url) if url.startswith(f"{_SITE}/") else None
      if found is None:
        # The browser asks for an icon by itself, now and then; what a page shows has another type.
        by_itself = url == _ICON and paused["resourceType"] == "Other"
        if len(self.blocked) < _SHOWN and not by_itself:
          self.blocked.append(url[:300])
        await self._browser.send(
          "Fetch.failRequest", self._session, requestId=request, errorReason="BlockedByClient"
        )
        return
      kind, content = found
      await self._browser.send(
        "Fetch.fulfillRequest",
        self._session,
        requestId=request,
        responseCode=200,
        responseHeaders=[{"name": "Content-Type", "value": kind}],
        body=base64.b64encode(content).decode(),
      )


@contextlib.asynccontextmanager
async def _started(binary: str, config: WebPageConfig) -> AsyncIterator[_Browser]:
  """A browser of its own, dead with its profile gone when the block is left."""
  home = tempfile.mkdtemp(prefix="agentjax-page-")
  process = None
  try:
    uid = None
    if os.geteuid() == 0:  # Chromium's sandbox refuses root
      uid = _FIRST_UID + secrets.randbelow(_UIDS)
      os.chown(home, uid, uid)
    arguments = [
      *_isolation(uid), "prlimit", f"--data={config.memory_bytes}", "--core=0", binary, *_FLAGS,
      f"--user-data-dir={home}", f"--window-size={config.width},{config.height}",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
      "/bin/sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh", *arguments,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
      cwd=home, env={"PATH": os.defpath, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"},
      start_new_session=True, limit=_MAX_MESSAGE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    browser = _Browser(process.stdout, process.stdin)
    try:
      yield browser
    finally:
      await browser.close()
  finally:
    if process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the first process of its namespace among them
      await process.wait()
    shutil.rmtree(home, ignore_errors=True)


def _isolation(uid: int | None) -> Sequence[str]:
  """The command line that runs another without network, among no other processes, as ``uid``."""
  unshare = ["unshare", "--net", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child"]
  setpriv = ["setpriv", "--no-new-privs", "--pdeathsig", "KILL"]
  if uid is None:
    return [*unshare, "--user", "--map-current-user", *setpriv]
  return [*unshare, *setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _probe_isolation() -> None:
  uid = _FIRST_UID if os.geteuid() == 0 else None
  try:
    subprocess.run(
      [*_isolation(uid), "prlimit", "--core=0", "true"], check=True, capture_output=True, timeout=30
    )
  except (OSError, subprocess.SubprocessError) as error:
    said = getattr(error, "stderr", b"") or str(error).encode()
    raise ConfigError(
      "tools.names: 'web_page' needs unshare, setpriv and prlimit (Debian's util-linux) and a "
      "machine that allows network and process namespaces; here it fails with "
      f"{said.decode(errors='replace').strip()[-300:]!r}."
    ) from error


def _find_browser(given: str | None) -> str:
  found = given if given is not None else next(filter(None, map(shutil.which, _BROWSERS)), None)
  if found is None or not Path(found).is_file():
    raise ConfigError(
      f"tools.names: 'web_page' needs Chromium, and there is no {given or ', '.join(_BROWSERS)}; "
      "install it (Debian: apt-get install chromium-headless-shell) or set "
      "tools.settings.web_page.browser."
    )
  return found
