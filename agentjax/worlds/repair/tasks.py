"""Repair tasks: small libraries of ours with an inserted fault, which the policy repairs in the
files.

A library is a folder of ``repositories/``: the package, visible tests in ``tests/`` and
``hidden_tests.py``. A fault counts only if a hidden test fails because of it, and some test still
passes. ``task.metadata`` holds

  files         path -> text: what the policy is given (the package with the fault, visible tests)
  package       name of the package; its ``.py`` files are what may be changed
  unit_tests    {"source", "modules"}: the hidden tests (adapters.unit_tests)
  passing       how many hidden tests pass before the repair
  faults        [{"path", "line", "operator"}], for people and statistics
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import dataclasses
import functools
import importlib.resources
import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from agentjax.config import ConfigError, PositiveInt, check
from agentjax.data import DataConfig
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.sandbox.interface import (
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
  run_once,
)
from agentjax.sandbox.process import ProcessSandbox, ProcessSandboxConfig
from agentjax.tools.files_program import lines_of, numbered, snippet
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.worlds.repair.mutations import OPERATORS, Mutation, mutations

SOURCE = "repair"
LIBRARIES = ("calendars", "gridpath", "intervals", "ledger", "samples", "textkit")
_HIDDEN = "hidden_tests.py"
_BATCH = 64  # faulty libraries tried in one run, at most

# Trusted code with faults: it runs separately only because a fault may cause an endless loop.
_TRY = r"""
import json, os, signal, sys
request = json.load(sys.stdin)
for index in range(request["count"]):
  read, write = os.pipe()
  child = os.fork()
  if child == 0:
    signal.setitimer(signal.ITIMER_PROF, 0.3)  # CPU time; the tests take milliseconds
    sys.path.insert(0, str(index))
    passed, names = [], {}
    try:
      exec(compile(request["tests"], "tests", "exec"), names)
    except Exception:
      names = {}
    for name, test in names.items():
      if name.startswith("test_"):
        try:
          test()
          passed.append(name)
        except Exception:
          pass
    os.write(write, json.dumps(passed).encode())
    os._exit(0)
  os.close(write)
  with open(read, "rb") as pipe:
    passed = pipe.read()
  os.waitpid(child, 0)
  print(json.dumps(json.loads(passed) if passed else None), flush=True)
"""


@dataclasses.dataclass(unsafe_hash=True)
class RepairTaskConfig(TaskSource):
  """Which libraries are broken, and how; the choices are ours.

  Attributes:
    libraries: of the training tasks.
    test_libraries: of the test tasks.
    operators: kinds of faults (``data.mutations``).
    faults: how many a task has.
    hint: "none"; "file" names the files with a fault; "test" shows a hidden test that fails. Then
      another hidden test must fail too, so that filling in the shown answers does not suffice.
    demonstrate: whether tasks carry the repair as a demonstration, with the tool ``files``.
  """

  libraries: tuple[str, ...] = ("calendars", "gridpath", "intervals", "ledger", "textkit")
  test_libraries: tuple[str, ...] = ("samples",)
  operators: tuple[str, ...] = OPERATORS
  faults: PositiveInt = 1
  hint: Literal["none", "file", "test"] = "file"
  demonstrate: bool = True

  def validate(self, path: str = "config.world.tasks") -> None:
    super().validate(path)
    require = self.requirements(path)
    for field in ("libraries", "test_libraries"):
      value = getattr(self, field)
      check(
        bool(value) and set(value) <= set(LIBRARIES) and len(set(value)) == len(value),
        f"{path}.{field}",
        value,
        f"some of {', '.join(LIBRARIES)}",
      )
    require(
      bool(self.operators) and set(self.operators) <= set(OPERATORS),
      "operators",
      f"some of {', '.join(OPERATORS)}",
    )

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    return repair_tasks(self, train_size=data.train_size, test_size=data.test_size, seed=data.seed)


def repair_tasks(
  config: RepairTaskConfig, *, train_size: int, test_size: int, seed: int
) -> TaskSplits:
  """So many distinct tasks; the same for the same arguments.

  Raises:
    ConfigError: the libraries do not give as many.
    SandboxError: no sandbox to try the faults in.
  """
  return TaskSplits(
    train=_tasks(config, config.libraries, train_size, seed, 0, "libraries"),
    test=_tasks(config, config.test_libraries, test_size, seed, FIRST_TEST_ID, "test_libraries"),
  )


@dataclasses.dataclass(frozen=True)
class _Library:
  name: str
  files: Mapping[str, str]  # package and visible tests
  hidden: str
  sites: tuple[tuple[str, Mutation], ...]  # path, fault


@dataclasses.dataclass(frozen=True)
class _Broken:
  library: _Library
  changed: Mapping[str, str]
  faults: tuple[dict[str, Any], ...]
  passing: tuple[str, ...]
  failing: tuple[str, ...]


@functools.cache
def _library(name: str) -> _Library:
  root = importlib.resources.files("agentjax.worlds.repair").joinpath("repositories", name)
  files: dict[str, str] = {}
  with importlib.resources.as_file(root) as folder:
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
      files[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
  hidden = files.pop(_HIDDEN)
  sites = [
    (path, mutation)
    for path, text in files.items()
    if path.startswith(f"{name}/")
    for mutation in mutations(text)
  ]
  return _Library(name, files, hidden, tuple(sites))


def _tasks(
  config: RepairTaskConfig, names: Sequence[str], size: int, seed: int, first_id: int, field: str
) -> list[Task]:
  if not size:
    return []
  found: list[_Broken] = []
  per_library = -(-size // len(names))
  for index, name in enumerate(names):
    library = _library(name)
    random = np.random.default_rng([seed, first_id, index])
    found += _break(config, library, per_library, random)
  if len(found) < size:
    # A library that is exhausted leaves its share to the others.
    found = []
    for index, name in enumerate(names):
      random = np.random.default_rng([seed, first_id, index])
      found += _break(config, _library(name), size, random)
  if len(found) < size:
    raise ConfigError(
      f"config.world.tasks.{field}={tuple(names)} give {len(found)} tasks with these operators and "
      f"hint, {size} were asked for; lower config.data.train_size or test_size, or name more "
      "libraries or operators"
    )
  order = np.random.default_rng([seed, first_id, len(names)]).permutation(len(found))[:size]
  return [_task(config, found[i], first_id + n) for n, i in enumerate(order)]


def _break(
  config: RepairTaskConfig, library: _Library, size: int, random: np.random.Generator
) -> list[_Broken]:
  """Up to ``size`` broken forms of a library that hidden tests notice."""
  sites = [site for site in library.sites if site[1].operator in config.operators]
  choices = _choices(sites, config.faults, random)
  broken: list[_Broken] = []
  enough = 2 if config.hint == "test" else 1
  tried = 0
  while tried < len(choices) and len(broken) < size:
    batch = choices[tried : tried + min(_BATCH, 2 * (size - len(broken)) + 2)]
    tried += len(batch)
    forms = [{path: mutation.source for path, mutation in choice} for choice in batch]
    every = _test_names(library.hidden)
    for choice, form, passing in zip(batch, forms, _passing(library, forms), strict=True):
      failing = tuple(name for name in every if name not in passing)
      if passing and len(failing) >= enough:
        faults = tuple(
          {"path": path, "line": mutation.line, "operator": mutation.operator}
          for path, mutation in choice
        )
        broken.append(_Broken(library, form, faults, tuple(passing), failing))
  return broken[:size]


def _choices(
  sites: Sequence[tuple[str, Mutation]], faults: int, random: np.random.Generator
) -> list[tuple[tuple[str, Mutation], ...]]:
  """Sets of faults in random order, each in files of its own."""
  if faults == 1:
    return [(sites[i],) for i in random.permutation(len(sites))]
  chosen: dict[tuple[int, ...], tuple[tuple[str, Mutation], ...]] = {}
  for _ in range(4 * len(sites)):
    indices: list[int] = []
    for i in random.permutation(len(sites)):
      if all(sites[i][0] != sites[j][0] for j in indices):
        indices.append(int(i))
      if len(indices) == faults:
        chosen[tuple(sorted(indices))] = tuple(sites[j] for j in sorted(indices))
        break
  return list(chosen.values())


def _test_names(source: str) -> list[str]:
  return [
    node.name
    for node in ast.parse(source).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
  ]


def _passing(library: _Library, forms: Sequence[Mapping[str, str]]) -> list[list[str]]:
  """Hidden tests that pass on each form of a library; none where it does not end."""
  files = {
    f"{index}/{path}": text.encode()
    for index, form in enumerate(forms)
    for path, text in {**library.files, **form}.items()
    if path.startswith(f"{library.name}/")
  }
  request = json.dumps({"count": len(forms), "tests": library.hidden}).encode()
  seconds = 3.0 * len(forms) + 10  # the machine may be busy
  limits = SandboxLimits(wall_seconds=seconds, cpu_seconds=seconds)

  async def run() -> str:
    sandbox = ProcessSandbox(ProcessSandboxConfig(concurrency=1))
    try:
      result = await run_once(
        sandbox, PythonScript(_TRY), stdin=request, files=files, limits=limits
      )
    finally:
      await sandbox.close()
    if result.status is not RunStatus.OK:
      raise SandboxError(f"faults could not be tried: {result.detail} {result.stderr[-500:]}")
    return result.stdout

  # In a thread: the caller may have a running event loop.
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    lines = pool.submit(asyncio.run, run()).result().splitlines()
  return [json.loads(line) or [] for line in lines]


def _task(config: RepairTaskConfig, broken: _Broken, id: int) -> Task:
  library = broken.library
  files = {**library.files, **broken.changed}
  return Task(
    id=id,
    prompt=(Message("user", _prompt(config, broken, files)),),
    answer="",  # any repair that passes the hidden tests is right
    source=SOURCE,
    demonstration=_demonstration(broken) if config.demonstrate else (),
    metadata={
      "files": files,
      "package": library.name,
      "unit_tests": {
        "source": library.hidden,
        "modules": {library.name: _imported(library.hidden, library.name)},
      },
      "passing": len(broken.passing),
      "faults": list(broken.faults),
      "level": len(broken.faults),
    },
  )


def _prompt(config: RepairTaskConfig, broken: _Broken, files: Mapping[str, str]) -> str:
  name, count = broken.library.name, len(broken.faults)
  what = "a fault" if count == 1 else f"{count} faults"
  lines = [
    f"The library {name} in this folder has {what}. Find and mend it; hidden tests decide.",
    f"Only the Python files of {name}/ count. Its tests: python3 -m unittest discover -s tests",
    f"Files: {' '.join(sorted(files))}",
  ]
  if config.hint == "file":
    places = sorted({fault["path"] for fault in broken.faults})
    lines.append(f"Look into: {' '.join(places)}")
  if config.hint == "test":
    lines += ["This test fails:", _test_source(broken.library.hidden, broken.failing[0])]
  return "\n".join(lines)


def _test_source(source: str, name: str) -> str:
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef) and node.name == name:
      return textwrap.dedent(ast.get_source_segment(source, node) or "")
  raise KeyError(name)


def _imported(source: str, package: str) -> list[str]:
  """Names that the tests take from the package."""
  return [
    alias.name
    for node in ast.parse(source).body
    if isinstance(node, ast.ImportFrom) and node.module == package
    for alias in node.names
  ]


def _demonstration(broken: _Broken) -> tuple[Message, ...]:
  """Looks into each faulty file and puts the right lines back; results as the tool shows them."""
  messages: list[Message] = []
  for path, wrong in sorted(broken.changed.items()):
    right = broken.library.files[path]
    old, new = _edit(wrong, right)
    shown = lines_of(wrong)
    first = wrong[: wrong.index(old)].count("\n") + 1
    calls = (
      ({"command": "view", "path": path}, numbered(shown, 1, len(shown))),
      (
        {"command": "str_replace", "path": path, "old_str": old, "new_str": new},
        f"edited {path}:\n{snippet(right, first, first + new.count(chr(10)))}",
      ),
    )
    for arguments, result in calls:
      messages.append(Message("assistant", "", (ToolCall("files", arguments),)))
      messages.append(Message("tool", result))
  return (*messages, Message("assistant", "Mended."))


def _edit(wrong: str, right: str) -> tuple[str, str]:
  """The lines that differ, with as many around them as make them unique in ``wrong``."""
  old, new = wrong.splitlines(), right.splitlines()
  head = 0
  while old[head] == new[head]:
    head += 1
  tail = 0
  while old[-1 - tail] == new[-1 - tail] and tail < min(len(old), len(new)) - head - 1:
    tail += 1
  while True:
    text = "\n".join(old[head : len(old) - tail])
    if wrong.count(text) == 1:
      return text, "\n".join(new[head : len(new) - tail])
    head, tail = max(0, head - 1), max(0, tail - 1)
