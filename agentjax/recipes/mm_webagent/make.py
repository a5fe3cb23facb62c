r"""Makes web pages from requests: plan, assets, page, scores, reflection; and a gallery of them.

  python -m agentjax.recipes.mm_webagent.make --output=runs/pages \
      --prompts=$AGENTJAX_DATA/mm_webagent/evaluation_dataset.jsonl.gz --count=10

Without a model, rules plan, write and draw. A model behind an endpoint plans and writes pages and
charts with ``--model.base_url=http://host:8000/v1 --model.model=NAME``; ``--images.base_url`` and
``--images.model`` name a generator of images, ``--judge.base_url``, ``--judge.model`` and
``--judge.images=FOLDER`` a model that sees pages and grades them beside the measured scores.
``--studio.render.echarts=echarts.min.js`` draws charts by ECharts.

Needs a Chromium (Debian: apt-get install chromium) and, for clips, the extra [pages]. The same
command goes on where it was stopped, and tries requests again of which no page could be made; they
are told, and are in no mean. ``--output`` then holds ``gallery.html`` to look at and a
folder for each page. MM-WebAgent, 2604.15309.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

from absl import flags
from rich.console import Console

from agentjax.adapters.chat_endpoint.endpoint import (
  EndpointConfig,
  endpoint_identity,
)
from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.data.synthesis_folder import claim
from agentjax.recipes.mm_webagent.brief import Brief, read_brief
from agentjax.recipes.mm_webagent.execute import Makers, built_in
from agentjax.recipes.mm_webagent.gallery import GALLERY, means, write_gallery
from agentjax.recipes.mm_webagent.judge import judged
from agentjax.recipes.mm_webagent.models import HttpImages, ModelChart, ModelPage, ask_plan
from agentjax.recipes.mm_webagent.plan import Plan
from agentjax.recipes.mm_webagent.planner import plan_request
from agentjax.recipes.mm_webagent.render import Renderer
from agentjax.recipes.mm_webagent.score import Scores
from agentjax.recipes.mm_webagent.studio import (
  Opinion,
  Studio,
  StudioConfig,
  make_all,
)
from agentjax.training.flags import define_settings_flag, require_paths
from agentjax.training.progress import print_line
from agentjax.trajectory.artifacts import ArtifactStore

_STUDIO = define_settings_flag("studio", StudioConfig(), "How pages are made.")
_MODEL = define_settings_flag(
  "model", HttpJudgeConfig(max_tokens=16_384), "Plans, writes pages and charts."
)
_IMAGES = define_settings_flag("images", EndpointConfig(), "Generates images.")
_JUDGE = define_settings_flag("judge", HttpJudgeConfig(), "Sees pages and grades them.")
_PROMPTS = flags.DEFINE_string("prompts", None, "Requests (.jsonl), each with input and file_id.")
_REQUEST = flags.DEFINE_string("request", None, "One request in words, instead of a file.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_COUNT = flags.DEFINE_integer("count", None, "Requests of the file; all.", lower_bound=1)
_KEY = flags.DEFINE_integer("key", 0, "Addresses all chance.", lower_bound=0)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_OUTPUT)
  if (_PROMPTS.value is None) == (_REQUEST.value is None):
    raise ConfigError("give --prompts=FILE or --request=TEXT, one of the two.")
  config: StudioConfig = _STUDIO.value
  config.validate("studio")
  used = {"model": _MODEL.value, "images": _IMAGES.value, "judge": _JUDGE.value}
  used = {name: endpoint for name, endpoint in used.items() if endpoint.base_url}
  for name, endpoint in used.items():
    endpoint.validate(name)
  if "judge" in used and _JUDGE.value.images is None:
    raise ConfigError("--judge.images=none; allowed: a folder for pictures of pages.")
  requests = _requests()
  made_with = {
    "studio": {k: v for k, v in config.to_dict().items() if k != "execute"},
    "endpoints": {name: endpoint_identity(endpoint) for name, endpoint in used.items()},
    "key": _KEY.value,
  }
  folder = claim(_OUTPUT.value, made_with, (GALLERY,))
  results, failed = asyncio.run(_make_pages(config, requests, folder))
  path = write_gallery(folder, results)
  console = Console()
  for which in ("first", "best"):
    shown = ", ".join(f"{name} {value:.3f}" for name, value in means(results, which).items())
    print_line(console, f"{which}: {shown}")
  print_line(console, f"{len(results)} pages: {path}")
  for name, reason in failed.items():
    print_line(console, f"no page of {name}: {reason}")
  if failed:
    sys.exit(1)


def _requests() -> dict[str, Brief]:
  """Name of its folder -> request."""
  if _REQUEST.value is not None:
    return {"page": read_brief(_REQUEST.value)}
  found: dict[str, Brief] = {}
  path: str = _PROMPTS.value or ""
  for line, row in read_jsonl(path):
    text, name = row.get("input"), str(row.get("file_id", line))
    if not isinstance(text, str) or not text.strip():
      raise DataError("the row has no text 'input'", path, line)
    if not _NAME.fullmatch(name) or name in found:
      raise DataError(f"file_id {name[:80]!r}; allowed: letters and digits, once", path, line)
    found[name] = read_brief(text)
    if len(found) == _COUNT.value:
      break
  return found


async def _make_pages(
  config: StudioConfig, requests: dict[str, Brief], folder: pathlib.Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
  async with _open_studio(config) as studio:
    return await make_all(studio, requests, folder, _KEY.value)


@contextlib.asynccontextmanager
async def _open_studio(config: StudioConfig) -> AsyncIterator[Studio]:
  makers, model = built_in(config.built_in), None
  if _MODEL.value.base_url:
    model = HttpJudge(_MODEL.value)
    makers = Makers(ModelPage(model), ModelChart(model), makers.image, makers.video)
  if _IMAGES.value.base_url:
    makers = Makers(makers.page, makers.chart, HttpImages(_IMAGES.value), makers.video)

  async def plan(brief: Brief, key: int) -> Plan:
    if model is None:
      return plan_request(brief)
    return await ask_plan(model, brief, attempts=config.plan_attempts, key=key)

  async with Renderer(config.render) as renderer:
    yield Studio(plan, makers, renderer, config, _opinion(config.judge_weight))


def _opinion(weight: float) -> Opinion | None:
  endpoint: HttpJudgeConfig = _JUDGE.value
  if not endpoint.base_url or endpoint.images is None:
    return None
  judge, images = HttpJudge(endpoint), ArtifactStore(endpoint.images)

  async def opinion(brief: Brief, scores: Scores, picture: bytes, key: int) -> Scores:
    return await judged(judge, images, brief, scores, picture, weight=weight, key=key)

  return opinion


if __name__ == "__main__":
  main(run, needs_config=False)
