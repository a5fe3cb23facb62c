"""Decoding: slots that keep keys, values, convolution tails and recurrent states between calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.attention import KVCache
from agentjax.models.blocks import KINDS, Appended, BlockKind, Stepped
from agentjax.models.config import ModelConfig
from agentjax.models.exact import chunk_shapes, padded_length, read_out, run_chunk
from agentjax.models.heads import compute_logits
from agentjax.models.linear import Adapted
from agentjax.models.lora import adapter_spec
from agentjax.models.mamba2 import MambaCache
from agentjax.models.mla import LatentCache
from agentjax.models.narrow import WeightDtype, narrow_spec, narrow_weight
from agentjax.models.norm import rms_norm
from agentjax.models.passes import DecodeSection, init_entries, pass_kind
from agentjax.models.spec import ParamSpec, is_spec
from agentjax.models.stack import (
  DecodeParams,
  Params,
  close_stream,
  given_to_blocks,
  num_routers,
  open_stream,
  param_specs,
  unstack,
)
from agentjax.sharding import LOGICAL_AXES, fitting_spec

Array = jax.Array

_FILLED = ("experts", "expert_mlp")
_WIDTHS = {"tpu": 128}  # by platform, a device has a multiple of so many hidden units of an expert
HELD = (KVCache, LatentCache)


@flax.struct.dataclass
class Cache:
  """State of some slots, each one context. What ``read_slots`` returns is a smaller ``Cache``.

  Attributes:
    blocks: per character of the pattern what ``BlockKind.init_cache`` makes (see ``init_entries``
      where blocks run more than once).
    lengths: int32 [slots], tokens each slot holds.
    recent: int32 [slots, C], ids of the tokens since the last multiple of C, which ``blocks`` does
      not hold, with ``config.exact_chunk = C``; None without.
  """

  blocks: tuple[Any, ...]
  lengths: Array
  recent: Array | None = None

  @property
  def slots(self) -> int:
    """Number of slots, static."""
    return self.lengths.shape[0]


class Decoded(NamedTuple):
  """Result of ``extend`` and ``decode_step``.

  Attributes:
    logits: float32 [rows, vocab], of the next token.
    cache: after the tokens.
    experts: int32 [routers, rows, time, choices] ([routers, slots, choices] of one step), the
      experts that tokens went through; None without a router.
    hidden: [rows, time, embed], after the last norm; None of one step, and with exact_chunk.
  """

  logits: Array
  cache: Cache
  experts: Array | None
  hidden: Array | None = None


def prepare_decode_params(
  params: Params,
  config: ModelConfig,
  *,
  heads: bool = False,
  mesh: jax.sharding.Mesh | None = None,
  narrow: WeightDtype | None = None,
) -> DecodeParams:
  """Unstacks the layers and casts to the compute dtype what is used in it.

  Args:
    params: of training, or what ``split_adapters`` gives of them.
    config: of the params.
    heads: keep those that predict further ahead, for drafts; the config has ``mtp`` then.
    mesh: on which they will lie. Where it does not divide experts or their hidden units, some of
      zero are added, which nobody is sent to and which add nothing.
    narrow: format of the matrices of the blocks; None is the compute dtype.
  """

  def prepare(path: Any, spec: ParamSpec, w: Any) -> Any:
    if w is None:
      return None
    if isinstance(w, Adapted):
      factors = adapter_spec(spec, w.a.shape[-1])
      return dataclasses.replace(
        w,
        base=prepare(path, spec, w.base),
        a=prepare((), factors.a, w.a),
        b=prepare((), factors.b, w.b),
      )
    more = [(0, n - m) for m, n in zip(spec.shape, _filled(spec, mesh), strict=True)]
    own = jnp.pad(w, more) if any(n for _, n in more) else w
    if narrow is not None and _in_blocks(path):
      made = narrow_weight(spec, own, narrow, config.compute_dtype)
      if made is not None:
        return made
    return own if spec.wide else own.astype(config.dtype)

  prepared = jax.tree_util.tree_map_with_path(prepare, param_specs(config), params, is_leaf=is_spec)
  return _unstacked(prepared, config, heads)


def _in_blocks(path: Any) -> bool:
  """Whether a leaf of ``Params`` belongs to a block."""
  return bool(path) and path[0].name in ("groups", "mtp")


def decode_specs(
  config: ModelConfig,
  *,
  heads: bool = False,
  mesh: jax.sharding.Mesh | None = None,
  narrow: WeightDtype | None = None,
  adapters: Any = None,
) -> DecodeParams:
  """What ``prepare_decode_params`` gives, as ``ParamSpec``s; of ``adapters`` alone, if given."""

  def prepare(path: Any, spec: ParamSpec, w: Any) -> Any:
    if w is None:
      return None
    if isinstance(w, Adapted):
      factors = adapter_spec(spec, w.a.shape[-1])
      return dataclasses.replace(w, a=prepare((), factors.a, w.a), b=prepare((), factors.b, w.b))
    spec = dataclasses.replace(spec, shape=_filled(spec, mesh))
    if narrow is not None and _in_blocks(path):
      made = narrow_spec(spec, narrow, config.compute_dtype)
      if made is not None:
        return made
    return dataclasses.replace(spec, dtype=spec.dtype if spec.wide else config.compute_dtype)

  specs = param_specs(config)
  prepared = jax.tree_util.tree_map_with_path(
    prepare, specs, specs if adapters is None else adapters, is_leaf=is_spec
  )
  return _unstacked(prepared, config, heads)


def decode_shardings(specs: DecodeParams, mesh: jax.sharding.Mesh) -> DecodeParams:
  """Where the arrays of ``decode_specs`` go; what does not divide is whole on every device."""
  return jax.tree.map(
    lambda spec: jax.sharding.NamedSharding(mesh, fitting_spec(spec.axes, spec.shape, mesh)),
    specs,
    is_leaf=is_spec,
  )


def _filled(spec: ParamSpec, mesh: jax.sharding.Mesh | None) -> tuple[int, ...]:
  """The shape of a weight with as many experts and hidden units as a mesh divides.

  A TPU keeps matrices whose rows are no multiple of 128 by columns, which its grouped product does
  not take: each dispatch would begin with a copy of them.
  """
  if mesh is None or not set(_FILLED) & set(spec.axes):
    return spec.shape
  units = {axis: math.prod(mesh.shape[m] for m in LOGICAL_AXES[axis]) for axis in _FILLED}
  units["expert_mlp"] *= _WIDTHS.get(mesh.devices.flat[0].platform, 1)
  return tuple(
    -(-size // units.get(axis or "", 1)) * units.get(axis or "", 1)
    for axis, size in zip(spec.axes, spec.shape, strict=True)
  )


def cache_shardings(cache: Any, mesh: jax.sharding.Mesh) -> Any:
  """Where the arrays of a cache go: slots as rows of a batch, heads where they divide.

  Args:
    cache: of arrays or their shapes; a ``Cache``, or another tree of blocks' entries.
    mesh: with the axes of ``agentjax.sharding.MESH_AXES``.
  """

  def place(axes: tuple[str | None, ...], x: Any) -> Any:
    known = axes[: x.ndim] + (None,) * (x.ndim - len(axes))
    return jax.sharding.NamedSharding(mesh, fitting_spec(known, x.shape, mesh))

  def entry(node: Any) -> Any:
    # A looped core has an axis of iterations behind that of the slots.
    if isinstance(node, KVCache):
      axes = ("batch", *(None,) * (len(node.keys.shape) - 4), "kv_heads")
      return jax.tree.map(functools.partial(place, axes), node)
    if isinstance(node, MambaCache):
      axes = ("batch", *(None,) * (node.state.ndim - 4), "mamba_heads")
      opening = jax.tree.map(functools.partial(place, ("batch",)), node.opening)
      return MambaCache(place(("batch",), node.tail), place(axes, node.state), opening)
    return place(("batch",), node)

  return jax.tree.map(entry, cache, is_leaf=lambda n: isinstance(n, KVCache | MambaCache))


def in_pages(cache: Any) -> list[bool]:
  """Of each array of a cache, whether it may be ``pages.Paged``: keys, values and latents."""

  def entry(node: Any) -> Any:
    return jax.tree.map(lambda _: isinstance(node, HELD), node)

  return jax.tree.leaves(jax.tree.map(entry, cache, is_leaf=lambda n: isinstance(n, HELD)))


def cache_windows(cache: Any) -> list[int | None]:
  """Of each array of a cache, how many places back it is read (``KVCache``); None is all."""

  def entry(node: Any) -> Any:
    window = (isinstance(node, KVCache) and node.window) or 0
    return jax.tree.map(lambda _: window, node)

  found = jax.tree.map(entry, cache, is_leaf=lambda n: isinstance(n, KVCache))
  return [window or None for window in jax.tree.leaves(found)]


def _unstacked(params: Params, config: ModelConfig, heads: bool) -> DecodeParams:
  out = DecodeParams(
    embedding=params.embedding,
    blocks=tuple(unstack(params.groups, config)),
    final_norm=params.final_norm,
    lm_head=params.lm_head,
    loop=params.loop,
    second_pass=params.second_pass,
    per_layer=params.per_layer,
  )
  if not heads:
    return out
  assert params.mtp is not None and config.mtp is not None
  layers = [
    jax.tree.map(lambda w, i=i: w[i], params.mtp, is_leaf=is_spec)
    for i in range(1 if config.mtp.shared else config.mtp.depths)
  ]
  return dataclasses.replace(out, mtp=tuple(layers))


def init_cache(config: ModelConfig, slots: int, max_length: int) -> Cache:
  """Empty slots that hold up to ``max_length`` tokens each.

  A power of two is the number of slots to take: on CPU, XLA may round exponentials differently in
  the remainder of a vector loop, so that in an odd number of slots the last ones can differ from
  the others in the last bit. The same holds for rows times time in ``extend``.
  """

  size = config.exact_chunk
  return Cache(
    blocks=init_entries(config, slots, padded_length(config, max_length)),
    lengths=jnp.zeros((slots,), jnp.int32),
    recent=jnp.zeros((slots, size), jnp.int32) if size else None,
  )


def extend(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  rows: Int[Array, " rows"],
  token_ids: Int[Array, "rows time"],
  counts: Int[Array, " rows"],
  *,
  sees: Int[Array, "rows time"] | None = None,
  embedded: Float[Array, "rows time embed"] | None = None,
) -> Decoded:
  """Appends tokens to some slots; prefill is the same thing on an empty slot.

  A slot's result depends on nothing but its own past and tokens (and the shapes). The caller keeps
  ``length + count <= max_length``: keys and values past the end are lost.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params.
    cache: donate it, so that it is updated in place.
    rows: slot of each row, no slot twice; out of range for a row that is not used.
    token_ids: [R, C], right-padded.
    counts: tokens of each row that are not padding; a row with 0 leaves its slot as it was.
    sees: last place of the slot that each token sees; None is its own.
    embedded: takes the place of the embeddings of ``token_ids``.

  Returns:
    The logits after the last token of each row, of no meaning where the count is 0; the cache; the
    experts and the hidden state of every token.

  Raises:
    ValueError: ``sees`` or ``embedded`` for a model of which ``config.check_sight`` says so.
  """
  if sees is not None or embedded is not None:
    config.check_sight()
  if cache.recent is not None:
    return _extend_exactly(params, config, cache, cache.recent, rows, token_ids, counts)
  used = (rows >= 0) & (rows < cache.slots) & (counts > 0)
  rows = jnp.where(used, rows, cache.slots)
  starts = cache.lengths.at[rows].get(mode="clip")
  positions = starts[:, None] + jnp.arange(token_ids.shape[1])
  appended = Appended(rows, positions, counts, sees)
  x, entries, routed = _run_stack(params, config, cache, token_ids, appended, embedded)
  x = close_stream(x, config)
  last = jnp.maximum(counts - 1, 0)[:, None, None]
  hidden = jnp.take_along_axis(x, last, axis=1)[:, 0]
  hidden = rms_norm(hidden, params.final_norm, config.norm_eps)
  lengths = cache.lengths.at[rows].add(counts, mode="drop")
  return Decoded(
    logits=compute_logits(params, config, hidden),
    cache=Cache(blocks=entries, lengths=lengths),
    experts=jnp.stack(routed) if routed else None,
    hidden=rms_norm(x, params.final_norm, config.norm_eps),
  )


def decode_step(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  token_ids: Int[Array, " slots"],
  active: Bool[Array, " slots"],
) -> Decoded:
  """Appends one token to every active slot and returns the logits of the next.

  Inactive slots keep keys, values, tail, state and length bit for bit; their logits mean nothing.
  A slot's result depends on nothing but its own past. The caller keeps ``length < max_length`` in
  every active slot.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params.
    cache: donate it, so that it is updated in place.
    token_ids: [S]; any id in an inactive slot.
    active: bool [S].

  Returns:
    The logits, the cache and the experts of every token.
  """
  if cache.recent is not None:
    return _step_exactly(params, config, cache, cache.recent, token_ids, active)
  stepped = Stepped(cache.lengths, active)
  x, entries, routed = _run_stack(params, config, cache, token_ids, stepped)
  hidden = rms_norm(close_stream(x, config), params.final_norm, config.norm_eps)
  return Decoded(
    logits=compute_logits(params, config, hidden),
    cache=Cache(blocks=entries, lengths=cache.lengths + active.astype(jnp.int32)),
    experts=jnp.stack(routed) if routed else None,
  )


def _extend_exactly(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  recent: Array,
  rows: Array,
  token_ids: Array,
  counts: Array,
) -> Decoded:
  """``extend`` by ``run_chunk``: one row after the other, from the last border of a chunk on."""
  size, time = config.exact_chunk, token_ids.shape[1]
  used = (rows >= 0) & (rows < cache.slots) & (counts > 0)
  (busy,) = jnp.nonzero(used, size=rows.shape[0], fill_value=0)
  pieces = -(-(size - 1 + time) // size)

  def one_row(step: Array, carry: _Carry) -> _Carry:
    row = busy[step]
    slot, count = rows[row], counts[row]
    length = carry.lengths[slot]
    begin = length % size
    total = begin + count
    ids = jnp.zeros(((pieces + 1) * size,), jnp.int32).at[:size].set(carry.recent[slot])
    ids = jax.lax.dynamic_update_slice_in_dim(ids, token_ids[row], begin, axis=0)

    def one_chunk(piece: Array, inner: tuple[Any, Array, Any]) -> tuple[Any, Array, Any]:
      blocks, _, routed = inner
      at = piece * size
      here = jnp.minimum(total - at, size)
      tokens = jax.lax.dynamic_slice_in_dim(ids, at, size)
      run = run_chunk(params, config, blocks, slot, tokens, length - begin + at, here)
      if run.experts is not None:
        routed = jax.lax.dynamic_update_slice_in_dim(routed, run.experts, at, axis=1)
      return run.entries, run.hidden[here - 1], routed

    routed = None
    if shapes.experts is not None:
      routers, _, choices = shapes.experts.shape
      routed = jnp.zeros((routers, ids.size, choices), jnp.int32)
    hidden = jnp.zeros(shapes.hidden.shape[1:], shapes.hidden.dtype)
    blocks, hidden, routed = jax.lax.fori_loop(
      0, -(-total // size), one_chunk, (carry.blocks, hidden, routed)
    )
    if routed is not None:
      routed = jax.lax.dynamic_slice_in_dim(routed, begin, time, axis=1)
    rest = jax.lax.dynamic_slice_in_dim(ids, total // size * size, size)
    return _Carry(
      blocks=blocks,
      recent=carry.recent.at[slot].set(rest),
      lengths=carry.lengths.at[slot].add(count),
      logits=carry.logits.at[row].set(read_out(params, config, hidden, count)),
      experts=None if routed is None else carry.experts.at[:, row].set(routed),
    )

  shapes = chunk_shapes(params, config, cache.blocks)
  carry = _carry(config, cache, recent, rows.shape[0], (rows.shape[0], time))
  return jax.lax.fori_loop(0, jnp.sum(used), one_row, carry).decoded()


def _step_exactly(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  recent: Array,
  token_ids: Array,
  active: Array,
) -> Decoded:
  """``decode_step`` by ``run_chunk``: one active slot after the other runs its chunk again."""
  (busy,) = jnp.nonzero(active, size=cache.slots, fill_value=0)

  def one_slot(step: Array, carry: _Carry) -> _Carry:
    slot = busy[step]
    length = carry.lengths[slot]
    place = length % config.exact_chunk
    count = place + 1
    tokens = carry.recent[slot].at[place].set(token_ids[slot])
    run = run_chunk(params, config, carry.blocks, slot, tokens, length - place, count)
    experts = carry.experts
    if run.experts is not None:
      experts = experts.at[:, slot].set(run.experts[:, place])
    return _Carry(
      blocks=run.entries,
      recent=carry.recent.at[slot].set(tokens),
      lengths=carry.lengths.at[slot].add(1),
      logits=carry.logits.at[slot].set(read_out(params, config, run.hidden[place], count)),
      experts=experts,
    )

  carry = _carry(config, cache, recent, cache.slots, (cache.slots,))
  return jax.lax.fori_loop(0, jnp.sum(active), one_slot, carry).decoded()


class _Carry(NamedTuple):
  """What the exact loops over slots pass on."""

  blocks: tuple[Any, ...]
  recent: Array
  lengths: Array
  logits: Array
  experts: Any

  def decoded(self) -> Decoded:
    """As a result."""
    return Decoded(self.logits, Cache(self.blocks, self.lengths, self.recent), self.experts)


def _carry(
  config: ModelConfig, cache: Cache, recent: Array, rows: int, tokens: tuple[int, ...]
) -> _Carry:
  routers = num_routers(config)
  shape = (routers, *tokens, config.experts_per_token)
  return _Carry(
    blocks=cache.blocks,
    recent=recent,
    lengths=cache.lengths,
    logits=jnp.zeros((rows, config.vocab_size), jnp.float32),
    experts=jnp.zeros(shape, jnp.int32) if routers else None,
  )


def _run_stack(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  token_ids: Array,
  where: Appended | Stepped,
  embedded: Array | None = None,
) -> tuple[Any, tuple[Any, ...], list[Array]]:
  """The stream after the last block, the entries of all blocks, the experts of each router."""
  x, per_layer = open_stream(params, config, token_ids, embedded)
  sections, start = [], 0
  given = given_to_blocks(config, None, per_layer, token_ids)
  for pattern in config.sections:
    here = slice(start, start + len(pattern))
    sections.append(DecodeSection(pattern, params.blocks[here], cache.blocks[here], given[here]))
    start += len(pattern)
  run = functools.partial(run_section, config=config, where=where)
  passes = pass_kind(config)
  if passes is None:
    return run(x, sections[0])
  own = getattr(params, passes.field)
  return passes.decode(own, x, token_ids, tuple(sections), config, where, run)


def run_section(
  x: Any,
  section: DecodeSection,
  *,
  config: ModelConfig,
  where: Appended | Stepped,
  kinds: Mapping[str, BlockKind] = KINDS,
) -> tuple[Any, tuple[Any, ...], list[Array]]:
  """Applies the blocks of a stretch of the pattern."""
  entries, routed = [], []
  for kind, block, entry, given in zip(*section, strict=True):
    decode = kinds[kind].extend if isinstance(where, Appended) else kinds[kind].step
    x, entry, experts = decode(block, x, entry, config, where, given)
    entries.append(entry)
    routed += [] if experts is None else [experts]
  return x, tuple(entries), routed
