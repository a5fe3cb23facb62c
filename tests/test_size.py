"""What the table of sizes counts."""

from tests.size import code_lines, long_functions, num_leaves

SOURCE = '''"""A page
of words."""

# A comment.
X = """a
b"""  # two lines of code


def f(x):
  """Words."""
  return (
    x  # one

    + 1
  )
'''


def test_comments_docstrings_and_blank_lines_are_no_code():
  assert code_lines(SOURCE) == 2 + 1 + 4


def test_a_function_is_long_with_all_its_lines():
  body = "\n".join("  x += 1" for _ in range(80))
  assert list(long_functions(f"def f(x):\n{body}\n")) == [(81, "f")]
  assert not list(long_functions(SOURCE))


def test_every_value_of_a_config_is_a_setting():
  assert num_leaves({"a": 1, "b": {"c": None, "d": [1, 2]}, "e": []}) == 5
