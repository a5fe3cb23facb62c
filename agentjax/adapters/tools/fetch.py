"""Fetching a page of the web as a tool: GET under an egress policy, HTML as text. Extra: [web]."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html.parser
import re
from collections.abc import Mapping
from typing import Any

from agentjax.config import AtLeastTwo, NonNegativeInt, PositiveFloat, PositiveInt, check
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.egress import EgressConfig, EgressDenied, EgressPolicy
from agentjax.tools.output import clip, is_unicode
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})  # may pass
_TRIES = 2
_TEXT = re.compile(r"text/|application/(json|xml|.*\+(json|xml))")
_UNSEEN = frozenset({"script", "style", "template", "noscript", "svg"})
_LINES = frozenset(
  "address article aside blockquote br dd div dl dt fieldset figure footer form h1 h2 h3 h4 h5 h6 "
  "header hr li main nav ol p pre section table td th title tr ul".split()
)


@dataclasses.dataclass(unsafe_hash=True)
class FetchConfig(ToolConfig):
  """Settings of the fetch tool; the figures are ours.

  Attributes:
    egress: what may be reached; without an entry in ``allow``, nothing.
    seconds: wall clock of one call, redirects included.
    redirects: how many a call follows; each is checked like a call of its own.
    max_bytes: of the answer, unpacked; what is beyond is not read.
    max_characters: characters the policy sees, half from the head and half from the tail.
  """

  egress: EgressConfig = dataclasses.field(default_factory=EgressConfig)
  seconds: PositiveFloat = 10.0
  redirects: NonNegativeInt = 5
  max_bytes: PositiveInt = 2**20
  max_characters: AtLeastTwo = 8000

  def check_run(self, bench: Workbench, path: str) -> None:
    allow = self.egress.allow
    check(bool(allow), f"{path}.egress.allow", allow, "hosts that may be reached, at least one")

  def build(self, bench: Workbench) -> Tool:
    return FetchTool(self)


class FetchTool:
  """Gets a page: its text where it is HTML, other text as it is.

  ``FetchConfig.egress`` says what the policy may reach. Names and their addresses are checked
  before anything is sent (status DENIED). No cookies are kept, and GET is the only method. A busy
  or unreachable server is tried again, then the status is ERROR: the policy chose the address, so
  it could choose one that never answers. The web changes, so the result of this tool does not
  depend only on a seed.

  Args:
    config: see FetchConfig.
    resolver: an aiohttp resolver; the system's by default.

  Raises:
    ImportError: aiohttp is missing (extra [web]).
  """

  name = "fetch"
  description = "Gets a page of the web by its address and returns its text."
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {"url": {"type": "string", "description": "http or https address"}},
    "required": ["url"],
    "additionalProperties": False,
  }

  def __init__(self, config: FetchConfig | None = None, resolver: Any = None):
    from agentjax.adapters.tools import egress_http  # names the extra where aiohttp is missing

    self._config = config or FetchConfig()
    self._config.validate("fetch")
    self._policy = EgressPolicy(self._config.egress)
    self._new_session = egress_http.guarded_session
    self._resolver = resolver

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    import aiohttp

    url = arguments["url"]
    if not is_unicode(url):
      return ToolResult(ToolStatus.ERROR, "error: the address holds half of a surrogate pair")
    seconds = min(self._config.seconds, 0.9 * context.timeout)
    limit = aiohttp.ClientTimeout(total=seconds)
    try:
      self._policy.check_url(url)
      # One session a call: nothing of an episode is left for the next one.
      async with (
        asyncio.timeout(seconds),
        self._new_session(self._policy, resolver=self._resolver, timeout=limit) as session,
      ):
        for _ in range(_TRIES - 1):
          with contextlib.suppress(_Busy, aiohttp.ClientConnectionError):
            return await self._get(session, url)
        return await self._get(session, url)
    except EgressDenied as error:
      return ToolResult(ToolStatus.DENIED, f"error: {error}")
    except TimeoutError:
      return ToolResult(ToolStatus.TIMEOUT, f"error: no answer within {seconds:.1f} s")
    except aiohttp.TooManyRedirects:
      return ToolResult(ToolStatus.ERROR, f"error: more than {self._config.redirects} redirects")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
      return ToolResult(ToolStatus.ERROR, f"error: {error} is no address of the web")
    except _Busy as busy:
      return ToolResult(ToolStatus.ERROR, f"error: {busy}")
    except aiohttp.ClientError as error:
      return ToolResult(ToolStatus.ERROR, f"error: {url} cannot be reached: {error}")

  async def _get(self, session: Any, url: str) -> ToolResult:
    async with session.get(url, max_redirects=self._config.redirects + 1) as answer:
      if answer.status in _BUSY:
        raise _Busy(f"{url} answered {answer.status}")
      if not _TEXT.match(answer.content_type):
        return ToolResult(ToolStatus.ERROR, f"error: {answer.content_type} is no text")
      body = await _read(answer.content, self._config.max_bytes)
      text = _decoded(body, answer.charset or "utf-8")
    if answer.content_type in ("text/html", "application/xhtml+xml"):
      text = text_of_html(text)
    shown = clip(text.strip() or "(no text)", self._config.max_characters)
    if answer.status >= 400:
      return ToolResult(ToolStatus.ERROR, f"error: status {answer.status}\n{shown}")
    return ToolResult(ToolStatus.OK, shown)


class _Busy(Exception):
  """The server has no answer now."""


async def _read(content: Any, most: int) -> bytes:
  parts = bytearray()
  while len(parts) < most and (part := await content.read(most - len(parts))):
    parts += part
  return bytes(parts)


def _decoded(body: bytes, charset: str) -> str:
  """UTF-8 where the server names what is no encoding of text, or one that stops at an error."""
  try:
    return body.decode(charset, errors="replace")
  except (LookupError, ValueError):
    return body.decode(errors="replace")


def text_of_html(source: str) -> str:
  """The text of a page: without scripts and styles, a line for each block, links as text only."""
  reader = _Text()
  with contextlib.suppress(AssertionError):  # of the parser, at some malformed declarations
    reader.feed(source)
    reader.close()
  lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
  return "\n".join(line for line in lines if line)


class _Text(html.parser.HTMLParser):
  def __init__(self) -> None:
    super().__init__()
    self.parts: list[str] = []
    self._unseen = 0

  def handle_starttag(self, tag: str, attrs: Any) -> None:
    if tag in _UNSEEN:
      self._unseen += 1
    elif tag in _LINES:
      self.parts.append("\n")

  def handle_endtag(self, tag: str) -> None:
    if tag in _UNSEEN:
      self._unseen = max(0, self._unseen - 1)
    elif tag in _LINES:
      self.parts.append("\n")

  def handle_data(self, data: str) -> None:
    if not self._unseen:
      self.parts.append(data)
