"""Fusion of experts: three vectors by hand, and folders."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from agentjax.config import ConfigError
from agentjax.recipes.longcat.fusion import fuse_folders, fuse_tensor

BASE = np.array([1.0, 1.0, 1.0, 1.0], np.float32)


def test_three_experts_by_hand():
  """Differences of norms 5, 5, 10 become (4, 3, 0, 0) 4/3, (0, 4, -3, 0) 4/3, (0, 0, 6, 8) 2/3: the
  third entry keeps the larger sum -4 + 4 = 0, so nothing."""
  differences = np.array([[4, 3, 0, 0], [0, 4, -3, 0], [0, 0, 6, 8]], np.float32)
  found = fuse_tensor(BASE, [BASE + d for d in differences])
  np.testing.assert_allclose(found - BASE, [16 / 3, (4 + 16 / 3) / 2, 0, 16 / 3], rtol=1e-5)


def test_entries_of_the_minority_are_erased():
  """Two go up and one goes down: the mean of all three would be a third of it."""
  experts = [BASE + s * np.ones(4, np.float32) for s in (1.0, 1.0, -1.0)]
  np.testing.assert_allclose(fuse_tensor(BASE, experts) - BASE, np.ones(4), rtol=1e-6)


def test_one_expert_without_dropout_is_itself():
  expert = np.array([3.0, -1.0, 0.5, 1.0], np.float32)
  np.testing.assert_array_equal(fuse_tensor(BASE, [expert]), expert)
  np.testing.assert_array_equal(fuse_tensor(BASE, [BASE, BASE]), BASE)


def test_dropout_keeps_the_mean_and_has_an_address():
  base = np.zeros(20_000, np.float32)
  expert = np.ones(20_000, np.float32)
  found = fuse_tensor(base, [expert], name="w", drop=0.25, seed=3)
  assert set(np.unique(found).round(4)) == {0.0, np.float32(1.3333)}
  assert found.mean() == pytest.approx(1, abs=0.02)
  np.testing.assert_array_equal(found, fuse_tensor(base, [expert], name="w", drop=0.25, seed=3))
  assert (found != fuse_tensor(base, [expert], name="v", drop=0.25, seed=3)).any()


def folder(path, value, dtype=np.float32, name="w"):
  path.mkdir()
  tensors = {name: np.full((2, 2), value, dtype), "step": np.array([int(value)], np.int32)}
  safetensors.numpy.save_file(tensors, path / "model.safetensors")
  (path / "config.json").write_text(json.dumps({"of": path.name}))
  return path


def test_folders_become_one(tmp_path):
  base, up, more = (folder(tmp_path / n, v) for n, v in (("base", 1), ("up", 2), ("more", 4)))
  assert fuse_folders(base, [up, more], tmp_path / "fused") == 2
  found = safetensors.numpy.load_file(tmp_path / "fused" / "model.safetensors")
  np.testing.assert_allclose(found["w"], 3)  # differences 1 and 3 of one size, 2
  assert found["step"] == [1]
  assert json.loads((tmp_path / "fused" / "config.json").read_text()) == {"of": "base"}


def test_stored_types_stay(tmp_path):
  kind = ml_dtypes.bfloat16
  base, up = folder(tmp_path / "base", 1, kind), folder(tmp_path / "up", 2, kind)
  fuse_folders(base, [up], tmp_path / "fused")
  found = safetensors.numpy.load_file(tmp_path / "fused" / "model.safetensors")["w"]
  assert found.dtype == kind and float(found[0, 0]) == 2


def test_other_models_and_present_folders_are_refused(tmp_path):
  base, other = folder(tmp_path / "base", 1), folder(tmp_path / "other", 2, name="v")
  with pytest.raises(ConfigError, match="differ in tensors such as 'v'"):
    fuse_folders(base, [other], tmp_path / "fused")
  with pytest.raises(ConfigError, match="is there"):
    fuse_folders(base, [base], other)
  with pytest.raises(ConfigError, match="no tensors"):
    fuse_folders(base, [tmp_path], tmp_path / "fused")


def test_what_stands_beside_the_output_stays_and_a_failure_leaves_nothing(tmp_path):
  base, up, other = (folder(tmp_path / n, 2) for n in ("base", "up", "fused.tmp"))
  fuse_folders(base, [up], tmp_path / "fused")
  assert (other / "config.json").exists()
  wide = {"w": np.ones((3, 3), np.float32), "step": np.array([2], np.int32)}
  safetensors.numpy.save_file(wide, up / "model.safetensors")
  with pytest.raises(ConfigError, match="tensor 'w' has the shapes"):
    fuse_folders(base, [up], tmp_path / "again")
  assert {p.name for p in tmp_path.iterdir()} == {"base", "up", "fused", "fused.tmp"}
