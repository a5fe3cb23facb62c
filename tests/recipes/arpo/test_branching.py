"""Branching at entropy: who is branched, what a branch shares, and what it costs in tool calls."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.arpo.branching import (
  BranchConfig,
  BranchSampler,
  branch_probability,
  entropy_budget,
  entropy_delta,
  probe_entropy,
)
from agentjax.rollout import keys
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import BRANCHES, Message, Status
from agentjax.trajectory.store import from_record, to_record
from agentjax.world.environment import Environment, Observation, Step
from tests.rollout.conftest import REWARDS, make_player, make_task
from tests.rollout.scripted_engine import RUN_SEED, TOKENIZER, ScriptedEngine, say
from tests.rollout.test_loop import content

TOOL_CALLS = 10
LOW, HIGH = 0.5, 3.0
# ARPO's default branches every other turn even where nothing is unsure: base 0 makes tests exact.
UNSURE_ONLY = BranchConfig(base=0.0)


class Ladder(Environment):
  """Answers every turn with all turns so far, ``rungs`` times; counts the answers of all."""

  def __init__(self, calls, rungs=TOOL_CALLS):
    self.calls, self.rungs, self.said = calls, rungs, []

  async def reset(self, task, key):
    self.key, self.said = key, []
    return Observation(task.prompt)

  async def step(self, action):
    self.said.append(action.text)
    if len(self.said) > self.rungs:
      return Step(Observation(()), terminated=True, answer="4")
    self.calls.append(list(self.said))
    return Step(Observation((Message("tool", f"{self.key % 97}:{'/'.join(self.said)}"),)))

  def snapshot(self):
    return json.dumps([self.key, self.said]).encode()

  def restore(self, state):
    self.key, self.said = json.loads(state)


def speak(address, turn):
  """Says who is speaking, so that no two draws are alike."""
  return say(f"{address[2]}.{turn}")


def unsure_at(*turns):
  return lambda address, turn: HIGH if turn in turns else LOW


def policy(entropy, seed=0, **settings):
  return ScriptedEngine(
    speak,
    entropy=entropy,
    delay=lambda a: np.random.default_rng([seed, *a]).uniform(0.0, 0.004),
    **settings,
  )


def grow(run, config, *, entropy, total=16, engine=None, rungs=TOOL_CALLS, **settings):
  """A group of ``total`` and the answers its environments gave."""
  calls, engine = [], engine or policy(entropy)
  sampler = None if config is None else BranchSampler(config)
  members = run(
    engine,
    [make_task(1)],
    samples=total,
    sampler=sampler,
    make_environment=lambda task: Ladder(calls, rungs),
    max_turns=rungs + 2,
    max_total_tokens=100_000,
    **settings,
  )
  for member in members:
    check_trajectory(member)
  assert engine.live_contexts == engine.live_prefixes == 0
  return members, calls


def turns_of(trajectory):
  """Text and branch of every turn of the policy."""
  return [
    (TOKENIZER.decode(s.token_ids[:-1].tolist()), branch)
    for s, branch in zip(trajectory.segments, trajectory.metadata[BRANCHES], strict=True)
    if s.sampled.any()
  ]


# The rule.


@pytest.mark.parametrize(
  ("root", "tool", "budget"), [(3.0, 0.2, 12.8), (0.2, 3.0, 3.2), (1.0, 1.0, 8.0)]
)
def test_budget_of_aepo(root, tool, budget):
  assert entropy_budget(16, root, tool, sensitivity=0.5) == pytest.approx(budget, abs=0.04)


def test_probability_is_that_of_arpo():
  config = BranchConfig()
  for delta, wanted in ((0.0, 0.5), (1.0, 0.7), (-2.0, 0.1), (3.0, 1.0), (-4.0, 0.0)):
    assert branch_probability(delta, 3, config) == pytest.approx(wanted)


def test_consecutive_branches_become_less_likely():
  config = BranchConfig(penalty=0.05)
  assert branch_probability(1.0, 4, config) == pytest.approx(0.7 * 0.8)
  assert branch_probability(1.0, 20, config) == branch_probability(1.0, 40, config) == 0.0


def test_a_short_turn_does_not_look_sure_of_itself():
  unsure = np.full(30, 2.0, np.float32)
  assert probe_entropy(unsure[:3], 20) == probe_entropy(unsure, 20) == 2.0
  assert probe_entropy(np.array([1.0] * 20 + [9.0] * 9), 20) == 1.0
  assert entropy_delta(2.0, 1.0, vocab_size=100) == pytest.approx(20 / np.log(100))


# Whom it branches.


def test_half_the_tool_calls_give_as_many_endings_after_the_unsure_turn(run):
  last = TOOL_CALLS
  members, calls = grow(run, UNSURE_ONLY, entropy=unsure_at(last))
  plain, plain_calls = grow(run, None, entropy=unsure_at(last))
  assert len(members) == len(plain) == 16
  assert len(plain_calls) == 160 and len(calls) == 80

  def endings(group):
    return {t.segments[-1].token_ids.tobytes() for t in group}

  affordable = len(calls) // TOOL_CALLS  # plain episodes for the same tool calls
  assert len(endings(members)) == 16 > len(endings(plain[:affordable])) == 8


def test_branches_share_all_before_the_unsure_turn_and_nothing_after(run):
  members, _ = grow(
    run, dataclasses.replace(UNSURE_ONLY, roots=2), entropy=unsure_at(4), total=4, rungs=6
  )
  for branch, origin in ((2, 0), (3, 1)):
    said = [text for text, _ in turns_of(members[branch])]
    assert said == [f"{origin}.{t}" for t in range(4)] + [f"{branch}.{t}" for t in range(4, 7)]
    assert [b for _, b in turns_of(members[branch])] == [origin] * 4 + [branch] * 3
    shared = [
      a.token_ids.tolist() == b.token_ids.tolist() and first == second
      for a, b, first, second in zip(
        members[branch].segments,
        members[origin].segments,
        members[branch].metadata[BRANCHES],
        members[origin].metadata[BRANCHES],
        strict=True,
      )
    ]
    cut = [s.turn for s in members[branch].segments].index(4)
    assert cut == shared.index(False) and not any(shared[cut:])


def test_the_world_of_a_branch_goes_on_from_the_snapshot(run):
  config = dataclasses.replace(UNSURE_ONLY, roots=1)
  members, _ = grow(run, config, entropy=unsure_at(2), total=2, rungs=3)
  key = keys.environment_key(RUN_SEED, (5, 1, 0)) % 97
  texts = [TOKENIZER.decode(s.token_ids.tolist()) for s in members[1].segments if s.owner == "tool"]
  assert [f"{key}:0.0", f"{key}:0.0/0.1", f"{key}:0.0/0.1/1.2"] == [
    text.replace("<|tool|>", "").replace("<|end|>", "") for text in texts
  ]
  assert members[1].answer == "4" and members[1].status is Status.OK


def test_a_branch_is_drawn_with_the_keys_of_its_own_address(run):
  engine = policy(unsure_at(2))
  grow(
    run, dataclasses.replace(UNSURE_ONLY, roots=1), entropy=None, total=3, engine=engine, rungs=3
  )
  asked = [r for a, turn, r in engine.requests if a == (5, 1, 1)]
  assert [r.key_data.tolist() for r in asked] == [
    keys.turn_key(RUN_SEED, (5, 1, 1), t).tolist() for t in (2, 3)
  ]


def permanently_unsure(address, turn):
  """Sample 0 is unsure after every tool result, the other root from the second one on."""
  return LOW if turn == 0 or (address[2] == 1 and turn == 1) else HIGH


def roots_branched(members):
  return {turns_of(t)[0][1] for t in members if t.sample >= 2}


def test_arpo_puts_all_branches_on_one_root_where_aepo_spreads_them(run):
  arpo = BranchConfig(roots=2, base=0.5, rule="threshold")
  aepo = dataclasses.replace(arpo, penalty=0.9)
  members, _ = grow(run, arpo, entropy=permanently_unsure, total=4)
  assert roots_branched(members) == {0}
  members, _ = grow(run, aepo, entropy=permanently_unsure, total=4)
  assert roots_branched(members) == {0, 1}


@pytest.mark.parametrize(
  ("first", "later", "roots"), [(3.0, 0.2, 13), (0.2, 3.0, 4), (1.0, 1.0, 9)]
)
def test_the_first_episode_decides_how_many_others_start_at_the_prompt(run, first, later, roots):
  always = BranchConfig(budget="entropy", rule="threshold", base=1.0, weight=0.0)
  members, _ = grow(run, always, entropy=lambda address, turn: later if turn else first, rungs=4)
  assert len(members) == 16
  assert {t.sample for t in members if len({b for _, b in turns_of(t)}) == 1} == set(range(roots))


def test_without_tool_results_all_episodes_start_at_the_prompt(run):
  members, _ = grow(run, BranchConfig(budget="entropy"), entropy=unsure_at(), rungs=0)
  assert [turns_of(t) for t in members] == [[(f"{s}.0", s)] for s in range(16)]


def test_places_nobody_branched_into_go_to_fresh_episodes(run):
  members, calls = grow(run, UNSURE_ONLY, entropy=unsure_at(), rungs=2)
  assert [t.sample for t in members] == list(range(16)) and len(calls) == 32
  assert all({b for _, b in turns_of(t)} == {t.sample} for t in members)


def test_more_copies_of_one_turn(run):
  config = dataclasses.replace(UNSURE_ONLY, roots=1, copies=3)
  members, _ = grow(run, config, entropy=unsure_at(1), total=4, rungs=2)
  assert [turns_of(t)[1] for t in members] == [(f"{s}.1", s) for s in range(4)]
  assert {turns_of(t)[0] for t in members} == {("0.0", 0)}


# What must not matter.


@pytest.mark.parametrize("config", [
  BranchConfig(roots=4),
  BranchConfig(roots=3, copies=2),
  BranchConfig(budget="entropy", rule="threshold", penalty=0.05),
], ids=["arpo", "copies", "aepo"])  # fmt: skip
def test_speed_and_concurrency_change_nothing(run, config):
  def entropy(address, turn):
    return float(np.random.default_rng([address[2], turn]).uniform(0.3, 1.5))

  def group(seed, concurrency):
    engine = policy(entropy, seed)
    return content(
      grow(run, config, entropy=None, total=12, rungs=4, engine=engine, concurrency=concurrency)[0]
    )

  reference = group(0, 64)
  starts = [tuple(r["metadata"][BRANCHES]) for r in reference]
  assert len({s[0] for s in starts}) < len(starts) == 12
  for seed, concurrency in ((1, 64), (2, 3), (3, 1)):
    np.testing.assert_equal(group(seed, concurrency), reference)


def test_a_group_that_is_half_known_is_completed_with_the_same_members(run):
  def entropy(address, turn):
    return float(np.random.default_rng([address[2], turn]).uniform(0.3, 1.5))

  config = BranchConfig(roots=3)
  reference, _ = grow(run, config, entropy=entropy, total=8, rungs=3)
  known = {t.address: t for t in reference[::2]}
  ended = []
  resumed, _ = grow(
    run, config, entropy=entropy, total=8, rungs=3, finished=known,
    on_finish=lambda t: ended.append(t.sample),
  )  # fmt: skip
  np.testing.assert_equal(content(resumed), content(reference))
  assert all(resumed[i] is reference[i] for i in range(0, 8, 2)) and sorted(ended) == [1, 3, 5, 7]
  idle = ScriptedEngine(lambda address, turn: pytest.fail("asked"))
  whole = {t.address: t for t in reference}
  again, _ = grow(run, config, entropy=None, total=8, engine=idle, finished=whole)
  assert all(a is b for a, b in zip(again, reference, strict=True))


def test_branches_survive_the_store(run):
  config = dataclasses.replace(UNSURE_ONLY, roots=1)
  members, _ = grow(run, config, entropy=unsure_at(1), total=2, rungs=2)
  again = [from_record(to_record(t)) for t in members]
  np.testing.assert_equal(
    pack(to_sequences(again), row_length=400, pad_id=0).columns["branches"],
    pack(to_sequences(members), row_length=400, pad_id=0).columns["branches"],
  )


def test_copies_of_a_token_have_one_number_in_the_batch(run):
  config = dataclasses.replace(UNSURE_ONLY, roots=1)
  members, _ = grow(run, config, entropy=unsure_at(1), total=3, rungs=2)
  sequences = to_sequences(members)
  first, second = (s.columns["branches"] for s in sequences[:2])
  same = np.flatnonzero(first[: len(second)] == second[: len(first)])
  shared = sum(len(s) for s in members[1].segments[: members[1].metadata[BRANCHES].index(1)])
  assert same.tolist() == list(range(shared)) and (first > 0).all()
  assert not set(first[shared:]) & set(second[shared:])


# Faults.


def faulty(calls, **faults):
  class Faulty(Ladder):
    def snapshot(self):
      if "snapshot" in faults:
        raise OSError("the sandbox does not answer")
      return super().snapshot()

    def restore(self, state):
      if "restore" in faults:
        raise OSError("the sandbox does not answer")
      super().restore(state)

  return Faulty(calls, 2)


def play(run, make_environment, *, engine=None, total=4, roots=2, **options):
  engine = engine or policy(unsure_at(1))
  try:
    return run(
      engine,
      [make_task(1)],
      samples=total,
      sampler=BranchSampler(dataclasses.replace(UNSURE_ONLY, roots=roots)),
      make_environment=make_environment,
      max_total_tokens=100_000,
      **options,
    )
  finally:
    assert engine.live_contexts == engine.live_prefixes == 0


def test_an_environment_that_cannot_be_copied_now_is_not_branched(run):
  members = play(run, lambda task: faulty([], snapshot=True))
  assert [t.status for t in members] == [Status.OK] * 4
  assert all(len(set(t.metadata[BRANCHES])) == 1 for t in members)


class Plain(Ladder):
  """Has no snapshots, as the methods of the base class say."""

  snapshot = Environment.snapshot


class Unwilling(Ladder):
  def snapshot(self):
    raise NotImplementedError


class NoWayBack(Ladder):
  """Has snapshots that nothing can go on from."""

  restore = Environment.restore


class Later(Ladder):
  """Takes its snapshots in a coroutine, and counts those that are held."""

  held = 0

  async def snapshot(self):
    await asyncio.sleep(0)
    Later.held += 1
    return Ladder.snapshot(self)

  def discard(self, state):
    assert json.loads(state)[1]
    Later.held -= 1


@pytest.mark.parametrize("environment", [Plain, Unwilling, NoWayBack])
def test_an_environment_without_snapshots_is_refused_where_they_are_needed_alone(run, environment):
  with pytest.raises(ConfigError, match=f"{environment.__name__} has no snapshots"):
    play(run, lambda task: environment([], 2))
  members = run(
    policy(unsure_at(1)),
    [make_task(1)],
    samples=2,
    make_environment=lambda task: environment([], 2),
    max_total_tokens=100_000,
  )
  assert [t.status for t in members] == [Status.OK] * 2


def test_snapshots_may_be_coroutines_and_are_discarded_once(run):
  members = play(run, lambda task: Later([], 2))
  assert Later.held == 0
  expected = play(run, lambda task: Ladder([], 2))
  np.testing.assert_equal(content(members), content(expected))


def test_an_environment_that_cannot_be_restored_masks_its_branch_alone(run):
  members = play(run, lambda task: faulty([], restore=True))
  assert [t.status for t in members] == [Status.OK] * 2 + [Status.ENV_ERROR] * 2
  assert "resume() raised OSError" in members[2].metadata["reason"]


def test_a_program_that_starts_anew_cannot_be_branched(run):
  async def stubborn(episode):
    await episode.open(await episode.reset())
    while True:
      step = await episode.step(await episode.act())
      await episode.observe(step.observation)

  with pytest.raises(RuntimeError, match="only where episode.opened is False"):
    play(run, lambda task: Ladder([], 2), program=stubborn)


def test_an_error_of_the_engine_in_a_branch_frees_everything(run):
  def script(address, turn):
    return RuntimeError("device lost") if address[2] == 2 else speak(address, turn)

  engine = ScriptedEngine(script, entropy=unsure_at(1))
  with pytest.raises(RuntimeError, match="device lost"):
    play(run, lambda task: Ladder([], 3), engine=engine)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.02, 0.04])
def test_a_cancelled_group_frees_every_fork(after):
  engine = policy(unsure_at(1, 2, 3))

  async def main():
    work = asyncio.ensure_future(
      collect(
        [make_task(i) for i in range(3)],
        step=5,
        samples_per_task=12,
        player=make_player(engine, max_total_tokens=100_000, max_turns=9, concurrency=8),
        make_environment=lambda task: Ladder([], 6),
        rewards=REWARDS,
        sampler=BranchSampler(dataclasses.replace(UNSURE_ONLY, roots=3)),
      )
    )
    await asyncio.sleep(after)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
      await work
    assert not asyncio.all_tasks() - {asyncio.current_task()}

  asyncio.run(main())
  assert engine.live_contexts == engine.live_prefixes == 0


# Settings.


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"roots": 9}, r"rollout.sampler.roots=9; allowed: at most rollout.group_size \(8\)"),
    ({"copies": 0}, "rollout.sampler.copies=0"),
    ({"penalty": -1.0}, "rollout.sampler.penalty=-1.0"),
    ({"rule": "always"}, "rollout.sampler.rule='always'"),
  ],
)
def test_impossible_settings_are_refused(settings, message):
  config = RolloutConfig(group_size=8, sampler=BranchConfig(**settings))
  with pytest.raises(ConfigError, match=message):
    config.validate("rollout")
