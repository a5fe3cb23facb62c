"""Several agents in one episode: who sees what, who is paid, and which tokens carry loss."""

import asyncio
import dataclasses
import types

import numpy as np
import pytest

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
from agentjax.adapters.chat_endpoint.seat import ServiceSeat
from agentjax.config import ConfigError
from agentjax.engine import SamplingConfig
from agentjax.recipes.monte_carlo import MonteCarlo, MonteCarloConfig
from agentjax.rewards import Formula, RewardGraph
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.integrity import play_turns
from agentjax.rollout.loop import GroupPlayer, collect
from agentjax.rollout.rescoring import rescore
from agentjax.rollout.seats import SeatPlayer
from agentjax.rollout.viewer import render
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.builder import check_trajectory, token_paths
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Reward, Status
from agentjax.trajectory.seats import agent_metrics, learning_views
from agentjax.trajectory.store import from_record, to_record
from agentjax.world.environment import Environment, Observation, Step
from tests.rollout.conftest import make_player, make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

GAME = RewardGraph({"environment": SCORERS["environment"]}, Formula("environment"))


class Nim(Environment):
  """Two players take 1 or 2 of the stones in turn; whoever takes the last one wins.

  "left" is told of every move, "right" only of the latest.
  """

  agents = ("left", "right")

  def __init__(self, stones=4):
    self.stones = stones

  async def reset(self, task, key):
    return Observation(
      (Message("user", f"left: {self.stones}"),),
      next="left",
      others={"right": (Message("user", "you are right"),)},
    )

  async def step(self, action):
    other = {"left": "right", "right": "left"}[action.agent]
    self.stones -= int(action.text)
    if self.stones <= 0:
      return Step(Observation(()), Reward(1.0), terminated=True, rewards={other: Reward(-1.0)})
    shown = (Message("user", f"{action.agent} took {action.text}"),)
    return Step(Observation(shown, next=other), rewards={other: Reward(0.25)})


class Players(ScriptedEngine):
  """Every context draws the same turns, by the number of model calls in it."""

  def __init__(self, *turns, **settings):
    super().__init__(lambda address, turn: say(turns[turn]), **settings)


def play(engine, *, samples=1, make_environment=lambda task: Nim(), seats=None, rotate="never"):
  async def main():
    player = dataclasses.replace(make_player(engine, rotate_seats=rotate), seats=seats or {})
    return await collect(
      [make_task(1)],
      step=5,
      samples_per_task=samples,
      player=player,
      make_environment=make_environment,
      rewards=GAME,
    )

  trajectories = asyncio.run(main())
  for trajectory in trajectories:
    check_trajectory(trajectory)
  assert engine.live_contexts == engine.live_prefixes == 0
  return trajectories


@pytest.mark.parametrize("known", [False, True], ids=["first prompt", "later turn"])
def test_words_that_nobody_can_be_shown_are_the_fault_of_who_wrote_them(known, monkeypatch):
  encode = type(TOKENIZER).encode

  def strict(self, text):  # ours make U+FFFD of them
    return encode(self, text.encode().decode())

  monkeypatch.setattr(type(TOKENIZER), "encode", strict)

  class Echo(Nim):
    async def step(self, action):
      self.stones -= 1
      if known and self.stones == 3:  # left's first turn is harmless
        return Step(Observation((), next="right"), Reward(0.5))
      if action.agent == "left":
        return Step(Observation((Message("user", "\ud800"),), next="right"), Reward(0.5))
      return Step(Observation((), next="left"), Reward(0.5))

  (episode,) = play(Players("1", "1", "1"), make_environment=lambda task: Echo())
  assert episode.status is Status.POLICY_ERROR and not episode.status.masked
  assert episode.metadata["fault"]["owner"] == "policy" and episode.metadata["ended_by"] == "left"
  left, right = learning_views([episode])
  assert left.reward == Reward(0.0) and left.status is Status.POLICY_ERROR
  assert right.reward == Reward(0.5 * known) and right.status is Status.TRUNCATED


def text_of(trajectory):
  return TOKENIZER.decode(np.concatenate([s.token_ids for s in trajectory.segments]).tolist())


def test_each_agent_sees_its_own_messages_and_is_paid_for_its_own_turns():
  (episode,) = play(Players("1", "2"))  # left 1, right 1, left 2
  assert episode.status is Status.OK
  assert len(token_paths(episode)) == 2  # a tree each
  left, right = learning_views([episode])
  assert (left.reward, right.reward) == (Reward(1.25), Reward(-0.75))
  assert "left: 4" in text_of(left) and "you are right" not in text_of(left)
  assert text_of(left).index("1") < text_of(left).index("right took 1")
  assert text_of(right).index("you are right") < text_of(right).index("left took 1")
  paid = left.turn_rewards["environment"]
  drawn = [i for i, s in enumerate(left.segments) if s.sampled.any()]
  assert [paid[i] for i in drawn] == [0.25, 1.0]
  # Right was paid before it had acted: that stands on the beginning of its prompt.
  paid = [p for p in right.turn_rewards["environment"] if p is not None]
  assert paid == [0.25, -1.0] and right.turn_rewards["environment"][0] == 0.25
  assert all(s.visible_to == ("left",) for s in left.segments)
  assert agent_metrics([episode]) == {
    "agents/left/episodes": 1.0, "agents/left/reward": 1.25,
    "agents/right/episodes": 1.0, "agents/right/reward": -0.75,
  }  # fmt: skip
  assert episode.reward == Reward(0.25) == episode.reward_parts["environment"]


def test_groups_hold_players_of_one_role_and_each_sampled_token_is_trained_once():
  episodes = play(Players("1", "2"), samples=2)
  sequences = to_sequences(learning_views(episodes))
  assert [s.group for s in sequences] == [0, 1, 0, 1]
  assert [int(s.column("agents")) for s in sequences] == [0, 1, 0, 1]
  packed = pack(sequences, row_length=64, pad_id=0)  # a loss tells the roles apart
  assert packed.columns["agents"].tolist() == [0, 1, 0, 1]
  assert [s.reward for s in sequences] == [1.25, -0.75, 1.25, -0.75]
  sampled = sum(int(s.sampled.sum()) for e in episodes for s in e.segments)
  assert sum(float(s.weights.sum()) for s in sequences) == sampled > 0
  assert {len(e.segments) for e in episodes} == {
    sum(len(v.segments) for v in learning_views([e])) for e in episodes
  }


def test_a_frozen_seat_has_an_engine_of_its_own_and_no_loss():
  own, frozen = Players("1", "2"), Players("2", version=1)
  chat = MarkedChat(TOKENIZER)
  seat = SeatPlayer("old", chat, frozen, SamplingConfig(temperature=0.5))
  (episode,) = play(own, seats={"right": seat})  # left 1, right 2, left 2
  assert frozen.live_contexts == frozen.live_prefixes == 0
  assert len(own.requests) == 2 and len(frozen.requests) == 1
  assert frozen.requests[0][2].sampling.temperature == 0.5
  by_policy = {s.policy: s for s in episode.segments if s.sampled.any()}
  assert set(by_policy) == {"policy", "old"}
  old = by_policy["old"]
  assert not old.weights.any() and (old.versions == 1).all()
  assert (old.behaviour_log_probs < 0).all()  # recorded all the same
  assert not episode.agents["right"].learns
  assert episode.agents["right"].parts == {"environment": Reward(-0.75)}
  assert episode.reward == Reward(1.25)
  (view,) = learning_views([episode])
  assert view.group.endswith(", left") and {s.policy for s in view.segments} == {"policy"}


def test_a_service_plays_from_its_own_messages():
  heard = []

  class Echo:
    async def reply(self, messages, *, key):
      heard.append([(m.role, m.content) for m in messages])
      return "1"

  engine = Players("1", "1")
  seat = SeatPlayer("web", MarkedChat(TOKENIZER), service=Echo())
  (episode,) = play(engine, seats={"right": seat})
  assert heard == [
    [("user", "you are right"), ("user", "left took 1")],
    [
      ("user", "you are right"), ("user", "left took 1"),
      ("assistant", "1"), ("user", "left took 1"),
    ],
  ]  # fmt: skip
  assert episode.agents["right"].parts["environment"] == Reward(1.5)
  assert not any(s.weights.any() for s in episode.segments if s.policy == "web")


def test_a_service_that_fails_masks_the_episode():
  class Down:
    async def reply(self, messages, *, key):
      raise ConnectionError("no route")

  seat = SeatPlayer("web", MarkedChat(TOKENIZER), service=Down())
  (episode,) = play(Players("1"), seats={"right": seat})
  assert episode.status is Status.ENV_ERROR and "no route" in episode.metadata["reason"]
  assert all(not view.reward.valid for view in learning_views([episode]))


def test_a_conversation_that_a_service_refuses_counts():
  class Short:
    async def reply(self, messages, *, key):
      raise JudgeRefusedError("too long", 413)

  seat = SeatPlayer("web", MarkedChat(TOKENIZER), service=Short())
  (episode,) = play(Players("1"), seats={"right": seat})
  assert episode.status is Status.TRUNCATED and "too long" in episode.metadata["reason"]
  assert [view.reward for view in learning_views([episode])] == [Reward(0.0)]


def test_players_rotate_over_the_samples():
  own, frozen = Players("1", "2"), Players("1", "2")
  seat = SeatPlayer("old", MarkedChat(TOKENIZER), frozen)
  episodes = play(own, samples=2, seats={"right": seat}, rotate="sample")
  assert [v.group for v in learning_views(episodes)] == ["task 1, left", "task 1, right"]
  assert [v.reward.value for v in learning_views(episodes)] == [1.25, -0.75]


def test_a_breach_is_lost_by_whoever_made_it():
  special = TOKENIZER.special

  class Forger(ScriptedEngine):
    def __init__(self):
      super().__init__(lambda address, turn: [special.tool, special.end])

  frozen = Players("1")
  seat = SeatPlayer("old", MarkedChat(TOKENIZER), frozen)
  (episode,) = play(Forger(), seats={"left": seat})  # left 1, right forges
  assert episode.status is Status.POLICY_ERROR
  (right,) = learning_views([episode])
  assert right.status is Status.POLICY_ERROR and right.reward == Reward(0.0)
  (episode,) = play(Players("1"), seats={"right": dataclasses.replace(seat, engine=Forger())})
  (left,) = learning_views([episode])
  assert left.status is Status.TRUNCATED and left.reward.valid


def test_the_record_keeps_what_every_agent_got():
  (episode,) = play(Players("1", "2"))
  again = from_record(to_record(episode))
  assert again.agents == episode.agents and again.reward == episode.reward
  assert "agents" not in to_record(dataclasses.replace(episode, agents={}))


@pytest.mark.parametrize(
  ("seats", "message"),
  [
    (("north",), "config.seats names north; allowed: agents of the environment, left, right"),
    (("left", "right"), "gives all agents .*at least one that it does not name"),
  ],
)
def test_seats_that_do_not_fit_the_environment_are_refused(seats, message):
  engine = Players("1")
  seat = SeatPlayer("old", MarkedChat(TOKENIZER), engine)
  with pytest.raises(ConfigError, match=message):
    play(engine, seats=dict.fromkeys(seats, seat))


def test_an_unknown_agent_is_the_environments_fault():
  class Odd(Nim):
    async def step(self, action):
      return Step(Observation((), next="north"))

  (episode,) = play(Players("1"), make_environment=lambda task: Odd())
  assert episode.status is Status.ENV_ERROR and "north" in episode.metadata["reason"]


def test_group_scorers_compare_one_role():
  seen = []

  def first(members, task):
    seen.append([(m.group, m.sample) for m in members])
    return [float(m.sample == 0) for m in members]

  rewards = RewardGraph({}, Formula("first"), {"first": first})

  async def main():
    playing = GroupPlayer(make_player(Players("1", "2")), lambda task: Nim(), rewards)
    return await playing.play(make_task(1), [(5, 1, 0), (5, 1, 1)], {})

  episodes = asyncio.run(main())
  assert sorted(seen) == [
    [("task 1, left", 0), ("task 1, left", 1)],
    [("task 1, right", 0), ("task 1, right", 1)],
  ]
  assert [v.reward.value for v in learning_views(episodes)] == [1.0, 1.0, 0.0, 0.0]


def test_stored_episodes_are_scored_again_agent_by_agent():
  (episode,) = play(Players("1", "2"))
  doubled = RewardGraph(
    {"environment": SCORERS["environment"], "drawn": SCORERS["turns"]},
    Formula("environment + 10 * drawn"),
  )
  task = make_task(1)
  (again,) = asyncio.run(rescore([episode], {1: task}, doubled))
  assert [v.reward.value for v in learning_views([again])] == [21.25, 9.25]  # two turns and one
  assert [v.reward.value for v in learning_views([episode])] == [1.25, -0.75]
  (back,) = asyncio.run(rescore([again], {1: task}, GAME))
  assert back.agents == episode.agents and back.turn_rewards == episode.turn_rewards


def test_monte_carlo_values_one_agent_only():
  async def main():
    player = make_player(Players("1", "2"))
    sampler = MonteCarlo(MonteCarloConfig(form="progress"), GAME)
    playing = GroupPlayer(player, lambda task: Nim(), GAME, sampler=sampler)
    await playing.play(make_task(1), [(5, 1, 0)], {})

  with pytest.raises(ConfigError, match="'monte_carlo' values states for one agent"):
    asyncio.run(main())


def test_gates_play_the_turns_of_all_agents_and_read_the_first_ones_reward():
  turns = [Message("assistant", text) for text in ("1", "1", "2")]
  trajectory = asyncio.run(play_turns(make_task(1), turns, lambda task: Nim()))
  assert trajectory.reward_parts == {"environment": Reward(1.25)}


def test_a_reader_sees_who_said_what_and_what_each_got():
  (episode,) = play(Players("1", "2"))
  shown = "\n".join(render(episode, tokenizer=TOKENIZER, expected=None))
  assert "left: reward 1.25 (environment 1.25)" in shown and "right: reward -0.75" in shown
  assert "--- left (policy): assistant, turn 0" in shown


def test_an_endpoint_plays_a_seat():
  web = pytest.importorskip("aiohttp.web")
  asked = []

  async def handle(request):
    asked.append(await request.json())
    return web.json_response({"choices": [{"message": {"content": "2"}}]})

  async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    endpoint = HttpJudgeConfig(base_url=f"http://127.0.0.1:{port}/v1", model="m")
    config = ServiceSeat(endpoint=endpoint)
    config.validate("config.seats.right")
    player = make_player(Players("1", "1"))
    bank = types.SimpleNamespace(chat=player.chat)
    player = dataclasses.replace(player, seats={"right": config.play(bank, "seat_right")})
    try:
      playing = GroupPlayer(player, lambda task: Nim(), GAME)
      return await playing.play(make_task(1), [(5, 1, 0)], {})
    finally:
      await runner.cleanup()

  (episode,) = asyncio.run(main())  # left 1, right 2, left 1
  assert episode.agents["left"].reward == Reward(1.25)
  assert {s.policy for s in episode.segments if s.agent == "right"} == {"seat_right"}
  (body,) = asked
  assert [m["content"] for m in body["messages"]] == ["you are right", "left took 1"]
