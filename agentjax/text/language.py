"""Regular languages over bytes and control tokens, and the automata that accept them.

A ``Language`` is a function that adds itself to a non-deterministic automaton; small ones are
joined by ``seq``, ``either``, ``repeat`` and ``separated``. ``compile_language`` makes the smallest
deterministic automaton; none of its states is a dead end. Letters are the 256 bytes of UTF-8 text,
and control tokens by their ids: markup that no text can spell.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

NUM_BYTES = 256
MAX_STATES = 50_000  # of an automaton under construction; ours

Ranges = tuple[tuple[int, int], ...]  # of code points, ends included

_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF


class LanguageError(ValueError):
  """A pattern or schema that has no automaton here; the message says which part."""


class Nfa:
  """An automaton under construction: states are numbers, letters bits of an integer."""

  def __init__(self) -> None:
    self.edges: list[list[tuple[int, int]]] = []  # of every state: (set of letters, target)
    self.jumps: list[list[int]] = []  # of every state: targets that need no letter
    self.controls: dict[int, int] = {}  # letter of every control token

  def state(self) -> int:
    """A new state."""
    if len(self.edges) >= 4 * MAX_STATES:
      raise LanguageError(_too_large(4 * MAX_STATES))
    self.edges.append([])
    self.jumps.append([])
    return len(self.edges) - 1

  def letter(self, token_id: int) -> int:
    """The letter of a control token."""
    return self.controls.setdefault(token_id, NUM_BYTES + len(self.controls))


Language = Callable[[Nfa, int], int]  # adds what leads on from a state, and gives the state behind


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """A deterministic automaton; state 0 is the start.

  Attributes:
    next_state: int32 [states, letters], -1 where the letter is forbidden. The first 256 letters
      are bytes.
    accepting: bool [states].
    controls: token ids of the letters from 256 on.
  """

  next_state: np.ndarray
  accepting: np.ndarray
  controls: tuple[int, ...]

  def accepts(self, text: str | bytes) -> bool:
    """Whether the whole text is in the language."""
    state = 0
    for byte in text.encode() if isinstance(text, str) else text:
      state = int(self.next_state[state, byte])
      if state < 0:
        return False
    return bool(self.accepting[state])


def empty(nfa: Nfa, start: int) -> int:
  """The language of the empty text."""
  del nfa
  return start


def byte_set(values: Iterable[int]) -> Language:
  """One byte of a set."""
  mask = sum(1 << value for value in set(values))
  return lambda nfa, start: _step(nfa, start, mask)


any_byte = byte_set(range(NUM_BYTES))


def control(*token_ids: int) -> Language:
  """One of some control tokens; without any, the language is empty."""

  def build(nfa: Nfa, start: int) -> int:
    return _step(nfa, start, sum(1 << nfa.letter(i) for i in set(token_ids)))

  return build


def literal(text: str | bytes) -> Language:
  """Just this text."""
  data = text.encode() if isinstance(text, str) else text

  def build(nfa: Nfa, start: int) -> int:
    for byte in data:
      start = _step(nfa, start, 1 << byte)
    return start

  return build


def characters(ranges: Ranges) -> Language:
  """One character of some ranges of code points, in UTF-8; surrogates are excluded."""

  def build(nfa: Nfa, start: int) -> int:
    end = nfa.state()
    for path in [path for low, high in _no_surrogates(ranges) for path in _utf8(low, high)]:
      state = start
      for low, high in path[:-1]:
        state = _step(nfa, state, _byte_range(low, high))
      nfa.edges[state].append((_byte_range(*path[-1]), end))
    return end

  return build


any_character = characters(((0, _LAST),))


def seq(*parts: Language) -> Language:
  """One after the other."""

  def build(nfa: Nfa, start: int) -> int:
    for part in parts:
      start = part(nfa, start)
    return start

  return build


def either(*parts: Language) -> Language:
  """Any one of them."""

  def build(nfa: Nfa, start: int) -> int:
    end = nfa.state()
    for part in parts:
      # A new start: a part that loops back to its start must not enter its siblings.
      own = nfa.state()
      nfa.jumps[start].append(own)
      nfa.jumps[part(nfa, own)].append(end)
    return end

  return build


def repeat(part: Language, least: int = 0, most: int | None = None) -> Language:
  """``least`` to ``most`` times, without end where ``most`` is None."""
  return separated(part, empty, least, most)


def separated(
  part: Language, separator: Language, least: int = 0, most: int | None = None
) -> Language:
  """``least`` to ``most`` parts with a separator between any two."""

  def build(nfa: Nfa, start: int) -> int:
    end = nfa.state()
    if least == 0:
      nfa.jumps[start].append(end)
    if most == 0:
      return end
    state, count = start, 0
    while True:
      before = nfa.state()
      nfa.jumps[state].append(before)
      state, count = part(nfa, before), count + 1
      if count >= least:
        nfa.jumps[state].append(end)
      if count == most:
        return end
      if most is None and count >= least:
        nfa.jumps[separator(nfa, state)].append(before)
        return end
      state = separator(nfa, state)

  return build


def accepted_by(automaton: Automaton) -> Language:
  """The language of an automaton, as a part of others."""

  def build(nfa: Nfa, start: int) -> int:
    states = [nfa.state() for _ in automaton.next_state]
    end = nfa.state()
    nfa.jumps[start].append(states[0])
    letters = [*range(NUM_BYTES), *(nfa.letter(i) for i in automaton.controls)]
    for state, row in enumerate(automaton.next_state):
      masks: dict[int, int] = {}
      for letter, target in zip(letters, row.tolist(), strict=True):
        if target >= 0:
          masks[target] = masks.get(target, 0) | (1 << letter)
      nfa.edges[states[state]] += [(mask, states[target]) for target, mask in masks.items()]
      if automaton.accepting[state]:
        nfa.jumps[states[state]].append(end)
    return end

  return build


def without(*texts: str) -> Language:
  """Bytes that contain none of the texts."""
  if not texts:
    return repeat(any_byte)
  found = seq(repeat(any_byte), either(*map(literal, texts)), repeat(any_byte))
  return accepted_by(_complement(compile_language(found)))


def both(left: Language, right: Language) -> Language:
  """What is in both; neither may hold control tokens."""
  return accepted_by(_intersection(compile_language(left), compile_language(right)))


def compile_language(language: Language) -> Automaton:
  """The smallest automaton of a language.

  Raises:
    LanguageError: it needs more than ``MAX_STATES`` states at some point, or it is empty.
  """
  nfa = Nfa()
  start = nfa.state()
  end = language(nfa, start)
  next_state, accepting = _determinised(nfa, start, end)
  return _smallest(next_state, accepting, tuple(nfa.controls))


# --- from a regular expression -----------------------------------------------------------------


def regex(pattern: str) -> Language:
  r"""What ``re.fullmatch(pattern, text)`` accepts.

  Supported are characters, ``.``, sets, ``\d \w \s \D \W \S``, groups, ``|``, and the quantifiers
  ``* + ? {n} {n,} {n,m}``, lazy or not; ``^`` first and ``$`` last may stand. ``\d``, ``\w`` and
  ``\s`` are those of ASCII, as JSON Schema has them; their opposites exclude what either Python or
  ASCII includes, so that both accept every accepted text.

  Raises:
    LanguageError: the pattern is no regular expression, or holds look-around, back-references,
      word borders, flags or anchors elsewhere.
  """
  return _Regex(pattern).parse()


def searched(pattern: str) -> Language:
  """What ``re.search(pattern, text)`` accepts, over characters: JSON schema's "pattern"."""
  parser = _Regex(pattern)
  inner = parser.parse()
  free = repeat(any_character)
  return seq(
    empty if parser.anchored_start else free, inner, empty if parser.anchored_end else free
  )


class _Regex:
  """Recursive descent; ``_at`` is the next character."""

  def __init__(self, pattern: str):
    self._pattern = pattern
    try:
      re.compile(pattern)
    except re.error as error:
      raise LanguageError(f"{pattern!r} is no regular expression: {error}.") from error
    self.anchored_start = pattern.startswith("^")
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    self.anchored_end = pattern.endswith("$") and escapes % 2 == 0
    self._at = int(self.anchored_start)
    self._end = len(pattern) - int(self.anchored_end)

  def parse(self) -> Language:
    found = self._alternatives()
    if self._at < self._end:
      raise self._refused(self._pattern[self._at])
    return found

  def _refused(self, what: str) -> LanguageError:
    return LanguageError(
      f"{what!r} at index {self._at} of the pattern {self._pattern!r} has no automaton here; "
      r"allowed: characters, sets, \d \w \s, groups, | and the quantifiers * + ? {n,m}, with ^ "
      "first and $ last."
    )

  def _peek(self) -> str:
    return self._pattern[self._at] if self._at < self._end else ""

  def _take(self) -> str:
    found = self._peek()
    self._at += 1
    return found

  def _alternatives(self) -> Language:
    parts = [self._sequence()]
    while self._peek() == "|":
      self._at += 1
      parts.append(self._sequence())
    return parts[0] if len(parts) == 1 else either(*parts)

  def _sequence(self) -> Language:
    parts = []
    while self._peek() and self._peek() not in "|)":
      parts.append(self._quantified())
    return seq(*parts)

  def _quantified(self) -> Language:
    part = self._atom()
    match = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}").match(self._pattern, self._at, self._end)
    if match is None or match[0] in ("{}", "{,}"):
      return part
    self._at = match.end()
    if self._peek() == "+":
      raise self._refused("+")  # possessive: another language
    if self._peek() == "?":
      self._at += 1
    match match[0]:
      case "*":
        return repeat(part)
      case "+":
        return repeat(part, 1)
      case "?":
        return repeat(part, 0, 1)
    least = int(match[1] or 0)
    if not match[2]:
      return repeat(part, least, least)
    return repeat(part, least, int(match[3]) if match[3] else None)

  def _atom(self) -> Language:
    first = self._take()
    match first:
      case "(":
        return self._group()
      case "[":
        return characters(self._set())
      case ".":
        return characters(_other_than(((10, 10),)))
      case "\\":
        return characters(self._escape(negative=False))
      case "*" | "+" | "?" | "^" | "$":
        self._at -= 1
        raise self._refused(first)
    return characters(((ord(first), ord(first)),))

  def _group(self) -> Language:
    if self._peek() == "?":
      match = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)").match(self._pattern, self._at)
      if match is None:
        raise self._refused(self._pattern[self._at - 1 : self._at + 2])
      self._at = match.end()
    inner = self._alternatives()
    if self._take() != ")":
      self._at -= 1
      raise self._refused(self._pattern[self._at])
    return inner

  def _set(self) -> Ranges:
    negative = self._peek() == "^"
    self._at += negative
    ranges: list[tuple[int, int]] = []
    first = True
    while first or self._peek() != "]":
      first = False
      low = self._member(negative)
      if len(low) == 1 and low[0][0] == low[0][1] and self._pattern[self._at] == "-":
        if self._pattern[self._at + 1] != "]":
          self._at += 1
          high = self._member(negative)
          low = ((low[0][0], high[0][0]),)
      ranges += low
    self._at += 1
    return _other_than(tuple(ranges)) if negative else tuple(ranges)

  def _member(self, negative: bool) -> Ranges:
    found = self._take()
    if found == "\\":
      return self._escape(negative=negative)
    return ((ord(found), ord(found)),)

  def _escape(self, *, negative: bool) -> Ranges:
    """The characters of an escape; in a negative set, all that some standard includes."""
    found = self._take()
    if found.lower() in _CLASSES:
      # A class is taken narrow, its opposite leaves out the wide one, and in sets that are
      # themselves negative it is the other way round.
      inside = _wide(found.lower()) if found.isupper() != negative else _CLASSES[found.lower()]
      return _other_than(inside) if found.isupper() else inside
    if found in _PLAIN_ESCAPES:
      return ((ord(_PLAIN_ESCAPES[found]),) * 2,)
    if found in ("x", "u"):
      digits = self._pattern[self._at : self._at + (2 if found == "x" else 4)]
      self._at += len(digits)
      return ((int(digits, 16),) * 2,)
    if found.isalnum():
      self._at -= 1
      raise self._refused("\\" + found)
    return ((ord(found), ord(found)),)


_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CLASSES: dict[str, Ranges] = {
  "d": ((48, 57),),
  "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
  "s": ((9, 13), (32, 32)),
}
_WIDE: dict[str, Callable[[str], bool]] = {
  "d": str.isdecimal,
  "w": lambda c: c.isalnum() or c == "_",
  # U+FEFF is a space to JSON schema's expressions, not to Python.
  "s": lambda c: c.isspace() or c == "\ufeff",
}


@functools.cache
def _wide(name: str) -> Ranges:
  """The characters of a class in all of Unicode."""
  inside = np.array([_WIDE[name](chr(c)) for c in range(_LAST + 1)])
  borders = np.flatnonzero(np.diff(np.concatenate([[0], inside, [0]]).astype(np.int8)))
  return tuple((int(a), int(b) - 1) for a, b in borders.reshape(-1, 2))


def _other_than(ranges: Ranges) -> Ranges:
  """All characters but these."""
  rest, start = [], 0
  for low, high in sorted(ranges):
    if low > start:
      rest.append((start, low - 1))
    start = max(start, high + 1)
  if start <= _LAST:
    rest.append((start, _LAST))
  return tuple(rest)


def _no_surrogates(ranges: Ranges) -> list[tuple[int, int]]:
  parts = []
  for low, high in ranges:
    parts += [(low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)]
  return [(low, high) for low, high in parts if low <= high]


def _utf8(low: int, high: int) -> list[list[tuple[int, int]]]:
  """Paths of byte ranges that spell exactly the code points of a range."""
  for border in (0x7F, 0x7FF, 0xFFFF):
    if low <= border < high:
      return _utf8(low, border) + _utf8(border + 1, high)
  if high > 0x7F:
    for bits in (6, 12, 18):
      block = (1 << bits) - 1
      if low & ~block == high & ~block:
        break
      if low & block:
        return _utf8(low, low | block) + _utf8((low | block) + 1, high)
      if high & block != block:
        return _utf8(low, (high & ~block) - 1) + _utf8(high & ~block, high)
  return [list(zip(chr(low).encode(), chr(high).encode(), strict=True))]


# --- automata ----------------------------------------------------------------------------------


def _step(nfa: Nfa, start: int, mask: int) -> int:
  end = nfa.state()
  nfa.edges[start].append((mask, end))
  return end


def _byte_range(low: int, high: int) -> int:
  return (1 << (high + 1)) - (1 << low)


def _too_large(states: int) -> str:
  return (
    f"more than {states} states are needed; bound fewer repetitions (maxLength, maxItems, {{n,m}})."
  )


def _determinised(nfa: Nfa, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
  """Subset construction over sets of letters with the same edges."""
  masks = sorted({mask for edges in nfa.edges for mask, _ in edges})
  letters = NUM_BYTES + len(nfa.controls)
  signatures: dict[tuple[bool, ...], int] = {}
  kinds = np.empty(letters, np.int64)
  for letter in range(letters):
    signature = tuple(bool(mask >> letter & 1) for mask in masks)
    kinds[letter] = signatures.setdefault(signature, len(signatures))
  members = [
    tuple(kind for signature, kind in signatures.items() if signature[i]) for i in range(len(masks))
  ]
  kinds_of = dict(zip(masks, members, strict=True))

  @functools.cache
  def closure(state: int) -> frozenset[int]:
    seen, todo = {state}, [state]
    while todo:
      for target in nfa.jumps[todo.pop()]:
        if target not in seen:
          seen.add(target)
          todo.append(target)
    # States without letters matter only if they are the end.
    return frozenset(s for s in seen if nfa.edges[s] or s == end)

  first = closure(start)
  numbers, queue = {first: 0}, [first]
  rows, accepting = [], []
  for subset in queue:
    targets: dict[int, set[int]] = {}
    for state in subset:
      for mask, target in nfa.edges[state]:
        for kind in kinds_of[mask]:
          targets.setdefault(kind, set()).update(closure(target))
    row = np.full(len(signatures), -1, np.int32)
    for kind, found in targets.items():
      key = frozenset(found)
      if key not in numbers:
        numbers[key] = len(numbers)
        queue.append(key)
      row[kind] = numbers[key]
    if len(numbers) > MAX_STATES:
      raise LanguageError(_too_large(MAX_STATES))
    rows.append(row)
    accepting.append(end in subset)
  return np.stack(rows)[:, kinds], np.array(accepting)


def _smallest(
  next_state: np.ndarray, accepting: np.ndarray, controls: tuple[int, ...]
) -> Automaton:
  """Drops dead ends, merges equivalent states, and puts the start first."""
  alive = alive_states(next_state, accepting)
  if not alive[0]:
    raise LanguageError("no text at all is in this language.")
  usable = (next_state >= 0) & alive[next_state]
  # Letters with the same effect are handled once.
  columns, kinds = np.unique(np.where(usable, next_state, -1), axis=1, return_inverse=True)
  weights = np.random.default_rng(0).integers(1, 2**63, columns.shape[1] + 1, dtype=np.uint64)
  labels = accepting.astype(np.int64)
  count = 0
  while True:
    seen = np.where(columns >= 0, labels[columns], -1).astype(np.uint64)
    keys = (seen + np.uint64(2)) @ (weights[1:] | np.uint64(1)) + labels.astype(np.uint64) * (
      weights[0] | np.uint64(1)
    )
    labels = np.unique(np.where(alive, keys, 0), return_inverse=True)[1].reshape(-1)
    if labels.max() == count:
      break
    count = labels.max()
  # Breadth first from the start.
  order, place = [0], {int(labels[0]): 0}
  for state in order:
    for target in columns[state]:
      if target >= 0 and int(labels[target]) not in place:
        place[int(labels[target])] = len(order)
        order.append(int(target))
  numbers = np.full(count + 1, -1, np.int32)
  numbers[list(place)] = list(place.values())
  rows = np.where(columns[order] >= 0, numbers[labels[columns[order]]], -1)
  return Automaton(rows[:, kinds.reshape(-1)].astype(np.int32), accepting[order], controls)


def alive_states(next_state: np.ndarray, accepting: np.ndarray) -> np.ndarray:
  """bool [states]: whether an accepting state can be reached."""
  sources = np.broadcast_to(np.arange(len(next_state))[:, None], next_state.shape)
  real = next_state >= 0
  pairs = np.unique(np.stack([sources[real], next_state[real]], axis=-1), axis=0)
  alive = accepting.copy()
  while True:
    found = alive.copy()
    found[pairs[alive[pairs[:, 1]], 0]] = True
    if (found == alive).all():
      return alive
    alive = found


def _complement(automaton: Automaton) -> Automaton:
  """All other runs of bytes."""
  sink = len(automaton.next_state)
  rows = np.append(automaton.next_state, np.full((1, automaton.next_state.shape[1]), -1), axis=0)
  accepting = ~np.append(automaton.accepting, False)
  return _smallest(np.where(rows < 0, sink, rows), accepting, automaton.controls)


def _intersection(left: Automaton, right: Automaton) -> Automaton:
  if left.controls or right.controls:
    raise LanguageError("languages with control tokens cannot be intersected.")
  numbers, queue = {(0, 0): 0}, [(0, 0)]
  rows, accepting = [], []
  for a, b in queue:
    row = np.full(NUM_BYTES, -1, np.int32)
    nexts = np.stack([left.next_state[a], right.next_state[b]], axis=-1)
    for letter in np.flatnonzero((nexts >= 0).all(axis=-1)):
      pair = (int(nexts[letter, 0]), int(nexts[letter, 1]))
      if pair not in numbers:
        numbers[pair] = len(numbers)
        queue.append(pair)
      row[letter] = numbers[pair]
    if len(numbers) > MAX_STATES:
      raise LanguageError(_too_large(MAX_STATES))
    rows.append(row)
    accepting.append(bool(left.accepting[a] and right.accepting[b]))
  return _smallest(np.stack(rows), np.array(accepting), ())


def lifted(automaton: Automaton, pieces: Sequence[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
  """The automaton over tokens instead of letters.

  Tokens that lead every state to the same place share a class; class 0 is forbidden everywhere.

  Args:
    automaton: over bytes and control tokens.
    pieces: bytes of every token; None where it is markup, which is allowed where the automaton has
      it as a letter. A token without any bytes is never allowed.

  Returns:
    int32 next states [states, classes] and int32 class of every token.
  """
  dead = len(automaton.next_state)
  table = np.append(automaton.next_state, np.full((1, automaton.next_state.shape[1]), -1), axis=0)
  table = np.where(table < 0, dead, table).astype(np.int32)
  columns = [np.full(dead + 1, dead, np.int32), np.arange(dead + 1, dtype=np.int32)]
  known = {column.tobytes(): i for i, column in enumerate(columns)}
  moves: dict[tuple[int, int], int] = {}
  letters, kinds = np.unique(table, axis=1, return_inverse=True)
  kind_of: list[int] = kinds.reshape(-1).tolist()

  def move(number: int, letter: int) -> int:
    key = (number, kind_of[letter])
    if key not in moves:
      column = letters[:, kind_of[letter]][columns[number]]
      moves[key] = known.setdefault(column.tobytes(), len(columns))
      if moves[key] == len(columns):
        columns.append(column)
    return moves[key]

  letter_of = {token: NUM_BYTES + i for i, token in enumerate(automaton.controls)}
  of_token = np.zeros(len(pieces), np.int64)
  for token, piece in enumerate(pieces):
    if piece is None:
      of_token[token] = move(1, letter_of[token]) if token in letter_of else 0
    elif piece:
      number = 1
      for byte in piece:
        number = move(number, byte)
        if number == 0:
          break
      of_token[token] = number
  used, classes = np.unique(np.append(0, of_token), return_inverse=True)
  found = np.stack([columns[i][:dead] for i in used], axis=1)
  return np.where(found == dead, -1, found), classes.reshape(-1)[1:].astype(np.int32)
