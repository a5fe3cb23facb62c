"""The registry that settings describe, and settings that cannot be."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sqlite3
import sys
from typing import Any

import pytest

from agentjax.adapters.tools.search import SearchConfig
from agentjax.adapters.tools.web_page import WebPageConfig
from agentjax.config import ConfigError
from agentjax.sandbox import Sandboxes
from agentjax.tools import ToolContext, ToolsConfig, build_tools
from agentjax.tools.shell import ShellConfig
from agentjax.tools.workspace import WorkspaceConfig
from agentjax.trajectory.record import ToolCall
from agentjax.worlds.sql.tool import SqlConfig


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_shell_and_files_share_a_workspace_and_sql_has_its_own(tmp_path: pathlib.Path) -> None:
  connection = sqlite3.connect(tmp_path / "a.db")
  connection.execute("CREATE TABLE t (x)")
  connection.close()
  (tmp_path / "start").mkdir()
  (tmp_path / "start" / "given").write_text("given\n")
  config = ToolsConfig(
    names=("files", "calculator", "shell", "sql"),
    settings={"sql": SqlConfig(databases=str(tmp_path / "a.db"), writable=True)},
    workspace=WorkspaceConfig(files=str(tmp_path / "start")),
  )
  config.validate("tools")
  registry = build_tools(config)
  assert [tool.name for tool in registry.tools] == ["files", "calculator", "shell", "sql"]

  async def body() -> list[str]:
    calls = [
      ("sql", {"query": "INSERT INTO t VALUES (7)"}),
      ("shell", {"command": "ls; echo made > file"}),
      ("files", {"command": "view", "path": "file"}),
      ("sql", {"query": "SELECT x FROM t"}),
    ]
    context = ToolContext("e", 0, 30.0)
    results = [await registry.call(ToolCall(n, a), context) for n, a in calls]
    for tool in registry.tools:
      if (end := getattr(tool, "end_episode", None)) is not None:
        await end("e")
    results.append(await registry.call(ToolCall("shell", {"command": "ls"}), context))
    await registry.close()
    return [result.output for result in results]

  assert asyncio.run(body()) == [
    "ok (1 rows changed)",
    "given",
    "     1\tmade",
    "x\n7\n(1 row)",
    "given",
  ]


@pytest.mark.parametrize(
  ("change", "field"),
  [
    (
      {"names": ("shell",), "timeout": 10.0},
      r"timeout=10.*> the wall clock.* of shell",
    ),
    (
      {"names": ("sql",), "settings": {"sql": SqlConfig(statement_seconds=10.0)}},
      r"settings\.sql\.statement_seconds",
    ),
    ({"names": ("web_page",), "timeout": 15.0}, r"> the wall clock.* of web_page"),
    ({"names": ("search",)}, r"search\.corpus"),
    (
      {"names": ("web_page",), "settings": {"web_page": WebPageConfig(width=0)}},
      r"settings\.web_page\.width",
    ),
    ({"settings": {"shell": ShellConfig()}}, r"settings='shell'; allowed: one of"),
    ({"workspace": WorkspaceConfig(sandbox="lost")}, r"workspace\.sandbox='lost'"),
    ({"calls_per_turn": 0}, r"calls_per_turn"),
    ({"workspace": WorkspaceConfig(max_open=0)}, r"workspace\.max_open"),
  ],
)
def test_settings_that_cannot_work_together_are_refused(change: dict[str, Any], field: str) -> None:
  with pytest.raises(ConfigError, match=field):
    config = dataclasses.replace(ToolsConfig(), **change)
    config.validate("tools")
    config.check_sandboxes(Sandboxes(), "tools")


def test_bad_data_stops_the_build(tmp_path: pathlib.Path) -> None:
  (tmp_path / "corpus.jsonl").write_text("{}")
  search = SearchConfig(corpus=(str(tmp_path / "corpus.jsonl"),))
  with pytest.raises(ConfigError, match=r"corpus\.jsonl:1"):
    build_tools(ToolsConfig(names=("search",), settings={"search": search}))
  with pytest.raises(ConfigError, match="folder of them"):
    build_tools(ToolsConfig(names=("sql",), settings={"sql": SqlConfig(databases=str(tmp_path))}))


def test_missing_extra_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / "corpus.jsonl").write_text('{"id": "1", "text": "x"}')
  monkeypatch.setitem(sys.modules, "bm25s", None)
  search = SearchConfig(corpus=(str(tmp_path / "corpus.jsonl"),))
  with pytest.raises(ImportError, match=r"agentjax\[search\]"):
    build_tools(ToolsConfig(names=("search",), settings={"search": search}))


def test_settings_of_all_tools_survive_json() -> None:
  config = ToolsConfig(names=("search",), settings={"search": SearchConfig(corpus=("a", "b"))})
  assert ToolsConfig.from_dict(config.to_dict()) == config
  assert config.to_short_dict() == {
    "names": ["search"],
    "settings": {"search": {"use": "search", "corpus": ["a", "b"]}},
  }
