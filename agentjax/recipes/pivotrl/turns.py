r"""Candidate turns of experts' trajectories, and the pivots among them.

Every assistant turn of a trajectory is a candidate: the history before it, and what the expert did.
A candidate is profiled with K one-turn samples of a policy, whose rewards r_1..r_K say whether they
did the same; with ``mean = 1/K sum r_k`` and ``variance = 1/K sum (r_k - mean)^2`` it is a pivot
where ``variance > 0`` and ``mean < lambda``. A turn without variance has no advantage in GRPO, and
so no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from agentjax.adapters.agent_trajectories import AgentTrajectory
from agentjax.tools.declared import DeclaredTool
from agentjax.worlds.pivot.tasks import PivotRow

_THINKING_END = "</think>"


def candidates(trajectories: Iterable[AgentTrajectory], source: str) -> list[PivotRow]:
  """Every assistant turn of every trajectory that has a message before it, in order.

  What the expert thought before the turn (up to ``</think>``) is not part of the expected action;
  the thinking of earlier turns stays in the history.
  """
  rows: list[PivotRow] = []
  for trajectory in trajectories:
    turn = 0
    for index, message in enumerate(trajectory.messages):
      if message.role != "assistant":
        continue
      if index:
        content = message.content.rpartition(_THINKING_END)[2].lstrip("\n")
        rows.append(
          PivotRow(
            id=len(rows),
            source=source,
            trajectory=trajectory.name,
            turn=turn,
            history=trajectory.messages[:index],
            expected=dataclasses.replace(message, content=content),
            tools=trajectory.tools,
          )
        )
      turn += 1
  return rows


def observed_tools(trajectories: Iterable[AgentTrajectory]) -> tuple[DeclaredTool, ...]:
  """The tools that conversations call, declared by the arguments that were seen, by name.

  For files that record calls and no tools, such as SWE-agent's. An argument is required if every
  call has it. A type is given where all its values have one.
  """
  seen: dict[str, list[dict[str, Any]]] = {}
  for trajectory in trajectories:
    for message in trajectory.messages:
      for call in message.tool_calls:
        seen.setdefault(call.name, []).append(dict(call.arguments))
  return tuple(DeclaredTool(name, "", _schema(calls)) for name, calls in sorted(seen.items()))


def _schema(calls: list[dict[str, Any]]) -> dict[str, Any]:
  """A JSON schema that all calls fit."""
  properties: dict[str, Any] = {}
  for key in sorted({key for call in calls for key in call}):
    kinds = {_kind(call[key]) for call in calls if key in call}
    properties[key] = {"type": kinds.pop()} if len(kinds) == 1 else {}
  required = [key for key in properties if all(key in call for call in calls)]
  return {"type": "object", "properties": properties, "required": required}


def _kind(value: Any) -> str:
  """JSON schema's name of a value's type."""
  if value is None:
    return "null"
  if isinstance(value, bool):  # which is an int as well
    return "boolean"
  kinds = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"))
  return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def select_pivots(
  rows: Iterable[PivotRow], *, max_mean: float = 1.0, limit: int | None = None
) -> list[PivotRow]:
  """The profiled rows with ``variance > 0`` and ``mean < max_mean``, by id.

  Args:
    rows: profiled; those without a profile are left out.
    max_mean: lambda. The paper gives no figure; 1 is the filter on variance alone.
    limit: at most this many, the easiest are dropped first; None keeps all.
  """
  kept = [
    row
    for row in rows
    if row.profile is not None and row.profile.variance > 0 and row.profile.mean < max_mean
  ]
  if limit is not None:
    kept = sorted(kept, key=lambda r: (r.profile.mean if r.profile else 0.0, r.id))[:limit]
  return sorted(kept, key=lambda r: r.id)
