import pytest

from agentjax.text.printable import printable


@pytest.mark.parametrize(
  ("text", "shown"),
  [
    ("Grüße,\n\t緑茶 👩\u200d💻", "Grüße,\n\t緑茶 👩\u200d💻"),
    ("\x1b[2J\x9b8m", "\\x1b[2J\\x9b8m"),
    ("a\rb\x08\x7f\0", "a\\rb\\x08\\x7f\\x00"),
    ("y\u202e\u2066\ud800", "y\\u202e\\u2066\\ud800"),
  ],
)
def test_what_a_terminal_would_obey_is_escaped_and_other_text_stays(text, shown):
  assert printable(text) == shown
