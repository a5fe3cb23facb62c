"""Queries beside costly ones: load takes nothing from a right one, cost is the query's own."""

import asyncio
import sqlite3
import sys

import pytest

from agentjax.sandbox.interface import RunStatus, SandboxResult
from agentjax.sandbox.process import ProcessSandbox
from agentjax.worlds.sql.environment import SqlJudge, SqlWorldConfig
from agentjax.worlds.sql.statements import run_sql

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

COSTLY = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
  path = tmp_path_factory.mktemp("sql") / "n.sqlite"
  connection = sqlite3.connect(path)
  connection.execute("CREATE TABLE n (id INTEGER PRIMARY KEY, v INT)")
  connection.executemany("INSERT INTO n VALUES (?, ?)", [(i, i * i) for i in range(40)])
  connection.commit()
  connection.close()
  return str(path)


class Late:
  """A sandbox whose clock ends a marked query, so many times."""

  def __init__(self, times):
    self.inner, self.times, self.alone, self.judge = ProcessSandbox(), times, [], None

  async def create(self, snapshot=None):
    box = await self.inner.create(snapshot)
    run = box.exec

    async def exec(program, *, stdin=b"", files=None, limits=None):
      if b"/* marked */" in stdin:
        places = self.judge._places
        self.alone.append(places._taken == places._count)
        if self.times:
          self.times -= 1
          return SandboxResult(RunStatus.TIMEOUT, "", "", -9, 1.0, "did not end")
      return await run(program, stdin=stdin, files=files, limits=limits)

    box.exec = exec
    return box


@pytest.mark.parametrize(("times", "right"), [(0, True), (1, True), (2, False)])
def test_a_query_that_the_clock_ends_is_run_again_alone(database, times, right):
  gold = "SELECT id, v FROM n WHERE v > 100"
  sandbox = Late(times)
  sandbox.judge = judge = SqlJudge(sandbox, SqlWorldConfig())

  async def main():
    try:
      return await judge.judge(database, gold, gold + " /* marked */")
    finally:
      await sandbox.inner.close()

  assert asyncio.run(main()).match is right
  assert sandbox.alone == [False, True][: min(times, 1) + 1]


def test_a_costly_query_is_stopped_by_its_own_cpu_time(database):
  async def main():
    sandbox = ProcessSandbox()
    try:
      with open(database, "rb") as file:
        content = file.read()
      return await run_sql(sandbox, [content], [(0, COSTLY)], seconds=0.5)
    finally:
      await sandbox.close()

  (result,) = asyncio.run(main())
  assert "CPU time" in result.error and not result.late
