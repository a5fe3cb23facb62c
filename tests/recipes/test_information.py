"""Mutual information of prompts and answers, and which of them are compared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.recipes.information import answer_pairs, mutual_information
from agentjax.training.diagnostics import DiagnosticsConfig
from tests.training.test_diagnostics import EPISODES, episode

GOLDEN = 10 * np.array([[-0.5, -0.9, -1.2], [-0.8, -0.6, -1.0], [-1.1, -1.0, -0.7]])
OWN = np.arange(3)


def test_golden_information_of_ragen_2():
  found = mutual_information(GOLDEN, OWN, np.full(3, 10))
  assert found.per_token == pytest.approx(0.102266, abs=1e-6)
  assert found.sequence == pytest.approx(1.022659, abs=1e-6)
  assert found.retrieval_accuracy == 1.0 and found.chance == pytest.approx(1 / 3)
  top = GOLDEN.max(1)
  marginal = (top + np.log(np.exp(GOLDEN - top[:, None]).sum(1)) - np.log(3)) / 10
  assert found.z_score == pytest.approx(0.102266 / (marginal.std() + 1e-3), rel=1e-4)


def test_answers_that_fit_any_prompt_carry_none():
  collapsed = np.repeat(GOLDEN[:, :1], 3, axis=1)
  found = mutual_information(collapsed, OWN, np.full(3, 10))
  assert found.sequence == pytest.approx(0, abs=1e-9) == found.per_token
  assert found.retrieval_accuracy == pytest.approx(1 / 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6), st.floats(0.1, 200))
def test_it_is_never_more_than_the_prompts_can_tell(seed, prompts, scale):
  random = np.random.default_rng(seed)
  cross = -scale * random.random((2 * prompts, prompts))
  own = np.repeat(np.arange(prompts), 2)
  found = mutual_information(cross, own, random.integers(1, 9, 2 * prompts))
  assert found.sequence <= np.log(prompts) + 1e-9
  shuffled = mutual_information(cross[:, ::-1], prompts - 1 - own, np.full(2 * prompts, 3))
  assert shuffled.sequence == pytest.approx(found.sequence)


def test_first_turns_follow_their_prompts():
  pairs = answer_pairs(EPISODES, DiagnosticsConfig(prompts=8, samples=3), turns="first", seed=0)
  assert [p.tolist() for p in pairs.prompts] == [[1, 10 + t, 2] for t in range(3)]
  assert pairs.own.tolist() == [0] * 3 + [1] * 3 + [2] * 3
  for answer, own in zip(pairs.answers, pairs.own, strict=True):
    assert answer[0] == 30 + own and len(answer) == 2


def test_any_turn_follows_all_that_stood_before_it():
  seen = set()
  for seed in range(20):
    pairs = answer_pairs(EPISODES, DiagnosticsConfig(prompts=2), turns="any", seed=seed)
    assert len(pairs.prompts) == len(pairs.answers) == 2
    for prompt, answer in zip(pairs.prompts, pairs.answers, strict=True):
      seen.add(len(prompt))
      assert len(answer) == (2 if len(prompt) == 3 else 3)
      if len(prompt) > 3:
        assert prompt[:3].tolist() == [1, prompt[1], 2] and prompt[-2:].tolist() == [3, 2]
  assert seen == {3, 7}
  assert answer_pairs(EPISODES[:4], DiagnosticsConfig(), turns="first", seed=0) is None


def test_an_answer_ends_where_the_reasoning_does():
  def decode(ids):
    return "".join(chr(i) for i in ids)

  text = [ord(c) for c in "so </think> 4"]
  episodes = [episode(t, 0, [text]) for t in range(2)]
  config = DiagnosticsConfig(reasoning_end="</think>")
  pairs = answer_pairs(episodes, config, turns="first", seed=0, decode=decode)
  assert decode(pairs.answers[0].tolist()) == "so </think"  # up to the token that completes it
  with pytest.raises(ValueError, match="needs decode"):
    answer_pairs(episodes, config, turns="first", seed=0)
