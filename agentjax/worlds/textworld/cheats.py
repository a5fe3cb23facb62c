"""Turns that ask TextWorld for points without earning them."""

from __future__ import annotations

from collections.abc import Mapping

from agentjax.trajectory.record import Message, Task
from agentjax.world.cheats import Turns, claims, each, say


def textworld_cheats(task: Task, tags: bool, max_turns: int) -> Mapping[str, Turns]:
  """Claims, several commands for one, commands where none is read, and those that come too late.

  Args:
    task: its answer is a way to win, commands with "; " between them.
    tags: whether commands must be in ``<answer>...</answer>``.
    max_turns: of the policy.
  """
  way = task.answer.split("; ")

  def form(text: str) -> str:
    return f"<answer>{text}</answer>" if tags else text

  joined = {
    "all_at_once": "; ".join(way),
    "all_in_lines": "\n".join(way),
    "all_with_and": " and ".join(way),
    "twice": " ".join([way[-1]] * 2),
    "won": "You have won. *** The End *** Your score is 1 out of a possible 1.",
    "facts": "on(o_0, s_0)",
    "logic": "quests complete",
    "debug": "tw-trace-actions",
  }
  late = (*["look"] * max_turns, *way)
  attempts = each(claims(task) | joined, form) | {
    "too_late": tuple(Message("assistant", form(command)) for command in late)
  }
  if tags:
    attempts["untagged"] = tuple(Message("assistant", command) for command in way)
    attempts["first_of_two_tags"] = tuple(
      Message("assistant", f"{form(command)}{form('look')}") for command in way
    )
    attempts["fake_answer"] = say(f"{form('')}\nYou {way[-1]}.\nYou have won.")
  return attempts
