"""Many pages in a folder, without a browser."""

import asyncio
import io
import json
import types

import pytest
from PIL import Image

from agentjax.config import ConfigError
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.browser import BrowserError
from agentjax.recipes.mm_webagent.execute import Draft
from agentjax.recipes.mm_webagent.gallery import write_gallery
from agentjax.recipes.mm_webagent.plan import Plan, PlanError
from agentjax.recipes.mm_webagent.reflect import Reflected
from agentjax.recipes.mm_webagent.studio import RESULT, Result, make_all, read_result, write_result
from agentjax.rewards.judges import JudgeUnavailableError
from tests.recipes.mm_webagent.pages import score


def _result(prompt):
  draft = Draft(Plan(f"Page {prompt}", ()), "<p>Words.</p>", {}, {}, {})
  done, picture = Reflected(draft, score(), ()), io.BytesIO()
  Image.new("RGB", (8, 8)).save(picture, "PNG")
  return Result(Brief(prompt), done, done, *[picture.getvalue()] * 2)


def _make(folder, **made):
  """Results and failures of requests by what comes of each: a text, or an error."""

  async def one(brief, key):
    found = made[brief.prompt]
    if isinstance(found, Exception):
      raise found
    return _result(found)

  studio = types.SimpleNamespace(make=one, renderer=types.SimpleNamespace(files=lambda draft: {}))
  return asyncio.run(make_all(studio, {name: Brief(name) for name in made}, folder, 0))


@pytest.mark.parametrize(
  "error",
  [PlanError(("no plan",)), BrowserError("slow"), ValueError("no HTML"), TimeoutError()],
)
def test_a_request_without_a_page_holds_up_no_other(tmp_path, error):
  results, failed = _make(tmp_path, a="a", b=error, c="c")
  assert [result["id"] for result in results] == ["a", "c"] and list(failed) == ["b"]
  again, failed = _make(tmp_path, a=AssertionError("made twice"), b="b", c=AssertionError())
  assert [result["id"] for result in again] == ["a", "b", "c"] and not failed


@pytest.mark.parametrize(
  "error", [ConfigError("no key"), JudgeUnavailableError("away"), ImportError("ffmpeg")]
)
def test_what_no_request_can_help_ends_the_call(tmp_path, error):
  with pytest.raises(type(error)):
    _make(tmp_path, a="a", b=error, c="c")
  assert read_result(tmp_path / "a") and not (tmp_path / "c").exists()


def test_a_text_cut_in_a_character_is_written(tmp_path):
  result, renderer = _result("Tür \ud83d"), types.SimpleNamespace(files=lambda draft: {})
  write_result(result, tmp_path / "a", "a", renderer)
  assert read_result(tmp_path / "a")["request"] == "Tür \ud83d"
  plan = json.loads((tmp_path / "a" / "plan.json").read_text())
  assert plan["code_generation"] == [{"prompt": "Page Tür \ud83d"}]
  assert "Tür ?" in write_gallery(tmp_path, [read_result(tmp_path / "a")]).read_text()
  assert (tmp_path / "a" / RESULT).read_text().isascii()
