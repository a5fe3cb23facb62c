"""Gates of every environment that a config can choose: the worked solution is paid in full, an
empty answer and every cheat get nothing. They are those of ``python -m agentjax.check``."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import pkgutil
import sqlite3
import sys
import typing

import pytest

from agentjax import envs
from agentjax.data.config import DataConfig
from agentjax.data.function_tasks import FunctionTaskConfig
from agentjax.data.pivots import PivotRow, write_pivots
from agentjax.data.reasoning_gym import ReasoningGymConfig
from agentjax.data.repair_tasks import RepairTaskConfig
from agentjax.data.spider import SpiderConfig
from agentjax.envs.config import EnvironmentConfig, build_environment
from agentjax.envs.countdown import CountdownConfig
from agentjax.envs.environment import Environment
from agentjax.envs.number_game import GuessNumber, guess_number_tasks
from agentjax.envs.sokoban import SokobanConfig
from agentjax.envs.sql import SqlEnvironmentConfig
from agentjax.envs.text_game import TextGame
from agentjax.envs.workspace import WorkspaceEnvironment
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.canaries import canaries
from agentjax.rewards.pivot import PivotVerifierConfig
from agentjax.rewards.tool_match import ArgumentMatchConfig
from agentjax.rollout.cheats import CHEATS
from agentjax.rollout.integrity import check_environment
from agentjax.tools.build import ToolsConfig
from agentjax.tools.declared import read_tool
from agentjax.tools.registry import ToolRegistry
from agentjax.training.gates import check_experiment
from agentjax.trajectory.record import Message, Task, ToolCall
from tests.training.smoke import smoke_experiment

needs_sandbox = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
KINDS = typing.get_args(typing.get_type_hints(EnvironmentConfig)["kind"])


@dataclasses.dataclass(frozen=True)
class Gated:
  """One way to build an environment: what a config says of it, and files that it reads."""

  kind: str
  source: str
  part: str
  tools: tuple[str, ...] = ()
  data: dict = dataclasses.field(default_factory=dict)
  environment: dict = dataclasses.field(default_factory=dict)
  reward: dict = dataclasses.field(default_factory=dict)
  files: typing.Callable = lambda folder: None
  tasks: int = 2
  needs: str | None = None  # a module of an extra
  at_most: float = 0.0


def _pets(folder):
  (folder / "databases").mkdir()
  connection = sqlite3.connect(folder / "databases" / "pets.sqlite")
  connection.executescript(
    "CREATE TABLE owner (id INTEGER PRIMARY KEY, name TEXT);"
    "CREATE TABLE pet (id INTEGER PRIMARY KEY, owner INT REFERENCES owner (id), kind TEXT,"
    " weight REAL);"
  )
  connection.executemany("INSERT INTO owner VALUES (?, ?)", [(i, f"o{i}") for i in range(1, 11)])
  connection.executemany(
    "INSERT INTO pet VALUES (?, ?, ?, ?)",
    [(i, i % 10 + 1, ("cat", "dog", "owl")[i % 3], 10.5 - 0.25 * i) for i in range(1, 31)],
  )
  connection.commit()
  connection.close()
  gold = "SELECT name FROM owner JOIN pet ON pet.owner = owner.id WHERE kind = 'cat' ORDER BY weight"
  row = {"db": "pets", "question": "Whose cats?", "gold_sql": gold}
  (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")


def _gsm8k(folder):
  row = {"question": "Ann has 3 eggs and buys 1,015. How many?", "answer": "So.\n#### 1,018"}
  for name in ("train", "test"):
    (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")


def _texts(folder):
  rows = [{"question": "Capital of France?", "answer": "Paris"}]
  for name in ("train", "test"):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _tool(name, **properties):
  schema = {"type": "object", "properties": properties, "required": list(properties)}
  return read_tool({"name": name, "parameters": schema})


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
SHOP = (
  _tool("search", query=TEXT, count=NUMBER),
  _tool("book", flight=TEXT),
  _tool("cancel", flight=TEXT),
)
EDITOR = (
  _tool("str_replace_editor", command=TEXT, path=TEXT, old_str=TEXT, new_str=TEXT),
  _tool("bash", command=TEXT),
  _tool("grep", pattern=TEXT, path=TEXT),
)
HISTORY = (Message("user", "Book the late flight home from Rome. Search first, then cancel LX8."),)


def _turns(tools, *turns):
  """A folder of recorded turns, each a text or calls that the expert made."""

  def write(folder):
    rows = []
    for turn in turns:
      text, calls = (turn, ()) if isinstance(turn, str) else ("", turn)
      expected = Message("assistant", text, calls)
      rows.append(PivotRow(len(rows), "made", "t", 0, HISTORY, expected, tools))
    write_pivots(folder / "pivots.jsonl", rows)

  return write


def _call(name, **arguments):
  return (ToolCall(name, arguments),)


CALLS = (
  _call("search", query="late flight from Rome", count=3),
  _call("book", flight="LX12"),
  _call("book", flight="LX12") + _call("cancel", flight="LX8"),
)
EDITS = (
  _call("str_replace_editor", command="str_replace", path="/w/a.py", old_str="x", new_str="y"),
  _call("str_replace_editor", command="view", path="/w/src/a.py"),
  _call("bash", command="pytest tests/test_a.py"),
  _call("grep", pattern="def f", path="/w/src/a.py"),
)
BATCH = json.dumps({
  "analysis": "a", "plan": "b", "commands": [{"keystrokes": "ls -la src\n"}],
  "task_complete": False,
})  # fmt: skip
STRICT = ArgumentMatchConfig(string_similarity="jaccard", string_threshold=0.5)


def _pivot(tools, *turns, **verifier):
  return Gated(
    "pivot", "pivots", "pivot", data={"train_size": None, "test_size": None},
    reward={"pivot": PivotVerifierConfig(**verifier)}, files=_turns(tools, *turns),
    tasks=len(turns),
  )  # fmt: skip


GATED = {
  "word_problems": Gated("question", "word_problems", "exact_match", ("calculator",), tasks=3),
  "gsm8k": Gated("question", "gsm8k", "exact_match", ("calculator",), files=_gsm8k, tasks=1),
  "texts": Gated("question", "jsonl", "exact_match", ("calculator",), files=_texts, tasks=1),
  "reasoning_gym": Gated(
    "question", "reasoning_gym", "reasoning_gym", ("calculator",), needs="reasoning_gym",
    data={"reasoning_gym": ReasoningGymConfig(name="leg_counting")},
  ),
  "code": Gated(
    "code", "function_tasks", "unit_tests", tasks=1,
    data={"function_tasks": FunctionTaskConfig(), "seed": 3},
  ),
  "sql": Gated(
    "sql", "spider", "sql_match", ("sql",), files=_pets, tasks=1,
    data={"spider": SpiderConfig(demonstration="checked", test_databases=())},
    environment={"sql": SqlEnvironmentConfig(query_seconds=0.5, max_rows=1000)},
  ),
  "repair": Gated(
    "repair", "repair", "repair_solved", ("files", "shell"), tasks=1,
    data={"repair": RepairTaskConfig(libraries=("ledger",)), "seed": 1},
  ),
  "mle": Gated("mle", "mle", "mle_beats_strong", tasks=1),
  "pivot_arguments": _pivot(SHOP, *CALLS, kind="arguments", arguments=STRICT),
  "pivot_tool_name": _pivot(SHOP, *CALLS[:2], kind="tool_name"),
  "pivot_schema": _pivot(SHOP, *CALLS[:2], kind="schema"),
  "pivot_edits": _pivot(EDITOR, *EDITS, kind="edits"),
  "pivot_terminal": _pivot((), BATCH, kind="terminal"),
  "bandit": Gated("bandit", "environment", "environment", tasks=3),
  "frozen_lake": Gated("frozen_lake", "environment", "environment", tasks=3, needs="gymnasium"),
  "sokoban": Gated("sokoban", "environment", "environment", tasks=3),
  "countdown": Gated(
    "countdown", "environment", "environment", tasks=3,
    environment={"countdown": CountdownConfig(format_reward=0.0)},
  ),
  "countdown_pays_for_form": Gated(
    "countdown", "environment", "environment", at_most=0.1
  ),
}  # fmt: skip


def experiment(gated: Gated, folder):
  """The smoke run with a context that any task fits, in another world."""
  gated.files(folder)
  base, length = smoke_experiment(), 16_384
  data = {"train_size": max(gated.tasks, 8), "test_size": 0, "path": str(folder)} | gated.data
  if gated.source == "mle":
    data["path"] = None
  return dataclasses.replace(
    base,
    environment=EnvironmentConfig(kind=gated.kind, **gated.environment),
    data=DataConfig(source=gated.source, **data),
    reward=RewardConfig(parts=(gated.part,), **gated.reward),
    tools=ToolsConfig(names=gated.tools),
    engine=dataclasses.replace(base.engine, max_length=length),
    rollout=dataclasses.replace(base.rollout, max_total_tokens=length, max_turns=6),
    rl=dataclasses.replace(base.rl, row_length=length),
  )


def broken(results):
  return [(r.task_id, r.attempt, r.reward, r.detail) for r in results if not r.held]


@pytest.mark.parametrize("name", GATED)
def test_gates(name, tmp_path):
  gated = GATED[name]
  if gated.needs is not None:
    pytest.importorskip(gated.needs)
  work = check_experiment(experiment(gated, tmp_path), tasks=gated.tasks, at_most=gated.at_most)
  results = asyncio.run(work)
  assert broken(results) == []
  assert len({r.task_id for r in results}) == gated.tasks
  assert len({r.attempt for r in results}) >= 8


def test_every_kind_has_cheats_and_gates():
  assert set(KINDS) == set(CHEATS) == {gated.kind for gated in GATED.values()}
  judges = typing.get_args(typing.get_type_hints(PivotVerifierConfig)["kind"])
  assert set(judges) == {g.reward["pivot"].kind for g in GATED.values() if g.kind == "pivot"}
