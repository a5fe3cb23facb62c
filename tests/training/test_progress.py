"""What commands print."""

import io

from rich.console import Console

from agentjax.training.progress import ProgressDisplay, print_line

_TEXT = "runs/[/a] and [bold]: nothing of it is lost"


def test_a_line_that_looks_like_markup_is_printed_as_it_is():
  stream = io.StringIO()
  print_line(Console(file=stream, width=20), _TEXT)
  assert stream.getvalue() == f"{_TEXT}\n"


def test_a_note_that_looks_like_markup_is_shown_as_it_is():
  stream = io.StringIO()
  console = Console(file=stream, width=100, force_terminal=True, color_system=None)
  with ProgressDisplay(console, {}) as display:
    display.stage("stage", 2)
    display.note(_TEXT)
  assert _TEXT in stream.getvalue()
