"""The policy's view of a program's output: head and tail, and how the program ended."""

from __future__ import annotations

from agentjax.sandbox.interface import RunStatus, SandboxResult
from agentjax.tools.protocol import ToolResult, ToolStatus


def clip(text: str, limit: int) -> str:
  """``text``, or its first and last ``limit / 2`` characters around a line that counts the rest."""
  if len(text) <= limit:
    return text
  tail = limit // 2
  left_out = len(text) - limit
  return f"{text[: limit - tail]}\n[... {left_out} characters left out ...]\n{text[-tail:]}"


def joined(first: str, second: str) -> str:
  """Both, without trailing newlines, on separate lines; an empty one is left out."""
  return "\n".join(part for part in (first.rstrip("\n"), second.rstrip("\n")) if part)


def is_unicode(text: str) -> bool:
  """False where ``text`` holds half of a surrogate pair, as JSON's ``"\\ud800"`` does."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def as_tool_result(result: SandboxResult, max_characters: int) -> ToolResult:
  """Stdout and stderr, clipped, then why the run failed, unless they say so."""
  shown = clip(joined(result.stdout, result.stderr), max_characters)
  if result.status is RunStatus.OK:
    shown = shown or "(no output)"
  elif result.status is not RunStatus.ERROR or not result.stderr:
    shown = joined(shown, f"error: {result.detail}")
  return ToolResult(ToolStatus(result.status.value), shown, result.seconds, fault=result.fault)
