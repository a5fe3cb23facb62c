r"""What guards cost: microseconds a tool call, on the host.

  JAX_PLATFORMS=cpu python benchmarks/guards.py

A tool that does nothing is called through a registry, without guards and behind 0, 10 and 100
rules or hooks that all look at the call and let it pass. Rules ask `turns_over(1000)` (a cheap
predicate) or `is_destructive` (the search of a shell command of 80 characters); hooks are async
functions, sync functions, which get a thread each, and commands, which get a process each. The
figures are what a call takes more than without guards: wall time, and CPU time of this process and
of its children, the median of --repeats.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable

from absl import app, flags

from agentjax.recipes.agentspec import AgentSpecConfig
from agentjax.rollout.guards import (
  EpisodeGuard,
  GuardsConfig,
  HookConfig,
  HookEvent,
  build_guards,
)
from agentjax.tools.egress import EgressConfig
from agentjax.tools.hooks import intercepted_by
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import ToolCall

_CALLS = flags.DEFINE_integer("calls", 300, "Calls a measurement.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Measurements of each setting.")

_COMMAND = "python -m tools.report --input=results/run_17.json | grep accuracy | sort | head"
_CONTEXT = ToolContext("benchmark", 0, 30.0)


class Nothing:
  """Does nothing."""

  name = "shell"
  description = "does nothing"
  parameters = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
  }

  async def __call__(self, arguments, context: ToolContext) -> ToolResult:
    return ToolResult(ToolStatus.OK, "")


async def approve_async(event: HookEvent) -> None:
  """An async hook that lets all pass."""


def approve(event: HookEvent) -> None:
  """A sync one."""


def rules(count: int, check: str) -> GuardsConfig:
  """``count`` rules that are triggered and do not hold."""
  text = "\n".join(
    f"rule @r{i} trigger before_action check {check} enforce stop end" for i in range(count)
  )
  return GuardsConfig(rules=AgentSpecConfig(text=text))


def hooks(count: int, run: str, kind: str = "python") -> GuardsConfig:
  """``count`` hooks that approve."""
  hook = HookConfig(run=run if kind == "command" else f"{__name__}:{run}", kind=kind)
  return GuardsConfig(hooks=(hook,) * count)


async def measure(call: Callable[[], Awaitable[object]], calls: int) -> tuple[float, float]:
  """(wall, CPU) microseconds a call."""
  await call()
  wall, cpu = time.perf_counter(), _cpu_seconds()
  for _ in range(calls):
    await call()
  wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
  return 1e6 * wall / calls, 1e6 * cpu / calls


def _cpu_seconds() -> float:
  times = os.times()
  children = times.children_user + times.children_system
  return time.process_time() + children


async def compare(name: str, config: GuardsConfig | None, calls: int) -> None:
  """Prints what a call takes more under ``config``, which is measured in turn with no guards."""
  registry = ToolRegistry([Nothing()])
  call = ToolCall("shell", {"command": _COMMAND})
  guards = None if config is None else build_guards(config, registry)

  async def plain() -> object:
    return await registry.call(call, _CONTEXT)

  differences, bare = [], []
  for _ in range(_REPEATS.value):
    base = await measure(plain, _CALLS.value)
    bare.append(base)
    if guards is None:
      continue
    guard = EpisodeGuard(guards, "benchmark", 0, "")
    turn = 0

    async def guarded(guard: EpisodeGuard = guard) -> object:
      nonlocal turn
      turn += 1
      if turn % 50 == 0:  # as episodes begin anew
        guard.set_state(EpisodeGuard(guards, "benchmark", 0, "").state())
      guard.begin_turn()
      result = await registry.call(call, _CONTEXT)
      guard.end_turn()
      return result

    with intercepted_by(guard):
      taken = await measure(guarded, calls)
    differences.append((taken[0] - base[0], taken[1] - base[1]))
  wall, cpu = (statistics.median(column) for column in zip(*(differences or bare), strict=True))
  print(f"{name:44s} {wall:10.1f} us wall {cpu:10.1f} us CPU")


async def run() -> None:
  """All settings."""
  calls = _CALLS.value
  await compare("a call without guards", None, calls)
  url = EgressConfig(allow=("example.org",))
  await compare("guarded, nothing to ask", GuardsConfig(), calls)
  await compare("egress", GuardsConfig(egress=url, egress_tools=("*",)), calls)
  for check in ("turns_over(1000)", "is_destructive"):
    for count in (10, 100):
      await compare(f"{count} rules, {check}", rules(count, check), calls)
  for count in (10, 100):
    await compare(f"{count} async hooks", hooks(count, "approve_async"), calls)
  for count in (10, 100):
    await compare(f"{count} sync hooks", hooks(count, "approve"), max(calls // 10, 1))
  await compare("1 command hook (true)", hooks(1, "true", "command"), max(calls // 30, 1))
  await compare("10 command hooks (true)", hooks(10, "true", "command"), max(calls // 100, 1))


def main(argv: list[str]) -> None:
  del argv
  asyncio.run(run())


if __name__ == "__main__":
  app.run(main)
