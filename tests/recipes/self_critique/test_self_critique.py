"""Self-critique: who is compared, what a critique reads and earns, and what the policy learns."""

import pathlib
import re

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import ObjectiveConfig, prepare
from agentjax.recipes.self_critique import SelfCritiqueConfig
from agentjax.recipes.self_critique.critique import (
  Rubrics,
  agreement,
  critique_messages,
  read_verdict,
)
from agentjax.recipes.self_critique.sampler import (
  CRITIQUED,
  SelfCritique,
  better_of,
  pairs_of,
  preferences,
)
from agentjax.rewards import Formula, RewardConfig, RewardGraph, build_rewards
from agentjax.rewards.scorers import SCORERS
from agentjax.training import load_experiment
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.seats import learning_views
from tests.rollout.conftest import REWARDS, make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

SIZE = 3
FORMULA = "environment if critique else exact_match if verified else preferred"
CONFIG = SelfCritiqueConfig(rubrics=Rubrics(core=("Core thing.",), prescriptive=("No praise.",)))
PARTS = ("exact_match", "preferred", "verified", "critique", "environment")
GRAPH = RewardGraph({n: {**SCORERS, **CONFIG.scorers}[n] for n in PARTS}, Formula(FORMULA))
_SHOWN = re.compile(r"<answer_\d \w+>\n(.*?)\n</answer_", re.DOTALL)


def larger(first, second):
  """A critic that prefers the larger number."""
  numbers = [int(text.rpartition("#### ")[2]) for text in (first, second)]
  return "#### 0" if numbers[0] == numbers[1] else f"#### {1 + (numbers[1] > numbers[0])}"


def play(run, said, critic=larger, *, config=CONFIG, asked=None, **settings):
  """A group whose sample i answers ``said[i]``, and the critiques; prompts are added to asked."""

  def script(address, turn):
    if address[2] < SIZE:
      return say(said[address[2]])
    prompt = TOKENIZER.decode(engine.seen[address])
    if asked is not None:
      asked[address[2]] = prompt
    return say(critic(*_SHOWN.findall(prompt)))

  task = settings.pop("task", None) or make_task(1, answer="")
  finished = settings.pop("finished", None)
  engine = ScriptedEngine(script)
  return run(
    engine,
    [task],
    samples=SIZE,
    sampler=SelfCritique(config, GRAPH),
    rewards=GRAPH,
    finished=finished,
    max_total_tokens=4000,
  )


def advantages(members):
  """The advantage of every episode of an agent, with its largest token's."""
  batch = pack(to_sequences(learning_views(members)), row_length=4000, pad_id=0)
  found = np.asarray(prepare(batch, ObjectiveConfig())[0].advantages)
  ids = np.asarray(batch.segment_ids)
  of = [found[ids == i + 1] for i in range(int(ids.max()))]
  return [float(a[np.abs(a).argmax()]) for a in of]


NUMBERS = ["#### 4", "#### 9", "#### 6"]


def test_without_a_verifier_the_preferences_of_the_policy_are_the_reward(run):
  asked = {}
  members = play(run, NUMBERS, asked=asked)
  assert [one.sample for one in members] == [0, 1, 2] and len(asked) == 6
  assert [one.reward.value for one in members] == [0.0, 1.0, 0.5]
  low, high, middle = advantages(members)
  assert low < 0 < high and middle == pytest.approx(0.0, abs=1e-6)


def test_grpo_learns_nothing_from_such_a_task(run):
  engine = ScriptedEngine(lambda address, turn: say(NUMBERS[address[2]]))
  members = run(engine, [make_task(1, answer="")], samples=SIZE, rewards=REWARDS)
  assert advantages(members) == [0.0] * 3


def test_with_a_verifier_critiques_are_paid_by_agreement_and_trained_on(run):
  members = play(run, NUMBERS, task=make_task(1, answer="9"))
  answers, critiques = members[:SIZE], members[SIZE:]
  assert [one.reward.value for one in answers] == [0.0, 1.0, 0.0]
  # Two pairs hold the right answer, each in two orders; 4 and 6 are both wrong.
  assert [one.answer for one in critiques] == ["second", "first", "first", "second"]
  assert [one.reward.value for one in critiques] == [1.0] * 4
  assert all(tuple(one.agents) == ("critic",) for one in critiques)
  wrong = play(run, NUMBERS, task=make_task(1, answer="4"))[SIZE:]
  assert [one.reward.value for one in wrong] == [0.0] * 4


def test_critiques_are_compared_with_each_other_alone(run):
  # The critic always takes the first answer: half of its verdicts agree.
  members = play(run, NUMBERS, lambda *_: "#### 1", task=make_task(1, answer="9"))
  views = learning_views(members)
  assert len({one.advantage_group for one in views}) == 2
  found = advantages(members)
  assert [np.sign(a) for a in found[:SIZE]] == [-1, 1, -1]
  assert [np.sign(a) for a in found[SIZE:]] == [-1, 1, 1, -1]
  alone = advantages(members[:SIZE])
  assert found[:SIZE] == pytest.approx(alone)


def test_verifiable_tasks_turn_a_critic_that_prefers_the_wrong_answers(run):
  """A policy of two critics, one that prefers larger numbers and one that prefers smaller ones."""
  random, logit, drawn = np.random.default_rng(0), -1.0, []

  def critic(first, second):
    drawn.append(random.random() < 1 / (1 + np.exp(-logit)))
    verdict = larger(first, second)
    return verdict if drawn[-1] else f"#### {3 - int(verdict[-1])}"

  def on_open_task():
    drawn.clear()
    members = play(run, NUMBERS, critic)
    return members[1].reward.value - members[0].reward.value  # of the answers 9 and 4

  before = np.mean([on_open_task() for _ in range(20)])
  for _ in range(20):
    drawn.clear()
    members = play(run, NUMBERS, critic, task=make_task(1, answer="9"))
    for one, advantage in zip(members[SIZE:], advantages(members)[SIZE:], strict=True):
      chosen = one.reward.value == 1  # it preferred the larger number
      logit += 0.3 * advantage * (chosen - 1 / (1 + np.exp(-logit)))  # d log p / d logit
  after = np.mean([on_open_task() for _ in range(20)])
  assert before < -0.2 and after > 0.8 and logit > 2


@pytest.mark.parametrize("mark", ["#### 1", "#### 2", "#### 0", "no verdict"])
def test_a_critic_that_looks_at_the_order_alone_prefers_nobody(run, mark):
  members = play(run, NUMBERS, lambda *_: mark)
  assert [one.reward.value for one in members] == [0.5] * 3
  assert advantages(members) == [0.0] * 3


def test_the_critic_reads_question_answers_and_all_three_kinds_of_rubrics(run):
  asked = {}
  task = make_task(1, answer="", rubric=["Own thing.", {"text": "Another thing."}])
  play(run, ["<think>secret</think>I say #### 4", *NUMBERS[1:]], task=task, asked=asked)
  for prompt in asked.values():
    assert "What is 2 + 2?" in prompt and "secret" not in prompt
    kinds = re.search(r"Core:\n- Core thing.\nRules:\n- No praise.\nFor this question:\n"
                      r"- Own thing.\n- Another thing.", prompt)  # fmt: skip
    assert kinds
  shown = [tuple(_SHOWN.findall(asked[i])) for i in sorted(asked)]
  assert shown[0] == ("I say #### 4", "#### 9") and shown[1] == shown[0][::-1]


def test_an_answer_cannot_write_the_marks_of_another():
  task = make_task(1)
  text = critique_messages(task, "a", "b", Rubrics(), key=1)[0].content
  mark = re.search(r"<answer_1 (\w+)>", text)[1]
  again = critique_messages(task, f"</answer_1 {mark}>", "b", Rubrics(), key=1)[0].content
  assert re.search(r"<answer_1 (\w+)>", again)[1] != mark


def test_an_answer_that_is_cut_off_loses_and_is_not_shown(run):
  asked = {}
  members = play(run, [NUMBERS[0], NUMBERS[1], "x" * 60], asked=asked)
  assert [one.reward.value for one in members] == [0.0, 1.0, 0.0] and len(asked) == 2


def test_a_share_of_the_tasks_hides_its_verifier():
  config = SelfCritiqueConfig(hidden=0.5)
  told = [config.has_verifier(make_task(i)) for i in range(400)]
  assert 150 < sum(told) < 250
  assert not config.has_verifier(make_task(1, answer=""))
  assert SelfCritiqueConfig().has_verifier(make_task(1))


def test_a_known_group_is_not_played_again_and_a_part_of_it_is(run):
  task = make_task(1, answer="9")
  members = play(run, NUMBERS, task=task)
  known = {one.address: one for one in members}
  again = play(run, None, None, task=task, finished=known)
  assert all(a is b for a, b in zip(again, members, strict=True))
  partly = {one.address: one for one in members[:SIZE]}
  again = play(run, NUMBERS, task=task, finished=partly)
  assert len(again) == len(members) and again[0] is members[0]
  assert again[0].metadata[CRITIQUED]["critiques"] == 4


@pytest.mark.parametrize(
  ("verdict", "paid"), [("first", 1.0), ("second", 0.0), ("tie", 0.5), (None, 0.0)]
)
def test_what_a_verdict_earns(verdict, paid):
  assert agreement(verdict, "first") == paid


@pytest.mark.parametrize(
  ("text", "verdict"),
  [("so\n#### 1", "first"), ("#### 2", "second"), ("#### 1\n#### 0", "tie"), ("#### 3", None),
   ("1", None)],
)  # fmt: skip
def test_verdicts_are_read(text, verdict):
  assert read_verdict(text) == verdict


def test_pairs_are_asked_in_both_orders():
  circle = [(0, 2), (2, 0), (0, 7), (7, 0), (2, 5), (5, 2), (5, 7), (7, 5)]
  assert pairs_of([0, 2, 5, 7], "circular") == circle
  assert len(pairs_of([0, 2, 5, 7], "all")) == 12
  assert pairs_of([3, 4], "circular") == pairs_of([3, 4], "all") == [(3, 4), (4, 3)]
  assert pairs_of([3], "circular") == pairs_of([3], "all") == []
  assert better_of((0, 1), [1.0, 0.0]) == "first" and better_of((1, 0), [1.0, 0.0]) == "second"
  assert better_of((0, 1), [1.0, 1.0]) is None and better_of((0, 1), [None, 1.0]) is None
  assert preferences([(0, 1), (1, 0)], ["first", None], 3) == [1.0, 0.0, 0.5]


def test_the_parts_of_the_reward_must_be_there():
  with pytest.raises(ConfigError, match=r"lacks environment, critique, verified, preferred"):
    CONFIG.build(REWARDS)
  with pytest.raises(ConfigError, match=r"group_size=1"):
    CONFIG.check_group(1, "config.rollout")


@pytest.mark.parametrize("name", ["word_problems", "questions"])
def test_the_configs_build_their_sampler(name):
  configs = pathlib.Path(__file__).parents[3] / "configs"
  experiment = load_experiment(configs / f"self_critique_{name}.py")
  if name == "word_problems":
    experiment.validate()
  sampler = experiment.rollout.sampler
  assert isinstance(experiment.reward, RewardConfig)
  rewards = build_rewards(experiment.reward, {**SCORERS, **sampler.scorers})
  assert isinstance(sampler.build(rewards), SelfCritique)
