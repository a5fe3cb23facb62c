"""Programs are run by shells and the embedded sandbox, which need Linux."""

from __future__ import annotations

import pathlib
import sys

import pytest

_HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  if sys.platform != "linux":
    for item in items:
      if _HERE in item.path.parents:
        item.add_marker(pytest.mark.skip(reason="sandboxes need Linux"))
