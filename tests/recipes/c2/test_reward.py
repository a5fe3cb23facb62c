"""C2's two models as a part of the reward: values, failures, models on disk, a run that resumes."""

import dataclasses
import re

import pytest

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig
from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer
from agentjax.adapters.judge_model import JudgeModelConfig
from agentjax.config import ConfigError
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.files import CheckpointError
from agentjax.recipes.c2.reward import (
  BY_RUBRIC,
  C2Cohort,
  C2RewardConfig,
  pairs_of,
  verifier_config,
)
from agentjax.recipes.c2.rubrics import Answers, Preference, prefer
from agentjax.recipes.c2.synthesis import generator_config
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.formula import Formula
from agentjax.rewards.graph import RewardGraph
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Run
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Message, Status
from agentjax.world.environment import Observation, Step
from tests.recipes.c2.scripted_endpoint import Endpoint
from tests.rewards.judging import Scripted, episode, run, task
from tests.text.folders import write_model, write_vocabulary
from tests.training.smoke import quiet
from tests.training.stages import (
  Digits,
  extensions,
  fingerprints,
  staged_experiment,
  train_until_killed,
)

_RUBRIC = "<analyze>hm</analyze>\n1. Safety: Is it kind?"
_QUALITY = {"best": 3, "good": 2, "poor": 1, "": 0, "also poor": 1}


def _shown(messages, name):
  return messages[-1].content.partition(f"<{name} ")[2].partition("\n")[2].split("\n</")[0]


def _asks_for_rubric(messages):
  return "Write a rubric" in messages[-1].content


def _verdict(answer, rubric=None):
  said = f"<rubric>{rubric}</rubric>" if rubric else ""
  return f"<analyze>so</analyze>{said}<answer>{answer}</answer>"


def _judge(word="helpful", choose=None):
  """Prefers the better answer, A where both are as good; calls every rubric ``word``."""

  def better(first, second):
    return "A" if _QUALITY[first] >= _QUALITY[second] else "B"

  def answer(messages, key):
    first, second = (_shown(messages, f"answer_{letter}") for letter in "AB")
    rubric = word if "<rubric " in messages[-1].content else None
    return _verdict((choose or better)(first, second), rubric)

  return Scripted(answer)


def _cohort(judge, generator=None, **settings):
  generator = generator or Scripted(lambda messages, key: _RUBRIC)
  return C2Cohort({"generator": generator, "judge": judge}, C2RewardConfig(**settings))


def _members(*answers):
  return [episode(answer, sample=i) for i, answer in enumerate(answers)]


def _values(cohort, *answers, **about):
  return [reward.value for reward in run(cohort(_members(*answers), task(**about)))]


def test_who_is_compared_with_whom():
  assert pairs_of([0, 2, 3, 5], "next") == [(0, 2), (0, 5), (2, 3), (3, 5)]
  assert pairs_of([0, 1], "next") == pairs_of([0, 1], "all") == [(0, 1)]
  assert len(pairs_of([0, 1, 2, 3], "all")) == 6
  assert pairs_of([1], "next") == pairs_of([], "reference") == []
  assert pairs_of([1, 4], "reference") == [(1, -1), (4, -1)]


def test_the_reward_is_the_share_of_won_comparisons():
  assert _values(_cohort(_judge(), against="all"), "poor", "best", "good") == [0.0, 1.0, 0.5]
  # In a circle of four: poor loses to best and good, best wins over both of its neighbours.
  circle = ("poor", "best", "also poor", "good")
  assert _values(_cohort(_judge()), *circle) == [0.0, 1.0, 0.0, 1.0]


def test_the_order_of_a_pair_does_not_matter():
  judge = _judge()
  assert _values(_cohort(judge), "poor", "good") == [0.0, 1.0]
  assert _values(_cohort(judge), "good", "poor") == [1.0, 0.0]
  assert _values(_cohort(judge), "poor", "also poor") == [0.5, 0.5]  # A both times
  always_first = _judge(choose=lambda first, second: "A")
  assert _values(_cohort(always_first, against="all"), "poor", "best", "good") == [0.5] * 3
  drawn = _cohort(always_first, orders="drawn", against="all")
  assert sorted(_values(drawn, "poor", "best")) == [0.0, 1.0]


def test_a_rubric_that_the_judge_calls_misleading_is_not_judged_by():
  trusting = _judge("helpful", lambda first, second: "A")
  doubting = _judge("misleading", lambda first, second: "A")

  def verdict(judge, generator=None):
    pair = Answers(7, (Message("user", "q"),), "good", "poor")
    generator = generator or Scripted(lambda messages, key: _RUBRIC)
    return run(prefer(pair, generator, judge)), len(judge.asked)

  assert verdict(trusting) == (Preference("A", by_rubric=True), 1)
  assert verdict(doubting) == (Preference("A", by_rubric=False), 2)
  assert "<rubric " in doubting.asked[0][0][-1].content
  assert "<rubric " not in doubting.asked[1][0][-1].content

  # A verdict by a rubric that cannot be read is none either, and so is a rubric.
  def mumbles(messages, key):
    return "hm" if "<rubric " in messages[-1].content else _verdict("B")

  assert verdict(Scripted(mumbles)) == (Preference("B", by_rubric=False), 2)
  silent = Scripted(lambda messages, key: "no rubric")
  assert verdict(_judge(), silent) == (Preference("A", by_rubric=False), 1)


def test_a_rubric_that_cannot_be_read_is_sampled_again_with_another_key():
  generator = Scripted(lambda m, key: _RUBRIC if len(generator.asked) % 3 == 0 else "hm")
  members = _members("poor", "good")
  run(_cohort(_judge(), generator, orders="drawn", rounds=3)(members, task()))
  assert len({key for _, key in generator.asked}) == 3
  assert members[0].reward_parts[BY_RUBRIC].value == 1.0
  run(_cohort(_judge(), generator, orders="drawn", rounds=2)(members, task()))
  assert members[0].reward_parts[BY_RUBRIC].value == 0.0


def test_no_answer_is_worth_nothing_and_nobody_is_asked():
  judge = _judge()
  assert _values(_cohort(judge), "good", None) == [0.5, 0.0]
  assert not judge.asked
  lost = [episode("good"), episode("best", sample=1, status=Status.POLICY_ERROR)]
  assert [r.value for r in run(_cohort(judge)(lost, task()))] == [0.5, 0.0]


def test_answers_are_compared_with_that_of_the_task():
  cohort = _cohort(_judge(), against="reference")
  assert _values(cohort, "best", answer="good") == [1.0]
  assert _values(cohort, "best", "poor", answer="good") == [1.0, 0.0]
  assert _values(cohort, "good", answer="3", reference="good") == [0.5]
  with pytest.raises(LookupError, match="task 3 of 'made' has no metadata"):
    run(cohort(_members("best"), task()))


def _graded(judge, *answers, generator=None):
  members = _members(*answers)
  graph = RewardGraph({}, Formula("c2"), {"c2": _cohort(judge, generator)})
  run(graph.score_group(members, task()))
  return members


@pytest.fixture
def at_once(monkeypatch):
  async def sleep(seconds):
    pass

  monkeypatch.setattr("agentjax.rewards.judges.asyncio.sleep", sleep)


@pytest.mark.parametrize("fails", ["judge", "generator"])
def test_a_model_that_stays_away_gives_no_verdict(at_once, fails):
  gone = Scripted(lambda messages, key: JudgeUnavailableError("down"))
  members = _graded(
    gone if fails == "judge" else _judge(),
    "poor",
    "good",
    generator=gone if fails == "generator" else None,
  )
  assert [m.reward.value for m in members] == [None, None]
  assert {m.status for m in members} == {Status.VERIFIER_ERROR}


def test_a_comparison_that_fails_leaves_those_that_do_not(at_once):
  def answer(messages, key):
    texts = {_shown(messages, f"answer_{letter}") for letter in "AB"}
    if texts == {"good", "best"}:
      return JudgeUnavailableError("down")
    return _judge().answer(messages, key)

  members = _graded(Scripted(answer), "poor", "good", "best")
  assert [m.reward.value for m in members] == [0.0, 1.0, 1.0]


def test_a_judge_that_nobody_can_read_masks_the_group():
  members = _graded(Scripted(lambda messages, key: "no verdict"), "poor", "good")
  assert [m.reward.value for m in members] == [None, None]


def test_an_answer_that_no_judge_can_read_is_worth_nothing_and_the_rest_is_judged():
  def answer(messages, key):
    texts = [_shown(messages, f"answer_{letter}") for letter in "AB"]
    return "hm" if "breaks" in texts else _judge().answer(messages, key)

  members = _graded(Scripted(answer), "poor", "breaks", "good")
  assert [m.reward.value for m in members] == [0.5, 0.0, 1.0]
  assert members[1].status is Status.OK


def test_the_same_group_is_asked_about_in_the_same_words():
  judge = _judge()
  for _ in range(2):
    run(_cohort(judge)(_members("poor", "good"), task()))
  half = len(judge.asked) // 2
  assert judge.asked[:half] == judge.asked[half:] and half == 2
  assert len({key for _, key in judge.asked}) == 2


def test_settings_are_checked(tmp_path):
  with pytest.raises(ConfigError, match=r"reward\.generator\.path=''"):
    C2RewardConfig().validate("reward")
  on_disk = JudgeModelConfig(str(tmp_path / "none"))
  config = C2RewardConfig(generator=on_disk, judge=on_disk)
  with pytest.raises(CheckpointError, match="none"):
    build_rewards(RewardConfig(parts=("c2",), settings={"c2": config}))
  config.engine = dataclasses.replace(config.engine, lanes=2)
  with pytest.raises(ConfigError, match="one device and one lane"):
    build_rewards(RewardConfig(parts=("c2",), settings={"c2": config}))


def test_models_on_disk_are_served_beside_the_run(tmp_path):
  """A model that always says the same, which is no rubric: every pair is judged without one."""
  folder, said = tmp_path / "qwen3", _verdict("A")
  write_vocabulary(folder, corpus=(said,), vocab_size=400, split=False)
  tokenizer = HuggingFaceTokenizer(folder)
  (one,), start = tokenizer.encode(said), tokenizer.encode("\n\n")[-1]
  write_model(folder, tokenizer, [(start, one), (one, tokenizer.controls["<|im_end|>"])])
  model = JudgeModelConfig(str(folder), SamplingConfig(temperature=0.0), 4)
  engine = EngineConfig(
    slots=4, max_length=2048, chunk_tokens=4, extend_buckets=(256,), extend_rows=(4,), warmup=False
  )
  for orders, values in (("both", [0.5, 0.5]), ("drawn", [0.0, 1.0])):
    config = C2RewardConfig(orders=orders, rounds=1, generator=model, judge=model, engine=engine)
    graph = build_rewards(RewardConfig(parts=("c2",), settings={"c2": config}))
    members = _members("poor", "good")
    run(graph.score_group(members, task()))
    assert sorted(m.reward.value for m in members) == values
    assert members[0].reward_parts[BY_RUBRIC].value == 0.0
    run(graph.close())


class _Verdicts(Endpoint):
  """Judges by the number of even letters, with rubrics that it calls helpful or misleading."""

  def answer(self, body):
    asked = body["messages"][1]["content"]
    if "Write a rubric" in asked:
      return super().answer(body)
    texts = [_shown([Message("user", asked)], f"answer_{letter}") for letter in "AB"]
    even = [sum(ord(c) % 2 == 0 for c in text) for text in texts]
    named = re.search(r"Is it (\w+)\?", asked)
    word = None if named is None else "helpful" if named[1] == "kind" else "misleading"
    text = _verdict("A" if even[0] >= even[1] else "B", word)
    return {"choices": [{"message": {"content": text}}]}


class _Says(Digits):
  """One turn, whose text is the answer."""

  async def step(self, action):
    return Step(Observation(()), terminated=True, answer=action.text)


@pytest.mark.slow
def test_a_run_learns_from_an_endpoint_and_resumes_without_asking_again(tmp_path):
  pytest.importorskip("aiohttp", reason="needs the extra [web]")
  endpoint = _Verdicts()
  service = EndpointConfig(endpoint.url, "c2")
  config = C2RewardConfig(
    generator=dataclasses.replace(generator_config(), http=service),
    judge=dataclasses.replace(verifier_config(), http=service),
  )

  def made(name):
    experiment = staged_experiment(ScheduleConfig())
    experiment.rl.steps = 3
    experiment.reward = RewardConfig(parts=("c2",), settings={"c2": config})
    return Run(experiment, tmp_path / name, extensions=extensions(_Says), console=quiet())

  try:
    assert made("whole").train().finished
    asked = len(endpoint.seen)
    assert asked > 3 * 2 * 2 * 2  # steps, groups, orders, models
    train_until_killed(made("cut"), 2)
    assert made("cut").train().finished
    assert len(endpoint.seen) == 2 * asked  # recorded rewards are not asked for again
    assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert 0 < max(row.get(f"reward/part_{BY_RUBRIC}", 0.0) for row in rows) < 1
    assert all(0 < row["reward/mean"] <= 0.5 for row in rows)  # no answer is worth 0
  finally:
    endpoint.close()
