"""Words of a text, put together anew."""

_SMALL = ("a", "an", "and", "in", "of", "on", "or", "the", "to")


def slug(text, limit=40):
  """Lower-case letters and digits with single hyphens, cut at a hyphen to at most ``limit``."""
  letters = "".join(c if c.isalnum() else " " for c in text.lower())
  result = "-".join(letters.split())
  if len(result) <= limit:
    return result
  cut = result[: limit + 1].rfind("-")
  return result[:cut] if cut > 0 else result[:limit]


def title(text):
  """Capitalises words, but not small ones in the middle."""
  words = text.lower().split()
  last = len(words) - 1
  return " ".join(
    word if word in _SMALL and 0 < index < last else word.capitalize()
    for index, word in enumerate(words)
  )


def acronym(text):
  """The initials of the words that are not small, in capitals."""
  return "".join(word[0].upper() for word in text.split() if word.lower() not in _SMALL)
