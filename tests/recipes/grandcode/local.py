"""Candidates that run in this process, for tests that need no sandbox."""

from agentjax.adapters.unit_tests.boxed.plain import NotPlain, decode, encode
from agentjax.adapters.unit_tests.scorer import CallAnswer, CaseResult, Verdict
from agentjax.recipes.grandcode.inputs import Example, Problem


class Hangs(Exception):
  """Stands for code whose time runs out."""


def ask_here(function, calls=None):
  """An ``Ask`` that executes trusted code; ``raise Hangs`` is late and ends the calls."""

  async def ask(code, inputs):
    scope = {"Hangs": Hangs}
    answers = []
    try:
      exec(code, scope)
    except SyntaxError:
      return [CallAnswer(None, "it ended early")] * len(inputs)
    for arguments in inputs:
      if calls is not None:
        calls.append((code, arguments))
      if answers and answers[-1].answer is None:
        answers.append(CallAnswer(None, "it was not asked"))
        continue
      try:
        answers.append(CallAnswer({"value": encode(scope[function](*arguments))}))
      except Hangs:
        answers.append(CallAnswer(None, "CPU time ran out"))
      except NotPlain:
        answers.append(CallAnswer({"object": "generator"}))
      except Exception as error:
        answers.append(CallAnswer({"error": [type(error).__name__]}))
    return answers

  return ask


def problem(*examples, function="f"):
  """A problem with examples (arguments, result)."""
  return Problem(7, "Do it.", function, tuple(Example(a, r) for a, r in examples))


class LocalRunner:
  """A ``Runner`` of trusted code in this process."""

  def of(self, function):
    return ask_here(function)

  async def verify(self, code, tests):
    scope, results = {}, []
    for line in tests.source.split("\n"):
      if line.startswith("assert "):
        try:
          exec(code, scope)
          exec(line, scope)
          results.append(CaseResult(line, True))
        except Exception as error:
          results.append(CaseResult(line, False, type(error).__name__))
    return Verdict(tuple(results))

  async def inputs(self, generator, seed):
    (answer,) = await ask_here("inputs")(generator, [(seed,)])
    found = decode(answer.answer["value"]) if answer.answer and "value" in answer.answer else []
    return found if isinstance(found, list) else []

  async def close(self):
    pass
