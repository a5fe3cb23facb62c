"""The suite for machines with a GPU, at sizes for a CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels import causal_conv1d, selective_scan, ssd

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
# Interpreted programs are large and run once.
QUICKLY = "--xla_backend_optimization_level=0"
WRONG = """
import sys
import gpu_suite
from pallas_kernels.causal_conv1d import api

right = api.IMPLEMENTATIONS["pallas_gpu"]
api.IMPLEMENTATIONS["pallas_gpu"] = lambda *arguments: 1.0001 * right(*arguments)
folders = [f for f in gpu_suite.folders() if f[0] in ("causal_conv1d", *gpu_suite.PAGED)]
gpu_suite.folders = lambda: folders
cases = gpu_suite.kernels(True)
gpu_suite.kernels = lambda tiny: {"causal_conv1d": cases["causal_conv1d"]}
for name in ("check_attention", "check_model", "check_pages"):
  setattr(gpu_suite, name, lambda *arguments: None)
gpu_suite.app.run(gpu_suite.main, argv=["gpu_suite", "--tiny", "--repeats=1", "--parts=checks"])
"""


def run(command: list[str], out: pathlib.Path) -> subprocess.CompletedProcess[str]:
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "PYTHON": sys.executable,
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks"))),
    "XLA_FLAGS": QUICKLY,
    "OUT": str(out),
  }
  return subprocess.run(
    command, cwd=out, env=environment, capture_output=True, text=True, timeout=1200
  )


def test_every_kernel_and_the_model_are_checked_and_timed(tmp_path):
  done = run(["bash", str(ROOT / "benchmarks" / "gpu_suite.sh"), "--tiny", "--repeats=1"], tmp_path)
  assert done.returncode == 0, done.stdout + done.stderr
  rows = json.loads((tmp_path / "gpu_suite.json").read_text())["rows"]
  for module in (causal_conv1d, selective_scan, ssd):
    name = module.__name__.rpartition(".")[2]
    kinds = {(r["run"], r["dtype"], r["implementation"]) for r in rows if r["what"] == name}
    for implementation in ("xla", "pallas_gpu"):
      for dtype in ("float32", "bfloat16"):
        assert {(run, dtype, implementation) for run in ("check", "forward", "gradient")} <= kinds
  dtypes = {
    "paged_attention": ("float32", "bfloat16", "int8"),
    "kv_packet": ("float32", "bfloat16"),
  }
  for name, checked in dtypes.items():
    kinds = {(r["run"], r["dtype"], r["implementation"]) for r in rows if r["what"] == name}
    for implementation in ("xla", "pallas_gpu"):
      checks = {("check", dtype, implementation) for dtype in checked}
      assert checks | {("forward", "float32", implementation)} <= kinds
  for name in ("attention", "model"):
    assert {r["implementation"] for r in rows if r["what"] == name} == {"xla", "pallas_gpu"}
  assert len([r for r in rows if r["what"] == "training step"]) == 2
  steps = {(r["what"], r["run"], r["implementation"]) for r in rows if r["what"].startswith("GRPO")}
  assert steps == {
    (f"GRPO, {name}", run, implementation)
    for name in ("Qwen3", "Nemotron-H")
    for run in ("publish", "prefill", "generate", "update", "step")
    for implementation in ("xla", "pallas_gpu")
  }
  # Each row was printed too.
  assert done.stdout.count("\n| ") == len(rows) + 1


def test_a_wrong_kernel_is_named_and_fails_the_suite(tmp_path):
  done = run([sys.executable, "-c", WRONG], tmp_path)
  assert done.returncode == 1, done.stdout + done.stderr
  rows = json.loads((tmp_path / "gpu_suite.json").read_text())["rows"]
  assert [(r["what"], r["dtype"], r["implementation"]) for r in rows if not r["ok"]] == [
    ("causal_conv1d", "float32", "pallas_gpu")
  ]


def test_without_a_gpu_it_says_what_to_do(tmp_path):
  done = run(["bash", str(ROOT / "benchmarks" / "gpu_suite.sh")], tmp_path)
  assert done.returncode != 0
  assert "jax sees no GPU but cpu; --tiny runs on a CPU" in done.stdout + done.stderr
