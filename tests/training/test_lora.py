"""Training adapters: what moves, what is kept, and that a run with them is a run like any other."""

import dataclasses

import jax
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.models import ModelConfig, param_specs
from agentjax.models.lora import LoraConfig
from agentjax.models.spec import count
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.sharding import MeshConfig, make_mesh, split_rows
from agentjax.training import Run, update
from agentjax.training.evaluation import evaluate_checkpoint
from agentjax.training.metrics import read_metrics
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.state import StateSpec, merged_policy, network_specs
from agentjax.training.update import UpdateSettings
from tests.training.machine import MIXTURE, machine, sequences, step, update_batch
from tests.training.smoke import quiet, smoke_experiment

_LORA = LoraConfig(rank=2, alpha=4.0)


def test_only_adapters_move_and_only_they_have_moments():
  made = machine(MIXTURE, UpdateSettings(lora=_LORA))
  before = made.fresh()
  _, whole = update_batch(sequences(), 4)
  state, metrics = step(made, made.fresh(), whole, 2)
  jax.tree.map(np.testing.assert_array_equal, state.reference, before.reference)
  # A is multiplied by a B of zero, so at first B alone has a gradient.
  query = state.weights.policy.groups[0][0].mixer.query
  assert np.abs(query.b).max() > 0.01 and metrics["update_norm"] > 0
  state, _ = step(made, state, whole, 2)
  old = before.weights.policy.groups[0][0].mixer.query
  assert np.abs(state.weights.policy.groups[0][0].mixer.query.a - old.a).max() > 1e-3
  adapters = count(network_specs(MIXTURE, critic=False, lora=_LORA))
  assert adapters < count(param_specs(MIXTURE))
  opt_state = state.networks["policy"].opt_state
  moments = sum(leaf.size for leaf in jax.tree.leaves(opt_state) if leaf.ndim)
  assert moments == 2 * adapters


def test_the_update_needs_no_memory_for_merged_weights_or_their_gradients(monkeypatch):
  model = ModelConfig(
    vocab_size=16, d_model=128, pattern="*-*-", num_heads=2, num_kv_heads=1, head_dim=16, d_mlp=512
  )
  _, whole = update_batch(sequences(), 4)

  def temporary_bytes():
    made = machine(model, UpdateSettings(lora=_LORA))
    state = jax.eval_shape(made.fresh)
    compiled = made.update.lower(state, split_rows(whole, 2), np.int32(2)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  ours = temporary_bytes()
  monkeypatch.setattr(update, "full_policy", merged_policy)
  merged = temporary_bytes()
  matrices = 4 * count(param_specs(model))
  assert merged - ours > matrices, (ours, merged, matrices)


@pytest.mark.slow
def test_the_first_forward_is_that_of_the_policy_without_adapters():
  _, whole = update_batch(sequences(), 4)
  with_lora = machine(MIXTURE, UpdateSettings(lora=_LORA))
  plain = machine(MIXTURE)
  state = with_lora.fresh()
  jax.tree.map(np.testing.assert_array_equal, state.reference, plain.fresh().weights.policy)
  merged = merged_policy(state.weights, state.reference, _LORA)
  jax.tree.map(np.testing.assert_array_equal, merged, state.reference)
  _, ours = step(with_lora, state, whole, 2)
  _, theirs = step(plain, plain.fresh(), whole, 2)
  for name in ("loss", "mismatch/mean", "mismatch/max"):
    assert ours[name] == pytest.approx(theirs[name], abs=1e-7)


def test_adapters_are_placed_as_the_axes_of_their_arrays():
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  optimizer = build_optimizer(
    OptimizerConfig(name="muon"), 10, network_specs(MIXTURE, critic=False, lora=_LORA)
  )
  placed = StateSpec(MIXTURE, optimizer, mesh, lora=_LORA).placed
  assert jax.tree.structure(placed.reference) == jax.tree.structure(
    param_specs(MIXTURE), is_leaf=lambda v: hasattr(v, "axes")
  )


def _experiment(**changes):
  experiment = smoke_experiment(lora=_LORA, **changes)
  loss = PolicyLossConfig(kl_coefficient=0.1)
  return dataclasses.replace(
    experiment,
    supervised=dataclasses.replace(experiment.supervised, steps=0, router_bias_rate=0.0),
    rl=dataclasses.replace(
      experiment.rl,
      steps=2,
      router_bias_rate=0.0,
      objective=ObjectiveConfig(policy_loss=loss),
    ),
    evaluation=dataclasses.replace(experiment.evaluation, every=0, samples=0),
    checkpoint=dataclasses.replace(experiment.checkpoint, every=1),
  )


@pytest.mark.slow
def test_a_run_with_adapters_trains_resumes_replays_and_is_evaluated(tmp_path):
  directory = tmp_path / "run"
  report = Run(_experiment(), directory, console=quiet()).train()
  assert report.finished and report.after
  run = Run(_experiment(), directory, console=quiet())
  assert run.replay(2).identical
  with run._session() as session:
    (state, at), (start, _) = session._restore(), session._restore(at_most=0)
    assert at == 2
    # The KL term's reference is what the adapters are added to: there is no second copy.
    jax.tree.map(np.testing.assert_array_equal, state.reference, start.reference)
    moved = session.learner.policy(state).groups[0][0].mixer
    assert any(np.abs(leaf.b).max() > 1e-4 for leaf in vars(moved).values() if leaf is not None)
  measured = evaluate_checkpoint(_experiment(), directory).metrics()
  for name in ("greedy", "greedy/rollout/sampled_tokens"):
    assert measured[name] == report.after[name], name


@pytest.mark.slow
def test_a_run_that_lets_go_of_the_base_has_the_same_figures_and_sends_it_again(tmp_path):
  rows = []
  for keep in (True, False):
    experiment = _experiment()
    experiment.engine.keep_base = keep
    directory = tmp_path / str(keep)
    Run(experiment, directory, console=quiet()).train()
    rows.append([row for row in read_metrics(directory / "metrics.jsonl") if "loss" in row])
  (first, second), (again, other) = rows
  assert [first["loss"], second["loss"]] == [again["loss"], other["loss"]]
  assert other["memory/published"] > 5 * second["memory/published"]


@pytest.mark.slow
def test_adapters_start_from_a_run_without_and_refuse_what_needs_the_base(tmp_path):
  whole = dataclasses.replace(_experiment(), lora=None)
  whole = dataclasses.replace(
    whole,
    rl=dataclasses.replace(whole.rl, steps=1, objective=ObjectiveConfig()),
    evaluation=dataclasses.replace(whole.evaluation, tasks=0),
  )
  Run(whole, tmp_path / "base", console=quiet()).train()
  run = Run(_experiment(start_from=str(tmp_path / "base")), tmp_path / "lora", console=quiet())
  with run._session() as session, Run(whole, tmp_path / "base", console=quiet())._session() as base:
    started, _ = session._restore()
    trained, _ = base._restore()
    jax.tree.map(np.testing.assert_array_equal, started.reference, trained.weights.policy)
  broken = _experiment()
  broken.rl.router_bias_rate = 1e-3
  with pytest.raises(ConfigError, match=r"config\.rl\.router_bias_rate=0.001.*config\.lora"):
    broken.validate()
