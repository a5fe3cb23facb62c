"""Copies of a database with other contents, on which a query fails that is right only by accident.

The idea is that of test suites for SQL (Zhong et al., 2010.02840): two queries that agree on many
contents of one schema most likely mean the same. They draw fresh values; we keep the existing
values, so that the constants of a query still occur:

  1. a share of the rows is dropped, and with it every row that referred to a dropped one;
  2. the values of each column that no key is made of are permuted among the rows;
  3. the rows are stored in another order.

A permutation makes no new ties, so ``ORDER BY ... LIMIT`` stays as well defined as it was. Where
these copies do not change what a query gives, *planted* ones go further: a column whose values
repeat is drawn anew from them, and the constants of the query are put into rows.

``choose_copies`` takes those copies on which the result of a query is another one, so that a query
that states the rows it has seen fails on each of them.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import numpy as np

from agentjax.worlds.sql.results import Row, is_ordered, results_match
from agentjax.worlds.sql.statements import Cell

Constant = str | int | float  # of a query

_DROPS = (1.0, 0.5, 1.5, 2.0, 0.25, 0.0, 1.0, 2.5)  # times the drop asked for; figures are ours
_MOST_DROPPED = 0.9
_PLANTED_SHARE = 0.3  # of the rows that a constant is put into, where it stands more than once
_ORDERS = (1, 2)  # of storage that a result must not hang on
_STRING = re.compile(r"'((?:[^']|'')*)'|\"([^\"]*)\"")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")


@dataclasses.dataclass(frozen=True)
class Perturbation:
  """How one copy differs; with the contents of a database it gives the copy.

  Attributes:
    seed: of the choices.
    drop: share of rows dropped from each table, before those that then refer to nothing; 0..1.
    planted: constants put into rows of columns that hold them, or of all columns of their kind;
      None leaves columns permuted and puts in nothing.
    order: of the rows in their tables, which says nothing about the contents.
  """

  seed: int
  drop: float = 0.3
  planted: tuple[Constant, ...] | None = None
  order: int = 0


def perturbations(query: str, drop: float, count: int) -> Iterator[Perturbation]:
  """``count`` perturbations that may change what ``query`` gives: plain ones, then planted ones.

  Args:
    query: trusted.
    drop: of the first one; the others drop none to two and a half times as much.
    count: the first half of them, rounded up, is plain, and the same for all queries.
  """
  constants = _constants(query)
  for k in range(count):
    share = min(_MOST_DROPPED, drop * _DROPS[k % len(_DROPS)])
    plain = k < (count + 1) // 2
    yield Perturbation(k + 1, share, None if plain else constants)


def choose_copies(
  database: bytes,
  query: str,
  *,
  copies: int,
  candidates: int,
  drop: float = 0.3,
  seconds: float = 5.0,
  max_rows: int = 10_000,
  tolerance: float = 1e-6,
  make: Callable[[Perturbation], bytes] | None = None,
) -> tuple[Perturbation, ...]:
  """Up to ``copies`` perturbations on which ``query`` gives another result than on ``database``.

  Distinct results with rows are preferred to empty ones. Planted copies are tried only if no plain
  one works. A copy is left out where the result does not follow from its contents alone, as with
  ``LIMIT`` among equals: there a query that means the same may give other rows.

  The query runs in this process, in memory.

  Args:
    database: trusted contents of a SQLite file.
    query: trusted; runs on ``database``.
    copies: wanted.
    candidates: tried at most.
    drop: see ``perturbations``.
    seconds: longest run of the query; a copy on which it takes longer is left out.
    max_rows: longest result; likewise.
    tolerance: relative, between numbers of two results.
    make: perturbation -> copy; None makes each anew.

  Returns:
    Fewer than ``copies`` where there are no more; () where no candidate changes the result.
  """
  make = make or (lambda how: perturbed_copy(database, how))

  def run(how: Perturbation, text: str = query) -> list[Row] | None:
    return _run(make(how), text, seconds, max_rows)

  def same(left: list[Row] | None, right: list[Row] | None) -> bool:
    return (
      left is not None
      and right is not None
      and results_match(left, right, ordered=False, tolerance=tolerance)
    )

  def follows(how: Perturbation, rows: list[Row]) -> bool:
    """Whether neither the order of storage nor that of equals changes the result."""
    again = [run(dataclasses.replace(how, order=order)) for order in _ORDERS]
    if (ties := _with_ties_broken(query, len(rows[0]) if rows else 0)) is not None:
      again += [run(how, text) for text in ties]
    return all(same(rows, other) for other in again)

  original = _run(database, query, seconds, max_rows)
  if original is None:
    return ()
  full: list[Perturbation] = []
  empty: list[Perturbation] = []
  seen = [original]
  for how in perturbations(query, drop, candidates):
    if len(full) >= copies or (how.planted is not None and (full or empty)):
      break
    rows = run(how)
    if rows is None or any(same(rows, other) for other in seen) or not follows(how, rows):
      continue
    if rows:
      seen.append(rows)
    (full if rows else empty).append(how)
  return (*full, *empty)[:copies]


def _with_ties_broken(query: str, columns: int) -> tuple[str, str] | None:
  """The query with rows that tie in its own ORDER BY sorted by their columns, up and down.

  None where it has no such ORDER BY, or no columns are known.
  """
  if not columns or not is_ordered(query):
    return None
  text = query.rstrip().removesuffix(";")
  limits = list(re.finditer(r"\blimit\b[^()]*$", text, re.IGNORECASE))
  head, tail = (text[: limits[0].start()], text[limits[0].start() :]) if limits else (text, "")
  numbers = range(1, columns + 1)
  up, down = (", ".join(f"{n} {way}" for n in numbers) for way in ("ASC", "DESC"))
  return f"{head}, {up} {tail}", f"{head}, {down} {tail}"


def _run(database: bytes, query: str, seconds: float, max_rows: int) -> list[Row] | None:
  """The rows of a query; None where it fails, takes too long or gives too many."""
  connection = sqlite3.connect(":memory:")
  try:
    connection.deserialize(database)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.execute("PRAGMA query_only = ON")
    start = time.monotonic()
    connection.set_progress_handler(lambda: time.monotonic() - start > seconds, 20_000)
    rows = connection.execute(query).fetchmany(max_rows + 1)
  except sqlite3.Error:
    return None
  finally:
    connection.close()
  return rows if len(rows) <= max_rows else None


def perturbed_copy(database: bytes, how: Perturbation) -> bytes:
  """A copy of a SQLite file with other contents and the same schema; a function of its arguments.

  No table that has rows loses all of them: where one would, fewer rows are dropped.

  Args:
    database: trusted contents of a SQLite file; not changed.
    how: what is changed.
  """
  connection = sqlite3.connect(":memory:")
  try:
    while True:
      connection.deserialize(database)
      connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
      if _perturb(connection, how) or how.drop == 0:
        return connection.serialize()
      how = dataclasses.replace(how, drop=how.drop / 2 if how.drop > 0.05 else 0.0)
  finally:
    connection.close()


def _perturb(connection: sqlite3.Connection, how: Perturbation) -> bool:
  """Changes the contents; False where a table lost all its rows."""
  connection.execute("PRAGMA foreign_keys = OFF")
  connection.execute("PRAGMA ignore_check_constraints = ON")
  random = np.random.default_rng([how.seed, 0x5C1])
  tables = [
    row[0]
    for row in connection.execute(
      "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
      "ORDER BY name"
    )
  ]
  filled = [table for table in tables if _has_rows(connection, table)]
  links = _links(connection, tables)
  _remember_keys(connection, links)
  places = _places(connection, tables, links, how)
  for table in tables:
    _permute(connection, table, _key_columns(connection, table, links), random, how, places)
  _drop_orphans(connection, links)
  connection.commit()
  return all(_has_rows(connection, table) for table in filled)


def _has_rows(connection: sqlite3.Connection, table: str) -> bool:
  return connection.execute(f"SELECT 1 FROM {_quoted(table)} LIMIT 1").fetchone() is not None


def _permute(
  connection: sqlite3.Connection,
  table: str,
  keys: frozenset[str],
  random: np.random.Generator,
  how: Perturbation,
  places: Mapping[tuple[str, str], Sequence[Constant]],
) -> None:
  columns = _columns(connection, table)
  rows = connection.execute(f"SELECT {_names(columns)} FROM {_quoted(table)}").fetchall()
  if not rows:
    return
  kept = random.permutation(len(rows))[: max(1, round(len(rows) * (1 - how.drop)))]
  values = []
  for index, column in enumerate(columns):
    order = kept if column.lower() in keys else random.permutation(kept)
    cells = [rows[i][index] for i in order]
    different = list(dict.fromkeys(row[index] for row in rows))
    if how.planted is not None and column.lower() not in keys and len(different) < len(rows):
      cells = [different[i] for i in random.integers(len(different), size=len(kept))]
    for constant in places.get((table, column), ()):
      several = sum(row[index] == constant for row in rows) > 1
      chosen = random.random(len(cells)) < _PLANTED_SHARE
      for at in np.flatnonzero(chosen) if several else random.integers(len(cells), size=1):
        cells[at] = constant
    values.append(cells)
  stored = np.random.default_rng([how.order, len(kept)]).permutation(len(kept))
  values = [[cells[i] for i in stored] for cells in values]
  connection.execute(f"DELETE FROM {_quoted(table)}")
  # OR IGNORE: a unique index may refuse a row.
  connection.executemany(
    f"INSERT OR IGNORE INTO {_quoted(table)} ({_names(columns)}) "
    f"VALUES ({', '.join('?' * len(columns))})",
    list(zip(*values, strict=True)),
  )


@dataclasses.dataclass(frozen=True)
class _Link:
  """A foreign key: the rows of ``table`` whose ``column`` is the ``key`` of a row of ``parent``."""

  table: str
  column: str
  parent: str
  key: str


def _links(connection: sqlite3.Connection, tables: Sequence[str]) -> list[_Link]:
  spelled = {table.lower(): table for table in tables}
  return [
    _Link(table, column, spelled[parent.lower()], key)
    for table in tables
    for _, _, parent, column, key, *_ in connection.execute(
      f"PRAGMA foreign_key_list({_quoted(table)})"
    ).fetchall()
    if key is not None and parent.lower() in spelled
  ]


def _remember_keys(connection: sqlite3.Connection, links: Sequence[_Link]) -> None:
  """Keeps what each foreign key can refer to before rows are dropped, as temp.parent_NUMBER."""
  for number, link in enumerate(links):
    connection.execute(f"DROP TABLE IF EXISTS temp.parent_{number}")
    connection.execute(
      f"CREATE TEMP TABLE parent_{number} AS "
      f"SELECT {_quoted(link.key)} AS key FROM {_quoted(link.parent)}"
    )


def _drop_orphans(connection: sqlite3.Connection, links: Sequence[_Link]) -> None:
  """Deletes rows that referred to a row which is gone, until none is left.

  A row that never referred to anything is kept.
  """
  dropped = True
  while dropped:
    dropped = False
    for number, link in enumerate(links):
      column, key = _quoted(link.column), _quoted(link.key)
      cursor = connection.execute(
        f"DELETE FROM {_quoted(link.table)} WHERE "
        f"{column} IN (SELECT key FROM temp.parent_{number}) AND "
        f"{column} NOT IN (SELECT {key} FROM {_quoted(link.parent)} WHERE {key} IS NOT NULL)"
      )
      dropped = dropped or cursor.rowcount > 0


def _key_columns(
  connection: sqlite3.Connection, table: str, links: Sequence[_Link]
) -> frozenset[str]:
  """Lower-case names of the columns that rows are told apart or joined by."""
  joining = {link.column.lower() for link in links if link.table == table}
  return _own_keys(connection, table, links) | joining


def _own_keys(connection: sqlite3.Connection, table: str, links: Sequence[_Link]) -> frozenset[str]:
  """Lower-case names of the columns that rows are told apart by, or referred to by others."""
  info = connection.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
  primary = {row[1].lower() for row in info if row[5]}
  return frozenset(primary | {link.key.lower() for link in links if link.parent == table})


def _places(
  connection: sqlite3.Connection,
  tables: Sequence[str],
  links: Sequence[_Link],
  how: Perturbation,
) -> dict[tuple[str, str], list[Constant]]:
  """(table, column) -> constants that may stand there, so that references stay whole."""
  found: dict[tuple[str, str], list[Constant]] = collections.defaultdict(list)
  if not how.planted:
    return found
  everywhere = how.seed % 2 == 1  # a column may hold none of a constant that it is compared with
  contents: dict[tuple[str, str], set[Cell]] = {}
  allowed: dict[tuple[str, str], set[Cell]] = {}  # of a column that refers to others
  for table in tables:
    columns = _columns(connection, table)
    rows = connection.execute(f"SELECT {_names(columns)} FROM {_quoted(table)}").fetchall()
    contents |= {(table, c): set(v) for c, v in zip(columns, zip(*rows, strict=True), strict=False)}
  for link in links:
    allowed[link.table, link.column] = contents.get((link.parent, link.key), set())
  for table in tables:
    for key in [place for place in contents if place[0] == table]:
      if key[1].lower() in _own_keys(connection, table, links):
        del contents[key]
  for constant in how.planted:
    fits = [
      place
      for place, values in contents.items()
      if _is_of_kind(constant, values) and constant in allowed.get(place, (constant,))
    ]
    holding = [place for place in fits if _holds(constant, contents[place])]
    for place in fits if everywhere or not holding else holding:
      found[place].append(constant)
  return found


def _is_of_kind(constant: Constant, values: Set[Cell]) -> bool:
  return any(isinstance(value, str) == isinstance(constant, str) for value in values if value)


def _holds(constant: Constant, values: Set[Cell]) -> bool:
  """Whether a text is one of the values, or a number lies between two of them."""
  if isinstance(constant, str):
    return constant in values
  numbers = [value for value in values if isinstance(value, int | float)]
  return bool(numbers) and min(numbers) <= constant <= max(numbers)


def _constants(query: str) -> tuple[Constant, ...]:
  """The texts of a query, without wildcards, and its numbers with their neighbours."""
  texts = [(a or b).replace("''", "'").strip("%_") for a, b in _STRING.findall(query)]
  numbers: list[Constant] = []
  for written in _NUMBER.findall(_STRING.sub(" ", query)):
    number = float(written) if "." in written else int(written)
    numbers += [number - 1, number, number + 1]
  return tuple(dict.fromkeys([text for text in texts if text] + numbers))


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
  info = connection.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
  return [row[1] for row in info]


def _names(columns: Sequence[str]) -> str:
  return ", ".join(_quoted(column) for column in columns)


def _quoted(name: str) -> str:
  return '"' + name.replace('"', '""') + '"'
