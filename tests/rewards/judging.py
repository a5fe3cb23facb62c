"""Judges made of functions, and episodes to put to them."""

import asyncio

from agentjax.trajectory.record import Message, Status, Task, Trajectory


class Scripted:
  """A judge that answers with a function of (messages, key), and remembers what it was asked."""

  def __init__(self, answer, letters=None):
    self.answer, self.letters, self.asked = answer, letters, []

  async def reply(self, messages, *, key):
    self.asked.append((messages, key))
    result = self.answer(messages, key)
    if isinstance(result, Exception):
      raise result
    return result

  async def log_probs(self, messages, opening, choices):
    return self.letters(messages, opening, choices)


def run(coroutine):
  return asyncio.run(coroutine)


def task(question="Why is the sky blue?", id=3, answer="", **metadata):
  return Task(id, (Message("user", question),), answer, "made", metadata=metadata)


def episode(answer, sample=0, status=Status.OK, id=3):
  return Trajectory(0, id, sample, "made", segments=[], answer=answer, status=status)
