"""A model call: its request, its result and its errors."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentjax.engine.config import SamplingConfig
from agentjax.engine.grammar import Grammar, GrammarError
from agentjax.engine.sampling import Filters

Decode = Callable[[list[int]], str]
Array = Any  # numpy on the host, jax inside a program


class EngineError(RuntimeError):
  """The engine cannot go on, or a context was used after it was closed or lost."""


class SharedLanesError(EngineError):
  """Lanes of several processes stopped; mostly another of these processes has ended."""


class EngineBusyError(EngineError):
  """More calls wait for a slot than ``EngineConfig.max_waiting``; try again later."""


class NonFiniteError(EngineError):
  """A context's log-probs were not finite. It is lost; the others go on."""


class ImageError(ValueError):
  """A request has images, and the model has no vision tower."""


class ContextLengthError(ValueError):
  """More tokens than ``EngineConfig.max_length``; the message gives both numbers."""


class Finish(enum.StrEnum):
  """Why a model call ended."""

  STOP = "stop"  # a stop id, which is the last token
  LENGTH = "length"  # max_tokens
  CONTEXT_FULL = "context_full"  # the context holds EngineConfig.max_length tokens
  STOP_STRING = "stop_string"  # the last token completes a stop string


@dataclasses.dataclass(frozen=True)
class SampleRequest:
  """One model call.

  Attributes:
    key_data: uint32 [2], see ``address_key``. With the token's index in the call it addresses all
      randomness of the call; calls that must differ need different keys.
    max_tokens: most tokens of the call, forced ones included.
    sampling: temperature and filters.
    stop_ids: each of these tokens ends the call and is kept.
    stop_strings: each of these ends the call as soon as the decoded call contains it. Tokens
      sampled after it, in the same chunk and in the next one, are dropped.
    forced_ids: first tokens of the call, not drawn. They pass through the same compiled step as
      sampled ones, so an interrupted call continues with the same bits, and recorded calls can be
      scored again exactly.
    grammar: what the call may say (see ``engine.grammar``); None allows any text. Only a call that
      ends in a stop id is complete: ``max_tokens`` may cut it anywhere.
  """

  key_data: np.ndarray | tuple[int, int]
  max_tokens: int
  sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  forced_ids: tuple[int, ...] = ()
  grammar: Grammar | None = None

  def __post_init__(self) -> None:
    if np.shape(self.key_data) != (2,):
      raise ValueError(
        f"key_data must be two uint32, got shape {np.shape(self.key_data)}; see address_key."
      )
    _check_whole("key_data", tuple(self.key_data), 2**32)
    if self.max_tokens < 1:
      raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
    if len(self.forced_ids) > self.max_tokens:
      raise ValueError(
        f"{len(self.forced_ids)} forced_ids do not fit in max_tokens={self.max_tokens}."
      )
    if "" in self.stop_strings:
      raise ValueError(f"a stop string must not be empty, got stop_strings={self.stop_strings!r}.")
    if self.grammar is not None:
      _check_grammar(self.grammar, self)

  def check_ids(self, vocab_size: int) -> None:
    """Raises ValueError if ``stop_ids`` or ``forced_ids`` are not of a vocabulary of this size."""
    for name in ("stop_ids", "forced_ids"):
      _check_whole(name, getattr(self, name), vocab_size)


def _check_whole(name: str, values: Sequence[Any], end: int) -> None:
  for at, value in enumerate(values):
    if not (isinstance(value, (int, np.integer)) and 0 <= value < end):
      raise ValueError(f"{name}[{at}]={value!r}; allowed: whole numbers from 0 to {end - 1}.")


def _check_grammar(grammar: Grammar, request: SampleRequest) -> None:
  if set(request.stop_ids) != set(grammar.stop_ids):
    raise GrammarError(
      f"a call with the grammar of {grammar.name} ends with its stop_ids={grammar.stop_ids}, got "
      f"stop_ids={request.stop_ids}; compile the grammar with the ids of the request."
    )
  state = 0
  for at, token in enumerate(request.forced_ids):
    state = grammar.advance(state, (token,))
    if state < 0:
      raise GrammarError(
        f"forced_ids[{at}]={token} is not allowed there by the grammar of {grammar.name}."
      )


@dataclasses.dataclass(frozen=True)
class Sample:
  """Result of a model call; arrays have one entry a token.

  Attributes:
    token_ids: int32 [n], the stop token included.
    behaviour_log_probs, entropies: float32 [n], nats, of the temperature-scaled distribution that
      the trainer recomputes, whatever the filters were.
    sampling_log_probs: float32 [n], of the distribution that was drawn from, after the grammar's
      mask, top-k, top-p and min-p.
    versions: int32 [n], version of the weights that sampled the token.
    finish: why the call ended.
    experts: uint8 or uint16 [n, routers, choices], what the routers chose for each token (see
      ``trajectory.experts``); None unless ``EngineConfig.record_experts``.
  """

  token_ids: np.ndarray
  behaviour_log_probs: np.ndarray
  entropies: np.ndarray
  sampling_log_probs: np.ndarray
  versions: np.ndarray
  finish: Finish
  experts: np.ndarray | None = None


class DecodePlan(NamedTuple):
  """What each slot does in one decode dispatch, one row a slot."""

  key_data: Array  # uint32 [slots, 2]
  token_index: Array  # int32 [slots], index in its call of the first token of the dispatch
  budget: Array  # int32 [slots], tokens at most; 0 leaves the slot as it is
  filters: Filters  # of each slot
  stop_ids: Array  # int32 [slots, max_stop_ids], -1 where unused
  forced: Array  # int32 [slots, chunk_tokens], -1 where the token is drawn
  grammars: Any  # (Grammar, its state) by slot; in the program, ``grammar.Masks`` if it has any
  tables: Array  # int32 [tables, slots, entries], pages of each slot, see ``Programs.table_shape``
  ahead: Array  # bool [slots], goes on from the dispatch before, unless that ended in a stop id
  policies: Array | None = None  # int32 [slots], whose adapters; None if all are of one policy

  @classmethod
  def idle(
    cls, slots: int, chunk_tokens: int, max_stop_ids: int, tables: tuple[int, int, int]
  ) -> DecodePlan:
    """A plan in which no slot does anything."""
    return cls(
      key_data=np.zeros((slots, 2), np.uint32),
      token_index=np.zeros(slots, np.int32),
      budget=np.zeros(slots, np.int32),
      filters=Filters.idle(slots),
      stop_ids=np.full((slots, max_stop_ids), -1, np.int32),
      forced=np.full((slots, chunk_tokens), -1, np.int32),
      grammars={},
      tables=np.zeros(tables, np.int32),
      ahead=np.zeros(slots, bool),
    )


class Chunk(NamedTuple):
  """Result of a decode dispatch; the first ``counts[s]`` columns of row s are valid."""

  token_ids: Array  # int32 [slots, chunk_tokens]
  behaviour_log_probs: Array  # float32 [slots, chunk_tokens]
  entropies: Array  # float32 [slots, chunk_tokens]
  sampling_log_probs: Array  # float32 [slots, chunk_tokens]
  counts: Array  # int32 [slots]
  stopped: Array  # bool [slots], the last token is a stop id
  experts: Array | None  # uint8 or uint16 [slots, chunk_tokens, routers, choices], if recorded
  drafted: Array | None = None  # int32 [slots], tokens that were drafted, with speculation
  accepted: Array | None = None  # int32 [slots], those of them that were right

  @property
  def columns(self) -> tuple[Array, ...]:
    """Ids, log-probs and entropies: what every token has."""
    return self[:4]


class Generation:
  """A model call under way: writes its row of a plan, reads its row of a chunk."""

  def __init__(
    self, request: SampleRequest, *, max_stop_ids: int, decode: Decode | None = None
  ) -> None:
    if request.stop_strings and decode is None:
      raise ValueError(
        "stop_strings need text: give the engine decode=tokenizer.decode, or use stop_ids."
      )
    if len(request.stop_ids) > max_stop_ids:
      raise ValueError(
        f"{len(request.stop_ids)} stop_ids; allowed: engine.max_stop_ids={max_stop_ids}."
      )
    self.request = request
    self.finish: Finish | None = None
    self.sampled = 0  # tokens that went through the model, also those after a stop string
    self.kept = 0  # tokens of the result
    self._text: StopStrings | None = None
    if decode is not None and request.stop_strings:
      self._text = StopStrings(request.stop_strings, decode)
    self._parts: list[tuple[np.ndarray, ...]] = []
    self._experts: list[np.ndarray] = []
    self._grammar_state = 0  # after the tokens sampled so far

  def write(self, plan: DecodePlan, slot: int, room: int, under_way: int = 0) -> None:
    """Fills row ``slot``.

    Args:
      plan: of all slots.
      slot: which.
      room: how many tokens its context can still hold.
      under_way: tokens that a dispatch still draws which was not read yet. If it ends in a stop id,
        this row does nothing.
    """
    request, chunk_tokens = self.request, plan.forced.shape[1]
    index = self.sampled + under_way
    plan.key_data[slot] = request.key_data
    plan.token_index[slot] = index
    plan.ahead[slot] = under_way > 0
    plan.budget[slot] = min(chunk_tokens, request.max_tokens - index, room)
    for name, values in plan.filters._asdict().items():
      values[slot] = getattr(request.sampling, name)
    plan.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
    if index < len(request.forced_ids):
      forced = request.forced_ids[index : index + chunk_tokens]
      plan.forced[slot, : len(forced)] = forced
    if request.grammar is not None:
      plan.grammars[slot] = request.grammar, self._grammar_state

  def read(self, chunk: Chunk, slot: int, room: int, version: int, first: int) -> bool:
    """Reads row ``slot``; returns whether the call has ended. ``room`` is that after the chunk.

    ``first`` is the version of the first token: its logits come from the dispatch before, whose
    weights may be older.
    """
    count = int(chunk.counts[slot])
    versions = np.full(count, version, np.int32)
    versions[:1] = first
    self._parts.append((*(column[slot, :count] for column in chunk.columns), versions))
    if chunk.experts is not None:
      self._experts.append(chunk.experts[slot, :count])
    if self.request.grammar is not None:
      ids = chunk.token_ids[slot, :count]
      self._grammar_state = self.request.grammar.advance(self._grammar_state, ids)
    before, self.sampled = self.sampled, self.sampled + count
    self.kept = self.sampled
    found = None if self._text is None else self._text.find(chunk.token_ids[slot, :count])
    if found is not None:
      self.kept = before + found
      self.finish = Finish.STOP_STRING
    elif chunk.stopped[slot]:
      self.finish = Finish.STOP
    elif self.sampled >= self.request.max_tokens:
      self.finish = Finish.LENGTH
    elif room == 0:
      self.finish = Finish.CONTEXT_FULL
    return self.finish is not None

  def result(self) -> Sample:
    """The sample of a call that has ended, without tokens after a stop string."""
    assert self.finish is not None
    columns = (np.concatenate(c)[: self.kept] for c in zip(*self._parts, strict=True))
    ids, log_probs, entropies, drawn_log_probs, versions = columns
    experts = np.concatenate(self._experts)[: self.kept] if self._experts else None
    return Sample(ids, log_probs, entropies, drawn_log_probs, versions, self.finish, experts)


class StopStrings:
  """Looks for strings in the text of ids that come bit by bit; old ids are not decoded again.

  Text is decoded from so many ids before the new ones that every string which ends in the new ones
  lies in it whole. A character may be cut in two where that window begins, so some characters more
  are decoded there and not looked at.

  Args:
    strings: to be found; none is empty.
    decode: ids to text.
  """

  _CUT = 8  # characters at the edges of a window that may differ from those of the whole text

  def __init__(self, strings: Sequence[str], decode: Decode) -> None:
    self._strings, self._decode = strings, decode
    self._ids: list[int] = []
    self._looked_at = max(map(len, strings)) - 1 + self._CUT

  def find(self, token_ids: np.ndarray) -> int | None:
    """The fewest of the new ids with which the text holds one of the strings; None if it does not.

    Ids that were searched before hold none.
    """
    known = len(self._ids)
    self._ids += token_ids.tolist()
    start, behind = self._window(known)

    def holds(end: int) -> bool:
      text = self._decode(self._ids[start:end])[behind:]
      return any(string in text for string in self._strings)

    ends = range(known + 1, len(self._ids) + 1)
    if not ends or not holds(ends[-1]):
      return None
    return next(end for end in ends if holds(end)) - known

  def _window(self, known: int) -> tuple[int, int]:
    """The first id to decode, and how many characters of the window are not looked at."""
    tokens = self._looked_at + self._CUT
    while tokens < known:
      characters = len(self._decode(self._ids[known - tokens : known]))
      if characters >= self._looked_at + self._CUT:
        return known - tokens, characters - self._looked_at
      tokens *= 2
    return 0, 0
