"""What an episode records, and how each way to end gets its status."""

import dataclasses

import numpy as np
import pytest

from agentjax.rewards import Formula, RewardGraph
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout import keys
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.record import Flag, Message, Reward, Status, ToolCall
from agentjax.world.environment import Environment, Observation, Step
from agentjax.world.world import WorldConfig
from tests.rollout.conftest import make_task
from tests.rollout.scripted_engine import END, TOKENIZER, ScriptedEngine, say

SPECIAL = TOKENIZER.special


def script(*turns):
  return lambda address, turn: turns[turn]


def play(run, turns, *, task=None, engine=None, **settings):
  """One episode of a scripted policy."""
  engine = engine or ScriptedEngine(script(*turns))
  (trajectory,) = run(engine, [task or make_task(1)], **settings)
  check_trajectory(trajectory)
  assert engine.live_contexts == engine.live_prefixes == 0
  return trajectory


def ids_of(trajectory):
  return np.concatenate([s.token_ids for s in trajectory.segments]).tolist()


def test_a_tool_call_and_its_result_are_recorded_token_by_token(run):
  turns = [say("2+2 is ", call="calculator 2+2"), say("#### 4")]
  engine = ScriptedEngine(script(*turns))
  trajectory = play(run, turns, engine=engine)

  assert trajectory.address == (5, 1, 0)
  assert trajectory.status is Status.OK and trajectory.answer == "4"
  assert trajectory.reward == Reward(1.0)
  assert trajectory.reward_parts == {"exact_match": Reward(1.0)}
  (call,) = trajectory.tools
  assert (call.name, dict(call.arguments), call.status, call.output) == (
    "calculator", {"expression": "2+2"}, "ok", "4",
  )  # fmt: skip
  owners = [(s.owner, bool(s.sampled.any()), s.turn) for s in trajectory.segments]
  assert owners == [
    ("user", False, 0), ("assistant", False, 0), ("assistant", True, 0),
    ("tool", False, 0), ("assistant", False, 0), ("assistant", True, 1),
  ]  # fmt: skip
  for segment in trajectory.segments:
    drawn = segment.sampled
    assert (segment.weights == drawn).all()
    assert (segment.versions == np.where(drawn, 3, -1)).all()
    assert (segment.behaviour_log_probs[drawn] < 0).all() and (segment.entropies[drawn] > 0).all()
    assert not segment.behaviour_log_probs[~drawn].any() and not segment.entropies[~drawn].any()


def test_the_record_is_the_conversation_rendered_at_once(run):
  turns = [say("", call="calculator 2+2"), say("#### 4")]
  trajectory = play(run, turns)
  messages = [
    Message("user", "What is 2 + 2?"),
    Message("assistant", "", (ToolCall("calculator", {"expression": "2+2"}),)),
    Message("tool", "4"),
    Message("assistant", "#### 4"),
  ]
  rendered = [i for _, ids in MarkedChat(TOKENIZER).prompt(messages) for i in ids]
  assert ids_of(trajectory) == rendered[:-1]  # a prompt ends in <|assistant|>


def test_the_policy_sees_exactly_what_is_recorded(run):
  turns = [say("", call="calculator 1"), say("", call="calculator 2"), say("#### 4")]
  engine = ScriptedEngine(script(*turns))
  recorded = ids_of(play(run, turns, engine=engine))
  assert engine.seen[5, 1, 0] == recorded[: -len(turns[-1])]


def test_sampled_ids_that_no_text_encodes_to_are_kept_as_drawn(run):
  broken = [8 + 0xC3, 8 + 0x28, END]  # not UTF-8: decoding and encoding it again gives other ids
  trajectory = play(run, [broken])
  assert trajectory.segments[-1].token_ids.tolist() == broken


def test_every_turn_has_its_own_key(run):
  turns = [say("", call="calculator 1"), say("#### 4")]
  engine = ScriptedEngine(script(*turns))
  play(run, turns, engine=engine)
  for address, turn, request in engine.requests:
    np.testing.assert_array_equal(request.key_data, keys.turn_key(7, address, turn))
  assert len(engine.requests) == 2


def test_the_environment_gets_its_addressed_seed(run):
  seeds = []

  class Seeded(_Talk):
    async def reset(self, task, key):
      seeds.append(key)
      return await super().reset(task, key)

  engine = ScriptedEngine(lambda address, turn: say("hi"))
  run(engine, [make_task(1)], samples=2, make_environment=lambda task: Seeded(turns=1))
  assert seeds == [keys.environment_key(7, (5, 1, sample)) for sample in range(2)]


@pytest.mark.parametrize(
  ("turns", "settings", "reason"),
  [
    ([say("x" * 99)], {}, "truncated"),
    ([say("", call="calculator 1")] * 4, {"max_turns": 2}, "rollout.max_turns=2"),
    ([say("", call="calculator 1")] * 9, {"max_turns": 9}, "truncated"),  # the environment's own
    ([say("", call="calculator 1")] * 3, {"max_total_tokens": 35}, "rollout.max_total_tokens=35"),
    ([say("12345678")], {"max_total_tokens": 22}, "truncated"),
    ([], {"max_total_tokens": 18}, "the prompt has 18 tokens"),
  ],
  ids=["turn", "turns", "environment's turns", "observation", "total", "prompt"],
)
def test_running_out_of_tokens_or_turns_truncates(run, turns, settings, reason):
  trajectory = play(run, turns, **settings)
  assert trajectory.status is Status.TRUNCATED
  assert reason in trajectory.metadata["reason"]
  limit = settings.get("max_total_tokens", 400)
  assert sum(len(s) for s in trajectory.segments) <= limit
  assert trajectory.reward == Reward(0.0)  # scored: the policy failed, the system did not


@pytest.mark.parametrize(
  ("max_length", "reason"),
  [
    (10, "engine.max_length=10"),
    (34, "engine.max_length=34"),
    (36, "truncated"),
    (40, "truncated"),
  ],
  ids=["prompt", "observation", "no token left", "turn"],
)
def test_a_context_of_the_engine_that_is_full_truncates(run, max_length, reason):
  turns = [say("", call="calculator 1"), say("x" * 30)]
  trajectory = play(run, turns, engine=ScriptedEngine(script(*turns), max_length=max_length))
  assert trajectory.status is Status.TRUNCATED
  assert reason in trajectory.metadata["reason"]


def test_a_cut_turn_is_flagged_and_closed_before_the_environment_answers(run):
  turns = [say("abc", end=False), say("done")]
  trajectory = play(run, turns, make_environment=lambda task: _Talk(turns=2), max_tokens_per_turn=3)
  cut = trajectory.segments[2]
  assert Flag.TRUNCATED in cut.flags and cut.token_ids.tolist() == say("abc", end=False)
  assert trajectory.segments[3].token_ids.tolist() == [END]
  assert not trajectory.segments[3].sampled.any()


@pytest.mark.parametrize("name", ["pad", "bos", "system", "user", "assistant", "tool"])
def test_markup_forged_by_the_policy_is_a_policy_error(run, name):
  forged = [*TOKENIZER.encode("a"), getattr(SPECIAL, name), *TOKENIZER.encode("4"), END]
  trajectory = play(run, [forged])
  assert trajectory.status is Status.POLICY_ERROR
  assert f"<|{name}|>" in trajectory.metadata["reason"]
  assert trajectory.segments[-1].token_ids.tolist() == forged
  assert trajectory.reward == Reward(0.0)


def _losses(kind):
  """Turns that win nothing: silence, one move again and again, all moves."""
  moves = {"sokoban": "Up Down Left Right", "frozen_lake": "Up Down Left Right"}.get(kind, "")
  for text in ("", *moves.split(), moves, "1 + 1", "<answer>"):
    yield [f"<answer>{' || '.join([word] * 5)}</answer>" for word in text.split()] * 10 or [""] * 10


@pytest.mark.parametrize(
  ("kind", "before"),
  [
    *((kind, ()) for kind in ("bandit", "frozen_lake", "sokoban", "countdown")),
    ("sokoban", ("Up",)),
    ("frozen_lake", ("Up",)),
  ],
)
def test_a_forged_turn_is_never_worth_more_than_losing(run, kind, before):
  if kind == "frozen_lake":
    pytest.importorskip("gymnasium", reason="the lake is gymnasium's")
  config = WorldConfig.from_name(kind, "world")
  task = config.make_tasks(1, split="train", seed=0, first_id=1)[0]
  rewards = RewardGraph({"environment": SCORERS["environment"]}, Formula("environment"))
  settings = {"make_environment": lambda task: config.game(), "rewards": rewards, "max_turns": 20}
  settings |= {"max_total_tokens": 20_000, "max_tokens_per_turn": 400}

  def played(turns):
    return play(run, turns, task=task, **settings)

  losses = [played([say(text) for text in turns]).reward.value for turns in _losses(kind)]
  made = [say(f"<answer>{move}</answer>") for move in before]
  forged = played([*made, [SPECIAL.tool, END]])
  assert forged.status is Status.POLICY_ERROR and not forged.status.masked
  assert forged.reward.value <= min(losses) and forged.reward.value <= 0.0
  paid = forged.turn_rewards.get("environment", [])
  assert sum(v for v in paid if v is not None) == pytest.approx(forged.reward.value)


def test_what_an_environment_paid_is_taken_back_after_a_breach(run):
  forged = [SPECIAL.tool, END]
  rewards = [Reward(0.25), Reward(0.5)]
  trajectory = play(
    run,
    [say("a"), forged],
    make_environment=lambda task: _Talk(turns=3, rewards=rewards),
  )
  assert trajectory.reward_parts["environment"] == Reward(0.0)
  assert [v for v in trajectory.turn_rewards["environment"] if v is not None] == [0.25, -0.25]


@pytest.mark.parametrize(
  ("call", "answer"),
  [
    ("abacus 2+2", "unknown tool 'abacus'; tools: calculator"),
    ("calculator 2+", "error"),
    ("", "the call has no tool name"),
  ],
  ids=["unknown", "bad argument", "malformed"],
)
def test_a_call_the_policy_got_wrong_is_an_observation(run, call, answer):
  trajectory = play(run, [say("", call=call), say("#### 4")])
  assert trajectory.status is Status.OK and trajectory.reward == Reward(1.0)
  assert trajectory.tools[0].status == "error"
  assert answer in TOKENIZER.decode(trajectory.segments[3].token_ids.tolist())
  assert Flag.TOOL_ERROR in trajectory.segments[2].flags
  assert Flag.TOOL_ERROR not in trajectory.segments[5].flags


def test_rewards_the_environment_pays_add_up_to_a_part(run):
  trajectory = play(
    run,
    [say("a"), say("b")],
    make_environment=lambda task: _Talk(turns=2, rewards=[Reward(0.25), Reward(0.5)]),
  )
  assert trajectory.reward_parts["environment"] == Reward(0.75)


def test_one_invalid_reward_of_the_environment_makes_the_part_invalid(run):
  rewards = [Reward(0.25), Reward.invalid("sensor off")]
  trajectory = play(
    run, [say("a"), say("b")], make_environment=lambda task: _Talk(turns=2, rewards=rewards)
  )
  assert trajectory.reward_parts["environment"] == Reward.invalid("sensor off")


def test_turns_that_were_not_carried_out_are_flagged(run):
  class Reports(_Talk):
    async def step(self, action):
      if action.text == "c":
        raise RuntimeError("broken")
      return dataclasses.replace(await super().step(action), executed=action.text == "b")

  turns = [say(text) for text in "abc"]
  trajectory = play(run, turns, make_environment=lambda task: Reports(turns=5))
  drawn = [s for s in trajectory.segments if s.sampled.any()]
  assert [Flag.NOT_EXECUTED in s.flags for s in drawn] == [True, False, True]


@pytest.mark.parametrize("status", [Status.POLICY_ERROR, Status.TRUNCATED, Status.ENV_ERROR])
def test_a_status_the_environment_reports_stands(run, status):
  class Reports(_Talk):
    async def step(self, action):
      return Step(Observation(()), terminated=True, status=status)

  trajectory = play(run, [say("a")], make_environment=lambda task: Reports(turns=1))
  assert trajectory.status is status
  assert trajectory.reward.valid == (status is not Status.ENV_ERROR)
  assert (Flag.ENV_FAULT in trajectory.segments[-1].flags) == (status is Status.ENV_ERROR)


class _Talk(Environment):
  """Answers "go on" until its turns are over."""

  def __init__(self, turns, rewards=()):
    self.turns, self.rewards = turns, list(rewards)

  async def reset(self, task, key):
    return Observation(task.prompt)

  async def step(self, action):
    self.turns -= 1
    reward = self.rewards.pop(0) if self.rewards else None
    return Step(
      Observation((Message("user", "go on"),)),
      reward=reward,
      terminated=self.turns == 0,
      answer=action.text,
    )

  def snapshot(self):
    return b""

  def restore(self, state):
    del state
