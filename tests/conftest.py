"""What all tests share."""

import gc
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

# Where programs are compiled in haste (see the Makefile), XLA's older emitters halve the time.
# Up to jax 0.10 it has them, and knows the flag.
if "--xla_backend_optimization_level=0" in (flags := os.environ.get("XLA_FLAGS", "")):
  if importlib.metadata.version("jax").startswith("0.10."):
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"

_MAPS = pathlib.Path("/proc/self/maps")
# Linux grants a process 65,530 unless told otherwise, and compilers that get no more crash.
_MOST_MAPS = 40_000


@pytest.fixture(autouse=True, scope="module")
def room_for_programs() -> Iterator[None]:
  """Forgets compiled programs now and then: each holds memory maps, and a worker makes many."""
  yield
  if "jax" in sys.modules and _MAPS.exists():
    with _MAPS.open() as lines:
      count = sum(1 for _ in lines)
    if count > _MOST_MAPS:
      sys.modules["jax"].clear_caches()
      gc.collect()
