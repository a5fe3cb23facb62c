"""Machines that grant the sandbox more or less, each a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.sandbox.machines import MACHINES, Machine, NoMachine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  if sys.platform != "linux":
    for item in items:
      if "sandbox" in item.nodeid:
        item.add_marker(pytest.mark.skip(reason="the embedded sandbox needs Linux"))


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
  machine = _start(request.param)
  yield machine
  machine.close()


@pytest.fixture
def start_machine() -> Callable[..., Machine]:
  return _start


def _start(name: str, config: dict[str, Any] | None = None) -> Machine:
  try:
    return Machine(name, config)
  except NoMachine as reason:
    pytest.skip(str(reason))
