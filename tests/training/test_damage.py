"""Damage on the disk: what is loaded is what was saved, or it is refused, set aside and told."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from agentjax.sharding import fingerprint
from agentjax.training.checkpoint import (
  CheckpointError,
  CheckpointStore,
  DamagedCheckpointError,
  latest_checkpoint,
  load_networks,
  read_metadata,
)
from agentjax.training.state import Network, TrainState, Weights
from tests.training.machine import abstract_like

HOST = {"stream": {"round": 3, "consumed": [[1, 2]]}, "note": "ä"}
PENDING = b"\x00half an episode\x00" * 20


def make_state(seed: int) -> TrainState:
  """A policy, a value head, Adam's moments, a reference and a reward model with its own."""
  random = np.random.default_rng(seed)

  def weights(*shape: int) -> jax.Array:
    return jnp.asarray(random.normal(size=shape), jnp.float32)

  policy = Weights(policy={"w": weights(64, 64), "b": weights(5)}, value=weights(7))
  optimizer = optax.apply_if_finite(optax.adamw(1e-3), 10)
  moments = jax.tree.map(lambda x: x + 0.5, optimizer.init(policy))
  networks = {
    "policy": Network(policy, moments),
    "reference": Network(Weights(weights(4, 4))),
    "reward_model": Network(Weights(policy.policy), weights(3)),
  }
  return TrainState(jnp.int32(seed), networks)


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
  """A folder of checkpoints of steps 0 and 7."""
  directory = tmp_path_factory.mktemp("run") / "checkpoints"
  store = CheckpointStore(directory, keep=2, identity={"model": {"d_model": 8}})
  for step in (0, 7):
    store.save(step, make_state(step), HOST, PENDING)
  return directory


def copy_of(saved: pathlib.Path, tmp_path: pathlib.Path) -> CheckpointStore:
  shutil.copytree(saved, tmp_path / "checkpoints", dirs_exist_ok=True)
  return CheckpointStore(tmp_path / "checkpoints", keep=2, identity={"model": {"d_model": 8}})


def flip(file: pathlib.Path, place: float) -> None:
  """Flips the bit that lies at ``place``, 0 to 1, of the file."""
  data = bytearray(file.read_bytes())
  bit = int(place * len(data) * 8)
  data[bit // 8] ^= 1 << bit % 8
  file.write_bytes(bytes(data))


def assert_whole_or_refused(store: CheckpointStore, what: str) -> bool:
  """Whether step 7 was refused; where it was not, it is what was saved, to the bit."""
  try:
    state, host, pending = store.restore(7, abstract_like(make_state(7)))
  except DamagedCheckpointError:
    return True
  assert fingerprint(state) == fingerprint(make_state(7)), what
  assert (host, pending) == (HOST, PENDING), what
  return False


def damage_every_file(saved, tmp_path, damages: int, seed: int) -> tuple[int, int]:
  """One flip a time at random places of step 7; how many were refused, of how many.

  Every second one is in the two largest files, weights and moments, the others go round all files.
  """
  random = np.random.default_rng(seed)
  names = [p.relative_to(saved) for p in sorted((saved / "7").rglob("*")) if p.is_file()]
  names = [name for name in names if (saved / name).stat().st_size]
  largest = sorted(names, key=lambda name: (saved / name).stat().st_size)[-2:]
  store = copy_of(saved, tmp_path)
  refused = 0
  for i in range(damages):
    name = largest[i // 2 % 2] if i % 2 else names[i // 2 % len(names)]
    file = store.directory / name
    flip(file, float(random.uniform()))
    refused += assert_whole_or_refused(store, f"{name}, flip {i} of seed {seed}")
    shutil.copyfile(saved / name, file)
  return refused, damages


def test_no_flipped_bit_is_loaded(saved, tmp_path):
  refused, damages = damage_every_file(saved, tmp_path, 60, seed=0)
  assert refused > damages / 3  # many bits of orbax's files say nothing


@pytest.mark.slow
def test_no_flipped_bit_is_loaded_of_very_many(saved, tmp_path):
  refused, damages = damage_every_file(saved, tmp_path, 600, seed=1)
  assert refused > damages / 3


@pytest.mark.slow
def test_no_cut_off_or_missing_file_is_loaded(saved, tmp_path):
  store = copy_of(saved, tmp_path)
  refused = 0
  for file in sorted(p for p in (store.directory / "7").rglob("*") if p.is_file()):
    whole = file.read_bytes()
    for rest in {len(whole) // 2, None} if whole else {None}:
      if rest is None:
        file.unlink()
      else:
        file.write_bytes(whole[:rest])
      refused += assert_whole_or_refused(store, f"{file} with {rest} of {len(whole)} bytes")
      file.write_bytes(whole)
  assert refused > 10
  assert not assert_whole_or_refused(store, "restored")


def weights_file(store: CheckpointStore, step: int) -> pathlib.Path:
  files = (store.directory / str(step) / "networks").rglob("d/*")
  return max(files, key=lambda file: file.stat().st_size)


def target(step: int) -> TrainState:
  return abstract_like(make_state(step))


def test_the_newest_whole_one_is_taken_and_the_damaged_one_is_kept(saved, tmp_path, caplog):
  store = copy_of(saved, tmp_path)
  shutil.copytree(store.directory / "7", store.directory / "9")
  weights_file(store, 7).write_bytes(b"")
  for file in (store.directory / "9").rglob("_CHECKPOINT_METADATA"):
    file.unlink()
  networks, first = abstract_like(make_state(0).weights), make_state(0)
  assert latest_checkpoint(tmp_path).name == "7"  # only its metadata are looked at
  loaded = load_networks(tmp_path, networks, store.identity)
  assert fingerprint(loaded) == fingerprint(first.weights)
  with pytest.raises(CheckpointError, match="7 is damaged"):
    load_networks(store.directory / "7", networks, store.identity)
  step, restored = store.restore_newest(target, {}, set_aside=False)
  assert step == 0 and store.steps() == [0, 7, 9]
  step, restored = store.restore_newest(target, {})
  assert step == 0 and fingerprint(restored.state) == fingerprint(first)
  names = sorted(p.name for p in store.directory.iterdir())
  assert names == ["0", "damaged-7", "damaged-9"]
  assert "checkpoints/7 is damaged" in caplog.text and "step 0 is taken instead" in caplog.text


def test_where_none_is_whole_all_are_left_alone(saved, tmp_path):
  store = copy_of(saved, tmp_path)
  for step in store.steps():
    weights_file(store, step).unlink()
  with pytest.raises(CheckpointError, match="no checkpoint in .* is whole: .*7 is .*0 is damaged"):
    store.restore_newest(target, {})
  assert store.steps() == [0, 7]


def test_a_checkpoint_that_the_journal_knows_otherwise_is_refused(saved, tmp_path):
  store = copy_of(saved, tmp_path)
  known = fingerprint(make_state(7).trained)
  assert store.restore_newest(target, {7: known})[0] == 7
  assert store.restore_newest(target, {7: "another"})[0] == 0


def test_a_checkpoint_without_a_seal_is_read_and_compared_with_the_journal(tmp_path, monkeypatch):
  save = ocp.save_checkpointables_async

  def old(*args, custom_metadata, **kwargs):
    kept = {k: v for k, v in custom_metadata.items() if k not in ("seal", "fingerprints")}
    return save(*args, custom_metadata=kept, **kwargs)

  monkeypatch.setattr(ocp, "save_checkpointables_async", old)
  store = CheckpointStore(tmp_path, keep=2, identity={})
  store.save(3, make_state(3), HOST)
  assert read_metadata(tmp_path / "3")["fingerprints"] is None
  assert store.restore(3, target(3)).host == HOST
  with pytest.raises(DamagedCheckpointError, match="the journal says another"):
    store.restore(3, target(3), "another")
