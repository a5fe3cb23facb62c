"""Problems with graphs, and the reward of their steps, by hand."""

import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig, load_tasks
from agentjax.recipes.interplay import GraphConfig, GraphProblemConfig
from agentjax.recipes.interplay.graph import process_score, right
from agentjax.rewards.formula import Formula
from agentjax.sandbox.config import Sandboxes
from agentjax.training.experiment import write_experiment
from agentjax.training.stage_graph import load_stages
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
GRAPH = {"a": [7, []], "b": [10, ["a"]], "c": [3, ["b", "a"]], "d": [4, ["c"]], "e": [9, ["d"]]}
SOLUTION = "a = 7\nb = a + 3 = 10\nc = b - a = 3\nd = c + 1 = 4\ne = d + 5 = 9\n#### 9"
TASK = Task(0, (), "9", "made", metadata={"graph": GRAPH, "asked": "e"})


def episode(text, status=Status.OK):
  return Trajectory(0, 0, 0, "made", segments=[], answer=text, status=status)


@pytest.mark.parametrize(
  ("change", "penalty"),
  [
    (("", ""), 0),
    (("c = b - a = 3", "c = b - a = 5"), 1),  # a wrong value
    (("c = b - a = 3", "c = b - 7 = 3"), 1),  # a wrong dependency
    (("c = b - a = 3\n", ""), 1),  # a missing quantity
    (("a = 7\n", "a = 7\nz = 1\ny = z + 1 = 2\n"), 2),  # further ones
    (("e = d + 5 = 9", "e = d + 5 = 9\nz = 1"), 2),  # a further one, which is the last
    (("c = b - a = 3", "c = b - a = 3\nc = b = 99"), 0),  # written twice
    (("a = 7\nb = a + 3 = 10\nc = b - a = 3\nd = c + 1 = 4\n", ""), 4),
  ],
)
def test_every_difference_from_the_graph_costs_a_share(change, penalty):
  assert process_score(SOLUTION.replace(*change), GRAPH, "e") == pytest.approx(1 - penalty / 5)


def test_an_answer_without_steps_earns_nothing_for_them():
  assert process_score("#### 9", GRAPH, "e") == 0


@pytest.mark.parametrize(
  ("text", "paid"),
  [
    (SOLUTION, 1.0),
    (SOLUTION.replace("= 3\n", "= 5\n").replace("d = c + 1", "d = 4 + 1"), 0.68),
    (SOLUTION.replace("#### 9", "#### 8"), 0.0),
    ("#### 9", 0.2),
  ],
)
def test_right_answers_by_wrong_steps_earn_less(text, paid):
  """GRPO on answers pays 1 for all but the third."""
  process = GraphConfig().build(Sandboxes())(episode(text), TASK)
  parts = {"right": Reward(right(episode(text), TASK)), "process": Reward(process)}
  formula = Formula("0.2 * right + 0.8 * process if right >= 1 else 0")
  assert formula.evaluate(parts).value == pytest.approx(paid)


def test_strict_pays_the_whole_graph_alone():
  strict = GraphConfig(strict=True).build(Sandboxes())
  assert strict(episode(SOLUTION), TASK) == 1
  assert strict(episode(SOLUTION.replace("= 3\n", "= 5\n")), TASK) == 0
  assert strict(episode(SOLUTION, Status.POLICY_ERROR), TASK) == 0


def test_worked_solutions_are_paid_in_full_and_have_their_operations():
  settings = GraphProblemConfig(operations=4, reinforced=6)
  tasks = settings.load(DataConfig(train_size=100, test_size=30, source=settings))
  scorer = GraphConfig().build(Sandboxes())
  for task in tasks.train:
    assert scorer.refusal(task) is None
    text = task.demonstration[0].content
    assert right(episode(text), task) == scorer(episode(text), task) == 1
    assert 1 <= task.metadata["operations"] <= 4
  assert {t.metadata["operations"] for t in tasks.test} == {4, 5, 9}
  assert tasks.train[3] == settings.load(DataConfig(train_size=4, test_size=0)).train[3]


def test_reinforcement_learning_is_on_other_problems_than_what_came_before(tmp_path):
  """All training tasks of a stage are those of its difficulty; the others begin at one policy."""
  stages = {stage.name: stage for stage in load_stages(_CONFIGS / "stages" / "interplay.py")}
  first = stages.pop("pretrained").experiment({})
  (tmp_path / "config.json").write_text(write_experiment(first))
  known = {task.metadata["operations"] for task in _tasks(first)}
  assert (first.rl.steps, known) == (0, {1, 2, 3, 4})
  for name, operations in {"edge": 5, "far": 9, "outcome": 5}.items():
    experiment = stages.pop(name).experiment({"pretrained": tmp_path})
    tasks = _tasks(experiment)
    assert {task.metadata["operations"] for task in tasks} == {operations}
    assert not any(task.demonstration for task in tasks)
    assert (experiment.supervised.steps, experiment.start_from) == (0, str(tmp_path))
    assert experiment.rl.steps > 0
    assert (experiment.reward.formula == first.reward.formula) == (name != "outcome")
  assert not stages


def _tasks(experiment):
  experiment.data.train_size = 50
  return load_tasks(experiment.data).train


def test_train_and_test_share_no_problem():
  settings = GraphProblemConfig(operations=1, reinforced=1, tested=(1,))
  tasks = settings.load(DataConfig(train_size=300, test_size=100, source=settings))

  def contents(split):
    return {tuple((v, len(p)) for v, p in task.metadata["graph"].values()) for task in split}

  assert not contents(tasks.train) & contents(tasks.test)


def test_a_task_without_a_graph_is_refused():
  assert "graph" in GraphConfig().build(Sandboxes()).refusal(Task(0, (), "", "made"))
  with pytest.raises(ConfigError, match="tested"):
    GraphProblemConfig(tested=()).validate()
