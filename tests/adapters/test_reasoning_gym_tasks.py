"""Tasks of reasoning-gym: splits without a shared question, and what is refused."""

import asyncio
import json

import pytest

from agentjax.adapters.reasoning_gym.scoring import ReasoningGymScoring, ReasoningGymVerifier
from agentjax.adapters.reasoning_gym.tasks import ReasoningGymConfig, load_reasoning_gym
from agentjax.config import ConfigError
from agentjax.data import DataError

pytest.importorskip("reasoning_gym")


def gym(name, size=30, seed=0, **parameters):
  config = ReasoningGymConfig(name, json.dumps(parameters), instruction="Answer after ####.")
  return load_reasoning_gym(config, train_size=size, test_size=10, seed=seed)


@pytest.mark.parametrize(
  "name",
  [
    "chain_sum",
    "word_sorting",
    pytest.param("leg_counting", marks=pytest.mark.slow),
    pytest.param("basic_arithmetic", marks=pytest.mark.slow),
  ],
)
def test_any_reasoning_gym_data_set_gives_tasks_its_verifier_accepts(name):
  splits = gym(name)
  assert (len(splits.train), len(splits.test)) == (30, 10)
  verifier = ReasoningGymVerifier(ReasoningGymScoring())

  async def paid():
    try:
      asked = (verifier.score(t.answer, t.metadata["entry"]) for t in (*splits.train, *splits.test))
      return {reward.value for reward in await asyncio.gather(*asked)}
    finally:
      await verifier.close()

  assert asyncio.run(paid()) == {1.0}
  for task in (*splits.train, *splits.test):
    assert task.prompt[0].content.startswith("Answer after ####.\n")


def test_reasoning_gym_splits_share_no_question_and_repeat_by_seed():
  splits = gym("chain_sum", size=100, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
  questions = [{t.prompt[0].content for t in part} for part in (splits.train, splits.test)]
  assert not questions[0] & questions[1]
  assert len(questions[1]) == 10
  again = gym("chain_sum", size=100, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
  assert again == splits
  other = gym("chain_sum", size=100, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
  assert other.train != splits.train


def test_a_generator_without_enough_questions_is_an_error():
  with pytest.raises(DataError, match="reasoning_gym/chain_sum: only"):
    gym("chain_sum", size=3000, min_terms=2, max_terms=2, min_digits=1, max_digits=1)


def test_unknown_names_and_parameters_of_reasoning_gym_are_refused():
  with pytest.raises(ConfigError, match="config.data.source.name='no_such'.*chain_sum"):
    gym("no_such")
  with pytest.raises(ConfigError, match="chain_sum refuses them.*colour"):
    gym("chain_sum", colour=1)
  with pytest.raises(ConfigError, match="chain_sum refuses them"):
    gym("chain_sum", min_terms=5, max_terms=2)
