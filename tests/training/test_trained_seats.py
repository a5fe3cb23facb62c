"""A run that trains two policies: each learns from what it drew itself, and from nothing else."""

import dataclasses

import jax
import numpy as np
import pytest

from agentjax.config import ConfigError, Table
from agentjax.data import TaskSplits
from agentjax.files import CheckpointError
from agentjax.models.lora import LoraConfig, merge_adapters
from agentjax.objectives import AdvantageConfig, ObjectiveConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import (
  CheckpointSeat,
  SnapshotSeat,
  TrainedSeat,
  policy_names,
  trained_seats,
)
from agentjax.sharding import fingerprint
from agentjax.signals.critic import CriticConfig
from agentjax.signals.signal import Signal, SignalConfig, get_states, set_states
from agentjax.training import Extensions, Run
from agentjax.training.alternation import AlternateConfig, learners
from agentjax.training.checkpoint import load_whole_policy
from agentjax.training.evaluation import evaluate_checkpoint, load_snapshot
from agentjax.training.metrics import read_metrics
from agentjax.training.phases import optimizer_steps
from agentjax.trajectory.record import Task
from tests.training.smoke import quiet
from tests.training.stages import fingerprints, staged_experiment, train_until_killed
from tests.training.test_seats import Duel, episodes_of, versions

WHITE = "seat_white"
WITH_REFERENCE = ObjectiveConfig(with_reference=True)
WITH_VALUES = ObjectiveConfig(AdvantageConfig(centre="none", scale="none", credit="gae"))


def made(directory, *, seats=None, steps=2, schedule=None, lora=None, tasks=0, **changes):
  """Duels of "policy", black, with whoever plays white; ``changes`` are those of the stage."""
  seats = Table({"white": TrainedSeat()} if seats is None else seats)
  experiment = staged_experiment(schedule or ScheduleConfig(), seats=seats, lora=lora)
  for name, value in {"steps": steps, **changes}.items():
    setattr(experiment.rl, name, value)
  experiment.checkpoint.every = 2
  experiment.evaluation.tasks, experiment.evaluation.samples = tasks, 0
  experiment.evaluation.success_part, experiment.evaluation.success_threshold = "environment", 0.01
  duels = [Task(id=i, prompt=(), answer="", source="duels") for i in range(6)]
  extensions = Extensions(tasks=TaskSplits(duels, duels[:2]), make_environment=lambda task: Duel())
  return Run(experiment, directory, extensions=extensions, console=quiet())


def trained_step_by_step(run):
  """Hashes of all networks' weights before the first step and after each; runs it to its end."""
  found = []
  with run._session() as session:
    step = session.learner.rl_step

    def noting(state, episodes, number):
      found[:] = found or [hashes(state)]
      state, values = step(state, episodes, number)
      found.append(hashes(state))
      return state, values

    session.learner.rl_step = noting
    session.train()
  return found


def hashes(state):
  return {name: fingerprint(network.weights) for name, network in state.networks.items()}


def test_each_policy_has_its_own_weights_versions_and_metrics(tmp_path):
  found = trained_step_by_step(made(tmp_path))
  assert found[0]["policy"] == found[0][WHITE]
  for name in ("policy", WHITE):
    assert len({one[name] for one in found}) == 3
  assert all(one["policy"] != one[WHITE] for one in found[1:])
  episodes = episodes_of(tmp_path)
  assert versions(episodes, "policy") == versions(episodes, WHITE) == {1: {1}, 2: {2}}
  for row in read_metrics(tmp_path / "metrics.jsonl"):
    # The network that is trained on a token is the one that drew it.
    assert row["mismatch/max"] < 1e-4 and row[f"policies/{WHITE}/mismatch/max"] < 1e-4
    # White has no turn where black ends the episode by a breach.
    assert row["policies/policy/episodes"] == 8 >= row[f"policies/{WHITE}/episodes"] > 0
    assert row["policies/policy/reward"] == row["agents/black/reward"]
    assert row[f"policies/{WHITE}/learning_rate"] == row["learning_rate"]


def drawn_tokens(episodes):
  """How many tokens each policy drew."""
  found = dict.fromkeys(("policy", WHITE), 0)
  for segment in (s for episode in episodes for s in episode.segments):
    found[segment.policy] += int(segment.sampled.sum())
  return found


def test_every_drawn_token_is_trained_once_by_the_policy_that_drew_it(tmp_path):
  run, drawn, packed = made(tmp_path, steps=1, seats={"white": TrainedSeat(start="random")}), {}, []
  with run._session() as session:
    learner, step = session.learner, session.learner.rl_step
    prepare = learner._prepare_batch

    def counting(phase, state, sequences, *rest):
      packed.append((fingerprint(state.weights), sum((s.weights > 0).sum() for s in sequences)))
      return prepare(phase, state, sequences, *rest)

    def noting(state, episodes, number):
      for name, count in drawn_tokens(episodes).items():
        drawn[fingerprint(state.networks[name].weights)] = count
      return step(state, episodes, number)

    learner._prepare_batch, learner.rl_step = counting, noting
    session.train()
  assert dict(packed) == drawn and len(packed) == len(drawn) == 2
  assert all(drawn.values())


def reworded(episode, policy):
  """The episode with other words of a policy."""
  return dataclasses.replace(
    episode,
    segments=[
      dataclasses.replace(s, token_ids=np.full_like(s.token_ids, 65)) if s.policy == policy else s
      for s in episode.segments
    ],
  )


@pytest.mark.slow
def test_what_one_policy_writes_does_not_change_the_update_of_the_other(tmp_path):
  def train(name, replaced):
    run = made(tmp_path / name, steps=1)
    with run._session() as session:
      step = session.learner.rl_step
      found = []

      def other_words(state, episodes, number):
        state, values = step(state, [reworded(e, replaced) for e in episodes], number)
        found.append(hashes(state))
        return state, values

      session.learner.rl_step = other_words
      session.train()
    return found[0]

  plain = train("plain", None)
  for changed, same in ((WHITE, "policy"), ("policy", WHITE)):
    other = train(changed, changed)
    assert other[same] == plain[same] and other[changed] != plain[changed]


@pytest.mark.slow
def test_a_policy_learns_as_if_the_other_one_were_a_checkpoint_that_plays(tmp_path):
  """Whoever never has its turn keeps its bits, and is to the other what a frozen player is."""
  made(tmp_path / "first", seats={}, steps=1).train()
  path = str(tmp_path / "first")
  seat = TrainedSeat(start="checkpoint", path=path)
  turns = AlternateConfig(order=("policy",))
  waiting = trained_step_by_step(made(tmp_path / "a", seats={"white": seat}, alternate=turns))
  frozen = trained_step_by_step(made(tmp_path / "b", seats={"white": CheckpointSeat(path=path)}))
  assert [one["policy"] for one in waiting] == [one["policy"] for one in frozen]
  assert len({one["policy"] for one in waiting}) == 3
  assert len({one[WHITE] for one in waiting}) == 1
  assert waiting[0][WHITE] != waiting[0]["policy"]
  both = trained_step_by_step(made(tmp_path / "c", seats={"white": seat}))
  assert both[1]["policy"] == waiting[1]["policy"] and both[1][WHITE] != waiting[1][WHITE]
  assert both[2]["policy"] != waiting[2]["policy"]  # whose opponent has learnt meanwhile


@pytest.mark.slow
def test_a_later_run_takes_policies_over_by_their_names(tmp_path):
  seats = {"white": TrainedSeat(policy="rival", start="random")}
  *_, last = trained_step_by_step(made(tmp_path / "first", steps=1, seats=seats))
  path = str(tmp_path / "first")
  again = {"white": TrainedSeat(start="checkpoint", path=path, of="rival")}
  first, _ = trained_step_by_step(made(tmp_path / "second", steps=1, seats=again))
  assert first[WHITE] == last["rival"] != first["policy"]
  again = {"white": CheckpointSeat(path=path, of="rival")}
  with made(tmp_path / "third", seats=again)._session() as session:
    *_, identity = session.bank._pool.serve(path, "rival")
    wanted = load_whole_policy(tmp_path / "first" / "checkpoints" / "1", policy="rival")
    assert identity == fingerprint(wanted)


@pytest.mark.slow
def test_policies_take_turns(tmp_path):
  found = trained_step_by_step(made(tmp_path, steps=4, alternate=AlternateConfig(every=1)))
  moved = [
    {name for name in ("policy", WHITE) if one[name] != two[name]}
    for one, two in zip(found[:-1], found[1:], strict=True)
  ]
  assert moved == [{"policy"}, {WHITE}, {"policy"}, {WHITE}]
  first, second, *_ = read_metrics(tmp_path / "metrics.jsonl")
  assert "loss" in first and f"policies/{WHITE}/loss" not in first
  assert "loss" not in second and f"policies/{WHITE}/loss" in second
  assert [learners(None, [WHITE], n) for n in (0, 9)] == [("policy", WHITE)] * 2
  three = AlternateConfig(every=2, order=("b", "policy", "a"))
  turns = [learners(three, ["a", "b"], n)[0] for n in range(7)]
  assert turns == ["b", "b", "policy", "policy", "a", "a", "b"]


@pytest.mark.slow
def test_a_snapshot_of_a_further_policy_follows_that_one(tmp_path):
  """Nobody is left to "policy" here: it plays nowhere and stays as it is."""
  seats = {"black": TrainedSeat(policy="other"), "white": SnapshotSeat(every=1, of="other")}
  first, second, third = trained_step_by_step(made(tmp_path, seats=seats))
  assert len({one["other"] for one in (first, second, third)}) == 3
  assert first[WHITE] == second[WHITE] == first["other"]
  assert third[WHITE] == second["other"]
  assert first["policy"] == third["policy"]
  assert versions(episodes_of(tmp_path), "other") == {1: {1}, 2: {2}}
  with pytest.raises(ConfigError, match=r"seats\.white\.of='b'; allowed: .*policy, other"):
    made(tmp_path, seats=seats | {"white": SnapshotSeat(of="b")}).train()


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"alternate": AlternateConfig(every=1), "objective": WITH_REFERENCE},
    {"schedule": ScheduleConfig(mode="one_step_off"), "objective": WITH_VALUES},
    {"objective": WITH_VALUES, "critic": CriticConfig(), "lora": LoraConfig(rank=2)},
  ],
)
def test_a_run_of_two_policies_goes_on_after_a_kill_with_the_same_bits(tmp_path, changes):
  seats = {"white": TrainedSeat(start="random", learning_rate=0.02)}
  made(tmp_path / "straight", steps=4, seats=seats, **changes).train()
  train_until_killed(made(tmp_path / "killed", steps=4, seats=seats, **changes), step=4)
  made(tmp_path / "killed", steps=4, seats=seats, **changes).train()
  assert fingerprints(tmp_path / "killed") == fingerprints(tmp_path / "straight")
  assert made(tmp_path / "killed", steps=4, seats=seats, **changes).replay(4).identical


@pytest.mark.slow
def test_references_and_networks_of_signals_are_each_policys_own(tmp_path):
  objective = dataclasses.replace(WITH_VALUES, with_reference=True)
  seats = {"white": TrainedSeat(start="random")}
  run = made(tmp_path, seats=seats, objective=objective, critic=CriticConfig())
  first, _, last = trained_step_by_step(run)
  for name in ("policy", WHITE):
    reference = "reference" if name == "policy" else f"{WHITE}.reference"
    critic = "critic" if name == "policy" else f"{WHITE}.critic"
    assert first[reference] == last[reference] == first[name] != last[name]
    assert first[critic] != last[critic]
  assert len(set(first.values())) == len(set(last.values())) - 2 == 4


class Count(Signal):
  """Remembers how many tokens it was shown."""

  name = "count"

  def __init__(self):
    self.tokens = 0

  def __call__(self, context, networks, batch):
    self.tokens += int((context.packed.weights > 0).sum())
    return super().__call__(context, networks, batch)

  def get_state(self):
    return self.tokens

  def set_state(self, state):
    self.tokens = state


@dataclasses.dataclass(unsafe_hash=True)
class CountConfig(SignalConfig):
  def build(self, tools):
    return Count()


def test_each_policy_has_its_own_signals_and_shares_programs_where_it_can(tmp_path):
  run = made(tmp_path, steps=1, signals=(CountConfig(),))
  with run._session() as session:
    session.train()
    learner = session.learner
    drawn = drawn_tokens(episodes_of(tmp_path))
    assert get_states(learner.signals) == {"count": drawn["policy"], f"{WHITE}.count": drawn[WHITE]}
    set_states(learner.signals, {f"{WHITE}.count": 7})
    assert get_states(learner.signals) == {"count": drawn["policy"], f"{WHITE}.count": 7}
    own, other = (learner._phases[name][0].passes for name in ("policy", WHITE))
    assert own is other and own[0].update._cache_size() == 1
  run = made(tmp_path / "b", steps=1, seats={"white": TrainedSeat(learning_rate=0.5)})
  with run._session() as session:
    own, other = (session.learner._phases[name][0].passes for name in ("policy", WHITE))
    assert own is not other
    state = session.learner.begin_rl(session.learner.first_state("rl"))
    rates = [session.learner.learning_rate("rl", state, name) for name in ("policy", WHITE)]
    np.testing.assert_allclose(rates, [1e-2, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"objective": WITH_VALUES}, {"lora": LoraConfig(rank=2)}])
def test_a_policy_is_measured_and_exported_by_its_name(tmp_path, changes):
  run = made(tmp_path, steps=1, tasks=2, seats={"white": TrainedSeat(start="random")}, **changes)
  with run._session() as session:
    session.train()
    state, _ = session._restore()
    learner, parts, path = session.learner, session.parts, tmp_path / "checkpoints" / "1"
    held, policy = learner.snapshot(state, WHITE), learner.policy(state)
    found = load_snapshot(parts, path, WHITE, policy)
    assert fingerprint(found) == fingerprint(held) != fingerprint(policy)
  merged = jax.jit(merge_adapters)(held)
  assert fingerprint(load_whole_policy(path, policy=WHITE)) == fingerprint(merged)
  with pytest.raises(CheckpointError, match=r"no policy 'seat_black'.*seat_white"):
    load_whole_policy(path, policy="seat_black")
  extensions = run._extended.extensions
  rewards = {}
  for name, agent in (("policy", "black"), (WHITE, "white")):
    report = evaluate_checkpoint(run.experiment, path, extensions=extensions, measured=name)
    for episode in report.greedy_trajectories:
      assert [a for a, outcome in episode.agents.items() if outcome.learns] == [agent]
      rewards.setdefault(episode.task_id, []).append(episode.reward_parts["environment"].value)
  assert len(rewards) == 2
  for black, white in rewards.values():
    assert black == -white or -1.0 in (black, white)  # a breach costs whoever made it
  with pytest.raises(ConfigError, match=r"--policy=seat_red; allowed: .*policy, seat_white"):
    evaluate_checkpoint(run.experiment, path, extensions=extensions, measured="seat_red")


def test_names_and_turns_of_policies_are_checked(tmp_path):
  seats = {
    "a": TrainedSeat(policy="one"),
    "b": TrainedSeat(policy="one"),
    "c": TrainedSeat(policy="two"),
    "d": SnapshotSeat(),
    "e": TrainedSeat(),
  }
  names = {"a": "one", "b": "one", "c": "two", "d": "seat_d", "e": "seat_e"}
  assert policy_names(seats) == names
  assert list(trained_seats(seats)) == ["one", "seat_e", "two"]
  with pytest.raises(ConfigError, match=r"config\.seats\.a has a policy 'one'"):
    policy_names(seats | {"b": TrainedSeat(policy="one", start="random")})
  for wrong, message in (
    (TrainedSeat(policy="policy"), r"policy='policy'; allowed: an identifier"),
    (TrainedSeat(path="runs/a"), r"path='runs/a'; allowed: none with start='policy'"),
    (TrainedSeat(start="checkpoint"), r"path=None; allowed: RUN"),
    (TrainedSeat(learning_rate=0.0), r"learning_rate=0\.0; allowed: > 0"),
  ):
    with pytest.raises(ConfigError, match=message):
      wrong.validate()

  def refused(message, **changes):
    with pytest.raises(ConfigError, match=message):
      made(tmp_path, **changes).train()

  turns = AlternateConfig(order=("x",))
  refused(r"rl\.alternate\.order=\('x',\).*policy, seat_white", alternate=turns)
  refused(r"rl\.alternate", alternate=AlternateConfig(), seats={})
  critic = {"white": TrainedSeat(policy="critic")}
  refused(r"policy 'critic'", seats=critic, objective=WITH_VALUES, critic=CriticConfig())
  loaded = {"white": TrainedSeat(start="checkpoint", path="runs/a")}
  refused(r"config\.lora", seats=loaded, lora=LoraConfig(rank=2))


def test_the_schedule_of_a_learning_rate_counts_the_turns_of_its_policy(tmp_path):
  run = made(tmp_path, steps=5, minibatches=2, alternate=AlternateConfig(every=2))
  counts = [optimizer_steps(run.experiment, name) for name in ("policy", WHITE)]
  assert counts == [6, 4]
  assert optimizer_steps(made(tmp_path, steps=5, minibatches=2).experiment, WHITE) == 10
