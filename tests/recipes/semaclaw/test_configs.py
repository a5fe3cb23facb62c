"""The configs, and the team on real tasks: who is paid what."""

import asyncio
import os
import pathlib

import pytest

from agentjax.recipes.semaclaw.team import ORCHESTRATOR, TeamWorldConfig
from agentjax.rollout.integrity import play_turns
from agentjax.training import Run, load_experiment
from agentjax.training.build import Extensions, build_scoring
from agentjax.trajectory.record import Message
from agentjax.worlds.code.code_block import mark_code
from agentjax.worlds.retail.desk import Desk
from tests.recipes.semaclaw.test_team import call, graph, task
from tests.training.smoke import quiet, smoke_experiment

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_DATA = os.environ.get("AGENTJAX_DATA")
needs_data = pytest.mark.skipif(_DATA is None, reason="needs AGENTJAX_DATA")


@pytest.mark.parametrize("name", ["chat", "code", "retail", "team"])
def test_a_config_is_valid(name):
  experiment = load_experiment(_CONFIGS / f"semaclaw_{name}.py")
  experiment.data.path = "folder" if name in ("code", "retail") else None
  experiment.validate()


def scoring(name, folder, **data):
  experiment = load_experiment(_CONFIGS / f"semaclaw_{name}.py")
  experiment.data.path = str(pathlib.Path(_DATA or "") / folder)
  for field, value in data.items():
    setattr(experiment.data, field, value)
  experiment.validate()
  return build_scoring(experiment, Extensions())


def played(made, solved, turns):
  async def main():
    await made.start()
    episode = await play_turns(solved, turns, made.world.environment)
    return episode

  return asyncio.run(main())


@needs_data
def test_a_clerk_and_a_reader_solve_recorded_tasks_together():
  made = scoring("retail", "tau_bench/retail", test_size=6)
  for solved in made.tasks.test:
    calls = [c for m in solved.demonstration for c in m.tool_calls]
    writes = [c for c in calls if c.name in Desk.WRITING]
    reads = [c for c in calls if c.name not in Desk.WRITING]
    written = graph(
      task("look", "reader", prompt="read"), task("do", "clerk", ["look"], prompt="change")
    )
    turns = [
      Message("assistant", "", (written,)),
      *([Message("assistant", "", tuple(reads))] if reads else []),
      Message("assistant", "read all"),
      *([Message("assistant", "", tuple(writes))] if writes else []),
      Message("assistant", "done"),
      solved.demonstration[-1],
    ]
    episode = played(made, solved, turns)
    assert episode.reward_parts["environment"].value == 1.0
    assert made.world.scorers["right_writes"](episode, solved) == float(bool(writes))
    assert made.world.scorers["work"](episode, solved) == 1.0
  environment = made.world.environment(made.tasks.test[0])
  asyncio.run(environment.reset(made.tasks.test[0], 0))
  names = {a: {t.name for t in environment.tools_of(a)} for a in environment.agents}
  assert not names["reader"] & set(Desk.WRITING) and "cancel_pending_order" in names["clerk"]
  assert names[ORCHESTRATOR] == {"list_agents", "create_parent"}


@needs_data
@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="the sandbox needs Linux")
def test_a_coder_is_paid_for_its_own_code_and_the_orchestrator_for_the_answer():
  from agentjax.rollout.loop import collect
  from tests.recipes.semaclaw.test_team import Turns
  from tests.rollout.conftest import make_player
  from tests.rollout.scripted_engine import say

  made = scoring("code", "code_tasks", train_size=2, test_size=2)
  solved = made.tasks.train[0]
  right = solved.demonstration[-1].content
  wrong = mark_code("def nothing():\n  return None")
  written = graph(task("write", "coder"), task("mend", "reviewer", ["write"]))
  turns = (call(written), say(wrong), say(right), say(right))

  async def main():
    try:
      return await collect(
        [solved],
        step=1,
        samples_per_task=1,
        player=make_player(
          Turns(*turns),
          max_total_tokens=9000,
          max_tokens_per_turn=3000,
          max_turns=9,
          reward_timeout=200.0,
        ),
        make_environment=made.world.environment,
        rewards=made.rewards,
      )
    finally:
      await made.close()

  (episode,) = asyncio.run(main())
  parts = {agent: outcome.parts["hand_in"].value for agent, outcome in episode.agents.items()}
  assert parts == {ORCHESTRATOR: 1.0, "coder": 0.0, "reviewer": 1.0}


@pytest.mark.slow
def test_a_run_learns_with_each_seat_as_an_episode_of_its_own(tmp_path):
  experiment = smoke_experiment()
  experiment.world = TeamWorldConfig(inner=experiment.world, orchestrator_tools=("*",))
  experiment.reward.parts, experiment.reward.weights = ("exact_match", "work"), (1.0, 0.5)
  run = Run(experiment, tmp_path, console=quiet())
  assert run.train().finished
  metrics = (tmp_path / "metrics.jsonl").read_text()
  assert "agents/orchestrator/reward" in metrics
