"""LoopCoder's second pass (IQuest-Coder-V1 report): the whole stack twice with the same weights.

The second pass is that of the LoopCoder in the IQuest-Coder-V1 report (``config.second_pass``): the
stack runs on its own output with the same weights, and each attention mixes, by a gate of every
head, all keys and values of the first pass with those of a short window of the second.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.attend import attend, attend_cache, max_scores
from agentjax.models.attention import (
  KVCache,
  append_rows,
  init_kv_cache,
  merge_heads,
  project_heads,
)
from agentjax.models.blocks import KINDS, Appended, Block, BlockReport, Rows, Stepped
from agentjax.models.config import ModelConfig
from agentjax.models.norm import rms_norm
from agentjax.models.passes import DecodeSection, PassKind, RunDecodeSection, RunSection, Section
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array


@flax.struct.dataclass
class Gates:
  """How much of the first pass each head of the second reads, one set an attention block."""

  weight: Weight  # [attentions, heads, head_dim]
  bias: Weight  # [attentions, heads]


@flax.struct.dataclass
class TwoPassCache:
  """What slots keep for an attention block that runs in two passes."""

  first: KVCache
  second: KVCache


class _FirstPass(NamedTuple):
  """What the second pass of an attention block reads of the first, and its gate."""

  weight: Array  # [heads, head_dim]
  bias: Array  # [heads]
  keys: Array  # [B, T, kv_heads, head_dim]
  values: Array  # [B, T, kv_heads, head_dim]


def gates_spec(config: ModelConfig) -> Gates:
  """Abstract parameters; zeros (ours), which mixes the two passes in equal parts."""
  count = config.pattern.count("*")
  shape, axes = (count, config.num_heads, config.head_dim), ("layers", "heads", "head_dim")
  return Gates(
    weight=ParamSpec(shape, axes, config.param_dtype, "zeros"),
    bias=ParamSpec(shape[:2], axes[:2], config.param_dtype, "zeros", decayed=False),
  )


def run_twice(
  params: Gates,
  x: Float[Array, "batch time embed"],
  token_ids: Int[Array, "batch time"],
  sections: tuple[Section, ...],
  config: ModelConfig,
  rows: Rows,
  drawn: None,
  run: RunSection,
) -> tuple[Float[Array, "batch time embed"], list[BlockReport]]:
  """The stack, and on its output the stack again with gated attention.

  In the second pass ``O = g O_global + (1 - g) O_local``, ``g = sigmoid(w · Q2 + b)`` for every
  head and token: O_global reads keys and values of the first pass, O_local those of the last
  ``config.second_pass.window`` tokens of the second. The second pass takes the output of the first
  as it is, without the token shift that the report describes and its implementation leaves out.

  Args:
    params: of the gates.
    x: embedded tokens.
    sections: the whole pattern, as one.
    token_ids, config, rows, drawn: not read.
    run: applies a section; another table of ``kinds`` can be given to it.

  Returns:
    The stream, and the reports of all blocks, the larger scores of both passes.
  """
  del token_ids, config, rows, drawn
  (section,) = sections
  first = {**KINDS, "*": dataclasses.replace(KINDS["*"], forward=_first_forward)}
  second = {**KINDS, "*": dataclasses.replace(KINDS["*"], forward=_second_forward)}
  x, told = run(x, section, kinds=first)
  reports: list[BlockReport] = []
  given: list[_FirstPass | None] = []
  gates = iter(zip(params.weight, params.bias, strict=True))
  for report in told:
    if isinstance(report, BlockReport):
      reports.append(report)
      given.append(None)
    else:
      reports.append(report[0])
      given.append(_FirstPass(*next(gates), *report[1:]))
  x, again = run(x, section._replace(given=tuple(given)), kinds=second)
  return x, jax.tree.map(jnp.maximum, reports, again)


def decode_twice(
  params: Gates,
  x: Float[Array, "*lead embed"],
  token_ids: Int[Array, "*lead"],
  sections: tuple[DecodeSection, ...],
  config: ModelConfig,
  where: Appended | Stepped,
  run: RunDecodeSection,
) -> tuple[Float[Array, "*lead embed"], tuple[Any, ...], list[Array]]:
  """The same over the entries of slots, see ``init_entries``.

  Returns:
    The stream, the entries of all blocks, and no experts.
  """
  del token_ids, config, where  # ``run`` knows the last two
  (section,) = sections
  kinds = {
    **KINDS,
    "*": dataclasses.replace(KINDS["*"], extend=_second_extend, step=_second_step),
  }
  twice = [isinstance(entry, TwoPassCache) for entry in section.entries]
  single = [e.first if two else e for e, two in zip(section.entries, twice, strict=True)]
  x, first, _ = run(x, section._replace(entries=tuple(single)))
  gates = iter(zip(params.weight, params.bias, strict=True))
  x, entries, _ = run(
    x,
    section._replace(
      entries=tuple(
        TwoPassCache(first=new, second=old.second) if two else new
        for new, old, two in zip(first, section.entries, twice, strict=True)
      ),
      given=tuple(next(gates) if two else None for two in twice),
    ),
    kinds=kinds,
  )
  return x, entries, []


def init_entries(config: ModelConfig, slots: int, length: int) -> tuple[Any, ...]:
  """An attention block keeps a ``TwoPassCache``, others what their kind makes."""
  assert config.second_pass is not None
  window = config.second_pass.window
  return tuple(
    TwoPassCache(
      first=init_kv_cache(config, slots, length),
      second=init_kv_cache(config, slots, length, window=window),
    )
    if kind == "*"
    else KINDS[kind].init_cache(config, slots, length)
    for kind in config.pattern
  )


def _first_forward(params: Block, x: Array, config: ModelConfig, rows: Rows, given: Any):
  """An attention block that tells its keys and values."""
  del given
  inputs = rms_norm(x, params.norm, config.norm_eps)
  query, key, value = project_heads(params.mixer, inputs, config, rows.positions)
  out, top = _attend(query, key, value, config, rows, None)
  return x + merge_heads(params.mixer, out), (BlockReport(max_scores=top), key, value)


def _second_forward(params: Block, x: Array, config: ModelConfig, rows: Rows, given: _FirstPass):
  """An attention block that reads the keys and values of the first pass, too."""
  assert config.second_pass is not None
  inputs = rms_norm(x, params.norm, config.norm_eps)
  query, key, value = project_heads(params.mixer, inputs, config, rows.positions)
  far, far_top = _attend(query, given.keys, given.values, config, rows, None)
  near, near_top = _attend(query, key, value, config, rows, config.second_pass.window)
  out = _mix((given.weight, given.bias), query, far, near)
  top = None if far_top is None or near_top is None else jnp.maximum(far_top, near_top)
  return x + merge_heads(params.mixer, out), BlockReport(max_scores=top)


def _attend(
  query: Array, key: Array, value: Array, config: ModelConfig, rows: Rows, window: int | None
) -> tuple[Array, Array | None]:
  """Heads' output, and with ``record_max_scores`` the largest score of each, [1, heads]."""
  how: dict[str, Any] = {
    "segment_ids": rows.segment_ids,
    "scale": config.head_dim**-0.5,
    "block": config.attention_block,
    "window": window,
  }
  top = max_scores(query, key, **how)[None] if config.record_max_scores else None
  return attend(query, key, value, **how), top


def _second_extend(
  params: Block, x: Array, entry: TwoPassCache, config: ModelConfig, appended: Appended, given: Any
):
  inputs = rms_norm(x, params.norm, config.norm_eps)
  query, key, value = project_heads(params.mixer, inputs, config, appended.positions)
  where = {"rows": appended.rows, "positions": appended.positions, "counts": appended.counts}
  second = append_rows(entry.second, key, value, **where)
  out = _mix_cached(
    given, query, entry.first, second, appended.positions, config, appended.counts, appended.rows
  )
  return x + merge_heads(params.mixer, out), dataclasses.replace(entry, second=second), None


def _second_step(
  params: Block, x: Array, entry: TwoPassCache, config: ModelConfig, stepped: Stepped, given: Any
):
  inputs = rms_norm(x, params.norm, config.norm_eps)[:, None]
  active = stepped.active
  positions = jnp.where(active, stepped.lengths, 0)[:, None]  # idle slots need not be read
  query, key, value = project_heads(params.mixer, inputs, config, positions)
  second = append_rows(entry.second, key, value, rows=None, positions=positions, counts=active)
  out = _mix_cached(given, query, entry.first, second, positions, config, active)
  return x + merge_heads(params.mixer, out)[:, 0], dataclasses.replace(entry, second=second), None


def _mix_cached(
  gate: tuple[Array, Array],
  query: Array,
  first: KVCache,
  second: KVCache,
  positions: Array,
  config: ModelConfig,
  counts: Array,
  rows: Array | None = None,
) -> Array:
  assert config.second_pass is not None
  how: dict[str, Any] = {
    "positions": positions,
    "scale": config.head_dim**-0.5,
    "rows": rows,
    "counts": counts,
    "kernels": config.kernels,
  }
  far = attend_cache(query, first.keys, first.values, **how)
  window = config.second_pass.window
  near = attend_cache(query, second.keys, second.values, window=window, **how)
  return _mix(gate, query, far, near)


def _mix(gate: tuple[Array, Array], query: Array, far: Array, near: Array) -> Array:
  """``g far + (1 - g) near`` with a gate of every head, float32, in the dtype of far."""
  weight, bias = (v.astype(jnp.float32) for v in gate)
  logits = jnp.sum(query.astype(jnp.float32) * weight, axis=-1) + bias
  share = jax.nn.sigmoid(logits)[..., None]
  wide = share * far.astype(jnp.float32) + (1.0 - share) * near.astype(jnp.float32)
  return wide.astype(far.dtype)


SECOND_PASS = PassKind(
  field="second_pass",
  spec=gates_spec,
  forward=run_twice,
  decode=decode_twice,
  init_entries=init_entries,
)
