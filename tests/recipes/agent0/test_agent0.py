"""Agent0: labels by the majority, and what an author of questions earns, by hand."""

import pytest

from agentjax.recipes.agent0 import MajorityConfig, consistency, question_rewards
from agentjax.recipes.agent0.questions import bleu, cluster_shares
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Status, Task

TASK = Task(0, (), "99", "made")


def episode(answer, status=Status.OK):
  made = TrajectoryBuilder(step=1, task_id=0, sample=0, source="made").build(status=status)
  made.answer = answer
  return made


def test_the_majority_is_the_label_whatever_the_answer_of_the_task_is():
  """GRPO on the task's answer would give this group no gradient: nobody said 99."""
  group = [episode("12"), episode("12.0"), episode("13"), episode(None)]
  score = MajorityConfig().build_group(Sandboxes())
  assert score(group, TASK) == [1.0, 1.0, 0.0, 0.0]
  assert consistency(group) == 0.5


def test_breaches_and_broken_episodes_have_no_vote():
  group = [episode("1", Status.POLICY_ERROR), episode("2"), episode("1", Status.ENV_ERROR)]
  score = MajorityConfig().build_group(Sandboxes())
  assert score(group, TASK) == [0.0, 1.0, 0.0]
  assert consistency(group) == 0.5
  assert score([episode(None)], TASK) == [0.0] and consistency([episode(None)]) == 0


@pytest.mark.parametrize(
  ("p", "calls", "paid"), [(0.5, 2, 0.5), (1.0, 9, 0.1), (0.3, 0, 0.2), (0.0, 0, -0.1)]
)
def test_a_question_earns_by_its_difficulty_its_novelty_and_its_tools(p, calls, paid):
  """Ten questions without a word in common: each has a tenth of the batch in its cluster."""
  questions = [f"w{i}a w{i}b w{i}c w{i}d w{i}e" for i in range(10)]
  found = question_rewards(questions, [p] * 10, [calls] * 10)
  assert found == pytest.approx([paid] * 10)


def test_no_question_earns_less_than_any():
  questions = [None, *(f"w{i}a w{i}b w{i}c w{i}d" for i in range(9))]
  assert question_rewards(questions, [0.5] * 10, [2] * 10)[0] == pytest.approx(-1.1)


def test_questions_that_repeat_one_another_share_a_cluster():
  words = "how many apples does mia have if she buys five more".split()
  other = "what is the sum of all squares below ninety".split()
  assert cluster_shares([words, words, [*words[:-1], "less"], other], 4, 0.5) == [
    0.75, 0.75, 0.75, 0.25
  ]  # fmt: skip


def test_bleu_is_1_for_itself_and_punishes_what_is_left_out():
  words = "a b c d e f".split()
  assert bleu(words, words) == pytest.approx(1)
  assert bleu(words[:3], words) < bleu(words[:5], words) < 1
  assert bleu(words, "u v w x y z".split()) == 0
