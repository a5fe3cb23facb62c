"""Judges programs by their unit tests as an ordinary user, whoever starts it.

A script of its own: root, once given up, cannot be had back. ``as_user.py SITE_PACKAGES``; stdin is
JSON, name -> [code, tests]; stdout is JSON, {"uid", "protections", "passed": name -> how many}.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[3])
sys.path.append(sys.argv[1])

from agentjax.adapters.unit_tests.scorer import (  # noqa: E402
  UnitTestConfig,
  UnitTests,
  UnitTestVerifier,
)
from agentjax.sandbox import ProcessSandbox, jail  # noqa: E402

NOBODY = 65534


async def judge(cases: dict[str, list[str]]) -> None:
  config = UnitTestConfig(cpu_seconds=1)
  sandbox = ProcessSandbox()
  verifier = UnitTestVerifier(sandbox, config)
  passed = {}
  for name, (code, tests) in cases.items():
    verdict = await verifier.verify({"solution.py": code}, UnitTests(tests, {"solution": ("f",)}))
    passed[name] = verdict.passed
  report = {"uid": os.geteuid(), "protections": sorted(sandbox.protections), "passed": passed}
  await verifier.close()
  print(json.dumps(report))


if __name__ == "__main__":
  if os.geteuid() == 0:
    jail.become(NOBODY)
  asyncio.run(judge(json.load(sys.stdin)))
