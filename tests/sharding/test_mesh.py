"""Mesh settings: what fits a number of devices and what is refused."""

from __future__ import annotations

import jax
import pytest

from agentjax.config import ConfigError
from agentjax.sharding import MESH_AXES, MeshConfig, make_mesh


@pytest.mark.parametrize(
  ("config", "devices", "expected"),
  [
    (MeshConfig(), 1, (1, 1, 1, 1, 1)),
    (MeshConfig(), 8, (1, 8, 1, 1, 1)),
    (MeshConfig(data=2, fsdp=2, tensor=2), 8, (2, 2, 1, 2, 1)),
    (MeshConfig(data=-1, fsdp=2, expert=2), 12, (3, 2, 2, 1, 1)),
    (MeshConfig(fsdp=1, context=-1), 4, (1, 1, 1, 1, 4)),
  ],
)
def test_one_axis_takes_the_rest(config, devices, expected):
  assert tuple(config.sizes(devices).values()) == expected
  assert tuple(config.sizes(devices)) == MESH_AXES


@pytest.mark.parametrize(
  ("config", "devices", "message"),
  [
    (MeshConfig(data=2, fsdp=2), 8, "fsdp=2.*needs 4 devices, got 8"),
    (MeshConfig(data=3), 8, "needs a multiple of 3 devices, got 8"),
    (MeshConfig(data=16), 8, "needs a multiple of 16 devices, got 8"),
    (MeshConfig(data=-1), 8, "-1 for data and fsdp; allowed: at most one"),
    (MeshConfig(tensor=0), 8, r"config\.mesh\.tensor=0; allowed: at least 1, or -1"),
  ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(config, devices, message):
  with pytest.raises(ConfigError, match=message):
    config.sizes(devices)


def test_every_axis_is_left_to_the_compiler():
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  assert mesh.axis_names == MESH_AXES
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_axes_that_a_torus_has_not_are_refused_by_name(monkeypatch):
  def refuses(*_, **__):
    raise NotImplementedError

  monkeypatch.setattr(jax, "make_mesh", refuses)
  with pytest.raises(ConfigError, match="fsdp=8 does not lie on these devices"):
    make_mesh(MeshConfig(fsdp=8), jax.devices()[:1] * 8)
