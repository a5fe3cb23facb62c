"""A draft in the browser: what is measured of it, and its picture."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import pathlib

from agentjax.config import Config, ConfigError, FilePath
from agentjax.recipes.mm_webagent.browser import Browser, BrowserConfig, File, Rendered
from agentjax.recipes.mm_webagent.charts import DRAW, DRAW_SCRIPT, LIBRARY, chart_page
from agentjax.recipes.mm_webagent.execute import Draft
from agentjax.recipes.mm_webagent.facts import ChartFacts, PageFacts, read_facts


@dataclasses.dataclass(unsafe_hash=True)
class RenderConfig(Config):
  """How pages are shown.

  Attributes:
    browser: which shows them.
    echarts: file of ECharts, dist/echarts.min.js of the npm package; "" draws charts as our SVG.
  """

  browser: BrowserConfig = dataclasses.field(default_factory=BrowserConfig)
  echarts: FilePath = ""

  def library(self, path: str = "render") -> bytes | None:
    """ECharts.

    Raises:
      ConfigError: the file is not there, or is none.
    """
    if not self.echarts:
      return None
    try:
      content = pathlib.Path(self.echarts).read_bytes()
    except OSError as error:
      raise ConfigError(
        f"{path}.echarts={self.echarts!r}; allowed: dist/echarts.min.js of the npm package echarts "
        f"(npm pack echarts), or '': {error.strerror}."
      ) from error
    if b"echarts" not in content[:200_000]:
      raise ConfigError(f"{path}.echarts={self.echarts!r} is not ECharts.")
    return content


class Renderer:
  """Shows drafts in a browser; use it from one event loop, as ``async with Renderer(config)``."""

  def __init__(self, config: RenderConfig):
    self._library = config.library()
    self._browser = Browser(config.browser)

  async def __aenter__(self) -> Renderer:
    await self._browser.start()
    return self

  async def __aexit__(self, *error: object) -> None:
    await self._browser.close()

  async def render(self, draft: Draft) -> tuple[PageFacts, bytes]:
    """What is measured of a page, and a PNG of it.

    Raises:
      BrowserError: the page took too long or went elsewhere.
    """
    rendered = await self._browser.render(self.files(draft), _script(), _frame_script())
    return page_facts(rendered), rendered.screenshot

  async def measure(self, draft: Draft) -> PageFacts:
    """As ``render``, without the picture, which takes most of the time."""
    files = self.files(draft)
    rendered = await self._browser.render(files, _script(), _frame_script(), picture=False)
    return page_facts(rendered)

  def files(self, draft: Draft) -> dict[str, File]:
    """All that the page can get."""
    files = {"index.html": File(draft.page.encode("utf-8", "replace"), "text/html; charset=utf-8")}
    for path, content in draft.files.items():
      files[path] = File(content, "video/mp4" if path.endswith(".mp4") else "image/png")
    library = self._library is not None
    for path, option in draft.options.items():
      document = chart_page(option, library=library).encode("utf-8", "replace")
      files[path] = File(document, "text/html; charset=utf-8", scripts=library)
    if self._library is not None:
      files[LIBRARY] = File(self._library, "text/javascript")
      files[DRAW] = File(DRAW_SCRIPT.encode(), "text/javascript")
    return files


def page_facts(rendered: Rendered) -> PageFacts:
  """The facts of a page that was rendered."""
  charts = {
    path: ChartFacts(
      values["marks"], tuple(values["texts"]), tuple(values["outside"]), values["error"]
    )
    for path, values in rendered.frames.items()
  }
  for one in rendered.values["shown"]:  # a frame may name a file and show something else
    if one["source"].startswith("assets/") and one["source"].endswith(".html"):
      charts.setdefault(one["source"], ChartFacts(error="the frame does not show the file"))
  return read_facts(rendered.values, charts, rendered.refused)


@functools.cache
def _script() -> str:
  return importlib.resources.files(__package__).joinpath("facts.js").read_text()


@functools.cache
def _frame_script() -> str:
  return importlib.resources.files(__package__).joinpath("chart_facts.js").read_text()
