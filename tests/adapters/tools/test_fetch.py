"""The fetch tool against a server on 127.0.0.1."""

from __future__ import annotations

import asyncio

import pytest

from agentjax.adapters.tools.fetch import FetchConfig, FetchTool, text_of_html
from agentjax.config import ConfigError
from agentjax.sandbox import Sandboxes
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.tools.egress import EgressConfig
from agentjax.tools.protocol import ToolContext, ToolStatus

pytest.importorskip("aiohttp", reason="needs the extra [web]")
from aiohttp import web

_CONTEXT = ToolContext("episode", seed=0, timeout=20.0)


@pytest.fixture
def fetch():
  """Gets paths of a server one after the other; the results, and what the server was asked for."""

  def fetch(*paths, allow=("127.0.0.1:*",), **settings):
    asked = []

    async def page(request):
      asked.append(request.path)
      match request.path:
        case "/page":
          text = (
            "<html><head><title>T</title><style>p{}</style><body><p>Hello<p>you<script>1<2</script>"
          )
          return web.Response(text=text, content_type="text/html")
        case "/latin":
          return web.Response(
            body="é".encode("latin-1"), headers={"content-type": "text/plain; charset=latin-1"}
          )
        case "/odd":
          return web.Response(body=b"odd", headers={"content-type": "text/plain; charset=no-such"})
        case "/zlib" | "/idna":
          kind = f"text/plain; charset={request.path[1:]}"
          return web.Response(body=b"a\xffb", headers={"content-type": kind})
        case "/long":
          return web.Response(text="x" * 5000)
        case "/picture":
          return web.Response(body=b"\x89PNG", content_type="image/png")
        case "/busy":
          return web.Response(status=503)
        case "/slow":
          await asyncio.sleep(5.0)
        case "/round":
          raise web.HTTPFound("/round")
        case "/inside":
          raise web.HTTPFound(f"http://127.0.0.2:{request.url.port}/page")
        case "/file":
          raise web.HTTPFound("file:///etc/passwd")
      raise web.HTTPNotFound(text="no such page")

    async def run():
      app = web.Application()
      app.add_routes([web.get("/{path:.*}", page)])
      runner = web.AppRunner(app)
      await runner.setup()
      site = web.TCPSite(runner, "0.0.0.0", 0)
      await site.start()
      port = site._server.sockets[0].getsockname()[1]
      egress = EgressConfig(allow=allow, allow_addresses=("127.0.0.1/32",))
      tool = FetchTool(FetchConfig(egress=egress, **settings))
      try:
        urls = [p if ":" in p else f"http://127.0.0.1:{port}{p}" for p in paths]
        return [await tool({"url": url}, _CONTEXT) for url in urls]
      finally:
        await runner.cleanup()

    return asyncio.run(run()), asked

  return fetch


def test_pages_come_as_text(fetch):
  (page, latin, odd), _ = fetch("/page", "/latin", "/odd")
  assert (page.status, page.output) == (ToolStatus.OK, "T\nHello\nyou")
  assert (latin.output, odd.output) == ("é", "odd")


def test_a_server_that_names_no_encoding_of_text_ends_no_call(fetch):
  results, _ = fetch("/zlib", "/idna")
  assert [(r.status, r.output) for r in results] == [(ToolStatus.OK, "a\ufffdb")] * 2


def test_what_is_not_allowed_is_denied_before_anything_is_sent(fetch):
  results, asked = fetch(
    "/page", "ftp://127.0.0.1/x", "http://u:p@127.0.0.1/", allow=("good.test",)
  )
  assert [r.status for r in results] == [ToolStatus.DENIED] * 3
  assert "not among the allowed hosts" in results[0].output and asked == []


def test_redirects_are_checked_and_counted(fetch):
  (inside, file, around), asked = fetch("/inside", "/file", "/round", allow=("*:*",), redirects=2)
  assert inside.status is ToolStatus.DENIED and "no public address" in inside.output
  assert file.status is ToolStatus.ERROR
  assert around.output == "error: more than 2 redirects"
  assert asked == ["/inside", "/file", "/round", "/round", "/round"]


def test_whatever_a_chosen_address_does_the_call_counts(fetch):
  (busy, lost, picture), asked = fetch("/busy", "/lost", "/picture")
  assert busy.status is ToolStatus.ERROR and "503" in busy.output
  assert asked.count("/busy") == 2
  (slow,), _ = fetch("/slow", seconds=0.5)
  assert slow.status is ToolStatus.TIMEOUT
  assert (lost.status, lost.output) == (ToolStatus.ERROR, "error: status 404\nno such page")
  assert picture.status is ToolStatus.ERROR and "image/png" in picture.output
  (away,), _ = fetch("http://127.0.0.1:9/", allow=("127.0.0.1:*",))
  assert away.status is ToolStatus.ERROR and "cannot be reached" in away.output
  (nowhere,), _ = fetch("http://no-such-name.invalid/", allow=("*:*",))
  assert nowhere.status is ToolStatus.ERROR and "cannot be reached" in nowhere.output


def test_long_answers_are_cut(fetch):
  (long,), _ = fetch("/long", max_bytes=100, max_characters=10)
  assert long.output == "xxxxx\n[... 90 characters left out ...]\nxxxxx"
  (odd,), _ = fetch("http://\ud800/")
  assert odd.status is ToolStatus.ERROR


def test_text_of_html_survives_what_is_left_open():
  assert text_of_html("<head><title>a</title><b>b &amp; c</b><ul><li>d<li>e") == "a\nb & c\nd\ne"
  assert text_of_html("x</script></p><script>y") == "x"
  assert text_of_html("<p>x</p><![odd[y") == "x"


def test_a_run_without_allowed_hosts_is_refused():
  with pytest.raises(ConfigError, match=r"config\.tools\.settings\.fetch\.egress\.allow"):
    ToolsConfig(names=("fetch",)).check_sandboxes(Sandboxes())
  config = ToolsConfig(
    names=("fetch",), settings={"fetch": FetchConfig(egress=EgressConfig(allow=("a.org",)))}
  )
  config.validate()
  assert list(build_tools(config).schemas) == ["fetch"]
