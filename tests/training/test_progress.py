"""What commands print."""

import io

from rich.console import Console

from agentjax.training.progress import ProgressDisplay, print_line, print_table

_TEXT = "runs/[/a] and [bold]: nothing of it is lost"


def test_a_line_that_looks_like_markup_is_printed_as_it_is():
  stream = io.StringIO()
  print_line(Console(file=stream, width=20), _TEXT)
  assert stream.getvalue() == f"{_TEXT}\n"


def test_a_terminal_obeys_no_text_of_a_line_or_a_table():
  stream, rude = io.StringIO(), "\x1b]0;x\x07\x1b[2J[/a] :smile:"
  console = Console(file=stream, width=100)
  print_line(console, rude)
  print_table(console, rude, ("name",), [(rude,)])
  assert stream.getvalue().count("\\x1b]0;x\\x07\\x1b[2J[/a] :smile:") == 3
  assert "\x1b" not in stream.getvalue()


def test_a_note_that_looks_like_markup_is_shown_as_it_is():
  stream = io.StringIO()
  console = Console(file=stream, width=100, force_terminal=True, color_system=None)
  with ProgressDisplay(console, {}) as display:
    display.stage("stage", 2)
    display.note(_TEXT)
  assert _TEXT in stream.getvalue()
