"""Cheats of Countdown."""

from __future__ import annotations

from agentjax.trajectory.record import Task
from agentjax.world.cheats import Turns, claims, each, say


def countdown_cheats(task: Task, tags: bool) -> dict[str, Turns]:
  """Expressions of other numbers, of too many, several at once, and what is no expression."""
  right, target = task.answer, task.metadata["target"]
  texts = {
    "the_target": str(target),
    "cancelled": f"{target} + 0 * ({right})",
    "twice": f"({right}) + ({right}) - ({right})",
    "several": f"{right}, 1 + 1",
    "either": f"({right}) or 1",
    "comparison": f"{target} == {target}",
    "call": f"int({target})",
    "power": "9 ** 9 ** 9",
    "walrus": f"(x := {target})",
    "brackets": "(" * 150,
    "digits": "9" * 190,
  }

  def form(text: str) -> str:
    return f"<answer>{text}</answer>" if tags else text

  attempts = each(texts | claims(task), form)
  if tags:
    attempts["untagged"] = say(right)
    attempts["first_of_two_tags"] = say(f"{form(right)}{form('1')}")
    attempts["open_tag"] = say(f"<answer>{right}")
  return attempts
