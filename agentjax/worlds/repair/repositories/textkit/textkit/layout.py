"""Lines of a given width."""


def wrap(text, width):
  """Lines of at most ``width`` characters, broken between words; a longer word stands alone."""
  lines = []
  line = ""
  for word in text.split():
    if line and len(line) + 1 + len(word) > width:
      lines.append(line)
      line = word
    else:
      line = f"{line} {word}" if line else word
  if line:
    lines.append(line)
  return lines


def justify(line, width):
  """Spreads blanks so that the line fills the width; the first gaps get one more where needed."""
  words = line.split()
  if len(words) < 2:
    return line.strip()
  gaps = len(words) - 1
  blanks = width - sum(len(word) for word in words)
  if blanks < gaps:
    return " ".join(words)
  each, more = divmod(blanks, gaps)
  text = words[0]
  for index, word in enumerate(words[1:]):
    text += " " * (each + (1 if index < more else 0)) + word
  return text
