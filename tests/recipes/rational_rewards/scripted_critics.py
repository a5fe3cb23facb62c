"""A teacher and a checker made of functions, for the aspects correctness and clarity."""

import json
import re


def critique(grade, word):
  return (
    f"## Request analysis\nA prime is asked for.\n\n## Detailed judgement\ncorrectness: {grade}, "
    f"{word}.\n**Clarity** (score): {grade}/4 - short.\n\n## Summary\n{word}"
  )


def teacher_reply(messages, key):
  """Good grades exactly where it is told that the answer is preferred."""
  told = "compared both answers prefer the answer." in messages[-1].content
  return critique(4, "right") if told else critique(1, "wrong")


def checker_reply(messages, key):
  """The answer whose critique says "right"."""
  assert "prefer" not in messages[-1].content
  found = re.search(r"<critiques \w+>\n(.*)\n</critiques", messages[-1].content, re.DOTALL)
  texts = json.loads(found[1])
  assert "correctness: …" in texts["critique_of_A"] and "(score): … - short" in str(texts)
  return f"So <answer>{'A' if 'right' in texts['critique_of_A'] else 'B'}</answer>"
