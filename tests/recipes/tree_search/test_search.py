"""Tree search: which turns are drawn, who makes the group, and what a search needs."""

import asyncio

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.tree_search import TreeConfig, TreeSearch
from agentjax.rollout.config import SamplerConfig
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.record import BRANCHES, Status
from tests.recipes.arpo.test_branching import Ladder, speak
from tests.rollout.conftest import REWARDS, make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine
from tests.rollout.test_loop import content

MORE = {"max_total_tokens": 100_000, "max_turns": 20}


def worth(trajectory, task):
  """The sample number of the last draw modulo 5: some are worth more than others."""
  return float(trajectory.metadata[BRANCHES][-1] % 5)


def search(run, *, seed=0, size=3, rungs=2, score=worth, concurrency=64, world=Ladder, **config):
  calls = []
  engine = ScriptedEngine(
    speak, delay=lambda a: np.random.default_rng([seed, *a]).uniform(0.0, 0.004)
  )
  members = run(
    engine,
    [make_task(1)],
    samples=size,
    sampler=TreeSearch(TreeConfig(**config), score),
    make_environment=lambda task: world(calls, rungs),
    concurrency=concurrency,
    **MORE,
  )
  for member in members:
    check_trajectory(member)
  assert engine.live_contexts == engine.live_prefixes == 0
  return members, calls


def drawn_by(trajectory):
  return [
    TOKENIZER.decode(s.token_ids[:-1].tolist()) for s in trajectory.segments if s.sampled.any()
  ]


def test_a_beam_keeps_the_most_valuable_nodes_of_every_depth(run):
  members, calls = search(run, rule="beam", width=3, beam=1, rungs=1)
  # Nodes 1, 2, 3 are worth 1, 2, 3; node 3 is expanded into 4, 5, 6, worth 4, 0, 1: all end.
  assert [drawn_by(t) for t in members] == [["3.0", f"{n}.1"] for n in (4, 5, 6)]
  assert [t.sample for t in members] == [4, 5, 6] and len(calls) == 3
  assert all(t.status is Status.OK and t.answer == "4" for t in members)


def test_uct_returns_to_what_was_worth_most_and_plays_the_rest_to_its_end(run):
  members, _ = search(run, rule="uct", width=2, expansions=4, rungs=3, size=3, exploration=0.0)
  # Nodes 1 and 2 are worth 1 and 2, so 2 is expanded into 3 and 4. Node 4, worth most, gives 5 and
  # 6, worth little; so the search returns to 3, which gives 7 and 8. Then 8, 7 and 1 lead.
  assert [drawn_by(t)[:-1] for t in members] == [
    ["2.0", "3.1", "8.2"],
    ["2.0", "3.1", "7.2"],
    ["1.0", "11.1", "11.2"],
  ]
  assert [drawn_by(t)[-1] for t in members] == ["9.3", "10.3", "11.3"]
  assert all(t.status is Status.OK for t in members)


@pytest.mark.parametrize("rule", ["beam", "uct"])
def test_a_search_does_not_depend_on_time(run, rule):
  settings = {"rule": rule, "width": 3, "beam": 2, "expansions": 5, "rungs": 3}
  reference = content(search(run, **settings)[0])
  for seed, concurrency in ((1, 64), (2, 2), (3, 1)):
    members, _ = search(run, seed=seed, concurrency=concurrency, **settings)
    np.testing.assert_equal(content(members), reference)


def test_places_that_no_leaf_fills_go_to_episodes_from_the_start(run):
  members, _ = search(run, rule="beam", width=2, beam=1, size=5, rungs=1)
  assert len(members) == 5
  assert sum(drawn_by(t)[0].startswith("2.") for t in members) == 2
  assert len({drawn_by(t)[0] for t in members}) == 4


def test_a_scorer_may_be_a_coroutine(run):
  async def score(trajectory, task):
    await asyncio.sleep(0)
    return worth(trajectory, task)

  direct, _ = search(run, width=2)
  np.testing.assert_equal(content(search(run, width=2, score=score)[0]), content(direct))


def test_a_scorer_that_fails_costs_its_node_and_not_the_run(run):
  def score(trajectory, task):
    if trajectory.metadata[BRANCHES][-1] % 2:
      raise OSError("the judge does not answer")
    return worth(trajectory, task)

  members, _ = search(run, rule="beam", width=4, beam=1, rungs=1, score=score)
  assert len(members) == 3 and all(t.status is Status.OK for t in members)
  assert {drawn_by(t)[0] for t in members[:2]} == {"4.0"}


class Busy(Ladder):
  """Cannot be copied after its first turn."""

  def snapshot(self):
    if self.said:
      raise OSError("busy")
    return super().snapshot()


def test_a_node_that_cannot_be_copied_is_played_to_its_end(run):
  members, _ = search(run, rule="beam", width=3, beam=1, rungs=2, world=Busy)
  assert [drawn_by(t) for t in members] == [[f"{n}.{i}" for i in range(3)] for n in (1, 2, 3)]
  assert all(t.status is Status.OK and t.answer == "4" for t in members)


def test_a_config_names_the_search_and_its_scorer():
  config = SamplerConfig.from_name("tree_search", "config.rollout.sampler")
  config.score = "tests.recipes.tree_search.test_search:worth"
  assert config.build(REWARDS) == TreeSearch(config, worth)
  config.score = "tests.recipes.tree_search.test_search:MORE"
  with pytest.raises(ConfigError, match="rollout.sampler.score=.*a function of an episode"):
    config.build(REWARDS)


def test_impossible_settings_are_refused():
  with pytest.raises(ConfigError, match="tree.width=0; allowed: >= 1"):
    TreeConfig(width=0).validate("tree")
