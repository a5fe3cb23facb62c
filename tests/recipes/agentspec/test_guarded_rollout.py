"""Guards in whole rollouts: what the record says of them, and how a run gets them."""

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.agentspec import AgentSpecConfig
from agentjax.recipes.arpo import BranchConfig, BranchSampler
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.guards import GuardsConfig, guard_environments
from agentjax.rollout.viewer import render
from agentjax.training.build import Extensions, build_parts
from agentjax.trajectory.record import GUARDS, Flag, Status
from agentjax.trajectory.store import from_record, to_record
from agentjax.trajectory.weights import WeightConfig, token_weights
from tests.rollout.conftest import REGISTRY, make_task, question
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say
from tests.training.smoke import smoke_experiment

RULES = """
rule @small trigger calculator check input_matches("99") enforce llm_self_reflect end
rule @tiny trigger calculator check input_matches("777") enforce stop end
"""
SCRIPT = [say("", call="calculator 99+1"), say("", call="calculator 2+2"), say("#### 4")]


def guarded(**settings):
  return guard_environments(
    question, GuardsConfig(rules=AgentSpecConfig(text=RULES), **settings), REGISTRY
  )


@pytest.fixture
def episode(run):
  engine = ScriptedEngine(lambda address, turn: SCRIPT[turn])
  (episode,) = run(engine, [make_task(1)], make_environment=guarded())
  return episode


def test_a_denied_call_is_an_observation_and_its_turn_is_flagged(episode):
  assert (episode.status, episode.answer, episode.reward.value) == (Status.OK, "4", 1.0)
  assert [record.status for record in episode.tools] == ["denied", "ok"]
  text = TOKENIZER.decode([t for s in episode.segments for t in s.token_ids.tolist()])
  assert "<|tool|>not done: rule @small objects." in text
  turns = [s for s in episode.segments if s.sampled.any()]
  assert [Flag.DENIED in s.flags for s in turns] == [True, False, False]
  assert [Flag.TOOL_ERROR in s.flags for s in turns] == [True, False, False]


def test_decisions_are_recorded_stored_and_shown(episode):
  (record,) = from_record(to_record(episode)).metadata[GUARDS]
  assert record == {
    "turn": 0,
    "event": "before_action",
    "tool": "calculator",
    "guard": "rule @small",
    "decision": "reflect",
    "reason": "llm_self_reflect",
    "arguments": None,
  }
  shown = "\n".join(render(episode, tokenizer=TOKENIZER, expected="4"))
  assert "guard in turn 0: rule @small at before_action calculator\nreflect: llm_self" in shown


def test_denials_can_be_trained_on(episode):
  assert SCORERS["tool_errors"](episode, make_task(1)) == 0.5
  weights = token_weights(episode, WeightConfig(rules=("role", "error_masked")))
  turns = [w.sum() for w, s in zip(weights, episode.segments, strict=True) if s.sampled.any()]
  assert [weight > 0 for weight in turns] == [False, True, True]


@pytest.mark.parametrize("status", [Status.POLICY_ERROR, Status.TRUNCATED, Status.OK])
def test_a_stop_ends_the_episode_with_its_status_and_reason(run, status):
  engine = ScriptedEngine(lambda address, turn: say("", call="calculator 777"))
  (episode,) = run(engine, [make_task(1)], make_environment=guarded(stop_status=status.value))
  assert episode.status is status
  assert episode.metadata["reason"] == "rule @tiny ended the episode at before_action"
  assert episode.reward.value == 0.0
  assert [g["decision"] for g in episode.metadata[GUARDS]] == ["stop"]


def test_an_unguarded_episode_records_no_guards(run):
  engine = ScriptedEngine(lambda address, turn: SCRIPT[turn])
  (episode,) = run(engine, [make_task(1)])
  assert GUARDS not in episode.metadata


def test_a_branch_keeps_what_guards_did_before_it(run):
  engine = ScriptedEngine(
    lambda address, turn: SCRIPT[turn], entropy=lambda address, turn: 3.0 if turn == 2 else 0.5
  )
  sampler = BranchSampler(BranchConfig(base=0.0, weight=1.0, roots=1))
  episodes = run(
    engine,
    [make_task(1)],
    samples=2,
    sampler=sampler,
    make_environment=guarded(),
  )
  assert [e.metadata["branches"][-1] for e in episodes] == [0, 1]
  assert len(engine.requests) == 4  # the second one only took the last turn
  assert episodes[0].metadata[GUARDS] == episodes[1].metadata[GUARDS]
  assert len(episodes[0].metadata[GUARDS]) == 1


def test_a_run_guards_its_environments_by_its_settings(tmp_path):
  experiment = smoke_experiment(guards=GuardsConfig(rules=AgentSpecConfig(text=RULES)))
  experiment.validate()
  parts = build_parts(experiment, tmp_path, Extensions())
  (task, *_) = parts.tasks.train
  assert type(parts.make_environment(task)).__name__ == "GuardedEnvironment"


def test_rules_that_do_not_fit_the_tools_stop_a_run_before_it_starts(tmp_path):
  rules = "rule @x trigger calcualtor check true enforce stop end"
  experiment = smoke_experiment(guards=GuardsConfig(rules=AgentSpecConfig(text=rules)))
  experiment.validate()
  with pytest.raises(
    ConfigError, match=r"config.guards.rules.text:1:17: unknown trigger 'calcualtor'"
  ):
    build_parts(experiment, tmp_path, Extensions())
