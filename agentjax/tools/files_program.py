"""The side of the files tool that runs inside the sandbox, with the work directory as ``.``.

Reads one JSON request from stdin, prints text for the policy and ends with 0, or with ``REFUSED``
if the request cannot be carried out. Standard library only; nothing may be imported from the work
directory, where the policy can plant modules.
"""

import sys

if __name__ == "__main__":
  del sys.path[0]

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from typing import Any

REFUSED = 3  # exit code
_SNIPPET_LINES = 4  # shown around an edit
_LINE_CHARACTERS = 300  # shown of a line that matches a search


class Refused(Exception):
  """The request cannot be carried out; the message is for the policy."""


def inside(path: str) -> str:
  """``path`` relative to the work directory, links followed.

  Raises:
    Refused: it leads out of the work directory.
  """
  if "\0" in path:
    raise Refused("the path holds a NUL character")
  root = os.path.realpath(".")
  real = os.path.realpath(path)
  if real != root and not real.startswith(root + os.sep):
    raise Refused(f"{path!r} is outside the work directory; give a relative path without '..'")
  return os.path.relpath(real, root)


def read_text(path: str, limit: int) -> str:
  """A file's text.

  Raises:
    Refused: no regular file, too large, or binary.
  """
  if os.path.isdir(path):
    raise Refused(f"{path!r} is a directory")
  if not os.path.exists(path):
    raise Refused(f"there is no file {path!r}")
  if not os.path.isfile(path):
    raise Refused(f"{path!r} is not a regular file")
  size = os.path.getsize(path)
  if size > limit:
    raise Refused(f"{path!r} has {size} bytes; at most {limit} can be viewed or edited")
  with open(path, "rb") as file:
    content = file.read()
  text = decoded(content)
  if text is None:
    raise Refused(f"{path!r} is a binary file of {size} bytes")
  return text


def decoded(content: bytes) -> str | None:
  """The text, or None where the content is binary: a NUL byte, or not UTF-8."""
  if b"\0" in content:
    return None
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError:
    return None


def write_text(path: str, text: str, limit: int) -> None:
  content = text.encode("utf-8", errors="surrogatepass")
  if len(content) > limit:
    raise Refused(f"{path!r} would have {len(content)} bytes; at most {limit} are allowed")
  parent = os.path.dirname(path)
  if parent:
    try:
      os.makedirs(parent, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
      raise Refused(f"a part of {parent!r} is a file, not a directory") from None
  with open(path, "wb") as file:
    file.write(content)


def numbered(lines: list[str], first: int, last: int) -> str:
  """Lines ``first`` .. ``last`` (from 1) with their numbers."""
  return "\n".join(f"{n:6d}\t{lines[n - 1]}" for n in range(first, last + 1))


def lines_of(text: str) -> list[str]:
  """Split at newlines only; a final newline does not begin a further line."""
  lines = text.split("\n")
  return lines[:-1] if lines[-1] == "" else lines


def snippet(text: str, first: int, last: int) -> str:
  lines = lines_of(text)
  first, last = max(1, first - _SNIPPET_LINES), min(len(lines), last + _SNIPPET_LINES)
  return numbered(lines, first, last)


def line_at(text: str, position: int) -> int:
  return text.count("\n", 0, position) + 1


def view(request: dict[str, Any]) -> str:
  path = inside(request["path"])
  if os.path.isdir(path):
    return list_entries({**request, "depth": 2})
  lines = lines_of(read_text(path, request["max_file_bytes"]))
  first, last = (int(n) for n in request.get("view_range") or (1, -1))  # JSON has 3.0 for 3
  if last == -1:
    last = len(lines)
  if not lines:
    return f"{path} is empty"
  if not 1 <= first <= last <= len(lines):
    raise Refused(
      f"view_range {request['view_range']} does not fit {path!r}, which has {len(lines)} lines; "
      "give [first, last] with 1 <= first <= last, or -1 for the end"
    )
  return numbered(lines, first, last)


def create(request: dict[str, Any]) -> str:
  path = inside(request["path"])
  if os.path.isdir(path):
    raise Refused(f"{path!r} is a directory")
  existed = os.path.lexists(path)
  write_text(path, request["file_text"], request["max_file_bytes"])
  return f"{'overwrote' if existed else 'created'} {path}"


def str_replace(request: dict[str, Any]) -> str:
  path = inside(request["path"])
  text = read_text(path, request["max_file_bytes"])
  old, new = request["old_str"], request.get("new_str", "")
  if not old:
    raise Refused("old_str is empty; use insert to add lines")
  places = [m.start() for m in re.finditer(re.escape(old), text)]
  if not places:
    raise Refused(f"old_str does not occur in {path!r}; it must match exactly, spaces included")
  if len(places) > 1:
    shown = ", ".join(str(line_at(text, p)) for p in places[:10])
    raise Refused(
      f"old_str occurs {len(places)} times in {path!r}, at lines {shown}"
      f"{', ...' if len(places) > 10 else ''}; add lines around it until it is unique"
    )
  at = places[0]
  changed = text[:at] + new + text[at + len(old) :]
  write_text(path, changed, request["max_file_bytes"])
  first = line_at(changed, at)
  return f"edited {path}:\n{snippet(changed, first, first + new.count(chr(10)))}"


def insert(request: dict[str, Any]) -> str:
  path = inside(request["path"])
  text = read_text(path, request["max_file_bytes"])
  lines = lines_of(text)
  at = int(request["insert_line"])
  if not 0 <= at <= len(lines):
    raise Refused(f"insert_line {at} does not fit {path!r}; allowed: 0 .. {len(lines)}")
  new = lines_of(request["insert_text"])
  changed = "\n".join([*lines[:at], *new, *lines[at:]])
  if text.endswith("\n") or not text:
    changed += "\n"
  write_text(path, changed, request["max_file_bytes"])
  return f"edited {path}:\n{snippet(changed, at + 1, at + len(new))}"


def walk(path: str, glob: str | None) -> Iterator[str]:
  """Files below ``path``, a folder's own first, by name; folders named .git are left out."""
  if not os.path.isdir(path):
    yield path
    return
  for folder, folders, files in os.walk(path):
    folders[:] = sorted(name for name in folders if name != ".git")
    for name in sorted(files):
      found = os.path.normpath(os.path.join(folder, name))
      if glob is None or fnmatch.fnmatchcase(found, glob) or fnmatch.fnmatchcase(name, glob):
        yield found


def list_entries(request: dict[str, Any]) -> str:
  path, most = inside(request.get("path") or "."), request["max_results"]
  if not os.path.isdir(path):
    raise Refused(f"there is no directory {path!r}")
  depth = request.get("depth")
  shown: list[str] = []
  for file in walk(path, request.get("glob")):
    relative = os.path.relpath(file, path).split(os.sep)
    if depth is not None and len(relative) > depth:
      entry = os.path.normpath(os.path.join(path, *relative[:depth])) + "/"
    else:
      entry = f"{file} ({os.lstat(file).st_size} bytes)"
    if not shown or shown[-1] != entry:
      shown.append(entry)
    if len(shown) > most:
      return "\n".join(shown[:most]) + f"\n(only the first {most}; narrow path or glob)"
  return "\n".join(shown) or "(no files)"


def search(request: dict[str, Any]) -> str:
  path, most = inside(request.get("path") or "."), request["max_results"]
  if not os.path.exists(path):
    raise Refused(f"there is no {path!r}")
  pattern = request["pattern"]
  try:
    expression = re.compile(pattern if request.get("regex") else re.escape(pattern))
  except (re.error, OverflowError, RecursionError) as error:
    raise Refused(f"the pattern is not a regular expression: {error}") from None
  shown: list[str] = []
  for file in walk(path, request.get("glob")):
    if not os.path.isfile(file) or os.path.getsize(file) > request["max_file_bytes"]:
      continue
    if os.path.islink(file):
      continue  # what it points at is searched where it stands, or lies outside
    with open(file, "rb") as opened:
      text = decoded(opened.read())
    for number, line in enumerate(lines_of(text or ""), start=1):
      if expression.search(line):
        shown.append(f"{file}:{number}: {line[:_LINE_CHARACTERS]}")
        if len(shown) > most:
          return "\n".join(shown[:most]) + f"\n(only the first {most}; narrow the search)"
  return "\n".join(shown) or "(no matches)"


COMMANDS = {
  "view": view,
  "create": create,
  "str_replace": str_replace,
  "insert": insert,
  "search": search,
  "list": list_entries,
}


def main() -> int:
  sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names are bytes
  request = json.load(sys.stdin)
  try:
    print(COMMANDS[request["command"]](request))
  except Refused as refused:
    print(f"error: {refused}")
    return REFUSED
  except OSError as error:
    print(f"error: {error.strerror or error}")
    return REFUSED
  except (ValueError, RecursionError, MemoryError, OverflowError) as error:
    print(f"error: {type(error).__name__}: {error}")
    return REFUSED
  return 0


if __name__ == "__main__":
  sys.exit(main())
