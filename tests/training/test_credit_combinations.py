"""Rewards of turns, stages, baselines and process rewards with adapters, and in two processes."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from agentjax.training.metrics import read_metrics
from tests.training.credits import FEATURES, credit_run, prepare
from tests.training.figures import assert_same_figures, free_address
from tests.training.stages import fingerprints, train_until_killed

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_adapters_learn_from_the_same_credit_resume_and_replay(feature, tmp_path):
  prepare(tmp_path)
  made = credit_run(tmp_path / "lora", feature, tmp_path, lora=True)
  assert made.train().finished and made.replay(3).identical
  credit_run(tmp_path / "plain", feature, tmp_path).train()
  ours, plain = (read_metrics(tmp_path / n / "metrics.jsonl")[0] for n in ("lora", "plain"))
  # Adapters begin as nothing: the first step has the episodes and the credit of a run without.
  compared = [
    name
    for name, value in plain.items()
    if isinstance(value, float)
    and name in ours
    and name.startswith(("advantage", "reward", "process", "baseline", "rollout/episodes"))
  ]
  assert len(compared) > 4
  for name in compared:
    assert ours[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-5), name
  with made._session() as session:
    (state, at), (start, _) = session._restore(), session._restore(at_most=0)
    assert at == 3
    jax.tree.map(np.testing.assert_array_equal, state.reference, start.reference)

  cut = credit_run(tmp_path / "cut", feature, tmp_path, lora=True)
  train_until_killed(cut, 3)
  assert credit_run(tmp_path / "cut", feature, tmp_path, lora=True).train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "lora")


def _start(directory, feature, folder, *, lora, schedule, index=0, address="", mesh=None):
  settings = {
    "directory": str(directory),
    "feature": feature,
    "folder": str(folder),
    "lora": lora,
    "schedule": schedule,
    "mesh": mesh,
    "index": index,
    "address": address,
  }
  return subprocess.Popen(
    [sys.executable, "-m", "tests.training.credits", json.dumps(settings)],
    cwd=_ROOT,
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 if address else 1}",
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("feature", "lora", "schedule"),
  [
    *((feature, False, ("sync",)) for feature in FEATURES),
    *((feature, True, ("sync",)) for feature in ("staged", "greedy", "progress")),
    ("greedy", False, ("async", 0)),
  ],
)
def test_two_processes_give_the_figures_of_one(feature, lora, schedule, tmp_path):
  prepare(tmp_path)
  settings = {"lora": lora, "schedule": schedule}
  address = free_address()
  children = [_start(tmp_path / "one", feature, tmp_path, **settings)]
  outputs = [children[0].communicate(timeout=900)[0]]
  for index in range(2):
    where = {"index": index, "address": address, "mesh": {"data": 2, "fsdp": 2}}
    children.append(_start(tmp_path / "two", feature, tmp_path, **settings, **where))
  outputs += [child.communicate(timeout=900)[0] for child in children[1:]]
  assert [c.returncode for c in children] == [0, 0, 0], "\n".join(o[-3000:] for o in outputs)
  assert_same_figures(tmp_path / "two", tmp_path / "one", 3)
