"""Folders of weights read onto a mesh of eight devices. As a script: the checks, under them."""

from __future__ import annotations

import os
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np

from agentjax import models
from agentjax.models.huggingface import checkpoint, load_pretrained, save_pretrained, tensor_entries
from agentjax.sharding import MeshConfig, make_mesh

CONFIG = models.ModelConfig(
  vocab_size=64,
  d_model=64,
  pattern="ME*-ME",
  num_heads=4,
  num_kv_heads=4,
  head_dim=8,
  d_mlp=256,
  mamba_heads=8,
  mamba_head_dim=8,
  mamba_state=4,
  num_experts=8,
  d_expert=16,
  d_shared_expert=16,
)


READS: list[int] = []  # bytes of every read; a list, since reads come from several threads


def counted(descriptor, buffers, offset, read=os.preadv):
  READS.append(read(descriptor, buffers, offset))
  return READS[-1]


def bytes_of(folder):
  return sum(entry.size for entry in tensor_entries(folder).values())


def check_a_mesh_holds_the_same_and_reads_every_byte_once(folder, params):
  for mesh in (
    MeshConfig(fsdp=8),
    MeshConfig(fsdp=2, tensor=4),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(data=2, fsdp=4),
  ):
    READS.clear()
    loaded, _ = load_pretrained(folder, mesh=make_mesh(mesh))
    assert sum(READS) == bytes_of(folder), mesh
    assert not loaded.embedding.is_fully_replicated
    for got, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
      np.testing.assert_array_equal(got, wanted)


def check_one_eighth_of_a_model_reads_one_eighth_of_the_bytes(folder):
  """As processes with one device each would: the shards of the others are left out."""
  mesh = make_mesh(MeshConfig(fsdp=8))
  shards = checkpoint._shards
  shares = []
  for device in mesh.devices.flat:

    def own(spec, sharding, device=device):
      return [shard for shard in shards(spec, sharding) if device in shard.devices]

    READS.clear()
    with (
      mock.patch.object(checkpoint, "_shards", own),
      mock.patch.object(checkpoint, "_place", lambda *_: None),
    ):
      load_pretrained(folder, mesh=mesh)
    shares.append(sum(READS) / bytes_of(folder))
  # A little more: every device holds the whole of norms and convolutions.
  assert all(0.125 <= share < 0.14 for share in shares), shares
  print(f"{max(shares):.4f} of the bytes for an eighth of the model")


def check_sharded_parameters_are_saved_as_whole_ones(folder, params):
  loaded, config = load_pretrained(folder, mesh=make_mesh(MeshConfig(fsdp=2, tensor=4)))
  again = pathlib.Path(folder).with_name("again")
  save_pretrained(again, loaded, config, max_shard_bytes=200_000)
  for file in pathlib.Path(folder).iterdir():
    assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_mesh_reads_and_writes_what_one_device_does(on_eight_devices):
  assert "all checks passed" in on_eight_devices(__file__)


if __name__ == "__main__":
  assert jax.device_count() == 8
  with tempfile.TemporaryDirectory() as directory:
    place = pathlib.Path(directory) / "folder"
    drawn = models.init(CONFIG, jax.random.key(0))
    save_pretrained(place, drawn, CONFIG, max_shard_bytes=200_000)
    with mock.patch.object(os, "preadv", counted):
      check_a_mesh_holds_the_same_and_reads_every_byte_once(place, drawn)
      check_one_eighth_of_a_model_reads_one_eighth_of_the_bytes(place)
    check_sharded_parameters_are_saved_as_whole_ones(place, drawn)
    print("all checks passed")
