import unittest

from textkit import acronym, edit_distance, from_roman, justify, slug, title, to_roman, wrap


class TextTest(unittest.TestCase):
  def test_distance(self):
    self.assertEqual(edit_distance("cat", "cart"), 1)
    self.assertEqual(edit_distance("same", "same"), 0)

  def test_layout(self):
    self.assertEqual(wrap("one two three", 20), ["one two three"])
    self.assertEqual(justify("a b", 5), "a   b")

  def test_numerals(self):
    self.assertEqual(to_roman(12), "XII")
    self.assertEqual(from_roman("XII"), 12)

  def test_words(self):
    self.assertEqual(slug("Hello, World"), "hello-world")
    self.assertEqual(title("hello world"), "Hello World")
    self.assertEqual(acronym("world wide web"), "WWW")


if __name__ == "__main__":
  unittest.main()
