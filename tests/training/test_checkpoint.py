"""Checkpoints: exact, atomic, and refused where they do not fit."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from agentjax.config import ConfigError
from agentjax.sharding import fingerprint
from agentjax.training import checkpoint, processes
from agentjax.training.checkpoint import (
  CheckpointError,
  CheckpointStore,
  load_networks,
)
from agentjax.training.state import Network, TrainState, Weights
from tests.training.machine import abstract_like


def _state(seed: int):
  params = {"w": jax.random.normal(jax.random.key(seed), (4, 3)), "b": [jnp.ones(3, jnp.bfloat16)]}
  optimizer = optax.apply_if_finite(optax.adamw(1e-3), 10)
  return TrainState(
    step=jnp.full((), seed),
    networks={
      "policy": Network(Weights(params), (optimizer.init(params), jax.random.key(seed))),
    },
  )


def _small(values) -> TrainState:
  network = Network(Weights({"x": jnp.asarray(values)}), ())
  return TrainState(step=jnp.zeros(()), networks={"policy": network})


def test_restore_returns_the_same_bits_host_state_and_pending(tmp_path):
  store = CheckpointStore(tmp_path / "c", keep=2, identity={"d_model": 8})
  host = {"iterator": {"next_index": 3}, "text": "a\nb"}
  store.save(7, _state(1), host, pending=b"\x00half an episode\x00")
  state, read, pending = store.restore(7, abstract_like(_state(2)))
  assert fingerprint(state) == fingerprint(_state(1)) != fingerprint(_state(2))
  assert (read, pending) == (host, b"\x00half an episode\x00")
  assert jax.tree.structure(state) == jax.tree.structure(_state(1))


def test_a_reward_model_is_kept_and_a_run_without_has_the_tree_that_it_always_had(tmp_path):
  store = CheckpointStore(tmp_path, keep=1, identity={})
  both = _state(1).with_network("reward_model", _state(2).networks["policy"])
  for step, state in enumerate((_state(1), both)):
    store.save(step, state, {})
    restored, *_ = store.restore(step, abstract_like(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert fingerprint(restored) == fingerprint(state)
    saved = ocp.checkpointables_metadata(tmp_path / str(step)).metadata
    assert set(saved["rest"]) == {"step", "networks", "opt_state", "reference"}
    assert ("network_reward_model" in saved) == (state is both)


def test_a_reward_model_of_an_earlier_release_is_refused_by_name(tmp_path, monkeypatch):
  store = CheckpointStore(tmp_path, keep=1, identity={})
  both = _state(1).with_network("reward_model", _state(2).networks["policy"])
  monkeypatch.setattr(
    checkpoint, "_further", lambda state, _: {"process": state.networks["reward_model"]}
  )
  store.save(3, both, {})
  monkeypatch.undo()
  with pytest.raises(CheckpointError, match=r"'process'.*'network_reward_model'.*start_from"):
    store.restore(3, abstract_like(both))


def test_keeps_the_first_and_the_newest(tmp_path):
  store = CheckpointStore(tmp_path, keep=2, identity={})
  for step in (0, 5, 10, 15):
    store.save(step, _small([1.0]), {})
  assert store.steps() == [0, 10, 15]


def test_checkpoint_of_another_config_is_refused_by_field(tmp_path):
  CheckpointStore(tmp_path, keep=1, identity={"model": {"d_model": 8}}).save(
    1, _small([1.0, 1.0]), {}
  )
  other = CheckpointStore(tmp_path, keep=1, identity={"model": {"d_model": 16}})
  with pytest.raises(ConfigError, match=r"config\.model\.d_model is 16 .* 8"):
    other.restore(1, abstract_like(_small([1.0, 1.0])))
  with pytest.raises(ConfigError, match="d_model"):
    load_networks(
      tmp_path / "1", abstract_like(_small([1.0, 1.0]).weights), {"model": {"d_model": 16}}
    )


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_policies_with_and_without_a_value_head_begin_from_each_other(tmp_path, saved, wanted):
  def weights(head, number):
    return Weights({"x": jnp.full(3, number)}, {"v": jnp.full(2, number)} if head else None)

  state = TrainState(jnp.zeros(()), {"policy": Network(weights(saved, 5.0), ())})
  CheckpointStore(tmp_path / "checkpoints", 1, {}).save(0, state, {})
  found = load_networks(tmp_path, abstract_like(weights(wanted, 0.0)), {})
  np.testing.assert_array_equal(found.policy["x"], 5.0)
  assert (found.value is not None) == (saved and wanted)
  if found.value is not None:
    np.testing.assert_array_equal(found.value["v"], 5.0)


def test_missing_step_lists_what_there_is(tmp_path):
  store = CheckpointStore(tmp_path, keep=1, identity={})
  store.save(4, _small([1.0, 1.0]), {})
  with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 .*available: \[4\]"):
    store.restore(5, abstract_like(_small([1.0, 1.0])))
  with pytest.raises(CheckpointError, match="is not a checkpoint"):
    load_networks(tmp_path / "nowhere", abstract_like(_small([1.0, 1.0]).weights), {})


def test_what_is_saved_is_the_state_at_the_call_whatever_becomes_of_its_arrays(tmp_path):
  store, wanted = CheckpointStore(tmp_path, keep=2, identity={}), fingerprint(_state(1))
  state, target = _state(1), abstract_like(_state(1))
  store.begin_save(1, state, {"n": 1})
  doubled = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
  weights = doubled(state.weights)
  for leaf in jax.tree.leaves((state.step, state.networks["policy"].opt_state)):
    leaf.delete()
  assert fingerprint(store.restore(1, target).state) == wanted
  assert fingerprint(weights) != fingerprint(_state(1).weights)


_KILLED = """
import os, signal, sys
import jax.numpy as jnp
from agentjax.training.checkpoint import CheckpointStore
from tests.training.test_checkpoint import _small
store = CheckpointStore(sys.argv[1], keep=3, identity={})
store.save(1, _small(jnp.full(4_000_000, 1.0)), {"n": 1})
store.begin_save(2, _small(jnp.full(4_000_000, 2.0)), {"n": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_the_middle_of_a_save_the_one_before_is_taken(tmp_path):
  done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=120, check=False)
  assert done.returncode == -9
  store = CheckpointStore(tmp_path, keep=3, identity={})
  target = abstract_like(_small(jnp.zeros(4_000_000)))
  step, found = store.restore_newest(lambda step: target, {})
  whole = (tmp_path / "2").is_dir()  # a machine that is busy may have let the writer end
  assert step == found.host["n"] == 1 + whole
  assert bool((found.state.weights.policy["x"] == step).all())


_FULL_DISK = """
import resource, signal, sys
import jax.numpy as jnp
from agentjax.training.checkpoint import CheckpointError, CheckpointStore
from agentjax.training.state import Network, TrainState, Weights
from tests.training.machine import abstract_like
def state(values):
  return TrainState(step=jnp.zeros(()), networks={"policy": Network(Weights(values), ())})
store = CheckpointStore(sys.argv[1], keep=3, identity={})
store.save(1, state(jnp.arange(1000.0)), {"n": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing past the limit fails like a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
import numpy as np
big = jnp.asarray(np.random.default_rng(0).normal(size=200_000))
try:
  store.save(2, state(big), {"n": 2})
except CheckpointError as error:
  assert "still load: [1]" in str(error), error
else:
  raise SystemExit("the save should have failed")
assert store.steps() == [1]
read, host, _ = store.restore(1, abstract_like(state(jnp.arange(1000.0))))
assert float(read.weights.policy[999]) == 999.0 and host == {"n": 1}
print("survived")
"""


def test_full_disk_leaves_the_old_checkpoint_readable(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", _FULL_DISK, str(tmp_path / "c")],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0 and "survived" in done.stdout, done.stdout + done.stderr


def _raise_lost(*_args, **_kwargs):
  """As orbax does where a process is gone that the others wait for."""
  try:
    raise jax.errors.JaxRuntimeError("INTERNAL: Barrier failed: Task 1 heartbeat timeout")
  except jax.errors.JaxRuntimeError as error:
    raise TimeoutError("Timeout waiting at barrier") from error


class _Lost:
  result = staticmethod(_raise_lost)


@pytest.mark.parametrize("begin", [_raise_lost, lambda *_args, **_kwargs: _Lost()])
def test_a_process_that_is_gone_during_a_save_is_not_taken_for_a_full_disk(
  tmp_path, monkeypatch, begin
):
  left = []
  monkeypatch.setattr(processes.atexit, "register", lambda *call: left.append(call))
  monkeypatch.setattr(ocp, "save_checkpointables_async", begin)
  with pytest.raises(CheckpointError, match="Free disk space"):  # alone, it is one of its own
    CheckpointStore(tmp_path, keep=1, identity={}).save(1, _small([1.0]), {})
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(processes, "wait", lambda name: None)
  told: dict[str, str] = {}
  store = types.SimpleNamespace(key_value_set=lambda key, value, **_: told.update({key: value}))
  monkeypatch.setattr(processes, "key_value_store", lambda: store)
  with pytest.raises(processes.ProcessLostError, match="Start the same command again"):
    with processes.failing_together():
      CheckpointStore(tmp_path, keep=1, identity={}).save(1, _small([1.0]), {})
  assert [status for _, status in left] == [4]
  assert len(told) == 1  # the others learn of it


def test_an_error_of_ours_that_a_device_caused_is_not_a_lost_process(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  try:
    raise CheckpointError("too little room") from jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
  except CheckpointError as error:
    assert not processes.failed_together(error) and processes.failed_together(error.__cause__)


def test_fingerprint_sees_one_flipped_bit_and_swapped_values():
  x = np.arange(10, dtype=np.float32)
  flipped = x.view(np.uint32).copy()
  flipped[3] ^= 1
  swapped = x.copy()
  swapped[[2, 5]] = swapped[[5, 2]]
  hashes = [fingerprint({"a": jnp.asarray(v)}) for v in (x, flipped.view(np.float32), swapped)]
  hashes.append(fingerprint({"a": jnp.zeros(10), "b": jnp.asarray(x)}))
  hashes.append(fingerprint({"a": jnp.asarray(x), "b": jnp.zeros(10)}))
  assert len(set(hashes)) == 5
  assert fingerprint({"a": jnp.asarray(x)}) == hashes[0]
