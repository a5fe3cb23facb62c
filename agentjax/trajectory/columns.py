"""One table of what can be known of a token, a turn or a sequence. No jax.

A token is a row, and what is known of it stands in columns. Record, packing, batch, store, journal,
losses, planning and the checks of ``agentjax.testing`` read this registry and hold no list of their
own. A new column takes one call::

  register_column(Column("surprise", "float32", "How little the next turn was expected, nats."))

Then ``TrajectoryBuilder.append_sampled(..., columns={"surprise": values})`` records it, and a loss
reads ``inputs.column("surprise")``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Level = Literal["token", "turn", "sequence"]

# Stands in the place of the values that another process has: the number of the token (WideColumns).
REFERENCE = np.dtype([("token", "<u8")])
NO_REFERENCE = 2**64 - 1


class ColumnError(ValueError):
  """An unknown column, or values that it cannot have; names the column."""


@dataclasses.dataclass(frozen=True)
class Column:
  """What one column of the table is.

  Attributes:
    name: a Python identifier; the key in files, batches and losses.
    dtype: numpy's name of the dtype, or the names of those allowed, of which the first is the usual
      one.
    meaning: one sentence with the unit.
    shape: of one value. A name stands for a size that the data decides; columns that have the same
      name there have the same size.
    fill: stands where nothing is known, and on padding. None is the largest integer of the dtype.
    level: whose property it is. A column of tokens has one value a token of a segment, one of turns
      has one value a segment, one of sequences has one value a trajectory. In a batch a turn's
      value stands on all tokens of its segment, and a column of sequences is an array [N, ...].
    core: it always exists, as a field of its own of the classes that hold it; not for yours.
    needed: a stored record without it is refused, as no fill could stand for it.
    predicted: it is about how the token was predicted. The first token of a sequence, which nothing
      predicts, has the fill in a batch.
    conditional: it was computed from all the tokens before it. It is dropped where some of those
      are taken away (``packing.without_prompt``).
    in_loss: losses and advantage functions are given it.
    together: other columns that must be recorded with it.
    device_only: no code on the host reads its values, which are wide. Of several processes, only
      those whose devices train a token receive them (``training.wide_columns``).
  """

  name: str
  dtype: str | tuple[str, ...]
  meaning: str
  _: dataclasses.KW_ONLY
  shape: tuple[int | str, ...] = ()
  fill: float | None = 0
  level: Level = "token"
  core: bool = False
  needed: bool = False
  predicted: bool = False
  conditional: bool = False
  in_loss: bool = True
  together: tuple[str, ...] = ()
  device_only: bool = False

  def __post_init__(self) -> None:
    if not self.name.isidentifier():
      raise ColumnError(f"Column.name={self.name!r}; allowed: a Python identifier.")
    for dtype in self.dtypes:
      if dtype.kind not in "biuf":
        raise ColumnError(
          f"Column.dtype={dtype} of {self.name!r}; allowed: bool, integer and float dtypes."
        )
      if self.fill is None and dtype.kind not in "iu":
        raise ColumnError(
          f"Column.fill=None of {self.name!r} with dtype {dtype}; allowed: a number, as None is "
          "the largest integer."
        )
    if self.device_only and self.level != "token":
      raise ColumnError(
        f"Column.device_only=True of {self.name!r} with level {self.level!r}; allowed: columns of "
        'tokens (level="token").'
      )

  @functools.cached_property
  def dtypes(self) -> tuple[np.dtype, ...]:
    """Those that an array of it may have; the first is the usual one."""
    names = (self.dtype,) if isinstance(self.dtype, str) else self.dtype
    return tuple(map(np.dtype, names))

  def fill_value(self, dtype: np.dtype | None = None) -> float | int:
    """What stands for "not known" in an array of ``dtype``, by default the usual one."""
    kind = self.dtypes[0] if dtype is None else dtype
    if kind == REFERENCE:
      return NO_REFERENCE
    return int(np.iinfo(kind).max) if self.fill is None else self.fill

  @property
  def sized(self) -> bool:
    """Whether its shape is known without data."""
    return all(isinstance(size, int) for size in self.shape)

  @property
  def sizes(self) -> tuple[int, ...]:
    """``shape`` as numbers.

    Raises:
      ColumnError: the data decides one of them.
    """
    named = [size for size in self.shape if isinstance(size, str)]
    if named:
      raise ColumnError(
        f"the column {self.name!r} is not recorded here, and {', '.join(named)} of its shape "
        f"{self.shape} is known from data only."
      )
    return tuple(size for size in self.shape if isinstance(size, int))

  def filled(self, rows: Sequence[int]) -> np.ndarray:
    """An array [*rows, *shape] in which nothing is known."""
    return np.full((*rows, *self.sizes), self.fill_value(), self.dtypes[0])

  def padded(self, values: np.ndarray, rows: int) -> np.ndarray:
    """``values`` [n, ...] of n <= ``rows``, with the fill behind them."""
    widths = ((0, rows - len(values)), *((0, 0),) * (values.ndim - 1))
    return np.pad(values, widths, constant_values=self.fill_value(values.dtype))

  def cast(self, values: Any) -> np.ndarray:
    """``values`` as an array of an allowed dtype: as it is, or of the usual one."""
    array = np.asarray(values)
    return array if array.dtype in self.dtypes else array.astype(self.dtypes[0])

  def check(self, values: np.ndarray, rows: Sequence[int]) -> None:
    """Raises ColumnError unless ``values`` is an array [*rows, *shape] of an allowed dtype."""
    wanted = (*rows, *self.shape)
    right = values.shape == wanted or (
      len(values.shape) == len(wanted)
      and all(isinstance(w, str) or got == w for got, w in zip(values.shape, wanted, strict=True))
    )
    if not right or values.dtype not in self.dtypes:
      shape = ", ".join(map(str, wanted))
      raise ColumnError(
        f"{self.name} is {values.dtype}{list(values.shape)}; allowed: "
        f"{' or '.join(map(str, self.dtypes))}[{shape}]"
      )


_REGISTRY: dict[str, Column] = {}


def register_column(column: Column) -> Column:
  """Adds a column to the table; the same one again changes nothing. Returns it.

  Raises:
    ColumnError: another column has the name, or it says that it is a core one.
  """
  if column.core:
    raise ColumnError(
      f"Column.core=True of {column.name!r}; allowed: False, as core columns are fields of Batch."
    )
  known = _REGISTRY.setdefault(column.name, column)
  if repr(known) != repr(column):  # NaN, a fill, is no equal of itself
    raise ColumnError(
      f"the column {column.name!r} is registered as {known}; allowed: that one, or another name "
      f"for {column}."
    )
  return column


def registered_columns(*, core: bool | None = None) -> tuple[Column, ...]:
  """All columns in the order of registration; those that are ``core``, or are not."""
  return tuple(c for c in _REGISTRY.values() if core is None or c.core == core)


def find_column(name: str) -> Column | None:
  """The column of that name; None where it is not registered, as in a file of another program."""
  return _REGISTRY.get(name)


def get_column(name: str) -> Column:
  """The column of that name.

  Raises:
    ColumnError: there is none.
  """
  found = _REGISTRY.get(name)
  if found is None:
    raise ColumnError(
      f"there is no column {name!r}; allowed: {', '.join(_REGISTRY)}, or register it with "
      "agentjax.trajectory.columns.register_column."
    )
  return found


@functools.cache  # core columns are all here from the start
def core_fields(holder: type, level: Level | None = None) -> tuple[Column, ...]:
  """The core columns that are fields of a dataclass, of one level or of all, as registered."""
  fields = {field.name for field in dataclasses.fields(holder)}
  return tuple(
    c
    for c in registered_columns(core=True)
    if c.name in fields and (level is None or c.level == level)
  )


def absent_column(name: str) -> Column:
  """The column that a mapping of columns does not have, to be filled.

  Raises:
    ColumnError: there is none of that name, or it is a core one, which no such mapping has.
  """
  column = get_column(name)
  if column.core:
    raise ColumnError(f"{name} is a field and stands in no columns; read the attribute {name}.")
  return column


def value_or_fill(columns: Mapping[str, Any], name: str, rows: Sequence[int]) -> np.ndarray:
  """The array of a column, or one [*rows, ...] in which nothing is known.

  Raises:
    ColumnError: as ``absent_column``, or one that is not there and whose shape the data decides.
  """
  return columns[name] if name in columns else absent_column(name).filled(rows)


def join_known(
  column: Column, parts: Sequence[np.ndarray | None], lengths: Sequence[int]
) -> np.ndarray:
  """Parts [n, ...] of these lengths, of which one is known, in one array: the fill where None is.

  Raises:
    ColumnError: the shapes of the values differ.
  """
  known = next(part for part in parts if part is not None)
  shapes = {part.shape[1:] for part in parts if part is not None}
  if len(shapes) > 1:
    raise ColumnError(
      f"{column.name} has values of the shapes {sorted(shapes)}; allowed: one shape in all parts "
      "that are joined."
    )
  fill = column.fill_value(known.dtype)
  filled = [
    np.full((n, *known.shape[1:]), fill, known.dtype) if part is None else part
    for part, n in zip(parts, lengths, strict=True)
  ]
  return np.concatenate(filled)


def known_names(holders: Iterable[Mapping[str, np.ndarray]], *levels: Level) -> tuple[Column, ...]:
  """Registered columns of these levels that one of the mappings has, in order of registration."""
  present = {name for columns in holders for name in columns}
  return tuple(c for c in registered_columns() if c.name in present and c.level in levels)


_CORE = (
  Column("token_ids", "int32", "Id in the vocabulary.", needed=True),
  Column("sampled", "bool", "The policy drew the token.", needed=True),
  Column(
    "segment_ids",
    "int32",
    "1 + index of the token's sequence in the batch; 0 on padding.",
  ),
  Column("positions", "int32", "Index of the token in its sequence."),
  Column("weights", "float32", "Loss weight as a target.", needed=True, predicted=True),
  Column(
    "behaviour_log_probs",
    "float32",
    "Log-prob under the policy that sampled, at the temperature of sampling, nats; 0 elsewhere.",
    needed=True,
    predicted=True,
    conditional=True,
  ),
  Column(
    "entropies",
    "float32",
    "Entropy of the distribution that the token was sampled from, nats; 0 elsewhere.",
    predicted=True,
  ),
  Column(
    "versions",
    "int32",
    "Version of the weights that sampled the token; -1 elsewhere.",
    fill=-1,
    needed=True,
  ),
  Column("turns", "int32", "Index of the model call in its sequence; -1 on padding.", fill=-1),
  Column("rewards", "float32", "Outcome; 0 where not valid.", level="sequence"),
  Column(
    "valid", "bool", "The reward is a value and the place is used.", fill=False, level="sequence"
  ),
  Column(
    "groups", "int32", "Group of group statistics; -1 in unused places.", fill=-1, level="sequence"
  ),
)

_RECORDED = (
  Column(
    "experts",
    ("uint8", "uint16"),
    "Ids of the experts that the sampler's routers chose (trajectory.experts).",
    shape=("routers", "choices"),
    fill=None,
    conditional=True,
    in_loss=False,
    device_only=True,
  ),
  Column(
    "branches",
    "int32",
    "Number from 1 of the token's segment in a tree of episodes, the same on all its copies.",
    conditional=True,
    in_loss=False,
  ),
  Column(
    "agents",
    "int32",
    "Which of the environment's agents the sequence is of, from 0 in their order.",
    level="sequence",
  ),
  Column(
    "replayed",
    "bool",
    "The episode is one of an earlier step that is trained on again: its tokens are off policy.",
    fill=False,
    level="sequence",
  ),
  Column(
    "teacher_log_probs",
    "float32",
    "Log-prob under a teacher that was asked beforehand, nats.",
    fill=np.nan,
    conditional=True,
    in_loss=False,
  ),
  Column(
    "teacher_top_ids",
    "int32",
    "Candidates for the place of the token, the teacher's or the student's likeliest first.",
    shape=("candidates",),
    fill=-1,
    conditional=True,
    in_loss=False,
    together=("teacher_top_log_probs",),
    device_only=True,
  ),
  Column(
    "teacher_top_log_probs",
    "float32",
    "Log-probs of the candidates under the teacher, nats.",
    shape=("candidates",),
    fill=np.nan,
    conditional=True,
    in_loss=False,
    together=("teacher_top_ids",),
    device_only=True,
  ),
)

TEACHER_COLUMNS = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")

_REGISTRY |= {c.name: dataclasses.replace(c, core=True) for c in _CORE}
_REGISTRY |= {c.name: c for c in _RECORDED}
