"""Gates of every environment that a config can choose: the worked solution is paid in full, an
empty answer and every cheat get nothing. They are those of ``python -m agentjax.check``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import importlib
import inspect
import json
import math
import pkgutil
import sqlite3
import sys
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax import worlds
from agentjax.adapters.reasoning_gym.tasks import ReasoningGymConfig
from agentjax.adapters.tfds import TfdsConfig
from agentjax.config import ConfigError
from agentjax.data.config import DataConfig, JsonlConfig, MixtureConfig
from agentjax.data.source import TaskSource
from agentjax.names import known_names
from agentjax.rewards import RewardConfig
from agentjax.rollout.integrity import play_turns
from agentjax.text.answers import mark_answer
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.tools.declared import read_tool
from agentjax.tools.registry import ToolRegistry
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import resolve
from agentjax.training.reward_gates import check_experiment
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.environment import Environment
from agentjax.world.world import Site, WorldConfig
from agentjax.worlds.code.function_tasks import FunctionTaskConfig
from agentjax.worlds.code.sources import CodeTasksConfig, CodeTaskSource
from agentjax.worlds.mle.secret import run_secret
from agentjax.worlds.mle.tasks import MleTaskConfig
from agentjax.worlds.pivot.tasks import PivotRow, write_pivots
from agentjax.worlds.pivot.tool_match import ArgumentMatchConfig
from agentjax.worlds.pivot.verifier import PivotVerifierConfig
from agentjax.worlds.question.gsm8k import Gsm8kConfig
from agentjax.worlds.question.word_problems import WordProblemConfig
from agentjax.worlds.repair.tasks import RepairTaskConfig
from agentjax.worlds.sql.spider import SpiderConfig
from tests.adapters.tfds_folder import write_tfds
from tests.training.smoke import smoke_experiment
from tests.worlds import textworld_games

needs_sandbox = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
SOURCES = known_names(TaskSource)
KINDS = known_names(WorldConfig)


@dataclasses.dataclass(frozen=True)
class Gated:
  """One way to build an environment: what a config says of it, and files that it reads."""

  kind: str
  source: TaskSource | None = None  # None: the world's own
  part: str | None = None  # None: the first of the world's own scorers, or what it pays itself
  tools: tuple[str, ...] = ()
  data: dict = dataclasses.field(default_factory=dict)
  world: dict = dataclasses.field(default_factory=dict)
  files: typing.Callable = lambda folder: None
  tasks: int = 2
  needs: str | None = None  # a module of an extra
  at_most: float = 0.0
  fast: tuple[str, ...] | None = None  # cheats that the fast tests play; None is all


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
  gold = (
    "SELECT name FROM owner JOIN pet ON pet.owner = owner.id WHERE kind = 'cat' ORDER BY weight"
  )
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


def _examples(folder):
  rows = [{"question": "What is 507 + 507?", "answer": "1,014", "level": 1}] * 2
  write_tfds(folder, {"train": rows, "test": rows})


def _mbpp(folder):
  row = {
    "task_id": 601, "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n  return a + b", "test_list": ["assert add(1, 2) == 3",
    "assert add(20, 30) == 50"],
  }  # fmt: skip
  (folder / "mbpp.jsonl").write_text(json.dumps(row) + "\n")


def _shop(folder):
  place = {"address1": "1 Road", "address2": "", "city": "Rome", "state": "RM", "country": "Italy"}
  place["zip"] = "00100"
  user = {"name": {"first_name": "Ann", "last_name": "Lee"}, "address": place, "orders": ["#W1"]}
  user |= {"email": "ann@example.com", "payment_methods": {}}
  order = {"order_id": "#W1", "user_id": "ann", "address": place, "items": [], "status": "pending"}
  order["payment_history"] = []
  for kind, records in (("orders", {"#W1": order}), ("users", {"ann": user}), ("products", {})):
    (folder / f"db_{kind}.json").write_text(json.dumps(records))
  (folder / "policy.md").write_text("Be kind.")
  ended = order | {"status": "cancelled", "cancel_reason": "ordered by mistake"}
  arguments = {"order_id": "#W1", "reason": "ordered by mistake"}
  row = {
    "instruction": "Cancel #W1, ordered by mistake.", "outputs": ["cancelled"],
    "actions": [{"name": "cancel_pending_order", "arguments": arguments}],
    "golden": {"observations": [json.dumps(ended)], "changed": {"orders": {"#W1": ended}}},
  }  # fmt: skip
  for name in ("train", "test"):
    with gzip.open(folder / f"tasks_{name}.jsonl.gz", "wt") as file:
      file.write(json.dumps(row) + "\n")


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
  _call("str_replace_editor", command="view", path="/w/src/a.py", view_range=[1, 40]),
  _call("bash", command="pytest tests/test_a.py"),
  _call("grep", pattern="def f", path="/w/src/a.py"),
)
BATCH = json.dumps({
  "analysis": "a", "plan": "b", "commands": [{"keystrokes": "ls -la src\n"}],
  "task_complete": False,
})  # fmt: skip


def _pivot(tools, *turns, **verifier):
  return Gated(
    "pivot", None, "pivot", data={"train_size": None, "test_size": None},
    world={"verifier": PivotVerifierConfig(**verifier)}, files=_turns(tools, *turns),
    tasks=len(turns),
  )  # fmt: skip


GATED = {
  "word_problems": Gated("question", WordProblemConfig(), "exact_match", ("calculator",), tasks=3),
  "gsm8k": Gated("question", Gsm8kConfig(), "exact_match", ("calculator",), files=_gsm8k, tasks=1),
  "texts": Gated("question", JsonlConfig(), "exact_match", ("calculator",), files=_texts, tasks=1),
  "reasoning_gym": Gated(
    "question", ReasoningGymConfig(name="leg_counting"), "reasoning_gym", ("calculator",),
    needs="reasoning_gym",
  ),
  "tfds": Gated(
    "question", TfdsConfig(name="tiny"), "exact_match", ("calculator",), files=_examples,
    needs="tensorflow_datasets",
  ),
  "mixture": Gated(
    "question", MixtureConfig((WordProblemConfig(), JsonlConfig())), "exact_match",
    ("calculator",), files=_texts, tasks=4, data={"test_size": 1},
  ),
  "code_tasks": Gated(
    "code", None, "unit_tests", files=_mbpp, tasks=1,
    world={"tasks": CodeTasksConfig(test="mbpp")},
    fast=("exit_at_import", "always_equal", "test_files", "reads_the_tests", "reward_file",
          "forged_answers"),
  ),
  "code": Gated(
    "code", None, "unit_tests", tasks=1, world={"tasks": FunctionTaskConfig()}, data={"seed": 3}
  ),
  "sql": Gated(
    "sql", None, "sql_match", ("sql",), files=_pets, tasks=1,
    world={"tasks": SpiderConfig(demonstration="checked", test_databases=()),
           "query_seconds": 0.5, "max_rows": 1000},
  ),
  "repair": Gated(
    "repair", None, "repair_solved", ("files", "shell"), tasks=1,
    world={"tasks": RepairTaskConfig(libraries=("ledger",))}, data={"seed": 1},
    # Every canary is played as code; here the point is how it gets into the package.
    fast=("exit_at_import_as_package", "always_equal_as_package", "test_files_as_package",
          "daemon_as_package", "visible_tests", "shadowed_modules", "reward_file", "shell"),
  ),
  "retail": Gated("retail", None, "environment", files=_shop, tasks=1),
  "mle": Gated("mle", None, "mle_beats_strong", tasks=1),
  "pivot_arguments": _pivot(SHOP, *CALLS, kind="arguments"),
  "pivot_tool_name": _pivot(SHOP, *CALLS[:2], kind="tool_name"),
  "pivot_schema": _pivot(SHOP, *CALLS[:2], kind="schema"),
  "pivot_edits": _pivot(EDITOR, *EDITS, kind="edits"),
  "pivot_terminal": _pivot((), BATCH, kind="terminal"),
  "textworld": Gated("textworld", None, "environment", files=textworld_games.write, tasks=1),
  "countdown": Gated(
    "countdown", None, "environment", tasks=3,
    world={"format_reward": 0.0},
  ),
  "countdown_pays_for_form": Gated(
    "countdown", None, "environment", at_most=0.1
  ),
}  # fmt: skip
# A world that needs neither files nor settings for its gates is found in its folder.
GATED |= {kind: Gated(kind) for kind in KINDS if kind not in {g.kind for g in GATED.values()}}


@contextlib.contextmanager
def extras() -> typing.Iterator[None]:
  """Leaves out what needs an extra that is not installed."""
  try:
    yield
  except ConfigError as missing:
    if "pip install" not in str(missing):
      raise


def part_of(gated: Gated) -> str:
  """The part of the reward that is tried."""
  if gated.part is not None:
    return gated.part
  world = WorldConfig.from_name(gated.kind, "world").build(Site(ToolRegistry([])))
  return next(iter(world.scorers), "environment")


def experiment(gated: Gated, folder):
  """The smoke run with a context that any task fits, in another world."""
  gated.files(folder)
  base, length = smoke_experiment(), 16_384
  data = {"train_size": max(gated.tasks, 8), "test_size": 0, "path": str(folder)} | gated.data
  world = gated.world
  if gated.kind == "mle":
    run_secret(folder)
    data["path"] = None
    world = {"tasks": MleTaskConfig(secret_file=str(folder / "secret"))}
  return dataclasses.replace(
    base,
    world=dataclasses.replace(WorldConfig.from_name(gated.kind, "world"), **world),
    data=DataConfig(source=gated.source, **data),
    reward=RewardConfig(parts=(part_of(gated),)),
    tools=ToolsConfig(names=gated.tools),
    engine=dataclasses.replace(base.engine, max_length=length),
    rollout=dataclasses.replace(base.rollout, max_total_tokens=length, max_turns=6),
    rl=dataclasses.replace(base.rl, row_length=length),
    evaluation=dataclasses.replace(base.evaluation, tasks=0),
  )


def broken(results):
  return [(r.task_id, r.attempt, r.reward, r.detail) for r in results if not r.held]


@pytest.mark.parametrize("name", GATED)
def test_gates(name, tmp_path):
  gated = GATED[name]
  if gated.needs is not None:
    pytest.importorskip(gated.needs)
  results = None
  with extras():
    results = asyncio.run(
      check_experiment(
        experiment(gated, tmp_path),
        tasks=gated.tasks,
        at_most=gated.at_most,
        names=gated.fast,
      )
    )
  if results is None:
    pytest.skip("an extra is not installed")
  assert broken(results) == []
  assert len({r.task_id for r in results}) == gated.tasks
  assert len({r.attempt for r in results}) >= 8


def test_every_kind_and_source_has_cheats_and_gates():
  assert set(SOURCES) == {gated.source.chosen for gated in GATED.values() if gated.source}
  code = {g.world["tasks"].chosen for g in GATED.values() if g.kind == "code"}
  assert code == set(known_names(CodeTaskSource))
  judges = typing.get_args(typing.get_type_hints(PivotVerifierConfig)["kind"])
  assert set(judges) == {g.world["verifier"].kind for g in GATED.values() if g.kind == "pivot"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, gated in GATED.items() if gated.fast])
def test_gates_with_every_cheat(name, tmp_path):
  gated = GATED[name]
  results = asyncio.run(check_experiment(experiment(gated, tmp_path), tasks=4))
  assert broken(results) == [] and len(results) > 4 * len(gated.fast)


def test_no_bundled_environment_is_without_gates():
  for module in pkgutil.walk_packages(worlds.__path__, "agentjax.worlds."):
    if ".repositories" not in module.name:
      importlib.import_module(module.name)
  bundled, waiting = set(), [Environment]
  while waiting:
    for kind in waiting.pop().__subclasses__():
      waiting.append(kind)
      if kind.__module__.startswith("agentjax.worlds.") and not inspect.isabstract(kind):
        bundled.add(kind)
  gated = set()
  for kind in KINDS:
    registry = ToolRegistry([]) if kind != "repair" else build_tools(ToolsConfig(names=("files",)))
    site = Site(registry)
    world = WorldConfig.from_name(kind, "world").build(site)
    gated.add(type(world.environment(Task(0, (), "", ""))))
    asyncio.run(world.close())
    asyncio.run(registry.close())
  assert bundled <= gated


def test_an_environment_that_can_be_cheated_turns_its_gates_red(tmp_path):
  """The same cheats, through verifiers that believe what they are told."""

  def contains(trajectory, task):
    return float(task.answer in (trajectory.answer or ""))

  gated = dataclasses.replace(GATED["word_problems"], part="contains", tasks=1)
  results = asyncio.run(
    check_experiment(
      experiment(gated, tmp_path), tasks=1, extensions=Extensions(scorers={"contains": contains})
    )
  )
  assert {"alternatives", "list", "repeated_boxes"} <= {r.attempt for r in results if not r.held}
  released = ArgumentMatchConfig(string_similarity="overlap", string_threshold=0.1)
  config = experiment(_pivot(SHOP, CALLS[0], arguments=released), tmp_path)
  results = asyncio.run(check_experiment(config, tasks=1))
  assert {r.attempt for r in results if not r.held} == {"stuffed_arguments"}


@pytest.mark.parametrize(("least", "paid"), [(0.0, ["any_message"]), (0.5, [])])
def test_a_turn_at_which_any_message_is_right_does_not_hold(tmp_path, least, paid):
  config = experiment(_pivot(SHOP, "Which day do you mean?", message_similarity=least), tmp_path)
  results = asyncio.run(check_experiment(config, tasks=1))
  assert [r.attempt for r in results if not r.held] == paid


_texts = st.one_of(
  st.text(max_size=40),
  st.text(st.characters(categories=["Cs", "Nd", "Cc"]), max_size=8),
  st.text("0123456789+-*/().,=#$%<>answer \n", max_size=60),
  st.integers(0, 6000).map(lambda n: "9" * n),
)
_anything = st.one_of(
  _texts, _texts.map(lambda t: f"<answer>{t}</answer>"), _texts.map(mark_answer)
)
_arguments = st.recursive(
  st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=6),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
  ),
  max_leaves=5,
)


@pytest.fixture(scope="module")
def light_worlds(tmp_path_factory):
  """Environments that need no sandbox, by name: their parts, and a loop that uses them."""
  names = [name for name, g in GATED.items() if g.kind not in HEAVY and g.needs is None]
  parts = {}
  for name in names:
    config = experiment(GATED[name], tmp_path_factory.mktemp(name))
    with extras():
      parts[name] = build_parts(resolve(config), None, Extensions())
  with asyncio.Runner() as runner:
    yield parts, runner.run
    for built in parts.values():
      runner.run(built.close())


HEAVY = ("code", "mle", "repair", "sql")  # they run programs


def verdict(parts, task, turn):
  async def work():
    trajectory = await play_turns(task, (turn,), parts.make_environment)
    await parts.rewards.score(trajectory, task)
    return trajectory

  return work()


@settings(max_examples=60, deadline=None)
@given(_anything)
def test_no_text_takes_an_episode_out(light_worlds, text):
  for parts in light_worlds[0].values():
    task = parts.tasks.train[0]
    assert light_worlds[1](verdict(parts, task, Message("assistant", text))).reward.valid


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_argument_takes_a_turn_out(light_worlds, data):
  worlds, run = light_worlds
  name = data.draw(st.sampled_from([n for n in worlds if n.startswith("pivot")]))
  task = data.draw(st.sampled_from(worlds[name].tasks.train))
  calls = []
  for call in task.demonstration[0].tool_calls:
    changed = data.draw(st.sampled_from([*call.arguments, "more"]))
    odd = st.sampled_from([[1, math.inf], [math.nan, 2], "[1, Infinity]", [[]], "[" * 2000])
    arguments = {**call.arguments, changed: data.draw(odd | _arguments)}
    calls.append(ToolCall(call.name, arguments))
  turn = Message("assistant", "", tuple(calls))
  assert run(verdict(worlds[name], task, turn)).reward.valid, calls
