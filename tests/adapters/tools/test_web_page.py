"""The web page tool: what a page shows, what it cannot reach. Needs Chromium and namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pathlib
import struct
import tempfile
from collections.abc import Callable, Iterator

import matplotlib.image
import pytest

from agentjax.adapters.tools.web_page import WebPageConfig, WebPageTool, _View
from agentjax.config import ConfigError
from agentjax.sandbox import ProcessSandbox, SandboxLimits
from agentjax.tools import ToolContext, ToolRegistry, ToolResult, ToolStatus
from agentjax.tools.workspace import WorkspaceConfig, Workspaces
from agentjax.trajectory.record import ToolCall

Page = Callable[..., ToolResult]


def what_is_missing() -> str:
  try:
    WebPageTool()
  except ConfigError as error:
    return str(error)
  return ""


needs_browser = pytest.mark.skipif(bool(missing := what_is_missing()), reason=missing)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
  workspaces = Workspaces(ProcessSandbox(), SandboxLimits(), WorkspaceConfig())
  config = WebPageConfig(width=320, height=200)
  registry = ToolRegistry([WebPageTool(workspaces, config)])
  files = {
    "site/index.html": b"<link rel=stylesheet href=style.css><p>from a file</p>"
    b"<script src=/lib.js></script><img src=missing.png>",
    "site/style.css": b"html { background: rgb(0, 0, 255) }",
    "lib.js": b"document.body.append('lib ran')",
  }
  tree = workspaces.store.put_files(files)
  asyncio.run(workspaces.restore("e", tree))

  def call(html: str | None = None, *, seed: int = 0, timeout: float = 20.0, **more: str) -> ToolResult:  # fmt: skip  # noqa: E501
    arguments = more if html is None else {"html": html, **more}
    request = ToolCall("web_page", arguments)
    return asyncio.run(registry.call(request, ToolContext("e", seed, timeout)))

  yield call
  asyncio.run(registry.close())


def pixel(result: ToolResult, x: int, y: int) -> tuple[int, ...]:
  image = matplotlib.image.imread(io.BytesIO(result.artifacts["screenshot.png"]))
  return tuple(round(255 * float(v)) for v in image[y, x, :3])


@needs_browser
def test_page_comes_as_text_and_picture(page: Page) -> None:
  result = page(
    "<title>T</title><body style='margin:0;background:#f00'><h1>Größe</h1>"
    "<p style='display:none'>hidden</p><div style='height:100px;background:#0f0'></div>"
    "<script>setTimeout(() => document.body.append('late'), 1500)</script>"
  )
  assert (result.status, result.output) == (ToolStatus.OK, "title: T\nGröße\nlate")
  png = result.artifacts["screenshot.png"]
  assert struct.unpack(">II", png[16:24]) == (320, 200)
  assert pixel(result, 300, 5) == (255, 0, 0)
  assert pixel(result, 300, 120) == (0, 255, 0)


@needs_browser
def test_file_of_the_workspace_finds_its_neighbours(page: Page) -> None:
  result = page(path="site/index.html")
  assert result.output == (
    "from a file\n\nlib ran\nnot loaded: http://workspace.test/site/missing.png"
  )
  assert pixel(result, 300, 190) == (0, 0, 255)
  assert page(path="site/none.html").status is ToolStatus.ERROR
  assert page(path="../../etc/passwd").status is ToolStatus.ERROR


def test_only_what_the_page_asks_for_is_told_as_missing() -> None:
  """A browser asks for the icon of a site by itself, sooner or later."""

  class Browser:
    def __init__(self) -> None:
      self.failed: list[str] = []

    async def send(self, method: str, session: str, *, requestId: str, errorReason: str) -> None:
      assert method == "Fetch.failRequest"
      self.failed.append(requestId)

  async def nothing(url: str) -> None:
    return None

  async def blocked(kind: str, path: str) -> list[str]:
    browser = Browser()
    view = _View(browser, nothing)  # type: ignore[arg-type]
    request = {"url": f"http://workspace.test{path}"}
    paused = {"requestId": "7", "request": request, "resourceType": kind}
    view._on_event("Fetch.requestPaused", paused)
    await asyncio.gather(*view._answering)
    assert browser.failed == ["7"]  # else the browser would wait for it
    return view.blocked

  assert asyncio.run(blocked("Other", "/favicon.ico")) == []
  for kind, path in (("Image", "/favicon.ico"), ("Other", "/worker.js")):
    assert asyncio.run(blocked(kind, path)) == [f"http://workspace.test{path}"]


@needs_browser
def test_nothing_outside_the_workspace_is_reached(page: Page) -> None:
  result = page(
    "<iframe src='file:///etc/passwd'></iframe><img src='http://127.0.0.1:80/x'>"
    "<script>fetch('file:///etc/passwd').then(r => r.text()).then(t => document.body.append(t))"
    ".catch(e => document.body.append('refused'))</script>"
  )
  assert "root:" not in result.output
  assert "refused" in result.output
  assert "not loaded: http://127.0.0.1/x" in result.output
  moved = page("<script>location = 'file:///etc/passwd'</script>stays")
  assert "root:" not in moved.output


@needs_browser
def test_script_errors_are_told(page: Page) -> None:
  result = page("<p>shown</p><script>\nundefinedName()</script>")
  assert result.output.startswith(
    "shown\nscript error: ReferenceError: undefinedName is not defined"
  )


@needs_browser
def test_chance_and_time_follow_the_seed(page: Page) -> None:
  draw = "<script>document.write(Math.random(), ' ', new Date().getUTCFullYear())</script>"
  first, again, other = (page(draw, seed=seed) for seed in (1, 1, 2))
  assert first.output == again.output != other.output
  assert first.output.endswith(" 2020")
  assert first.artifacts == again.artifacts


@needs_browser
def test_hanging_and_wrong_pages_come_back_as_kinds(page: Page) -> None:
  hang = page("<script>while (true) {}</script>", timeout=4.0)
  assert hang.status is ToolStatus.TIMEOUT
  assert page(path="x", html="y").status is ToolStatus.ERROR  # type: ignore[call-arg]
  assert page("\ud800").status is ToolStatus.ERROR
  assert page("").output == "(no visible text)"


@pytest.mark.slow
@needs_browser
def test_page_that_eats_memory_is_killed(page: Page) -> None:
  hungry = page("<script>const a = []; while (true) a.push(new Uint8Array(1e8).fill(1))</script>")
  assert hungry.status in (ToolStatus.KILLED, ToolStatus.OK)  # a RangeError ends the script, too
  assert "error" in hungry.output


@needs_browser
def test_no_browser_is_left_behind(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
  homes: list[str] = []
  make = tempfile.mkdtemp
  monkeypatch.setattr(tempfile, "mkdtemp", lambda **k: homes.append(make(**k)) or homes[-1])
  page("<p>x</p>")
  (home,) = homes
  assert not os.path.exists(home)
  for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # it ended meanwhile
      assert home.encode() not in process.read_bytes()


def test_absent_browser_is_named_with_what_to_install(tmp_path: pathlib.Path) -> None:
  with pytest.raises(ConfigError, match="apt-get install chromium"):
    WebPageTool(None, WebPageConfig(browser=os.fspath(tmp_path / "chromium")))


def test_impossible_settings_are_refused_by_name() -> None:
  for field in ("width", "height", "virtual_seconds", "seconds", "memory_bytes", "concurrency",
                "queue_seconds", "max_characters"):  # fmt: skip
    with pytest.raises(ConfigError, match=field):
      WebPageConfig(**{field: 0}).validate("web_page")
