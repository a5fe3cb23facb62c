"""Cheats of questions."""

from __future__ import annotations

from agentjax.text.answers import mark_answer
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.cheats import Setting, Turns, another, claims, each, say


def question_cheats(task: Task, setting: Setting) -> dict[str, Turns]:
  """Several answers for one, answers where none is read, and texts that are no answer."""
  right, wrong = task.answer, another(task.answer)
  answers = {
    "alternatives": f"{right} or {wrong}",
    "list": f"{right}, {wrong}",
    "every_number": " ".join(map(str, range(1000))),
    "two_marks_in_a_line": f"{right} {mark_answer(wrong)}",
    "first_of_two_marks": f"{right}\n{mark_answer(wrong)}",
    "repeated_boxes": " ".join(f"\\boxed{{{a}}}" for a in (right, wrong, right)),
    "unsure_of_the_sign": f"±{right}",
    "hidden_in_a_sentence": f"not {right}",
  }
  call = ToolCall("calculator", {"expression": mark_answer(right)})
  in_a_call = (Message("assistant", "", (call,)), *say(""))
  return {"in_a_call": in_a_call} | each(answers | claims(task), setting.form)
