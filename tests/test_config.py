"""Settings: typed, mutable until frozen, equal after a trip through JSON."""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Annotated, Literal

import pytest

from agentjax.config import (
  Config,
  ConfigError,
  FilePath,
  PositiveInt,
  Range,
  Share,
  check,
)


@dataclasses.dataclass(unsafe_hash=True)
class Inner(Config):
  rate: float = 0.1
  kind: Literal["a", "b"] = "a"
  sizes: tuple[int, ...] = (1, 2)
  limit: int | None = None

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.rate > 0, f"{path}.rate", self.rate, "> 0")


@dataclasses.dataclass(unsafe_hash=True)
class Outer(Config):
  name: str = "x"
  inner: Inner = dataclasses.field(default_factory=Inner)
  extra: Inner | None = None


def test_json_round_trip_is_equal():
  config = Outer(inner=Inner(sizes=(3,), limit=7), extra=Inner(kind="b"))
  assert Outer.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@dataclasses.dataclass(unsafe_hash=True)
class Places(Config):
  path: FilePath | None = None
  files: tuple[FilePath, ...] = ()
  plain: str = "a/b"
  others: tuple[str, ...] = ("c",)


@dataclasses.dataclass(unsafe_hash=True)
class Holder(Config):
  inner: tuple[Places, ...] = ()
  path: FilePath = ""


def test_paths_become_absolute_and_nothing_else_does(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  config = Holder((Places("a", ("x/../b", "/c", "gs://d/e")), Places()))
  config.make_paths_absolute()
  here = str(tmp_path)
  assert config.inner[0] == Places(f"{here}/a", (f"{here}/b", "/c", "gs://d/e"))
  assert config.inner[1] == Places() and config.path == ""
  config.freeze().make_paths_absolute()
  with pytest.raises(ConfigError, match=r"path=3 has type int; allowed: str or NoneType"):
    Places(path=3).validate()  # type: ignore[arg-type]


def test_frozen_tree_refuses_every_change():
  config = Outer().freeze()
  with pytest.raises(ConfigError, match="rate is frozen"):
    config.inner.rate = 1.0
  assert dataclasses.replace(config.inner, rate=1.0).rate == 1.0


def test_misspelt_field_is_refused_when_set():
  with pytest.raises(ConfigError, match="no field 'rat'"):
    Inner().rat = 1.0


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"inner": {"rat": 1}}, r"config\.inner has no field rat; allowed: .*rate"),
    ({"inner": {"rate": "fast"}}, r"config\.inner\.rate='fast' has type str; allowed: float"),
    ({"inner": {"kind": "c"}}, r"config\.inner\.kind='c'.*'a', 'b'"),
    ({"inner": {"sizes": [1, "x"]}}, r"config\.inner\.sizes\[1\]='x'"),
    ({"name": 3}, r"config\.name=3 has type int; allowed: str"),
  ],
)
def test_bad_values_name_field_value_and_allowed(values, message):
  with pytest.raises(ConfigError, match=message):
    Outer.from_dict(values)


def test_validate_descends_and_checks_types_set_after_construction():
  config = Outer()
  config.inner.limit = "seven"
  with pytest.raises(ConfigError, match=r"config\.inner\.limit='seven'"):
    config.validate()
  config.inner.limit = True  # a bool is not an int
  with pytest.raises(ConfigError, match=r"limit=True"):
    config.validate()
  config.inner.limit, config.inner.rate = None, -1.0
  with pytest.raises(ConfigError, match=r"config\.inner\.rate=-1\.0; allowed: > 0"):
    config.validate()


def test_import_is_quick_and_starts_no_backend():
  code = (
    "import sys, time; t = time.perf_counter(); import agentjax; dt = time.perf_counter() - t;"
    "assert 'jax' not in sys.modules and 'numpy' not in sys.modules, 'heavy import';"
    "assert dt < 1.0, dt"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_loads():
  import agentjax

  for name in agentjax.__all__:
    assert getattr(agentjax, name) is not None


@dataclasses.dataclass(unsafe_hash=True)
class Ranged(Config):
  count: PositiveInt = 1
  share: Share | None = None
  slope: Annotated[float, Range(-1, 1, above=True, below=True)] = 0.0
  free: float = 0.0
  several: tuple[float, ...] = ()


@pytest.mark.parametrize(
  ("changes", "allowed"),
  [
    ({"count": 0}, "count=0; allowed: >= 1."),
    ({"share": 1.5}, "share=1.5; allowed: 0 to 1 or none."),
    ({"share": math.nan}, "share=nan; allowed: 0 to 1 or none."),
    ({"slope": 1.0}, "slope=1.0; allowed: over -1, below 1."),
    ({"slope": -1.0}, "slope=-1.0; allowed: over -1, below 1."),
    ({"count": 2**63}, f"count={2**63}; allowed: finite numbers, whole ones of 64 bits."),
    ({"free": math.inf}, "free=inf; allowed: finite numbers, whole ones of 64 bits."),
    ({"free": math.nan}, "free=nan; allowed: finite numbers, whole ones of 64 bits."),
    (
      {"several": (1.0, -math.inf)},
      "several=(1.0, -inf); allowed: finite numbers, whole ones of 64 bits.",
    ),
  ],
)
def test_a_range_in_an_annotation_is_checked(changes, allowed):
  Ranged(count=1, share=1.0, slope=0.99).validate()
  with pytest.raises(ConfigError) as caught:
    Ranged(**changes).validate()
  assert str(caught.value) == f"config.{allowed}"
