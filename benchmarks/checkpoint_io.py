"""Speed and memory of saving and loading a Hugging Face checkpoint.

  python benchmarks/checkpoint_io.py [--gib=2.0] [--directory=DIR]

Saves a dense bfloat16 model in several files, then loads it, each in a process of its own. Prints
wall and CPU seconds (machines are shared), MB/s, and the growth of the peak resident memory over
what the process has before: while loading as a share of the arrays it ends up with (1 is the least
possible), while saving as a share of the arrays it holds already. Saving waits for the disk; what
is loaded then comes from the page cache, unless memory is short.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import ml_dtypes
import numpy as np
from absl import app, flags

from agentjax.models import ModelConfig, Params, load_pretrained, param_specs, save_pretrained
from agentjax.models.spec import count, is_spec

_GIB = flags.DEFINE_float("gib", 2.0, "Size of the weights.", lower_bound=0.01)
_DIRECTORY = flags.DEFINE_string("directory", None, "Where files go; a temporary one if not given.")
_PHASE = flags.DEFINE_enum("phase", None, ["save", "load"], "One of the two, in this process.")


def _config(gib: float) -> ModelConfig:
  """Layers of 61 M parameters, as many as it takes."""
  base = ModelConfig(
    vocab_size=32_000,
    d_model=2048,
    pattern="*-",
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=1e6,
    qk_norm=True,
    d_mlp=8192,
    mlp_activation="swiglu",
    param_dtype="bfloat16",
    compute_dtype="bfloat16",
  )
  rest = count(param_specs(base)) - _layer(base)
  base.pattern = "*-" * max(1, round((gib * 2**30 / 2 - rest) / _layer(base)))
  return base


def _layer(config: ModelConfig) -> int:
  return count(param_specs(config).groups) // (len(config.pattern) // 2)


def _draw(config: ModelConfig) -> Params:
  rng = np.random.default_rng(0)

  def bits(spec):
    return jax.device_put(
      rng.integers(0, 0x3F80, spec.shape, np.uint16).view(ml_dtypes.bfloat16)  # from 0 to 1
    )

  return jax.tree.map(bits, param_specs(config), is_leaf=is_spec)


def _resident(peak: bool) -> int:
  """Bytes of this process in memory, now or at most since ``_forget_peak``."""
  name = "VmHWM" if peak else "VmRSS"
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(name):
      return int(line.split()[1]) * 1024
  raise RuntimeError(f"/proc/self/status has no {name}.")


def _forget_peak() -> None:
  pathlib.Path("/proc/self/clear_refs").write_text("5")


def _run_phase(phase: str, folder: pathlib.Path) -> None:
  if phase == "save":
    config = _config(_GIB.value)
    params = _draw(config)
  else:
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # starts the backend
  _forget_peak()
  before = _resident(peak=False)
  start, busy = time.perf_counter(), time.process_time()
  if phase == "save":
    save_pretrained(folder, params, config, max_shard_bytes=500_000_000)
  else:
    params, _ = load_pretrained(folder)
  seconds, busy = time.perf_counter() - start, time.process_time() - busy
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  growth = _resident(peak=True) - before
  print(json.dumps({"seconds": seconds, "busy": busy, "held": held, "growth": growth}))


def main(argv: list[str]) -> None:
  del argv
  if _PHASE.value is not None:
    _run_phase(_PHASE.value, pathlib.Path(_DIRECTORY.value) / "model")
    return
  with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as directory:
    for phase in ("save", "load"):
      command = [sys.executable, __file__, f"--phase={phase}", f"--directory={directory}"]
      done = subprocess.run(
        [*command, f"--gib={_GIB.value}"], stdout=subprocess.PIPE, text=True, check=True
      )
      seen = json.loads(done.stdout.splitlines()[-1])
      files = len(list((pathlib.Path(directory) / "model").glob("*.safetensors")))
      speed = seen["held"] / seen["seconds"] / 1e6
      print(
        f"{phase}: {seen['held'] / 1e6:,.0f} MB in {files} files, {seen['seconds']:.1f} s "
        f"({seen['busy']:.1f} s of CPU), {speed:,.0f} MB/s, peak memory grew by "
        f"{seen['growth'] / seen['held']:.2f} of the weights"
      )


if __name__ == "__main__":
  app.run(main)
