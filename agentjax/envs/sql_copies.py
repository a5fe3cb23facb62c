"""Copies of a database with other contents, on which a query that is right only by accident fails.

The idea is that of test suites for SQL (Zhong et al., 2010.02840): two queries that agree on many
contents of one schema most likely mean the same. Theirs draw fresh values; ours keep the values
that are there, so that the constants of a query still occur:

  1. a share of the rows is dropped, and with it every row that refers to a dropped one;
  2. the values of each column that no key is made of are permuted among the rows;
  3. the rows are stored in another order.

A permutation makes no new ties, so ``ORDER BY ... LIMIT`` stays as well defined as it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np


def perturbed_copy(database: bytes, seed: int, *, drop: float = 0.3) -> bytes:
  """A copy of a SQLite file with other contents and the same schema; a function of its arguments.

  Args:
    database: trusted contents of a SQLite file; not changed.
    seed: of the choices.
    drop: share of rows dropped from each table, before those that then refer to nothing; 0..1.
  """
  connection = sqlite3.connect(":memory:")
  try:
    connection.deserialize(database)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("PRAGMA ignore_check_constraints = ON")
    random = np.random.default_rng([seed, 0x5C1])
    tables = [
      row[0]
      for row in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
        "ORDER BY name"
      )
    ]
    for table in tables:
      _permute(connection, table, _key_columns(connection, table, tables), random, drop)
    _drop_orphans(connection, tables)
    connection.commit()
    return connection.serialize()
  finally:
    connection.close()


def _permute(
  connection: sqlite3.Connection,
  table: str,
  keys: frozenset[str],
  random: np.random.Generator,
  drop: float,
) -> None:
  columns = _columns(connection, table)
  rows = connection.execute(f"SELECT {_names(columns)} FROM {_quoted(table)}").fetchall()
  if not rows:
    return
  kept = random.permutation(len(rows))[: max(1, round(len(rows) * (1 - drop)))]
  values = []
  for index, column in enumerate(columns):
    order = kept if column.lower() in keys else random.permutation(kept)
    values.append([rows[i][index] for i in order])
  connection.execute(f"DELETE FROM {_quoted(table)}")
  # OR IGNORE: a unique index over several permuted columns may refuse a row.
  connection.executemany(
    f"INSERT OR IGNORE INTO {_quoted(table)} ({_names(columns)}) "
    f"VALUES ({', '.join('?' * len(columns))})",
    list(zip(*values, strict=True)),
  )


def _drop_orphans(connection: sqlite3.Connection, tables: Sequence[str]) -> None:
  """Deletes rows whose foreign key refers to nothing, until none is left."""
  links = [
    (table, link[3], link[2], link[4])
    for table in tables
    for link in connection.execute(f"PRAGMA foreign_key_list({_quoted(table)})").fetchall()
    if link[4] is not None and any(link[2].lower() == t.lower() for t in tables)
  ]
  dropped = True
  while dropped:
    dropped = False
    for table, column, parent, key in links:
      cursor = connection.execute(
        f"DELETE FROM {_quoted(table)} WHERE {_quoted(column)} IS NOT NULL AND "
        f"{_quoted(column)} NOT IN (SELECT {_quoted(key)} FROM {_quoted(parent)} "
        f"WHERE {_quoted(key)} IS NOT NULL)"
      )
      dropped = dropped or cursor.rowcount > 0


def _key_columns(
  connection: sqlite3.Connection, table: str, tables: Sequence[str]
) -> frozenset[str]:
  """Lower-case names of the columns that rows are told apart or joined by."""
  info = connection.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
  keys = {row[1].lower() for row in info if row[5]}
  for other in tables:
    for link in connection.execute(f"PRAGMA foreign_key_list({_quoted(other)})").fetchall():
      if other == table:
        keys.add(link[3].lower())
      if link[2].lower() == table.lower() and link[4] is not None:
        keys.add(link[4].lower())
  return frozenset(keys)


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
  info = connection.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
  return [row[1] for row in info]


def _names(columns: Sequence[str]) -> str:
  return ", ".join(_quoted(column) for column in columns)


def _quoted(name: str) -> str:
  return '"' + name.replace('"', '""') + '"'
