r"""Conversations with a shared beginning, merged into a tree whose messages count once or often.

An agent's history is often stored as one conversation a call, or a conversation for each of several
continuations, so that the same messages stand in many rows. Rows of the same tools are branches of
one tree, and part at the first message that differs. A row of the result is a path to a leaf:

* a conversation that another one continues is no leaf. It becomes a part of that other row, so its
  tokens are computed once;
* a message that several leaves share has its weight in the first of them, and 0, context, in the
  others. With m(v) the conversations that message v stands in, of weights w_c(v),

      each   weight(v) = sum_{c contains v} w_c(v)    (m(v) where all weights are 1)
      once   weight(v) = max_{c contains v} w_c(v)

With "each", the sums ``sum w log p`` and ``sum w`` are those of the conversations learnt
separately, so that the loss ``sum w (-log p) / sum w`` (aggregation "token_mean") and its gradient
are the same, where a chat template writes a turn alike wherever it stands.

Reference: KAT-Coder, 2510.18779: non-linear histories are merged into a prefix tree, and shared
prefixes are computed once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentjax.config import Config
from agentjax.data.conversations import check_turns, openai_messages

Row = Mapping[str, Any]
_WEIGHT, _MESSAGES = "weight", "messages"


@dataclasses.dataclass(unsafe_hash=True)
class TreeConfig(Config):
  """How conversations are merged.

  Attributes:
    count: "each", a shared message counts once for each of its conversations, as if they were
      learnt separately; "once", it counts once.
  """

  count: Literal["each", "once"] = "each"


@dataclasses.dataclass
class _Node:
  """A message; the root has none.

  Attributes:
    message: without its weight.
    weights: of the message, one a conversation that it stands in.
    row: the first conversation that ends here.
    children: by the text of their message.
    placed: whether a row of the result has its weight.
  """

  message: Row = dataclasses.field(default_factory=dict)
  weights: list[float] = dataclasses.field(default_factory=list)
  row: Row | None = None
  children: dict[str, _Node] = dataclasses.field(default_factory=dict)
  placed: bool = False


def merge(rows: Sequence[Row], config: TreeConfig) -> list[dict[str, Any]]:
  """A row for each leaf, in the order in which their beginnings came.

  Leaves without a message that has weight are left out.

  Args:
    rows: each with ``messages`` in OpenAI's form, and ``tools`` where it declares any. Further
      fields of a leaf's row are kept; those of a row that another one continues are not.
    config: see TreeConfig.

  Raises:
    ValueError: a row without a conversation.
  """
  roots: dict[str, _Node] = {}
  for number, row in enumerate(rows):
    try:
      messages = list(openai_messages(row[_MESSAGES], keep=True))
      check_turns(messages)
    except (KeyError, TypeError, ValueError) as error:
      reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
      raise ValueError(f"row {number}: {reason}") from error
    node = roots.setdefault(_text(row.get("tools") or []), _Node())
    for value, message in zip(row[_MESSAGES], messages, strict=True):
      bare = {name: item for name, item in value.items() if name != _WEIGHT}
      node = node.children.setdefault(_text(bare), _Node(bare))
      node.weights.append(message.weight)
    node.row = node.row or row
  made = [_row(path, config) for root in roots.values() for path in _paths(root)]
  return [row for row in made if row is not None]


def num_messages(rows: Sequence[Row]) -> int:
  """Messages of all rows: how much there is to compute."""
  return sum(len(row[_MESSAGES]) for row in rows)


def _paths(root: _Node) -> Iterator[list[_Node]]:
  """The messages from the root to each leaf."""
  open_paths: list[list[_Node]] = [[child] for child in reversed(root.children.values())]
  while open_paths:
    path = open_paths.pop()
    if not path[-1].children:
      yield path
    open_paths += [[*path, child] for child in reversed(path[-1].children.values())]


def _row(path: Sequence[_Node], config: TreeConfig) -> dict[str, Any] | None:
  """The row of a leaf; None if nothing in it is learnt."""
  messages, learnt = [], False
  for node in path:
    message = dict(node.message)
    if message["role"] == "assistant":
      total = sum(node.weights) if config.count == "each" else max(node.weights)
      weight = 0.0 if node.placed else total
      node.placed, learnt = True, learnt or weight > 0
      if weight != 1:
        message[_WEIGHT] = weight
    messages.append(message)
  leaf = path[-1].row
  assert leaf is not None
  return {**leaf, _MESSAGES: messages} if learnt else None


def _text(value: Any) -> str:
  return json.dumps(value, sort_keys=True, ensure_ascii=False)
