"""Blocks that run more than once: what the stack asks of a way to run its stretches of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from agentjax.models.blocks import KINDS
from agentjax.models.config import ModelConfig
from agentjax.names import load

Array = jax.Array

_FAMILIES = "agentjax.adapters.model_families"
# By the field of ModelConfig that asks for it, and of Params that holds its parameters.
_NAMED = {"loop": f"{_FAMILIES}.parcae:LOOP", "second_pass": f"{_FAMILIES}.loopcoder:SECOND_PASS"}


class Section(NamedTuple):
  """A stretch of the pattern, as training runs it."""

  units: tuple[tuple[str, int], ...]  # from ``factor_pattern``
  groups: tuple[Any, ...]  # one entry a unit, as in ``Params``
  given: tuple[Any, ...]  # one entry a block, see ``BlockKind``


class DecodeSection(NamedTuple):
  """A stretch of the pattern, as decoding runs it; one entry a block."""

  pattern: str
  blocks: tuple[Any, ...]
  entries: tuple[Any, ...]  # of the cache
  given: tuple[Any, ...]


RunSection = Callable[..., tuple[Array, list[Any]]]  # (x, section) -> (x, reports)
RunDecodeSection = Callable[..., tuple[Array, tuple[Any, ...], list[Array]]]


@dataclasses.dataclass(frozen=True)
class PassKind:
  """A way to run the blocks of a pattern more than once; every function is pure.

  Attributes:
    field: of ModelConfig and Params.
    spec: ``config -> params`` of its own, a tree of ParamSpec.
    forward: ``(params, x, token_ids, sections, config, rows, drawn, run) -> (x, reports)``: the
      stream after all sections of ``config.sections``, and what every block reports. ``drawn`` is
      of ``draw``, or None. ``run`` applies a section; another table of ``kinds`` can be given to
      it.
    decode: ``(params, x, token_ids, sections, config, where, run) -> (x, entries, experts)``, the
      same over slots; ``where`` and ``kinds`` can be given to ``run``.
    init_entries: ``(config, slots, length) -> entries``: what slots keep for every block of the
      pattern; the leading axis of all arrays is the slot.
    draw: ``(config, key, sequence_ids) -> drawn``, a tree of arrays [B, T]: what sequences draw in
      an update of supervised training, such as how often the blocks run; None where nothing is.
  """

  field: str
  spec: Callable[[ModelConfig], Any]
  forward: Callable[..., tuple[Array, list[Any]]]
  decode: Callable[..., tuple[Array, tuple[Any, ...], list[Array]]]
  init_entries: Callable[[ModelConfig, int, int], tuple[Any, ...]]
  draw: Callable[[ModelConfig, Array, Array], Any] | None = None


def pass_kind(config: ModelConfig) -> PassKind | None:
  """How the blocks of a model run; None is once."""
  field = next((field for field in _NAMED if getattr(config, field) is not None), None)
  return None if field is None else load(_NAMED[field], f"model.{field}", "a PassKind")


def init_entries(config: ModelConfig, slots: int, length: int) -> tuple[Any, ...]:
  """What slots keep for every block of the pattern; the leading axis of all arrays is the slot."""
  passes = pass_kind(config)
  if passes is not None:
    return passes.init_entries(config, slots, length)
  return tuple(KINDS[kind].init_cache(config, slots, length) for kind in config.pattern)
