"""A small client of Chromium's DevTools protocol over a pipe. Needs a Chromium; no Python package.

Pages come from memory under one made-up origin. The client answers every request itself, so a page
gets the files that it was given and nothing else: no file of this machine, no network, no other
origin. Four walls stand for each other: requests are answered by us; the command line maps every
host name to nothing and sends all else to a proxy that is not there; each document has a content
security policy without scripts (frames of charts have only ours); measuring runs in an isolated
world that a page's scripts could not reach.

Reference: https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from agentjax.config import Config, ConfigError, FilePath, PositiveFloat, PositiveInt

_log = logging.getLogger(__name__)

ORIGIN = "http://page.invalid"  # a name that no server can have (RFC 2606)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_POLICY = (
  "default-src 'none'; img-src 'self' data:; media-src 'self'; frame-src 'self'; "
  "style-src 'self' 'unsafe-inline'; font-src 'self' data:; script-src {scripts}; "
  "form-action 'none'; base-uri 'none'"
)
_FLAGS = (
  "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
  "--disable-extensions", "--disable-default-apps", "--dns-prefetch-disable", "--hide-scrollbars",
  "--mute-audio", "--disable-dev-shm-usage", "--force-color-profile=srgb",
  "--autoplay-policy=no-user-gesture-required", "--host-resolver-rules=MAP * ~NOTFOUND",
  "--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=<-loopback>",
  "--force-webrtc-ip-handling-policy=disable_non_proxied_udp", "--remote-debugging-pipe",
  "--disable-features=BackForwardCache,SpareRendererForSitePerProcess,Translate,PaintHolding",
)  # fmt: skip
# Puts the two ends of the pipe where Chromium expects them, then becomes it.
_LAUNCH = (
  "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
  "os.execv(sys.argv[3], sys.argv[3:])"
)
_MOST_BYTES = 256 * 2**20  # of one message


class BrowserError(RuntimeError):
  """The browser failed, or a page took too long."""


@dataclasses.dataclass(unsafe_hash=True)
class BrowserConfig(Config):
  """The browser and what it shows.

  Attributes:
    executable: of Chromium; "" takes the first of chromium, chromium-browser, google-chrome and
      chrome that there is.
    width, height: of the viewport, in pixels.
    most_height: of a picture of a page; what lies below is not shown, but measured.
    timeout: seconds that a page may take.
  """

  executable: FilePath = ""
  width: PositiveInt = 1280
  height: PositiveInt = 800
  most_height: PositiveInt = 6000
  timeout: PositiveFloat = 30.0


@dataclasses.dataclass(frozen=True)
class File:
  """A file that pages can get.

  Attributes:
    content: of it.
    media_type: such as text/html.
    scripts: whether it is a frame that may run the scripts under lib/.
  """

  content: bytes
  media_type: str
  scripts: bool = False


@dataclasses.dataclass(frozen=True)
class Rendered:
  """A page as the browser showed it.

  Attributes:
    values: of the script.
    frames: values of the script of frames, by the path of the frame.
    screenshot: PNG of the whole page; empty where none was asked for.
    refused: addresses that were asked for and are no file.
  """

  values: Any
  frames: Mapping[str, Any]
  screenshot: bytes
  refused: tuple[str, ...]


def find_chromium(config: BrowserConfig, path: str = "browser") -> str:
  """Where the browser is.

  Raises:
    ConfigError: it is not there; the message says how to install it.
  """
  wanted = (config.executable,) if config.executable else _NAMES
  found = next((where for name in wanted if (where := shutil.which(name))), None)
  if found is None:
    raise ConfigError(
      f"{path}.executable={config.executable!r}; allowed: a Chromium. None of {', '.join(wanted)} "
      "is there. On Debian: apt-get install --no-install-recommends chromium."
    )
  return found


class _Tab(NamedTuple):
  """A tab with a profile of its own."""

  context: str
  session: str


class Browser:
  """A running Chromium; use it from one event loop, as ``async with Browser(config) as browser``.

  Pages may be rendered at once, each in a tab with a profile of its own. A tab shows further pages,
  as pages can run and store nothing; one whose page failed is closed.
  """

  def __init__(self, config: BrowserConfig):
    self.config = config
    self._executable = find_chromium(config)
    self._numbers = itertools.count(1)
    self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
    self._heard: dict[str, Callable[[str, dict[str, Any]], None]] = {}  # by session
    self._folder: tempfile.TemporaryDirectory[str] | None = None
    self._free: list[_Tab] = []
    self._closing: set[asyncio.Task[None]] = set()

  async def __aenter__(self) -> Browser:
    await self.start()
    return self

  async def __aexit__(self, *error: object) -> None:
    await self.close()

  async def start(self) -> None:
    """Starts the program and connects to it; what has begun ends again if that fails."""
    try:
      await self._start()
    except BaseException:
      await self.close()
      raise

  async def _start(self) -> None:
    self._folder = tempfile.TemporaryDirectory(prefix="pages-", ignore_cleanup_errors=True)
    read_theirs, write_ours = os.pipe()
    read_ours, write_theirs = os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_theirs, write_theirs)]
    flags = [*_FLAGS, f"--user-data-dir={self._folder.name}"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to start as root otherwise
    errors = open(pathlib.Path(self._folder.name, "stderr"), "wb")
    try:
      self._process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _LAUNCH, *map(str, theirs), self._executable, *flags,
        "about:blank", pass_fds=theirs, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=errors, start_new_session=True,
        cwd=self._folder.name, env=self._environment(),
      )  # fmt: skip
    finally:
      errors.close()
      for fd in (read_theirs, write_theirs, *theirs):
        os.close(fd)
    loop = asyncio.get_running_loop()
    self._reader = asyncio.StreamReader(limit=_MOST_BYTES)
    source = os.fdopen(read_ours, "rb", 0)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), source)
    transport, protocol = await loop.connect_write_pipe(
      asyncio.streams.FlowControlMixin, os.fdopen(write_ours, "wb", 0)
    )
    self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
    self._listening = asyncio.create_task(self._listen())
    async with asyncio.timeout(60):
      await self.call("Browser.getVersion")

  def _environment(self) -> dict[str, str]:
    """Nothing of ours but where programs and fonts are; a home that goes away."""
    assert self._folder is not None
    kept = {n: os.environ[n] for n in ("PATH", "LANG", "FONTCONFIG_PATH") if n in os.environ}
    return {**kept, "HOME": self._folder.name, "TMPDIR": self._folder.name}

  async def render(
    self,
    files: Mapping[str, File],
    script: str,
    frame_script: str,
    *,
    picture: bool = True,
  ) -> Rendered:
    """Shows ``index.html`` and measures it.

    Args:
      files: by path, such as assets/hero.png.
      script: evaluated in the page; its value has a field ``waiting`` while media load.
      frame_script: evaluated in each frame.
      picture: whether to take a screenshot, which takes most of the time.

    Raises:
      BrowserError: it took too long, went elsewhere, or the browser died.
    """
    try:
      async with asyncio.timeout(self.config.timeout):
        tab = self._free.pop() if self._free else await self._open_tab()
        try:
          rendered = await self._render(tab, files, script, frame_script, picture)
        except BaseException:  # what the page did to its tab ends with it
          self._do_later(self._close_tab(tab))
          raise
        self._free.append(tab)
        return rendered
    except TimeoutError:
      raise BrowserError(f"the page took more than {self.config.timeout:g} s") from None

  async def _open_tab(self) -> _Tab:
    context = (await self.call("Target.createBrowserContext"))["browserContextId"]
    settings = {"url": "about:blank", "browserContextId": context}
    target = (await self.call("Target.createTarget", settings))["targetId"]
    attached = await self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
    tab = _Tab(context, attached["sessionId"])
    screen = {"width": self.config.width, "height": self.config.height}
    for method, params in (
      ("Page.enable", {}),
      ("Network.setCacheDisabled", {"cacheDisabled": True}),
      ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}),
      ("Emulation.setEmulatedMedia", {"features": [_STILL]}),
      (
        "Emulation.setDeviceMetricsOverride",
        {**screen, "deviceScaleFactor": 1, "mobile": False},
      ),
    ):
      await self.call(method, params, tab.session)
    return tab

  async def _close_tab(self, tab: _Tab) -> None:
    with contextlib.suppress(BrowserError):
      await self.call("Target.disposeBrowserContext", {"browserContextId": tab.context})

  def _do_later(self, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    self._closing.add(task)
    task.add_done_callback(self._closing.discard)

  async def _render(
    self,
    tab: _Tab,
    files: Mapping[str, File],
    script: str,
    frame_script: str,
    picture: bool,
  ) -> Rendered:
    session = tab.session
    page = _Page(self, session, files)
    self._heard[session] = page.hear
    try:
      address = f"{ORIGIN}/index.html?{next(self._numbers)}"
      await self.call("Page.navigate", {"url": address}, session)
      await page.loaded.wait()
      values = await self._measure(session, script)
      tree = (await self.call("Page.getFrameTree", {}, session))["frameTree"]
      if tree["frame"]["url"].partition("#")[0] != address:
        raise BrowserError(f"the page went to {tree['frame']['url'][:200]}")
      frames = {}
      for child in tree.get("childFrames", ()):
        where = _path(child["frame"]["url"])
        if where in files:
          frames[where] = await self._evaluate(session, child["frame"]["id"], frame_script)
      shot = await self._picture(session, values["content"][1]) if picture else b""
      return Rendered(values, frames, shot, tuple(page.refused))
    finally:
      self._heard.pop(session, None)
      await page.end()

  async def _picture(self, session: str, height: float) -> bytes:
    config = self.config
    height = min(max(height, config.height), config.most_height)
    taken = await self.call(
      "Page.captureScreenshot",
      {
        "format": "png",
        "captureBeyondViewport": True,
        "clip": {"x": 0, "y": 0, "width": config.width, "height": height, "scale": 1},
      },
      session,
    )
    return base64.b64decode(taken["data"])

  async def _measure(self, session: str, script: str) -> Any:
    """The script's value once nothing loads any more, or after a quarter of the time-out."""
    frame = (await self.call("Page.getFrameTree", {}, session))["frameTree"]["frame"]["id"]
    end = asyncio.get_running_loop().time() + self.config.timeout / 4
    while True:
      values = await self._evaluate(session, frame, script)
      if not values["waiting"] or asyncio.get_running_loop().time() > end:
        return values
      await asyncio.sleep(0.1)

  async def _evaluate(self, session: str, frame: str, script: str) -> Any:
    world = await self.call("Page.createIsolatedWorld", {"frameId": frame}, session)
    found = await self.call(
      "Runtime.evaluate",
      {
        "expression": script,
        "contextId": world["executionContextId"],
        "returnByValue": True,
        "awaitPromise": True,
      },
      session,
    )
    if "exceptionDetails" in found:
      raise BrowserError(f"measuring failed: {str(found['exceptionDetails'])[:400]}")
    return found["result"].get("value")

  async def call(
    self, method: str, params: Mapping[str, Any] | None = None, session: str | None = None
  ) -> dict[str, Any]:
    """The result of a method of the protocol, in a session or of the browser.

    Raises:
      BrowserError: it failed, or the browser has ended.
    """
    number = next(self._numbers)
    message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
    if session is not None:
      message["sessionId"] = session
    answer = asyncio.get_running_loop().create_future()
    self._waiting[number] = answer
    try:
      if self._listening.done():
        raise BrowserError(f"the browser has ended: {self._last_words()}")
      self._writer.write(json.dumps(message).encode() + b"\0")
      await self._writer.drain()
      found = await answer
    except (BrokenPipeError, ConnectionResetError) as error:
      raise BrowserError(f"the browser has ended: {self._last_words()}") from error
    finally:
      self._waiting.pop(number, None)
    if "error" in found:
      raise BrowserError(f"{method}: {found['error'].get('message', found['error'])}")
    return found["result"]

  async def _listen(self) -> None:
    try:
      while True:
        message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
        if "id" in message:
          answer = self._waiting.get(message["id"])
          if answer is not None and not answer.done():
            answer.set_result(message)
        elif (hear := self._heard.get(message.get("sessionId", ""))) is not None:
          hear(message["method"], message.get("params", {}))
    except (asyncio.IncompleteReadError, ConnectionResetError, asyncio.LimitOverrunError):
      pass
    finally:
      for answer in self._waiting.values():
        if not answer.done():
          answer.set_exception(BrowserError(f"the browser has ended: {self._last_words()}"))

  def _last_words(self) -> str:
    if self._folder is None:  # closed
      return ""
    try:
      text = pathlib.Path(self._folder.name, "stderr").read_text(errors="replace")
    except OSError:
      return ""
    return text[-500:].strip()

  async def close(self) -> None:
    """Ends the program and removes its folder."""
    if self._folder is None:
      return
    self._free.clear()
    for task in self._closing:
      task.cancel()
    await asyncio.gather(*self._closing, return_exceptions=True)
    with contextlib.suppress(BrowserError, TimeoutError, AttributeError):
      async with asyncio.timeout(5):
        await self.call("Browser.close")
    process = getattr(self, "_process", None)
    if process is not None:
      with contextlib.suppress(ProcessLookupError):
        try:
          async with asyncio.timeout(5):
            await process.wait()
        except TimeoutError:
          os.killpg(process.pid, 9)
          await process.wait()
    if (listening := getattr(self, "_listening", None)) is not None:
      listening.cancel()
      await asyncio.gather(listening, return_exceptions=True)
    if (writer := getattr(self, "_writer", None)) is not None:
      writer.close()
    self._folder.cleanup()
    self._folder = None


_STILL = {"name": "prefers-reduced-motion", "value": "reduce"}


class _Page:
  """Answers the requests of one page."""

  def __init__(self, browser: Browser, session: str, files: Mapping[str, File]):
    self.loaded = asyncio.Event()
    self.refused: list[str] = []
    self._browser, self._session, self._files = browser, session, files
    self._answers: set[asyncio.Task[None]] = set()

  def hear(self, method: str, params: dict[str, Any]) -> None:
    if method == "Page.loadEventFired":
      self.loaded.set()
    elif method == "Page.javascriptDialogOpening":
      self._do(lambda: self._call("Page.handleJavaScriptDialog", {"accept": False}))
    elif method == "Fetch.requestPaused":
      self._do(lambda: self._answer(params))

  async def end(self) -> None:
    for task in self._answers:
      task.cancel()
    await asyncio.gather(*self._answers, return_exceptions=True)

  def _do(self, work: Callable[[], Awaitable[Any]]) -> None:
    async def quiet() -> None:
      with contextlib.suppress(BrowserError):  # the request is gone, or the browser
        await work()

    task = asyncio.create_task(quiet())
    self._answers.add(task)
    task.add_done_callback(self._answers.discard)

  async def _call(self, method: str, params: Mapping[str, Any]) -> None:
    await self._browser.call(method, params, self._session)

  async def _answer(self, params: dict[str, Any]) -> None:
    url: str = params["request"]["url"]
    file = self._files.get(_path(url)) if params["request"]["method"] == "GET" else None
    if file is None:
      if not url.endswith("/favicon.ico"):
        self.refused.append(url[:300])
      await self._call(
        "Fetch.failRequest", {"requestId": params["requestId"], "errorReason": "AccessDenied"}
      )
      return
    scripts = f"{ORIGIN}/lib/" if file.scripts else "'none'"
    headers = {
      "Content-Type": file.media_type,
      "Content-Security-Policy": _POLICY.format(scripts=scripts),
      "X-DNS-Prefetch-Control": "off",
      "X-Content-Type-Options": "nosniff",
      "Referrer-Policy": "no-referrer",
      "Content-Length": str(len(file.content)),
    }
    await self._call(
      "Fetch.fulfillRequest",
      {
        "requestId": params["requestId"],
        "responseCode": 200,
        "responseHeaders": [{"name": n, "value": v} for n, v in headers.items()],
        "body": base64.b64encode(file.content).decode(),
      },
    )


def _path(url: str) -> str:
  """The path of an address of ours without its first slash; "" of others."""
  parts = urlsplit(url)
  return unquote(parts.path).lstrip("/") if f"{parts.scheme}://{parts.netloc}" == ORIGIN else ""
