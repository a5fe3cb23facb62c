"""What Chromium shows; skipped where there is none."""

import asyncio
import dataclasses
import pathlib

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.mm_webagent import browser as browsers
from agentjax.recipes.mm_webagent.browser import Browser, BrowserConfig, File, find_chromium
from agentjax.recipes.mm_webagent.draw import image_facts
from agentjax.recipes.mm_webagent.execute import Draft, ExecuteConfig, built_in, make_draft, spoilt
from agentjax.recipes.mm_webagent.page import FLAWS, build_page
from agentjax.recipes.mm_webagent.plan import Plan
from agentjax.recipes.mm_webagent.render import RenderConfig, Renderer
from agentjax.recipes.mm_webagent.score import score_page
from tests.recipes.mm_webagent.pages import BRIEF, PLAN, needs_chromium

_LAYOUT = PLAN.layout.partition("\nSection film")[0]
_STILL = Plan(_LAYOUT, PLAN.of("image") + PLAN.of("chart"))


def test_without_a_browser_the_message_says_how_to_get_one(monkeypatch):
  monkeypatch.setattr(browsers.shutil, "which", lambda name: None)
  with pytest.raises(ConfigError, match="apt-get install .*chromium"):
    find_chromium(BrowserConfig())
  with pytest.raises(ConfigError, match="render.echarts='gone.js'; allowed: dist/echarts.min.js"):
    RenderConfig(echarts="gone.js").library()


def test_a_browser_that_cannot_start_leaves_nothing_behind(tmp_path):
  program = tmp_path / "chromium"
  program.write_text("#!/bin/sh\nexit 1\n")
  program.chmod(0o755)

  async def start():
    browser = Browser(BrowserConfig(executable=str(program)))
    with pytest.raises(browsers.BrowserError, match="has ended"):
      async with browser:
        pass
    assert browser._folder is None and browser._process.returncode == 1
    with pytest.raises(browsers.BrowserError, match="has ended"):
      await browser.call("Browser.getVersion")

  asyncio.run(start())


@needs_chromium
def test_a_good_page_beats_each_damaged_one():
  brief = dataclasses.replace(BRIEF, texts=(*BRIEF.texts, "Books for every harbor."))

  async def shown():
    draft = await make_draft(BRIEF, _STILL, built_in(), ExecuteConfig(), 0)
    found = {}
    async with Renderer(RenderConfig()) as renderer:

      async def score(name, one):
        facts, picture = await renderer.render(one)
        found[name] = score_page(brief, _STILL, facts, one.options, one.media)
        assert image_facts(picture).size[0] == 1280

      await score("good", draft)
      for flaw in FLAWS:
        await score(flaw, draft.with_page(build_page(_STILL, (flaw,))))
    return found

  found = asyncio.run(shown())
  good = found.pop("good")
  assert good.overall > 0.9, good.issues
  assert set(good.items.values()) == {1.0}, good.issues
  for flaw, scores in found.items():
    codes = {issue.code for issue in scores.issues}
    assert flaw in codes, (flaw, codes)
    assert scores.overall < good.overall, flaw


@needs_chromium
def test_a_wrong_chart_and_a_broken_picture_are_seen_in_the_browser():
  async def shown():
    draft = await make_draft(BRIEF, _STILL, built_in(), ExecuteConfig(), 0)
    option = spoilt(draft.options["assets/sold.html"], np.random.default_rng(0))
    bad = dataclasses.replace(
      draft, options={"assets/sold.html": option}, files={"assets/hero.png": b"no picture"}
    )
    blank = dataclasses.replace(draft, options={"assets/sold.html": {"series": []}})
    async with Renderer(RenderConfig()) as renderer:
      return [
        score_page(BRIEF, _STILL, await renderer.measure(one), one.options, one.media)
        for one in (bad, blank)
      ]

  bad, blank = asyncio.run(shown())
  assert {"chart_value", "chart_title", "broken"} <= {issue.code for issue in bad.issues}
  assert bad.items == {"assets/hero.png": 0.0, "assets/sold.html": pytest.approx(0.6)}
  assert blank.items["assets/sold.html"] == 0


def _scores(pages, **config):
  """Scores of pages of one draft, by name."""

  async def shown():
    draft = await make_draft(BRIEF, _STILL, built_in(), ExecuteConfig(), 0)
    found = {}
    async with Renderer(RenderConfig(browser=BrowserConfig(**config))) as renderer:
      for name, page in pages.items():
        one = draft.with_page(page)
        facts = await renderer.measure(one)
        found[name] = score_page(BRIEF, _STILL, facts, one.options, one.media)
    return found

  return asyncio.run(shown())


def _styled(css):
  return build_page(_STILL).replace("</style>", f"{css}</style>")


_COVER = "content:'';inset:0;background:#fff;z-index:9;pointer-events:none!important"
_HIDDEN = {
  "no box": "figure{display:none}",
  "faded": "figure{opacity:0}",
  "filtered": "figure{filter:opacity(0)}",
  "cut off": "figure{width:0;height:0;overflow:hidden}",
  "clipped": "figure{clip-path:inset(100%)}",
  "outside": "figure{position:absolute;left:-9999px}",
  "covered": "figure{position:relative}figure::after{position:absolute;" + _COVER + "}",
}


@needs_chromium
def test_what_cannot_be_seen_is_not_shown():
  veil = "figure{position:relative}figure::after{content:'';position:absolute;inset:0;"
  honest = {
    "veiled": _styled(veil + "background:rgba(0,0,0,.3)}"),
    "not clickable": _styled("*{pointer-events:none!important}"),
  }
  found = _scores(honest | {name: _styled(css) for name, css in _HIDDEN.items()})
  for name in honest:
    assert set(found.pop(name).items.values()) == {1.0}, name
  for name, scores in found.items():
    assert set(scores.items.values()) == {0.0}, (name, scores.items)
    assert sum(issue.code == "missing" for issue in scores.issues) == 2, name


@needs_chromium
@pytest.mark.parametrize(
  "css, code",
  [
    ("h2{position:absolute;left:-9999px}", "texts"),
    ("h2{clip-path:inset(100%)}", "texts"),
    ("main{opacity:0}", "texts"),
    ("body::before{position:fixed;" + _COVER + "}", "blank"),
  ],
)
def test_texts_that_cannot_be_seen_are_missing(css, code):
  scores = _scores({"page": _styled(css)})["page"]
  assert code in {issue.code for issue in scores.issues}, scores.issues


@needs_chromium
def test_a_text_is_read_in_its_order_and_to_its_end():
  page = build_page(_STILL)
  heading = "<h2>Sales this year</h2>"
  assert heading in page
  pages = {
    "coloured": page.replace(heading, "<h2><span>Sales</span> this year</h2>"),
    "late": page.replace(heading, f"<h2>Numbers</h2><p>{60 * 'Words. '}Sales this year</p>"),
    "apart": page.replace(heading, "<h2>Sales<br>this year</h2>"),
    "other": page.replace(heading, "<h2>Numbers</h2>"),
  }
  codes = {name: {i.code for i in s.issues} for name, s in _scores(pages).items()}
  assert "texts" in codes.pop("other")
  assert not any("texts" in found for found in codes.values()), codes


@needs_chromium
def test_what_loads_late_is_waited_for():
  page = build_page(_STILL).replace("<main>", "<main><div style='height:5000px'></div>")
  for tag in ("img", "iframe"):
    page = page.replace(f"<{tag} ", f"<{tag} loading=lazy ")
  scores = _scores({"page": page})["page"]
  assert set(scores.items.values()) == {1.0}, scores.issues


@needs_chromium
def test_a_frame_that_shows_something_else_shows_no_chart():
  page = build_page(_STILL).replace("<iframe ", "<iframe srcdoc='<p>Sold</p>' ")
  assert _scores({"page": page})["page"].items["assets/sold.html"] == 0


@needs_chromium
def test_an_address_that_is_none_is_an_unplanned_picture():
  page = build_page(_STILL).replace("<main>", "<main><img src='http://['>")
  assert "extra" in {issue.code for issue in _scores({"page": page})["page"].issues}


def _hostile(port, secret):
  """A page that tries every way out that we know."""
  home = f"http://127.0.0.1:{port}"
  return f"""<!doctype html><html><head><title>x</title>
<link rel=preconnect href="{home}/"><link rel=dns-prefetch href="//leak.example">
<link rel=preload as=image href="{home}/preload"><link rel=prefetch href="{home}/prefetch">
<link rel=stylesheet href="{home}/style.css"><base href="{home}/base/">
<meta http-equiv=refresh content="1;url={home}/refresh">
<style>@import "{home}/import"; body{{background:url({home}/background)}}
@font-face{{font-family:f;src:url({home}/font)}} p{{font-family:f}}</style></head>
<body onload="document.title='ran'">
<p>Words.</p><script>document.title='ran'; fetch('{home}/fetch');
document.body.append('SCRIPT RAN'); new WebSocket('ws://127.0.0.1:{port}/');
new RTCPeerConnection()</script><script src="{home}/script.js"></script>
<img src="{home}/image"><img src="file://{secret}"><img src=x onerror="document.body.append('RAN')">
<iframe src="file://{secret}"></iframe><iframe src="{home}/frame"></iframe>
<iframe src="javascript:parent.document.body.append('RAN')"></iframe>
<iframe srcdoc="<script>parent.document.body.append('RAN')</script>"></iframe>
<iframe src="data:text/html,<img src={home}/data>"></iframe>
<object data="file://{secret}"></object><embed src="{home}/embed">
<video src="{home}/video" autoplay></video><audio src="file://{secret}" autoplay></audio>
<form action="{home}/form"><input autofocus></form>
<svg><image href="{home}/svg"/><use href="{home}/use#a"/></svg></body></html>"""


@needs_chromium
def test_a_hostile_page_reads_no_file_and_reaches_nobody(tmp_path):
  secret = tmp_path / "secret.txt"
  secret.write_text("TOP SECRET")
  script = pathlib.Path(browsers.__file__).with_name("facts.js").read_text()
  frame_script = "document.documentElement.innerText"
  visits = []

  async def visited(reader, writer):
    visits.append(await reader.read(200))
    writer.close()

  async def shown():
    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    page = _hostile(server.sockets[0].getsockname()[1], secret)
    files = {"index.html": File(page.encode(), "text/html")}
    async with server, Browser(BrowserConfig(timeout=20)) as browser:
      found = await browser.render(files, script, frame_script)
      await asyncio.sleep(1)
      return found

  found = asyncio.run(shown())
  assert visits == []
  text = " ".join(one["text"] for one in found.values["texts"])
  assert "Words." in text and "RAN" not in text and "SECRET" not in text
  assert "SECRET" not in str(found.frames) and len(found.refused) > 0
  assert not any(one["loaded"] for one in found.values["shown"] if one["natural"] != [0, 0])


@needs_chromium
def test_frames_of_charts_run_only_our_scripts(tmp_path):
  drawing = "<script>document.body.dataset.error = 'inline ran'</script>"
  frame = f"<body>{drawing}<script src='lib/ours.js'></script><script src='other.js'></script>"
  files = {
    "index.html": File(b"<iframe src='assets/a.html'></iframe>", "text/html"),
    "assets/a.html": File(frame.replace("'lib", "'../lib").encode(), "text/html", scripts=True),
    "lib/ours.js": File(b"document.body.dataset.ours = 'ran'", "text/javascript"),
    "assets/other.js": File(b"document.body.dataset.error = 'ran'", "text/javascript"),
  }
  script = "({waiting: false, content: [1, 1]})"

  async def shown():
    async with Browser(BrowserConfig()) as browser:
      return await browser.render(files, script, "({...document.body.dataset})", picture=False)

  assert asyncio.run(shown()).frames == {"assets/a.html": {"ours": "ran"}}


@needs_chromium
def test_a_browser_that_dies_and_a_page_that_never_ends_are_errors():
  async def shown():
    errors = []
    async with Browser(BrowserConfig(timeout=3)) as browser:
      files = {"index.html": File(b"<p>Hello</p>", "text/html")}
      for script in ("new Promise(() => {})", "while (true) {}"):
        try:
          await browser.render(files, script, "0")
        except browsers.BrowserError as error:
          errors.append(str(error))
      browser._process.kill()
      await browser._process.wait()
      try:
        await browser.render(files, "0", "0")
      except browsers.BrowserError as error:
        errors.append(str(error))
    return errors

  errors = asyncio.run(shown())
  assert len(errors) == 3 and "3 s" in errors[0] and "ended" in errors[2]


def test_the_files_of_a_draft_are_what_its_page_can_get():
  option = {"series": []}
  draft = Draft(_STILL, "<p>", {"assets/sold.html": option}, {"assets/hero.png": b"x"}, {})
  renderer = object.__new__(Renderer)
  renderer._library = None
  files = renderer.files(draft)
  assert set(files) == {"index.html", "assets/sold.html", "assets/hero.png"}
  assert not any(file.scripts for file in files.values())
  renderer._library = b"echarts"
  files = renderer.files(draft)
  assert {"lib/echarts.min.js", "lib/draw.js"} < set(files)
  assert [path for path, file in files.items() if file.scripts] == ["assets/sold.html"]
