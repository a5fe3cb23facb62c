"""Self-improve prompts: who begins from which solution, what it reads, and how it is compared."""

import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.rl4mle.improve import IMPROVED, Improve, ImproveConfig, Solution, improve
from agentjax.rewards import build_rewards
from agentjax.training import load_experiment
from tests.rollout.conftest import REWARDS, make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

SIZE = 4


def call(expression):
  return f"calculator {expression}"


def play(run, turns, *, finished=None, read=None, **settings):
  """A group whose sample i draws ``turns[i]``; what samples 2 and 3 read first is added to read."""

  def script(address, turn):
    if turn == 0 and read is not None:
      read[address[2]] = TOKENIZER.decode(engine.seen[address])
    return turns[address[2]][turn]

  engine = ScriptedEngine(script)
  members = run(
    engine,
    [make_task(1)],
    samples=SIZE,
    sampler=Improve(ImproveConfig(argument="expression", **settings), REWARDS),
    finished=finished,
    max_total_tokens=2000,
  )
  assert engine.live_contexts == engine.live_prefixes == 0
  return members


SUM, WRONG = [say("", call=call("2+2")), say("#### 4")], [say("", call=call("2+3")), say("#### 5")]
TURNS = {0: WRONG, 1: SUM, 2: [say("#### 4")], 3: [say("#### 5")]}


def test_half_begin_from_a_solution_with_its_output_and_score(run):
  read = {}
  members = play(run, TURNS, read=read)
  assert [one.metadata.get(IMPROVED) for one in members] == [
    None, None, {"sample": 0, "score": 0.0}, {"sample": 1, "score": 1.0}
  ]  # fmt: skip
  for text, program, output, score in ((read[2], "2+3", "5", "0"), (read[3], "2+2", "4", "1")):
    asked = f"\n{program}\nIt printed:\n{output}\nIts answer scored {score}. Write a better one."
    assert "What is 2 + 2?" in text and asked in text
  assert read[0] == read[1] and "earlier program" not in read[0]
  assert [one.reward.value for one in members] == [0.0, 1.0, 1.0, 0.0]


def test_the_record_has_the_prompt_that_was_read_and_is_compared_with_its_like(run):
  read = {}
  members = play(run, TURNS, read=read)
  for sample, one in enumerate(members):
    first = next(i for i, s in enumerate(one.segments) if s.sampled.any())
    ids = [int(t) for s in one.segments[:first] for t in s.token_ids]
    assert TOKENIZER.decode(ids) == read[sample]
  groups = [one.advantage_group for one in members]
  assert groups[0] == groups[1] != groups[2] == groups[3]


def test_all_may_begin_from_the_best(run):
  members = play(run, TURNS, begin_from="best")
  assert [one.metadata[IMPROVED]["sample"] for one in members[2:]] == [1, 1]


@pytest.mark.parametrize("turns", [{i: [say("#### 4")] for i in range(SIZE)}, TURNS])
def test_without_a_share_or_a_program_it_is_plain_sampling(run, turns):
  members = play(run, turns, share=0.0 if turns is TURNS else 0.5)
  assert not any(IMPROVED in one.metadata for one in members)
  assert len({one.advantage_group for one in members}) == 1


def test_the_last_program_that_ran_is_shown(run):
  failed = [say("", call=call("2+2")), say("", call=call("2+")), say("#### 4")]
  read = {}
  play(run, {**TURNS, 0: failed}, read=read)
  assert "\n2+2\nIt printed:\n4\n" in read[2]


def test_a_known_group_is_not_played_again(run):
  members = play(run, TURNS)
  again = play(run, {}, finished={one.address: one for one in members})
  assert all(a is b for a, b in zip(again, members, strict=True))


def test_a_long_program_is_cut_off(run):
  read = {}
  long = [say("", call=call("1+" * 8 + "1")), say("#### 9")]
  play(run, {**TURNS, 0: long}, read=read, most_characters=5)
  assert "\n1+1+1\nIt printed:\n9\n" in read[2]


def test_the_last_message_of_the_prompt_asks():
  task = improve(make_task(1), Solution(0, "print(1)\n", "", 0.25))
  assert len(task.prompt) == 1 and task.prompt[0].role == "user"
  assert task.prompt[0].content.endswith(
    "print(1)\nIt printed:\n(nothing)\nIts answer scored 0.25. Write a better one. Files that it "
    "wrote are gone."
  )


def test_somebody_begins_with_nothing_and_the_part_is_known():
  with pytest.raises(ConfigError, match=r"sampler\.share=1\.0.*group_size=4"):
    ImproveConfig(share=1.0).check_group(4, "config.rollout")
  with pytest.raises(ConfigError, match=r"sampler\.part='mle_score'.*exact_match"):
    ImproveConfig(part="mle_score").build(REWARDS)
  assert [ImproveConfig().count(n) for n in (1, 2, 4, 5)] == [0, 1, 2, 2]


def test_half_of_the_prompts_of_the_config_are_such():
  experiment = load_experiment(pathlib.Path(__file__).parents[3] / "configs" / "rl4mle.py")
  experiment.validate()
  sampler = experiment.rollout.sampler
  assert (sampler.share, sampler.part in experiment.reward.parts) == (0.5, True)
  scorers = {name: (lambda *_: 0.0) for name in experiment.reward.parts}
  assert isinstance(sampler.build(build_rewards(experiment.reward, scorers)), Improve)
