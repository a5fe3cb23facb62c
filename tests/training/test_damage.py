"""Damage on the disk: what is loaded is what was saved, or it is refused, set aside and told."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax.training.checkpoint import (
  CheckpointStore,
  DamagedCheckpointError,
  abstract_like,
)
from agentjax.training.fingerprint import fingerprint
from agentjax.training.state import Networks, TrainState

HOST = {"stream": {"round": 3, "consumed": [[1, 2]]}, "note": "ä"}
PENDING = b"\x00half an episode\x00" * 20


def make_state(seed: int) -> TrainState:
  """A policy, a value head, Adam's moments, a reference and a reward model with its own."""
  random = np.random.default_rng(seed)

  def weights(*shape: int) -> jax.Array:
    return jnp.asarray(random.normal(size=shape), jnp.float32)

  networks = Networks(policy={"w": weights(16, 12), "b": weights(5)}, value=weights(7))
  optimizer = optax.apply_if_finite(optax.adamw(1e-3), 10)
  moments = jax.tree.map(lambda x: x + 0.5, optimizer.init(networks))
  process = TrainState(jnp.int32(seed), Networks(networks.policy, None), weights(3), None)
  return TrainState(jnp.int32(seed), networks, moments, weights(4, 4), process)


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
  """One flip a time at random places of all files of step 7; how many were refused, of how many."""
  random = np.random.default_rng(seed)
  names = [p.relative_to(saved) for p in sorted((saved / "7").rglob("*")) if p.is_file()]
  names = [name for name in names if (saved / name).stat().st_size]
  store = copy_of(saved, tmp_path)
  refused = 0
  for i in range(damages):
    name = names[i % len(names)]
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
  refused, damages = damage_every_file(saved, tmp_path, 1500, seed=1)
  assert refused > damages / 3
