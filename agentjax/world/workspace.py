"""Episodes whose answer is a changed folder of files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping

from agentjax.faults import Fault, Owner, describe
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.workspace import Workspaces
from agentjax.trajectory.record import Status, Task
from agentjax.world.environment import Action, Observation, Step
from agentjax.world.question import QuestionEnvironment


class WorkspaceEnvironment(QuestionEnvironment):
  """A question with tools that share a folder, which is handed in when the policy stops calling.

  A snapshot saves the folder and holds the hash of its tree; ``restore`` finds the tree in the
  store of ``workspaces``, until ``discard``, and no call is made again. A folder that cannot be
  read (too large, too deep) is the policy's fault: it cannot be branched from, and handing it in is
  an error of the policy.

  Args:
    registry: tools, those over ``workspaces`` among them.
    workspaces: holds the folder; may serve many environments at once.
    files: the files of a task, by relative path.
    hand_in: the files at the end -> the answer that is judged; None where there is none.
    max_turns, tool_timeout: as in ``QuestionEnvironment``.
  """

  def __init__(
    self,
    registry: ToolRegistry,
    workspaces: Workspaces,
    *,
    files: Callable[[Task], Mapping[str, bytes]],
    hand_in: Callable[[Mapping[str, bytes]], str | None],
    max_turns: int,
    tool_timeout: float,
  ):
    super().__init__(registry, max_turns=max_turns, tool_timeout=tool_timeout)
    self._workspaces = workspaces
    self._files = files
    self._hand_in = hand_in
    self._tree = ""  # what the folder began as
    self._begun = False  # whether a call may have changed it since

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await super().reset(task, key)
    self._begin(await asyncio.to_thread(self._workspaces.store.put_files, self._files(task)))
    await self._workspaces.restore(self._episode, self._tree)
    return observation

  async def step(self, action: Action) -> Step:
    self._begun = self._begun or bool(action.tool_calls)
    step = await super().step(action)
    if step.status is not Status.OK or not step.terminated:
      return step
    if self._begun:
      files = await self._workspaces.files(self._episode)
    else:
      files = await asyncio.to_thread(self._saved)
    return dataclasses.replace(step, answer=self._hand_in(files))

  async def snapshot(self) -> bytes:
    if self._begun:
      tree = await self._workspaces.snapshot(self._episode)
    else:
      tree = self._tree
      self._workspaces.store.hold(tree)
    return json.dumps({"episode": self._state().decode(), "tree": tree}, sort_keys=True).encode()

  def restore(self, state: bytes) -> None:
    values = json.loads(state)
    super().restore(values["episode"].encode())
    self._workspaces.store.hold(values["tree"])
    self._begin(values["tree"])
    self._behind = True

  def discard(self, state: bytes) -> None:
    self._workspaces.store.release(json.loads(state)["tree"])

  async def close(self) -> None:
    if self._task is not None:
      await self._workspaces.end(self._episode)
    await super().close()
    self._begin("")

  async def _catch_up(self, turn: int) -> Fault | None:
    try:
      await self._workspaces.restore(self._episode, self._tree)
    except KeyError as error:  # the store lost it: nothing that the policy wrote is at fault
      return Fault(Owner.INFRASTRUCTURE, "sandbox", describe(error))
    self._behind = False
    return None

  def _begin(self, tree: str) -> None:
    """Replaces the present tree by ``tree``, which is held already."""
    before, self._tree, self._begun = self._tree, tree, False
    if before:
      self._workspaces.store.release(before)

  def _saved(self) -> dict[str, bytes]:
    """The regular files at the start."""
    store = self._workspaces.store
    return {
      entry.path: store.read(entry)
      for entry in store.entries(self._tree)
      if entry.kind in ("file", "program")
    }
