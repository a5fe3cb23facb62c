"""The world of questions to a database."""

from __future__ import annotations

from collections.abc import Mapping

from agentjax.data import DataConfig, TaskSplits
from agentjax.sandbox.interface import Sandbox
from agentjax.trajectory.record import Task
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Environment
from agentjax.world.world import Site, World
from agentjax.worlds.sql.cheats import sql_cheats
from agentjax.worlds.sql.environment import SqlEnvironment, SqlJudge, SqlWorldConfig

__all__ = ["SqlWorld", "SqlWorldConfig"]


class SqlWorld(World):
  """SQL episodes. Scorers: ``sql_match``, ``sql_overlap``, ``sql_runs`` (see ``SqlJudge``).

  Args:
    config: settings.
    site: its tool ``sql``, if there is one, works on the task's database.
    sandbox: where queries are judged; None leases that of ``config.sandbox``. It is closed here.
  """

  def __init__(self, config: SqlWorldConfig, site: Site, sandbox: Sandbox | None = None):
    self._config, self._site = config, site
    self._sandbox = sandbox or site.lease(config.sandbox, "config.world.sandbox").sandbox
    judge = SqlJudge(self._sandbox, config)
    self.tools = site.registry.tools
    self.scorers = {
      "sql_match": judge.score_match,
      "sql_overlap": judge.score_overlap,
      "sql_runs": judge.score_runs,
    }

  def tasks(self, data: DataConfig) -> TaskSplits:
    return self._config.tasks.load(data)

  def environment(self, task: Task) -> Environment:
    site = self._site
    return SqlEnvironment(site.registry, max_turns=site.max_turns, tool_timeout=site.tool_timeout)

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return sql_cheats(task, setting)

  async def close(self) -> None:
    await self._sandbox.close()
