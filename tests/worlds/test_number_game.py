import asyncio

from agentjax.trajectory.record import Reward, Status
from agentjax.world.environment import Action
from agentjax.worlds.number_game.game import HIGHEST, LOWEST, GuessNumber, guess_number_tasks

[TASK] = guess_number_tasks(1)


async def bisect(game: GuessNumber) -> tuple[int, list[Reward | None]]:
  low, high, rewards = LOWEST, HIGHEST, []
  while True:
    guess = (low + high) // 2
    step = await game.step(Action(f"Is it {guess}?"))
    rewards.append(step.reward)
    if step.terminated:
      assert step.answer == str(guess)
      return guess, rewards
    [message] = step.observation.messages
    low, high = (guess + 1, high) if message.content == "higher" else (low, guess - 1)


def start(key):
  game = GuessNumber()
  asyncio.run(game.reset(TASK, key))
  return game


def test_bisection_finds_every_hidden_number_and_only_finding_pays():
  found = set()
  for key in range(40):
    number, rewards = asyncio.run(bisect(start(key)))
    assert rewards == [Reward(0.0)] * (len(rewards) - 1) + [Reward(1.0)]
    found.add(number)
  assert len(found) > 20


def test_the_key_alone_hides_the_number():
  assert asyncio.run(bisect(start(3))) == asyncio.run(bisect(start(3)))


def test_a_fresh_game_restored_from_a_snapshot_hides_the_same_number():
  game, other = start(1), start(2)
  assert asyncio.run(bisect(start(1)))[0] != asyncio.run(bisect(start(2)))[0]
  other.restore(game.snapshot())
  assert asyncio.run(bisect(other)) == asyncio.run(bisect(game))


def test_text_without_a_number_is_told_so_and_a_cut_turn_truncates():
  game = start(0)
  step = asyncio.run(game.step(Action("no idea")))
  assert step.observation.messages[0].content == "Answer with one integer."
  assert not step.terminated
  cut = asyncio.run(game.step(Action("5", truncated=True)))
  assert (cut.status, cut.truncated, cut.reward) == (Status.TRUNCATED, True, Reward(0.0))


def test_tasks_have_ids_of_their_own():
  assert [t.id for t in guess_number_tasks(3)] == [0, 1, 2]
