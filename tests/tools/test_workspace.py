"""Workspaces of episodes, and the store that saves them by content."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import pathlib
import sys
import tarfile
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from agentjax.config import ConfigError
from agentjax.sandbox import (
  ProcessSandbox,
  ProcessSandboxConfig,
  SandboxError,
  SandboxLimits,
)
from agentjax.sandbox.interface import BoxContentError, Command
from agentjax.tools import ToolContext
from agentjax.tools.workspace import TreeStore, WorkspaceConfig, Workspaces

needs_sandbox = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
T = TypeVar("T")


def run(
  body: Callable[[Workspaces], Awaitable[T]],
  config: WorkspaceConfig | None = None,
  sandbox: ProcessSandboxConfig | None = None,
) -> T:
  config = config or WorkspaceConfig()

  async def whole() -> T:
    workspaces = Workspaces(
      ProcessSandbox(sandbox), (sandbox or ProcessSandboxConfig()).limits, config
    )
    try:
      return await body(workspaces)
    finally:
      await workspaces.close()

  return asyncio.run(whole())


async def shell(workspaces: Workspaces, episode: str, command: str) -> str:
  program = Command(("/bin/sh", "-c", command))
  result = await workspaces.run(program, ToolContext(episode, 0, 10.0))
  return result.stdout + result.stderr


def test_store_keeps_each_content_once_and_names_trees_by_what_they_hold(
  tmp_path: pathlib.Path,
) -> None:
  store = TreeStore(tmp_path)
  first = store.put_files({"a": b"same", "b/c": b"same"})
  assert store.put_files({"b/c": b"same", "a": b"same"}) == first
  assert store.put_files({"a": b"same", "b/d": b"same"}) != first
  assert store.put_files({"a": b"same", "b/c": b"other"}) != first
  contents = [p for p in (tmp_path / "contents").rglob("*") if p.is_file()]
  assert sorted(p.read_bytes() for p in contents) == [b"other", b"same"]
  assert store.put(store.archive(first)) == first
  again = TreeStore(tmp_path)
  assert [again.read(entry) for entry in again.entries(first)] == [b"same", b"same"]


def stored(store: TreeStore) -> int:
  return sum(path.is_file() for path in store._root.rglob("*"))


def test_a_temporary_store_deletes_what_nobody_holds() -> None:
  store = TreeStore()
  first = store.put_files({"a": b"shared", "b": b"1"})
  again = store.put_files({"b": b"1", "a": b"shared"})
  second = store.put_files({"a": b"shared", "b": b"2"})
  assert first == again and stored(store) == 5
  store.hold(second)
  for tree in (first, second):
    store.release(tree)
  assert stored(store) == 5  # each is held once more
  store.release(first)
  assert stored(store) == 3
  assert [store.read(e) for e in store.entries(second)] == [b"shared", b"2"]
  store.release(second)
  assert stored(store) == 0
  with pytest.raises(tarfile.TarError):
    store.put(store.archive(store.put_files({"x": b"y" * 1000}))[:700])
  assert stored(store) == 2  # the whole tree; nothing of the torn one
  store.close()


def test_threads_that_put_and_release_one_tree_leave_nothing() -> None:
  store = TreeStore()

  def work(number: int) -> None:
    for i in range(30):
      tree = store.put_files({"same": b"same", "own": bytes([(number + i) % 3])})
      assert len(store.entries(tree)) == 2
      assert [len(store.read(e)) for e in store.entries(tree)] == [1, 4]
      store.release(tree)

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))
  assert stored(store) == 0
  store.close()


def test_id_of_a_tree_never_changes() -> None:
  """Saved ids outlive a release: SHA-256 over the manifest's JSON lines."""
  store = TreeStore()
  expected = "c62300260b0d8639839720fa7ebd989a7de758e99e06510d59256bc1238f5991"
  assert store.put_files({"b": b"2", "a": b"1"}) == expected
  store.close()


def test_store_finds_damage(tmp_path: pathlib.Path) -> None:
  store = TreeStore(tmp_path)
  tree = store.put_files({"a": b"content"})
  (stored,) = [p for p in (tmp_path / "contents").rglob("*") if p.is_file()]
  stored.write_bytes(b"CONTENT")
  with pytest.raises(SandboxError, match="damaged"):
    store.archive(tree)
  with pytest.raises(KeyError, match="no 'feed"):
    store.entries("feed")


def test_folder_keeps_executables_empty_folders_links_and_second_names(
  tmp_path: pathlib.Path,
) -> None:
  folder = tmp_path / "folder"
  (folder / "empty").mkdir(parents=True)
  (folder / "run").write_text("#!/bin/sh\n")
  (folder / "run").chmod(0o700)
  (folder / "text").write_text("x")
  os.link(folder / "text", folder / "second")
  (folder / "link").symlink_to("/outside")
  store = TreeStore(tmp_path / "store")
  kinds = {e.path: e.kind for e in store.entries(store.put_directory(str(folder)))}
  assert kinds == {
    "empty": "directory",
    "run": "program",
    "text": "file",
    "second": "file",
    "link": "link",
  }


@needs_sandbox
def test_files_last_within_an_episode_and_never_reach_another() -> None:
  async def body(workspaces: Workspaces) -> tuple[str, str, str]:
    await shell(workspaces, "a", "echo 1 > file")
    in_a, in_b = await shell(workspaces, "a", "cat file"), await shell(workspaces, "b", "ls")
    await workspaces.end("a")
    return in_a, in_b, await shell(workspaces, "a", "ls")

  assert run(body) == ("1\n", "", "")


@needs_sandbox
def test_restored_workspace_is_what_was_saved(tmp_path: pathlib.Path) -> None:
  (tmp_path / "given").write_text("given")
  make = (
    "mkdir -p d/e; echo x > d/f; echo 'echo ran' > p; chmod +x p; ln -s /usr out; ln -s d/f in; "
  )
  make += "touch $(printf 'n\\377'); mkdir -p e/e"

  async def body(workspaces: Workspaces) -> None:
    await shell(workspaces, "a", make)
    saved = await workspaces.snapshot("a")
    await shell(workspaces, "a", "rm -r d given; echo more > more")
    assert await workspaces.snapshot("a") != saved
    for episode in ("a", "b"):  # set back, and copied to another
      await workspaces.restore(episode, saved)
      listed = await shell(workspaces, episode, "ls; ls d; cat in; ./p; readlink out")
      assert listed == "d\ne\ngiven\nin\nn\\xff\nout\np\ne\nf\nx\nran\n/usr\n"
      assert await workspaces.snapshot(episode) == saved
    with pytest.raises(KeyError):
      await workspaces.restore("a", "feed")

  run(body, WorkspaceConfig(files=str(tmp_path)))


@needs_sandbox
def test_idle_workspaces_are_closed_and_come_back(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  async def body(workspaces: Workspaces) -> tuple[list[str], int]:
    for episode in "abcd":
      await shell(workspaces, episode, f"echo {episode} > file; ln -s /etc/{episode} link")
    open_at_once = len(_boxes(workspaces))
    kept = [await shell(workspaces, e, "cat file; readlink link") for e in "abcd"]
    for episode in "abcd":
      await workspaces.end(episode)
    return kept, open_at_once

  temporary = tmp_path / "temporary"
  temporary.mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(temporary))
  listed, open_at_once = run(body, WorkspaceConfig(max_open=2))
  assert listed == [f"{e}\n/etc/{e}\n" for e in "abcd"]
  assert open_at_once == 2
  assert list(temporary.iterdir()) == []


@needs_sandbox
def test_a_workspace_that_cannot_be_saved_is_nothing_to_others() -> None:
  deep = "python3 -c \"import os\nfor _ in range(1200):\n  os.mkdir('d'); os.chdir('d')\""

  async def body(workspaces: Workspaces) -> tuple[str, bool]:
    await shell(workspaces, "a", deep)
    neighbour = await shell(workspaces, "b", "echo well")  # "a" would be saved and closed here
    with pytest.raises(BoxContentError):
      await workspaces.snapshot("a")
    return neighbour, await workspaces.is_healthy()

  assert run(body, WorkspaceConfig(max_open=1)) == ("well\n", True)


@needs_sandbox
def test_workspace_that_outgrows_its_bounds_is_set_back() -> None:
  async def body(workspaces: Workspaces) -> None:
    start = workspaces.store.put_files({"kept": b""})
    await workspaces.restore("a", start)
    await shell(workspaces, "a", "head -c 1000000 /dev/zero > big")
    assert await workspaces.set_back_if_too_big("a") is None
    await shell(workspaces, "a", "head -c 2000000 /dev/zero > bigger")
    assert "1048576 bytes" in (await workspaces.set_back_if_too_big("a") or "")
    assert await workspaces.snapshot("a") == start
    await shell(workspaces, "a", "mkdir -p hidden; umask 777; mkdir hidden/x")
    assert await workspaces.set_back_if_too_big("a") is not None

  run(body, WorkspaceConfig(max_bytes=2**20))


@needs_sandbox
def test_calls_of_an_episode_run_in_the_order_in_which_they_were_made() -> None:
  async def body(workspaces: Workspaces) -> str:
    calls = [shell(workspaces, "a", f"sleep 0.0{5 - n}; echo {n} >> log") for n in range(5)]
    await asyncio.gather(*calls)
    return await shell(workspaces, "a", "cat log")

  assert run(body).split() == ["0", "1", "2", "3", "4"]


@needs_sandbox
def test_end_stops_what_runs_and_leaves_no_folder() -> None:
  async def body(workspaces: Workspaces) -> list[str]:
    await shell(workspaces, "a", "true")
    running = asyncio.ensure_future(shell(workspaces, "a", "sleep 60"))
    queued = asyncio.ensure_future(shell(workspaces, "a", "echo late"))
    await asyncio.sleep(1.0)
    async with asyncio.timeout(5.0):
      await workspaces.end("a")
      await running
      with pytest.raises(SandboxError, match="ended"):
        await queued
    return _boxes(workspaces)

  limits = SandboxLimits(wall_seconds=60.0)
  assert run(body, sandbox=ProcessSandboxConfig(limits=limits)) == []


def test_impossible_settings_are_refused_by_name(tmp_path: pathlib.Path) -> None:
  for change, field in (
    ({"max_open": 0}, "max_open"),
    ({"max_bytes": 1}, "max_bytes"),
    ({"max_files": 0}, "max_files"),
    ({"files": str(tmp_path / "missing")}, "files"),
  ):
    with pytest.raises(ConfigError, match=field):
      dataclasses.replace(WorkspaceConfig(), **change).validate("workspace")


def _boxes(workspaces: Workspaces) -> list[object]:
  return list(workspaces._sandbox.boxes)  # type: ignore[attr-defined]
