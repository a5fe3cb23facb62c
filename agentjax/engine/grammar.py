"""Structured output: logit masks from an automaton over tokens, on the device.

The host compiles a grammar once, to a table ``next_state[state, class_of_token[token]]``. Several
grammars share one table of fixed shape on the device. The decode loop reads a slot's mask from its
row and moves on by the token drawn. So a new grammar compiles no program, and the host does nothing
between tokens. No state is a dead end. The ids that end a call are allowed exactly where the text
is complete.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from agentjax.engine.config import EngineConfig
from agentjax.text.chat import Chat
from agentjax.text.json_language import json_language
from agentjax.text.language import (
  Language,
  alive_states,
  compile_language,
  lifted,
  regex,
)
from agentjax.text.tokenizer import Tokenizer
from agentjax.text.tool_calls import DescribedTool

Array = jax.Array


class GrammarError(ValueError):
  """A grammar that does not fit the engine, the request or the vocabulary."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
  """What a call may say, compiled for one vocabulary. State 0 is the start.

  Attributes:
    name: for messages.
    next_state: int32 [states, classes], -1 where tokens of the class are forbidden.
    class_of_token: int32 [tokens]; tokens of class 0 are forbidden everywhere.
    stop_ids: ids that end the call, allowed exactly where the text is complete.
  """

  name: str
  next_state: np.ndarray
  class_of_token: np.ndarray
  stop_ids: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, int]:
    """States and classes."""
    return self.next_state.shape[0], self.next_state.shape[1]

  def advance(self, state: int, token_ids: Sequence[int] | np.ndarray) -> int:
    """The state after some tokens; -1 if one of them is forbidden."""
    for token in np.asarray(token_ids, np.int64).tolist():
      if state < 0 or not 0 <= token < len(self.class_of_token):
        return -1
      state = int(self.next_state[state, self.class_of_token[token]])
    return state

  def allowed(self, state: int) -> np.ndarray:
    """bool [tokens]: what may come next."""
    return self.next_state[state][self.class_of_token] >= 0


def compile_regex(pattern: str, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> Grammar:
  """Calls whose text ``re.fullmatch(pattern, text)`` accepts.

  Args:
    pattern: see ``text.language.regex``.
    tokenizer: of the model.
    stop_ids: ids that end the call; the request must name the same.

  Raises:
    LanguageError: the pattern has no automaton.
    GrammarError: the vocabulary cannot spell any such text, or no stop ids.
  """
  return _compiled(f"regex {pattern!r}", regex(pattern), tokenizer, stop_ids)


def compile_schema(
  schema: Mapping[str, Any], tokenizer: Tokenizer, stop_ids: Sequence[int]
) -> Grammar:
  """Calls whose text is a JSON value that satisfies ``schema``; else as ``compile_regex``.

  ``text.json_language`` says what it understands and which valid JSON it leaves out.
  """
  return _compiled("JSON schema", json_language(schema), tokenizer, stop_ids)


def compile_tool_calls(chat: Chat, tools: Sequence[DescribedTool]) -> Grammar:
  """Turns of free text with well-formed calls of ``tools``, in the chat's own format.

  ``chat.parse`` reads every call of a complete turn, and its arguments satisfy the tool's schema.
  Else as ``compile_regex``, with the chat's stop ids.
  """
  described = tuple((t.name, json.dumps(dict(t.parameters))) for t in tools)
  return _compiled_calls(chat, described)


@dataclasses.dataclass(frozen=True)
class _Offered:
  name: str
  parameters: Mapping[str, Any]
  description: str = ""


@functools.lru_cache(maxsize=256)
def _compiled_calls(chat: Chat, described: tuple[tuple[str, str], ...]) -> Grammar:
  tools = [_Offered(name, json.loads(parameters)) for name, parameters in described]
  name = f"calls of {', '.join(t.name for t in tools) or 'no tool'}"
  return _compiled(name, chat.turn_language(tools), chat.tokenizer, chat.stop_ids)


def _compiled(
  name: str, language: Language, tokenizer: Tokenizer, stop_ids: Sequence[int]
) -> Grammar:
  if not stop_ids:
    raise GrammarError(f"the grammar of {name} needs stop_ids: without one no call ends.")
  automaton = compile_language(language)
  next_state, classes = lifted(automaton, tokenizer.token_bytes())
  # One more state: the call has ended. One more class: the tokens that lead there.
  ended = len(next_state)
  next_state = np.pad(next_state, ((0, 1), (0, 1)), constant_values=-1)
  next_state[:ended, -1] = np.where(automaton.accepting, ended, -1)
  classes = classes.copy()
  classes[list(stop_ids)] = next_state.shape[1] - 1
  # A vocabulary that lacks some bytes adds dead ends.
  alive = alive_states(next_state, np.arange(ended + 1) == ended)
  if not alive[0]:
    raise GrammarError(f"no tokens of {tokenizer.name} spell what the grammar of {name} asks for.")
  numbers = np.where(alive, np.cumsum(alive) - 1, -1)
  rows = next_state[alive]
  rows = np.where(rows >= 0, numbers[rows], -1)
  used, merged = np.unique(np.append(0, classes), return_inverse=True)
  columns, place = np.unique(rows[:, used], axis=1, return_inverse=True)
  place = place.reshape(-1)[merged.reshape(-1)]
  # Class 0, which comes first in ``merged``, stays the forbidden one.
  order = np.argsort(np.arange(columns.shape[1]) != place[0], kind="stable")
  table = columns[:, order].astype(np.int32)
  return Grammar(name, table, np.argsort(order)[place[1:]].astype(np.int32), tuple(stop_ids))


def check_fits(grammar: Grammar, config: EngineConfig, vocab_size: int) -> None:
  """Raises GrammarError if an engine of these sizes cannot hold the grammar."""
  states, classes = grammar.shape
  if config.grammar_states == 0:
    raise GrammarError(
      f"the engine has no room for the grammar of {grammar.name}: engine.grammar_states=0 is off; "
      f"set it to {states} or more."
    )
  if states > config.grammar_states or classes > config.grammar_classes:
    raise GrammarError(
      f"the grammar of {grammar.name} has {states} states and {classes} classes of tokens; allowed:"
      f" engine.grammar_states={config.grammar_states}, "
      f"engine.grammar_classes={config.grammar_classes}."
    )
  if len(grammar.class_of_token) > vocab_size:
    raise GrammarError(
      f"the grammar of {grammar.name} is over {len(grammar.class_of_token)} tokens; allowed: "
      f"at most model.vocab_size={vocab_size}."
    )


class Masks(NamedTuple):
  """The grammars of all slots in a decode dispatch."""

  next_state: Array  # int16 [grammar_states, grammar_classes], rows of all grammars; -1 forbidden
  class_of_token: Array  # int16 [grammars, vocab]
  grammar: Any  # int32 [slots], row of class_of_token; -1 for a slot without a grammar
  state: Any  # int32 [slots], row of next_state
  first: Any  # int32 [slots], row of next_state of the first state of the slot's grammar

  @property
  def active(self) -> Bool[Array, " slots"]:
    """Which slots have a grammar."""
    return self.grammar >= 0

  def allowed(self, state: Int[Array, " slots"]) -> Bool[Array, "slots vocab"]:
    """Tokens that may come next in each slot; all in a slot without a grammar."""
    classes = self.class_of_token[jnp.maximum(self.grammar, 0)].astype(jnp.int32)
    following = jnp.take_along_axis(self.next_state[state], classes, axis=1)
    return (following >= 0) | ~self.active[:, None]

  def advance(
    self, state: Int[Array, " slots"], token_ids: Int[Array, " slots"]
  ) -> Int[Array, " slots"]:
    """States after a token; unchanged if it is forbidden or the slot has no grammar."""
    classes = self.class_of_token[jnp.maximum(self.grammar, 0), token_ids]
    following = self.next_state[state, classes.astype(jnp.int32)].astype(jnp.int32)
    return jnp.where(self.active & (following >= 0), following, state)


class GrammarTable:
  """The table of one lane, and which grammar has which rows of it. Not thread safe.

  Args:
    config: capacities; ``grammar_states`` above 0.
    slots: of the lane.
    vocab_size: of the model.
  """

  def __init__(self, config: EngineConfig, slots: int, vocab_size: int) -> None:
    self._slots = slots
    self._next_state = np.full((config.grammar_states, config.grammar_classes), -1, np.int16)
    self._class_of_token = np.zeros((config.grammars, vocab_size), np.int16)
    self._placed: dict[Grammar, tuple[int, int]] = {}  # row of classes, first row of states
    self._last_used: dict[Grammar, int] = {}
    self._tick = 0
    self._on_device: tuple[Array, Array] | None = None

  def masks(
    self, wanted: Mapping[int, tuple[Grammar, int]], put: Callable[[Any], Any]
  ) -> tuple[Masks, list[int]]:
    """The masks of a dispatch, and the slots that wait because their grammar has no room.

    Grammars that are not wanted make room, the longest unused one first. If the wanted ones do not
    fit together, the one that has waited longest comes first.

    Args:
      wanted: grammar and state in it, by slot.
      put: puts arrays on the devices of the lane.
    """
    self._tick += 1
    grammars = {grammar for grammar, _ in wanted.values()}
    served: set[Grammar] = set()
    for grammar in sorted(grammars, key=self._since):
      if grammar in self._placed or self._place(grammar, served, grammars):
        served.add(grammar)
        self._last_used[grammar] = self._tick
    row = np.full(self._slots, -1, np.int32)
    state = np.zeros(self._slots, np.int32)
    first = np.zeros(self._slots, np.int32)
    for slot, (grammar, inside) in wanted.items():
      if grammar in served:
        row[slot], first[slot] = self._placed[grammar]
        state[slot] = first[slot] + inside
    if self._on_device is None:
      # Copies: an array on a CPU device may share the memory it was made from.
      tables = (self._next_state.copy(), self._class_of_token.copy())
      self._on_device = put(tables)
    waiting = [slot for slot, (grammar, _) in wanted.items() if grammar not in served]
    next_state, class_of_token = self._on_device
    return Masks(next_state, class_of_token, row, state, first), waiting

  def _since(self, grammar: Grammar) -> int:
    """When it was last used."""
    return self._last_used.get(grammar, 0)

  def _place(self, grammar: Grammar, served: set[Grammar], wanted: set[Grammar]) -> bool:
    """Finds room for a grammar; those that are not yet served may lose theirs."""
    while (spot := self._spot(grammar.shape[0])) is None:
      others = [g for g in self._placed if g not in served]
      if not others:
        return False
      # First those not wanted, the longest unused first; then the one served last.
      victim = min(others, key=lambda g: (g in wanted, self._since(g) * (-1) ** (g in wanted)))
      del self._placed[victim]
      if victim not in wanted:
        del self._last_used[victim]
    row, first = self._placed[grammar] = spot
    states, classes = grammar.shape
    block = grammar.next_state
    self._next_state[first : first + states, :classes] = np.where(block >= 0, block + first, -1)
    self._class_of_token[row] = 0
    self._class_of_token[row, : len(grammar.class_of_token)] = grammar.class_of_token
    self._on_device = None
    return True

  def _spot(self, states: int) -> tuple[int, int] | None:
    """A free row of classes, and the first of ``states`` free rows; None if there are none."""
    rows = set(range(len(self._class_of_token))) - {row for row, _ in self._placed.values()}
    taken = sorted((first, first + g.shape[0]) for g, (_, first) in self._placed.items())
    start = 0
    for low, high in [*taken, (len(self._next_state),) * 2]:
      if rows and low - start >= states:
        return min(rows), start
      start = max(start, high)
    return None
