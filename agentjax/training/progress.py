"""The display of progress: one live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TaskID,
  TextColumn,
  TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from agentjax.text.printable import printable

_SPARKS = "▁▂▃▄▅▆▇█"


class ProgressDisplay:
  """Shows stage, bar, time left and the last values of named metrics.

  On a terminal it redraws in place; in a log file it prints one line every ``line_seconds``.
  """

  def __init__(
    self,
    console: Console,
    columns: Mapping[str, str],
    line_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """``columns``: metric name -> label, in the order shown.

    ``clock`` measures steps, in seconds, for the estimate of the time left. Use one that stops
    during compilation, because later steps need none.
    """
    self._console = console
    self._clock = clock
    self._columns = dict(columns)
    self._line_seconds = line_seconds
    self._history: dict[str, list[float]] = {name: [] for name in columns}
    self._progress = Progress(
      TextColumn("[bold]{task.description}"),
      BarColumn(bar_width=None),
      MofNCompleteColumn(),
      TimeElapsedColumn(),
      TextColumn("left {task.fields[left]}"),
      console=console,
    )
    self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
    self._task: TaskID | None = None
    self._started, self._last_line = clock(), time.monotonic()
    self._first = 0
    self._note = ""
    self.stage_name = ""

  def __enter__(self) -> ProgressDisplay:
    if self._live is not None:
      self._live.__enter__()
    return self

  def __exit__(self, *exc: object) -> None:
    if self._live is not None:
      self._refresh()
      self._live.__exit__(None, None, None)

  def stage(self, name: str, total: int, done: int = 0) -> None:
    """Starts a stage of ``total`` steps of which ``done`` are finished."""
    if self._task is not None:
      self._progress.remove_task(self._task)
    self._task = self._progress.add_task(name, total=total, completed=done, left="?")
    self.stage_name, self._total, self._first = name, total, done
    self._started = self._clock()
    self._last_line = 0.0
    self._history = {key: [] for key in self._columns}

  def update(self, done: int, values: Mapping[str, float]) -> None:
    """Reports a finished step."""
    for name in self._columns:
      if math.isfinite(values.get(name, math.nan)):
        self._history[name].append(float(values[name]))
    elapsed = self._clock() - self._started
    left = elapsed / max(done - self._first, 1) * (self._total - done)
    assert self._task is not None
    self._progress.update(self._task, completed=done, left=_clock(left))
    if self._live is not None:
      self._refresh()
    elif time.monotonic() - self._last_line > self._line_seconds or done == self._total:
      self._last_line = time.monotonic()
      shown = "  ".join(
        f"{label} {_show(self._history[n][-1])}"
        for n, label in self._columns.items()
        if self._history[n]
      )
      print_line(
        self._console, f"{self.stage_name} {done}/{self._total}  {shown}  left {_clock(left)}"
      )

  def note(self, text: str) -> None:
    """Shows a line under the bar; printed once if there is no terminal."""
    self._note = text
    if self._live is not None:
      self._refresh()
    else:
      print_line(self._console, text)

  def _refresh(self) -> None:
    assert self._live is not None
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, label in self._columns.items():
      values = self._history[name]
      if values:
        table.add_row(label, f"[bold]{_show(values[-1])}[/bold]", f"[cyan]{_spark(values)}[/cyan]")
    self._live.update(
      Panel(Group(self._progress, table, f"[dim]{escape(self._note)}[/dim]"), title="agentjax")
    )


def report_to(display: ProgressDisplay) -> Callable[[str, int, int], None]:
  """A callback (kind, number done, total) that shows each kind as a stage."""

  def report(what: str, done: int, total: int) -> None:
    if what != display.stage_name:
      display.stage(what, total, done)
    display.update(done, {})

  return report


def print_line(console: Console, text: str) -> None:
  """A line as it is: neither wrapped nor read as markup, which paths and messages may look like.

  A terminal shows its control characters and does not obey them.
  """
  text = printable(text)
  console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]):
  """A plain table, as at the end of a run; no text is read as markup or obeyed by a terminal."""
  table = Table(title=Text(printable(title), "table.title"))
  for i, name in enumerate(header):
    table.add_column(name, justify="left" if i == 0 else "right")
  for row in rows:
    table.add_row(*(Text(printable(cell)) for cell in row))
  console.print(table)


def _show(value: float) -> str:
  if abs(value) >= 1000:
    return f"{value:,.0f}"
  return f"{value:.3g}" if abs(value) < 0.01 and value else f"{value:.3f}".rstrip("0").rstrip(".")


def _clock(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  return f"{minutes}:{rest:02d}"


def _spark(values: Sequence[float], width: int = 32) -> str:
  if len(values) > width:
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    parts = [values[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    values = [sum(part) / len(part) for part in parts]
  low, high = min(values), max(values)
  scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
  return "".join(_SPARKS[round((v - low) * scale)] for v in values)
