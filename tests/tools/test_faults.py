"""A tool that fails: what the policy wrote is an error it reads, a fault of ours masks."""

import asyncio
import csv
import errno
import re

import pytest

from agentjax.faults import Boundary, Fault, Owner, fault_of
from agentjax.sandbox.interface import BoxContentError, SandboxError
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import ToolCall

CONTEXT = ToolContext("e", 0, 5.0)


class Tool:
  name, description = "t", "does"
  parameters = {"type": "object", "properties": {"x": {}}}

  def __init__(self, outcome, healthy=None):
    self.outcome = outcome
    if healthy is not None:

      async def is_healthy():
        return healthy

      self.is_healthy = is_healthy

  async def __call__(self, arguments, context):
    if isinstance(self.outcome, BaseException):
      raise self.outcome
    return self.outcome


def call(tool, arguments=None, **settings):
  registry = ToolRegistry([tool], **settings)
  return asyncio.run(registry.call(ToolCall("t", arguments or {}), CONTEXT))


OURS = Fault(Owner.INFRASTRUCTURE, "sandbox", "no machine")
QUEUE = Fault(Owner.INFRASTRUCTURE, "queue", "full")
BROKEN = ToolResult(ToolStatus.INFRA_ERROR, "no machine", fault=OURS)


@pytest.mark.parametrize(
  ("tool", "status"),
  [
    (Tool(ValueError("odd")), "error"),
    (Tool(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")), "error"),
    (Tool(RecursionError()), "error"),
    (Tool(OverflowError("too large")), "error"),
    (Tool(ZeroDivisionError()), "error"),
    (Tool(MemoryError()), "error"),
    (Tool(KeyError("x")), "error"),
    (Tool(BoxContentError("a directory")), "error"),
    (Tool(SyntaxError("no Python")), "error"),
    (Tool(re.error("no pattern")), "error"),
    (Tool(csv.Error("no table")), "error"),
    (Tool(AssertionError("0 <= n < 10")), "error"),
    (Tool(ExceptionGroup("both", [ValueError(), TypeError()])), "error"),
    (Tool(ExceptionGroup("both", [ValueError(), OSError(5, "disk")])), "infra_error"),
    (Tool(OSError(errno.EIO, "disk")), "infra_error"),
    (Tool(SandboxError("gone")), "infra_error"),
    (Tool(SandboxError("gone"), healthy=True), "killed"),
    (Tool(SandboxError("gone"), healthy=False), "infra_error"),
    (Tool(RuntimeError("a bug")), "infra_error"),
    (Tool(BROKEN), "infra_error"),
    (Tool(BROKEN, healthy=True), "killed"),
    (Tool(BROKEN, healthy=False), "infra_error"),
    (Tool(ToolResult(ToolStatus.INFRA_ERROR, "full", fault=QUEUE), healthy=True), "infra_error"),
    (Tool("no result"), "infra_error"),
  ],
  ids=lambda value: repr(getattr(value, "outcome", value))[:40],
)
def test_whose_fault_a_failed_call_is(tool, status):
  result = call(tool)
  assert result.status == status
  if status == "infra_error":
    assert result.fault is not None and result.fault.masks


@pytest.mark.parametrize(
  ("arguments", "number", "file", "status"),
  [
    ({"x": "foo"}, errno.ENOENT, "/data/pages/foo.txt", "error"),
    ({"x": ["a" * 300]}, errno.ENAMETOOLONG, "/data/" + "a" * 300, "error"),
    ({"x": {"in": "b"}}, errno.EISDIR, "/data/b", "error"),
    ({"x": "foo"}, errno.ENOENT, "/data/index.db", "infra_error"),
    ({"x": ""}, errno.ENOENT, "/data/index.db", "infra_error"),
    ({"x": "foo"}, errno.EIO, "/data/foo", "infra_error"),
    ({"x": 3}, errno.ENOENT, None, "infra_error"),
  ],
)
def test_a_file_that_a_call_names_and_that_is_not_there_is_its_error(
  arguments, number, file, status
):
  assert call(Tool(OSError(number, "cannot open", file)), arguments).status == status


class Typed(Tool):
  parameters = {
    "type": "object",
    "properties": {
      "n": {"type": "number", "multipleOf": 0.1},
      "s": {"type": "string", "maxLength": 3},
      "a": {"type": "array", "uniqueItems": True},
      "r": {"$ref": "#/$defs/tree"},
    },
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "additionalProperties": False,
  }


def deep(levels):
  value = []
  for _ in range(levels):
    value = [value]
  return value


@pytest.mark.parametrize(
  "arguments",
  [
    {"n": 10**400},
    {"n": float("inf")},
    {"n": float("nan")},
    {"n": 1e308},
    {"n": 10**5000},
    {"s": "\ud800" * 4},
    {"s": "x" * 10**6},
    {"a": deep(10_000)},
    {"r": deep(10_000)},
    {"\ud800": 1},
    {"a": [10**5000, "x"] * 2},
  ],
  ids=lambda arguments: f"{next(iter(arguments))!a}",
)
def test_arguments_that_no_check_can_bear_are_an_error(arguments):
  result = call(Typed(ToolResult(ToolStatus.OK, "ran")), arguments)
  assert result.status in (ToolStatus.ERROR, ToolStatus.OK)
  result.output.encode()


def test_what_the_policy_reads_can_be_encoded():
  assert call(Tool(ToolResult(ToolStatus.OK, "a\ud800b"))).output == "a\\ud800b"
  registry = ToolRegistry([])
  unknown = asyncio.run(registry.call(ToolCall("\ud800", {}), CONTEXT))
  unknown.output.encode()


@pytest.mark.parametrize("boundary", Boundary)
def test_nothing_before_the_policy_acts_is_its_fault(boundary):
  for error in (ValueError("odd"), BoxContentError("a directory")):
    assert fault_of(error, boundary).masks == (boundary is Boundary.RESET)


def test_errors_of_files_are_the_programs_but_those_of_the_machine():
  for number in (errno.ENOSPC, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EISDIR):
    assert not fault_of(OSError(number, ""), Boundary.FILES).masks
    assert fault_of(OSError(number, ""), Boundary.STEP).masks
  for number in (errno.EIO, errno.EMFILE, errno.ENOMEM):
    assert fault_of(OSError(number, ""), Boundary.FILES).masks
  fault = fault_of(ValueError("\ud800"), Boundary.STEP)
  assert Fault.from_dict(fault.to_dict()) == fault and fault.detail.isascii()
