"""Judges behind an endpoint: what is asked, how it fails, and reward parts made of them."""

import base64
import dataclasses
import struct

import pytest

from agentjax.adapters.chat_endpoint.judge import (
  HttpJudge,
  HttpJudgeConfig,
  JudgeRefusedError,
  bounded_log_probs,
)
from agentjax.config import ConfigError
from agentjax.faults import Boundary, fault_of
from agentjax.recipes.genrm.cohort import GenRMConfig
from agentjax.recipes.rational_rewards import RationalRewardsConfig
from agentjax.recipes.rational_rewards.scorer import CritiqueScorer
from agentjax.recipes.rubrics.rubric import RubricConfig
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.judges import (
  JudgeUnavailableError,
)
from agentjax.trajectory.artifacts import ArtifactStore
from agentjax.trajectory.messages import describe_image
from agentjax.trajectory.record import Message
from tests.rewards.judging import episode, run, task

PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 7, 5)  # as much as is read of it


def test_a_letter_that_was_not_told_gives_a_finite_margin():
  told = {"A": -0.1, "the": -2.0, "a": -9.0}
  assert bounded_log_probs(told, ("A", "B")) == [-0.1, -9.0]
  with pytest.raises(JudgeRefusedError, match="none of"):
    bounded_log_probs(told, ("X", "B"))


async def _with_server(handle, use):
  from aiohttp import web

  async def receive(request):
    body, status = handle(await request.json(), request.headers)
    if isinstance(body, str):
      return web.Response(text=body, status=status)
    return web.json_response(body, status=status)

  app = web.Application()
  app.router.add_post("/v1/chat/completions", receive)
  runner = web.AppRunner(app)
  await runner.setup()
  site = web.TCPSite(runner, "127.0.0.1", 0)
  await site.start()
  port = site._server.sockets[0].getsockname()[1]
  try:
    return await use(f"http://127.0.0.1:{port}/v1")
  finally:
    await runner.cleanup()


def test_a_judge_behind_an_endpoint_is_asked_as_configured(monkeypatch):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  monkeypatch.setenv("JUDGE_KEY", "secret")
  seen = []

  def handle(body, headers):
    seen.append((body, headers.get("Authorization")))
    top = [{"token": " B", "logprob": -0.5}, {"token": "A", "logprob": -1.5}]
    logprobs = {"content": [{"top_logprobs": top}]}
    return {"choices": [{"message": {"content": "fine"}, "logprobs": logprobs}]}, 200

  async def use(url):
    judge = HttpJudge(
      HttpJudgeConfig(url, "tiny", api_key_variable="JUDGE_KEY", temperature=0.6, top_p=0.95)
    )
    messages = (Message("user", "?"),)
    return await judge.reply(messages, key=9), await judge.log_probs(messages, "It is ", "AB")

  assert run(_with_server(handle, use)) == ("fine", [-1.5, -0.5])
  (body, key), (begun, _) = seen
  assert key == "Bearer secret"
  assert (body["model"], body["temperature"], body["top_p"], body["seed"]) == ("tiny", 0.6, 0.95, 9)
  assert begun["messages"][-1] == {"role": "assistant", "content": "It is "}
  assert begun["top_logprobs"] == 20 and begun["continue_final_message"]


@pytest.mark.parametrize(
  ("status", "error"),
  [(500, JudgeUnavailableError), (429, JudgeUnavailableError), (404, JudgeRefusedError)],
)
def test_faults_of_an_endpoint_are_told_from_refusals(status, error):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  async def use(url):
    with pytest.raises(error, match=str(status)):
      await HttpJudge(HttpJudgeConfig(url, "tiny")).reply((Message("user", "?"),), key=0)

  run(_with_server(lambda body, headers: ({"error": "no"}, status), use))


@pytest.mark.parametrize(
  ("body", "error"),
  [
    ("<html>busy</html>", JudgeUnavailableError),
    ("", JudgeUnavailableError),
    ([], JudgeRefusedError),
    ({"choices": "none"}, JudgeRefusedError),
    ({"choices": [{"text": "x"}]}, JudgeRefusedError),
    ({"choices": [{"message": None}]}, JudgeRefusedError),
    ({"choices": [{"logprobs": {"content": [{"top_logprobs": [{}]}]}}]}, JudgeRefusedError),
  ],
)
def test_garbage_of_an_endpoint_is_no_fault_of_what_is_judged(body, error):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  async def use(url):
    judge = HttpJudge(HttpJudgeConfig(url, "tiny"))
    for call in (
      judge.reply((Message("user", "?"),), key=0),
      judge.log_probs((Message("user", "?"),), "", ("A",)),
    ):
      with pytest.raises(error) as caught:
        await call
      assert fault_of(caught.value, Boundary.VERDICT).masks

  run(_with_server(lambda seen, headers: (body, 200), use))


def test_judged_parts_come_from_settings():
  """A rubric by a panel of two endpoints, and a cohort by a third, over one HTTP server."""
  pytest.importorskip("aiohttp", reason="needs the extra [web]")

  def handle(body, headers):
    said = {
      "kind": '{"present": true}',
      "strict": '{"present": false}',
      "genrm": '{"score_1": 5, "score_2": 1, "ranking": 1}',
    }
    return {"choices": [{"message": {"content": said[body["model"]]}}]}, 200

  async def use(url):
    judges = (HttpJudgeConfig(url, "kind"), HttpJudgeConfig(url, "strict"))
    comparer = HttpJudgeConfig(url, "genrm")
    settings = {
      "rubric": RubricConfig(combine="mean", judges=judges),
      "genrm": GenRMConfig(pairing="all", answer_length=1.0, comparer=comparer),
    }
    config = RewardConfig(parts=("rubric", "genrm"), weights=(1.0, 0.1), settings=settings)
    graph = build_rewards(RewardConfig.from_dict(config.to_dict()))
    members = [episode("short"), episode("rather long", 1)]
    await graph.score_group(members, task(rubric=[{"text": "is right"}]))
    return [t.reward.value for t in members]

  values = run(_with_server(handle, use))
  assert values == pytest.approx([0.5 + 0.1 * 5.5, 0.5 + 0.1 * 0.5])
  with pytest.raises(ConfigError, match="comparer"):
    build_rewards(RewardConfig(parts=("genrm",)))
  with pytest.raises(ConfigError, match=r"judges\[0\].model"):
    RubricConfig(judges=(HttpJudgeConfig("http://x/v1"),)).validate()


def test_the_image_of_a_question_reaches_the_endpoint(tmp_path):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  ArtifactStore(tmp_path).put("screen.png", PICTURE)
  question = (Message.of("user", "Look: ", describe_image(PICTURE), " What is it?"),)
  asked = []

  def handle(body, headers):
    asked.append(body["messages"])
    top = [{"token": "A", "logprob": -0.5}]
    logprobs = {"content": [{"top_logprobs": top}]}
    return {"choices": [{"message": {"content": "fine"}, "logprobs": logprobs}]}, 200

  async def use(url):
    judge = HttpJudge(HttpJudgeConfig(url, "tiny", images=str(tmp_path)))
    await judge.reply(question, key=1)
    await judge.log_probs(question, "It is ", "A")
    scorer = CritiqueScorer(judge, RationalRewardsConfig())
    await scorer(episode("a cat"), dataclasses.replace(task(), prompt=question))

  run(_with_server(handle, use))
  replied, begun, judged = asked
  url = replied[0]["content"][1]["image_url"]["url"]
  head, _, data = url.partition(",")
  assert head == "data:image/png;base64" and base64.b64decode(data) == PICTURE
  assert [p.get("text") for p in replied[0]["content"]] == ["Look: ", None, " What is it?"]
  assert begun[0] == replied[0] and begun[1]["role"] == "assistant"
  text, image = judged[-1]["content"]
  assert "Look: [image 1] What is it?" in text["text"] and image["image_url"]["url"] == url


def test_an_image_that_cannot_be_sent_is_refused_by_the_name_of_the_setting(tmp_path):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  shown = describe_image(PICTURE)
  gone = dataclasses.replace(shown, sha256="../" + shown.sha256)
  ArtifactStore(tmp_path).put("screen.png", PICTURE + b"!")  # another content

  def refusal(images, image):
    config = HttpJudgeConfig("http://127.0.0.1:9/v1", "tiny", images=images)
    with pytest.raises(JudgeRefusedError) as error:
      run(HttpJudge(config).reply((Message.of("user", image),), key=0))
    return str(error.value)

  assert "HttpJudgeConfig.images is None" in refusal(None, shown)
  for image in (shown, gone):
    said = refusal(str(tmp_path), image)
    assert f"HttpJudgeConfig.images={tmp_path} does not hold it" in said and image.sha256 in said


def test_nobody_there_is_unavailable():
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  judge = HttpJudge(HttpJudgeConfig("http://127.0.0.1:9/v1", "tiny", timeout=5.0))
  with pytest.raises(JudgeUnavailableError):
    run(judge.reply((Message("user", "?"),), key=0))


def test_settings_of_an_endpoint_are_checked():
  for changes in ({"base_url": "host:80"}, {"model": ""}, {"timeout": 0.0}, {"top_p": 0.0}):
    values = {"base_url": "http://x/v1", "model": "m", **changes}
    with pytest.raises(ValueError, match=next(iter(changes))):
      HttpJudgeConfig(**values).validate()
  HttpJudgeConfig("http://x/v1", "m").validate()
