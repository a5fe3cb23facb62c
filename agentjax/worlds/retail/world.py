"""Customers of a shop: the policy reads and changes records, and says what came of it."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjax.config import check
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.tools.build import ToolsConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Reward, Status, Task, ToolCall, Trajectory
from agentjax.world.cheats import Setting, Turns, claims, do, each
from agentjax.world.environment import Action, Environment, Step
from agentjax.world.question import QuestionEnvironment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.retail.desk import KINDS, Desk, read_records

SOURCE = "retail"
_ASKED = (
  "A customer wants this. The text was written for them:\n{instruction}\n\n"
  "Do what the rules of the shop allow with the tools, without asking back. Then answer in words."
)


@dataclasses.dataclass(unsafe_hash=True)
class RetailConfig(WorldConfig):
  """The retail domain of tau-bench (2406.12045), from the folder ``config.data.path``.

  Attributes:
    policy: whether the shop's rules (``policy.md``) are the system message.
    idle: whether tasks are taken of which the right outcome is that nothing is changed or said.
  """

  policy: bool = True
  idle: bool = False

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    check(data.source is None, f"{path}.data.source", data.source, "none for 'retail'")
    allowed = "tau-bench's folder 'retail' for the world 'retail'; set --config.data.path=DIR"
    check(data.path is not None, f"{path}.data.path", data.path, allowed)

  def build(self, site: Site) -> World:
    return RetailWorld(self, site)


class RetailWorld(World):
  """Episodes at the desk. They pay 1 in the part "environment" where the records end as they
  should and the answer says what was asked; the part "right_writes" is ``score_writes``.

  Args:
    config: validated.
    site: its tools are offered beside those of the desk.
  """

  def __init__(self, config: RetailConfig, site: Site):
    self._config, self._site, self._desk = config, site, Desk()
    self._registry = ToolRegistry(
      [*self._desk.tools, *site.registry.tools],
      timeout=site.tool_timeout,
      calls_per_turn=site.registry.calls_per_turn,
    )
    self.tools = self._registry.tools
    self.scorers = {"right_writes": score_writes}

  def tasks(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    folder = pathlib.Path(data.path)
    self._desk.records = read_records(folder)
    system: tuple[Message, ...] = ()
    if self._config.policy:
      try:
        system = (Message("system", (folder / "policy.md").read_text("utf-8")),)
      except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", folder / "policy.md") from error
    splits = (
      list(self._read(folder / f"tasks_{name}.jsonl.gz", system, first, size))
      for name, first, size in (
        ("train", 0, data.train_size),
        ("test", FIRST_TEST_ID, data.test_size),
      )
    )
    return TaskSplits(*splits)

  def environment(self, task: Task) -> Environment:
    site = self._site
    return RetailEnvironment(
      self._registry, self._desk, max_turns=site.max_turns, tool_timeout=site.tool_timeout
    )

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    """Words alone, and all right calls with one more."""
    own = [c for m in task.demonstration for c in m.tool_calls if c.name in Desk.WRITING]
    texts = claims(task) | {"done": "Done, the records are changed. #### Done."}
    user = next(iter(self._desk.records["users"]), "")
    address = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), "here")
    more = ToolCall("modify_user_address", {"user_id": user, **address})
    wrong = {"one_call_too_many": do(*own, more)} if user else {}
    return each(texts, str) | wrong

  async def close(self) -> None:
    await self._registry.close()

  def _read(
    self, path: pathlib.Path, system: tuple[Message, ...], first: int, size: int | None
  ) -> Iterator[Task]:
    found = 0
    for line, row in read_jsonl(path):
      if size is not None and found >= size:
        return
      task = read_task(row, first + line - 1, system, path, line)
      if self._config.idle or task.metadata["changed"] or task.metadata["outputs"]:
        found += 1
        yield task


def read_task(
  row: Mapping[str, Any], id: int, system: tuple[Message, ...], path: pathlib.Path, line: int
) -> Task:
  """A task from its row.

  Raises:
    DataError: a row of another form.
  """
  instruction = require_text(row, "instruction", path, line)
  try:
    golden = row["golden"]
    calls = [ToolCall(str(c["name"]), dict(c["arguments"])) for c in row["actions"]]
    results = [r if isinstance(r, str) else json.dumps(r) for r in golden["observations"]]
    outputs = [str(text) for text in row["outputs"]]
    changed = {kind: dict(golden["changed"][kind]) for kind in golden["changed"]}
    pairs = list(zip(calls, results, strict=True))
  except (KeyError, TypeError, ValueError) as error:
    raise DataError(f"no task of the retail domain: {error!r}"[:300], path, line) from error
  if not set(changed) <= set(KINDS):
    raise DataError(f"changes {', '.join(changed)}; allowed: {', '.join(KINDS)}", path, line)
  shown: list[Message] = []
  for call, result in pairs:
    if result.startswith("Error: "):
      result = f"error: {result.removeprefix('Error: ')}"
    shown += [Message("assistant", "", (call,)), Message("tool", result)]
  shown.append(Message("assistant", " ".join(["Done.", *outputs])))
  asked = Message("user", _ASKED.format(instruction=instruction))
  metadata = {"changed": changed, "outputs": outputs}
  return Task(id, (*system, asked), "", SOURCE, tuple(shown), metadata)


class RetailEnvironment(QuestionEnvironment):
  """A question whose outcome is the records of its episode, and what the last turn says.

  Args:
    registry: tools, those of the desk among them.
    desk: keeps the records.
    max_turns, tool_timeout: as in QuestionEnvironment.
  """

  def __init__(self, registry: ToolRegistry, desk: Desk, *, max_turns: int, tool_timeout: float):
    super().__init__(registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=str)
    self._desk = desk

  async def step(self, action: Action) -> Step:
    step = await super().step(action)
    if step.status is not Status.OK or not step.terminated:
      return step
    assert self._task is not None
    if self._behind and (fault := await self._catch_up(self._turn - 1)):
      return dataclasses.replace(step, status=Status.ENV_ERROR, fault=fault)
    wanted = self._task.metadata
    right = self._desk.visit(self._episode).changed == wanted["changed"]
    said = says(action.text, wanted["outputs"])
    return dataclasses.replace(step, reward=Reward(float(right and said)))


def says(text: str, outputs: Sequence[str]) -> bool:
  """Whether a text holds all outputs; commas and case do not count."""
  plain = text.lower().replace(",", "")
  return all(output.lower().replace(",", "") in plain for output in outputs)


def score_writes(trajectory: Trajectory, task: Task) -> float:
  """Share of the calls that changed a record and are calls of the worked solution; 0 for none.

  Each call of the solution counts once. Of several agents each is judged by its own calls.
  """
  if trajectory.status is Status.POLICY_ERROR:
    return 0.0
  left = collections.Counter(
    _written(call.name, call.arguments) for m in task.demonstration for call in m.tool_calls
  )
  made = [r for r in trajectory.tools if r.name in Desk.WRITING and r.status == "ok"]
  right = 0
  for record in made:
    key = _written(record.name, record.arguments)
    right += left[key] > 0
    left[key] -= 1
  return right / len(made) if made else 0.0


def _written(name: str, arguments: Mapping[str, Any]) -> str:
  return f"{name} {json.dumps(dict(arguments), sort_keys=True)}"
