import asyncio
import base64
import json

import pytest

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig
from agentjax.recipes.mm_webagent.execute import Order
from agentjax.recipes.mm_webagent.issues import Issue
from agentjax.recipes.mm_webagent.judge import judged
from agentjax.recipes.mm_webagent.models import (
  HttpImages,
  ModelChart,
  ModelPage,
  ask_plan,
  html_of,
  image_prompt,
  read_picture,
)
from agentjax.recipes.mm_webagent.plan import PlanError
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.trajectory.artifacts import ArtifactStore, read_artifact
from tests.recipes.mm_webagent.pages import BRIEF, OPTIONS, PLAN, plan_values, score

_PNG = base64.b64decode(
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class _Judge:
  """Replies in turn; keeps what it was asked."""

  def __init__(self, *replies):
    self._replies, self.asked = list(replies), []

  async def reply(self, messages, *, key):
    self.asked.append(messages)
    return self._replies.pop(0)


def _plan(*replies, attempts=2):
  judge = _Judge(*replies)
  return judge, asyncio.run(ask_plan(judge, BRIEF, attempts=attempts, key=0))


def test_a_planner_is_told_the_faults_of_its_plan_and_tries_again():
  wrong = plan_values()
  wrong["image_generation"][0]["size"] = "5x5"
  judge, plan = _plan(json.dumps(wrong), f"```json\n{json.dumps(plan_values())}\n```")
  assert plan == PLAN
  assert "size='5x5'" in judge.asked[1][-1].content and judge.asked[1][2].role == "assistant"
  with pytest.raises(PlanError, match="JSON object"):
    _plan("no plan", "none either")


def test_makers_read_what_models_write_and_tell_issues():
  issue = Issue(
    "chart", "chart_value", "Sold, Feb: it shows 3; the table has 20", "assets/sold.html"
  )
  asset, option = PLAN.asset("assets/sold.html"), OPTIONS["assets/sold.html"]
  judge = _Judge(json.dumps(option))
  order = Order(BRIEF, PLAN, 0, asset, (issue,), {"series": [3]})
  assert asyncio.run(ModelChart(judge)(order)) == option
  asked = judge.asked[0][1].content
  assert "it shows 3" in asked and '{"series": [3]}' in asked and "| Feb | 20 |" in asked
  with pytest.raises(ValueError, match="no option"):
    asyncio.run(ModelChart(_Judge("sorry"))(order))
  page = asyncio.run(ModelPage(_Judge("```html\n<h1>Hi</h1>\n```"))(Order(BRIEF, PLAN, 0)))
  assert page == "<h1>Hi</h1>" == html_of("<h1>Hi</h1>")
  with pytest.raises(ValueError, match="no HTML"):
    asyncio.run(ModelPage(_Judge("I will not"))(Order(BRIEF, PLAN, 0)))


def test_a_generator_of_images_is_told_the_plan_and_its_picture_is_opened():
  image = PLAN.asset("assets/hero.png")
  issue = Issue("image", "flat", "it is nearly one colour", image.path)
  prompt = image_prompt(Order(BRIEF, PLAN, 0, image, (issue,)))
  assert "A lake at sunrise" in prompt and "lighting: soft" in prompt and "one colour" in prompt
  good = json.dumps({"data": [{"b64_json": base64.b64encode(_PNG).decode()}]}).encode()
  assert read_picture(good, "url") == _PNG
  for bad in (b"{}", b"no", good.replace(b"iVBOR", b"aaaaa")):
    with pytest.raises(ValueError, match="url"):
      read_picture(bad, "url")


def test_a_generator_behind_an_endpoint_is_asked_for_the_planned_size():
  web = pytest.importorskip("aiohttp.web", reason="needs the extra [web]")
  seen = []

  async def answer(request):
    seen.append(await request.json())
    picture = {"b64_json": base64.b64encode(_PNG).decode()}
    return web.json_response({"data": [picture]}, status=200 if len(seen) == 1 else 503)

  async def ask():
    app = web.Application()
    app.router.add_post("/v1/images/generations", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    images = HttpImages(EndpointConfig(f"http://127.0.0.1:{port}/v1", "painter"))
    order = Order(BRIEF, PLAN, 0, PLAN.asset("assets/hero.png"))
    try:
      assert await images(order) == _PNG
      with pytest.raises(JudgeUnavailableError, match="answered 503"):
        await images(order)
    finally:
      await runner.cleanup()

  asyncio.run(ask())
  assert seen[0]["model"] == "painter" and seen[0]["size"] == "1536x1024"
  assert "A lake at sunrise" in seen[0]["prompt"] and len(seen) == 2


def test_a_judge_sees_the_page_and_its_opinion_is_mixed_in(tmp_path):
  store = ArtifactStore(tmp_path)
  scores = score()
  judge = _Judge('{"layout": 0, "style": 2, "chart": 0.5}')
  found = asyncio.run(judged(judge, store, BRIEF, scores, _PNG, weight=0.5, key=0))
  assert found.aspects["layout"] == 0.5 and found.aspects["chart"] == 0.75
  assert found.aspects["style"] == scores.aspects["style"]  # 2 is no grade
  (image,) = judge.asked[0][1].images
  assert read_artifact(tmp_path, image.sha256) == _PNG
  unread = asyncio.run(judged(_Judge("fine"), store, BRIEF, scores, _PNG, weight=1, key=0))
  assert unread.aspects == scores.aspects
