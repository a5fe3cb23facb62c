"""Cheats of function writing."""

from __future__ import annotations

from agentjax.adapters.unit_tests.canaries import canaries
from agentjax.trajectory.record import Task
from agentjax.world.cheats import Setting, Turns, claims, each
from agentjax.worlds.code.code_block import mark_code


def code_cheats(task: Task, setting: Setting) -> dict[str, Turns]:
  """The canaries of ``rewards.canaries`` as answers; no program for a task without entry points."""
  del setting
  names = task.metadata.get("entry_points", ())
  programs = canaries(names) if names else {}
  return each(programs, mark_code) | each(claims(task), str)
