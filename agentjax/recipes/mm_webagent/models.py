"""Models as planner and makers, in our words: what they are asked, and how replies are read.

A request is a person's and may hold anything; so may what a model wrote. Both reach a model between
marks that they cannot contain. Nothing that a model writes is run here: a page gets no scripts, a
chart is an option in JSON, and a picture is opened by Pillow and the browser only.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig, send
from agentjax.adapters.http_client import load_aiohttp
from agentjax.recipes.mm_webagent.brief import Brief
from agentjax.recipes.mm_webagent.draw import image_facts
from agentjax.recipes.mm_webagent.execute import Order
from agentjax.recipes.mm_webagent.issues import Issue
from agentjax.recipes.mm_webagent.plan import (
  ATTRIBUTES,
  CONTEXT,
  SECONDS,
  SIZES,
  Plan,
  PlanError,
  read_plan,
)
from agentjax.rewards.judges import (
  Judge,
  JudgeUnavailableError,
  ask,
  delimit,
  material_notice,
  nonce,
  question_key,
)
from agentjax.trajectory.record import Message

_GENERATOR = "a generator of images"
_MOST_IMAGE_BYTES = 64 * 2**20

PLAN = "You plan web pages."
PAGE = "You write web pages."
CHART = "You draw charts with ECharts."

_ASKED_PLAN = f"""Plan this page. Reply with one JSON object:
{{"code_generation": [{{"prompt": LAYOUT}}],
 "image_generation": [{{"save_path": "assets/NAME.png", "context": CONTEXT, "compiled_attributes": \
{{{", ".join(ATTRIBUTES["image"])}}}, "prompt": TEXT, "size": {" or ".join(SIZES["image"])}}}],
 "video_generation": [{{"save_path": "assets/NAME.mp4", "context": CONTEXT, "compiled_attributes": \
{{{", ".join(ATTRIBUTES["video"])}}}, "prompt": TEXT, "seconds": {" or ".join(SECONDS)}, "size": \
{" or ".join(SIZES["video"])}}}],
 "data_visualization": [{{"save_path": "assets/NAME.html", "context": CONTEXT, \
"compiled_attributes": {{{", ".join(ATTRIBUTES["chart"])}}}, "prompt": TEXT, "source_data": \
"the whole data as a Markdown table"}}]}}
CONTEXT is an object with {", ".join(CONTEXT)}; every value is a text. LAYOUT describes all
sections, texts, fonts and colours, and names each asset where it stands, with its size on the page,
in the form (path: assets/NAME.png, width: 600px, height: 400px). Save exactly the assets that it
names. Lists may be empty."""
_ASKED_PAGE = """Write the page as one HTML document with its styles. Use the assets by exactly
these paths: images as <img>, clips as <video autoplay muted loop>, charts as <iframe>. Scripts and
addresses of other hosts do not work. Reply with the HTML alone."""
_ASKED_CHART = """Reply with the option of ECharts for this chart: one JSON object, no functions.
All values of the data must be in it. Ground transparent; give it a title, and a legend for several
series."""


async def ask_plan(judge: Judge, brief: Brief, *, attempts: int, key: int) -> Plan:
  """A model's plan; it is told the faults of one that cannot be used, and tries again.

  Raises:
    PlanError: the last plan has faults too.
  """
  messages = list(_question(PLAN, {"request": brief.prompt}, _ASKED_PLAN, key))
  for number in range(attempts):
    reply = await ask(judge, messages, key=question_key(key, "plan", number))
    try:
      return read_plan(json_object(reply))
    except PlanError as error:
      if number + 1 == attempts:
        raise
      told = "This plan cannot be used. Write it again whole.\n" + "\n".join(error.faults[:40])
      messages = [*messages[:2], Message("assistant", reply), Message("user", told)]
  raise AssertionError("attempts is at least 1")


class ModelPage:
  """A maker of pages that asks a model."""

  def __init__(self, judge: Judge):
    self._judge = judge

  async def __call__(self, order: Order) -> str:
    material = {"layout": order.plan.layout} | _before(order, str(order.before or ""))
    page = html_of(await self._ask(material, order))
    if "<" not in page:
      raise ValueError(f"the reply has no HTML: {page[:100]!r}")
    return page

  async def _ask(self, material: Mapping[str, str], order: Order) -> str:
    messages = _question(PAGE, material, _ASKED_PAGE, order.key)
    return await ask(self._judge, messages, key=order.key)


class ModelChart:
  """A maker of charts that asks a model for an option."""

  def __init__(self, judge: Judge):
    self._judge = judge

  async def __call__(self, order: Order) -> Mapping[str, Any]:
    asset = order.item
    wanted = {**asset.context, **asset.attributes, "prompt": asset.prompt}
    before = "" if order.before is None else json.dumps(order.before)
    material = {"chart": json.dumps(wanted), "data": asset.source_data} | _before(order, before)
    messages = _question(CHART, material, _ASKED_CHART, order.key)
    option = json_object(await ask(self._judge, messages, key=order.key))
    if not isinstance(option, dict) or "series" not in option:
      raise ValueError("the reply has no option with series")
    return option


class HttpImages:
  """A maker of images behind ``POST base_url/images/generations`` of the OpenAI protocol.

  The prompt is the asset's, after what its context and attributes say; a second try is also told
  the issues. Needs the extra [web].
  """

  def __init__(self, config: EndpointConfig):
    config.validate("images")
    load_aiohttp(_GENERATOR)
    self._config = config

  async def __call__(self, order: Order) -> bytes:
    asset = order.item
    assert asset.size is not None
    body = {"prompt": image_prompt(order), "size": "{}x{}".format(*asset.size), "n": 1}
    url, status, data = await send(
      self._config, "images/generations", body, _GENERATOR, _MOST_IMAGE_BYTES
    )
    if status != 200:
      raise JudgeUnavailableError(f"{url} answered {status}: {data[:200].decode(errors='replace')}")
    return read_picture(data, url)


def read_picture(data: bytes, url: str) -> bytes:
  """The picture of a generator's answer.

  Raises:
    ValueError: there is none.
  """
  try:
    content = base64.b64decode(json.loads(data)["data"][0]["b64_json"], validate=True)
  except (ValueError, KeyError, IndexError, TypeError, binascii.Error) as error:
    raise ValueError(f"{url} gave no picture in data[0].b64_json") from error
  if (found := image_facts(content)).error:
    raise ValueError(f"{url}: {found.error}")
  return content


def image_prompt(order: Order) -> str:
  """What a generator is asked to draw."""
  asset = order.item
  about = ", ".join(f"{n.replace('_', ' ')}: {t}" for n, t in asset.attributes.items())
  place = f"For the section {asset.section} of a page in the style {asset.context['page_style']}"
  mend = [issue.detail for issue in order.issues if not issue.embedding]
  told = f" Avoid: {'; '.join(mend)}." if mend else ""
  return f"{asset.prompt}\n{place}, as {asset.context['role']}. {about}.{told}"


def json_object(reply: str) -> Any:
  """The JSON object of a reply that may stand in a fence; None if there is none."""
  start, end = reply.find("{"), reply.rfind("}")
  try:
    return json.loads(reply[start : end + 1]) if start >= 0 else None
  except (ValueError, RecursionError):
    return None


def html_of(reply: str) -> str:
  """The document of a reply that may stand in a fence."""
  fenced = re.search(r"```(?:html)?\s*\n(.*?)(?:```|\Z)", reply, re.S)
  return (fenced[1] if fenced else reply).strip()


def told_issues(issues: Sequence[Issue]) -> str:
  """Issues as a model reads them, the dearest first."""
  order = sorted(issues, key=lambda issue: -issue.penalty)
  return "\n".join(f"- {i.aspect}, {i.code}: {i.detail}" for i in order[:40])


def _before(order: Order, made: str) -> dict[str, str]:
  """What was made before and what is wrong with it."""
  if not order.issues:
    return {}
  return {"present": made, "issues": told_issues(order.issues)}


def _question(who: str, material: Mapping[str, str], asked: str, key: int) -> tuple[Message, ...]:
  mark = nonce(key, *material.values())
  shown = "\n\n".join(delimit(name, text, mark) for name, text in material.items())
  mend = " Mend the issues of what is there; keep what is good." if "issues" in material else ""
  return (
    Message("system", f"{who} {material_notice(mark)}"),
    Message("user", f"{shown}\n\n{asked}{mend}"),
  )
