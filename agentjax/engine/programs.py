"""The engine's compiled functions: few, of fixed shape, with the cache updated in place."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from agentjax.engine.config import EngineConfig
from agentjax.engine.decoding import Decoding, DeviceState, compact_experts, feed_heads
from agentjax.engine.home import Home, processes_of
from agentjax.engine.request import Chunk, DecodePlan
from agentjax.engine.speculation import written
from agentjax.models import ModelConfig
from agentjax.models.attend import CACHE_BLOCK
from agentjax.models.exact import padded_length
from agentjax.models.lora import join_adapters
from agentjax.models.narrow import NARROW
from agentjax.models.pages import (
  Paged,
  Pieces,
  Quantised,
  is_paged,
  place_index,
  read_places,
  write_places,
)
from agentjax.models.pieces import join_entries, states
from agentjax.sharding import dispatching, fitting_spec, in_order, row_multiple
from pallas_kernels.paged_attention import quantize_tokens

Array = jax.Array


_WITHOUT_PAST = ("lengths", "logits", "stopped")  # in the slot of a model which only attends


class _Group(NamedTuple):
  """Keys and values that move as one array: of one dtype, split over the same mesh axes."""

  dtype: Any
  axes: tuple[str, ...] = ()
  ways: int = 1


@dataclasses.dataclass(eq=False)
class PagedLayers:
  """Layers that look equally far back: they share a table of pages, and the programs that move one.

  A page has the same tokens in each of these layers.

  Attributes:
    number: of the table.
    window: how many places back a token looks, its own included; None is all.
    back: tokens at the end of a context that are still needed; None is all.
    block_tokens: tokens of a page.
    pages: of one way, the first of which is nobody's.
    follows: whether ``EngineConfig.cache_tokens`` decides the number of pages, not the slots.
    groups: what moves as one array.
    block_spec: of one page; of each group.
    block_bytes: size of one page.
    copy: copies pages to others.
    write: puts keys and values into pages.
    read_blocks: takes keys and values out of pages.
  """

  number: int
  window: int | None
  back: int | None
  block_tokens: int
  pages: int
  follows: bool
  groups: tuple[_Group, ...] = ()
  block_spec: tuple[jax.P, ...] = ()
  block_bytes: int = 0
  copy: Any = None
  write: Any = None
  read_blocks: Any = None

  def passed(self, tokens: int) -> int:
    """Pages at the start of a context of so many tokens that nobody needs any more."""
    return 0 if self.back is None else max(0, tokens - self.back) // self.block_tokens


class Programs:
  """One jitted function a job. Shapes depend on the configs alone, never on the requests.

  ``config`` is that of one lane. ``programs_of_lane`` shares programs between engines. On a mesh
  slots are rows of a batch, heads and the vocabulary are split over "tensor" and experts over
  "expert", as far as they divide.

  Keys, values and latents of all slots lie in pages of ``block_tokens`` tokens. Layers that look
  back through the same window have pages in common, and a table of them, int32 [slots, entries];
  the host has the tables and hands them to each dispatch. Pages before the window are free for
  others; with ``config.pieces`` layers keep all their pages, in one table. What else a block keeps
  lies in the slot.

  Attributes:
    mesh: of the lane; None for one device.
    params_spec: of the decode parameters; None for one device.
    state_spec: of a context's state, likewise.
    layers: what keeps keys and values, by window.
    extend_rows: of each bucket, a multiple of what the mesh splits a batch over.
    prepare: training parameters to per-layer decode parameters, a copy in any case.
    prepare_adapters: the same of the adapters of ``split_adapters``.
    extend: one function a bucket.
    decode: up to ``chunk_tokens`` tokens for all slots.
    place: gives several slots a context's state.
    read: takes a context's state out of a slot.
    join: states of pieces in a row; compiled for each number of them.
    traces: how often each was compiled; more than once means a shape leaked in, or other devices.
    block_tokens: tokens of a page.
    entries: pages of a context of ``max_length``.
    table_shape: of what ``extend`` and ``decode`` know of pages: their numbers by layers, and with
      ``config.pieces`` behind them what ``models.pages.Pieces`` holds.
    ways: parts in which slots and pages are split over the mesh; a slot has pages of its own part.
    max_tokens: that a context can hold: ``max_length``, or less where pages are fewer.
    unsettled: tokens at the end of a context at whose places something may still change.
    transfer_blocks: pages that ``write`` and ``read_blocks`` move at once.
    copies: pages that ``copy`` copies at once.
    has_blocks: whether the model has keys and values at all.
    attention_only: whether it has nothing else, so that a part of a context can be had from it.
    state_bytes: size of a context's state.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: EngineConfig,
    vocab_limit: int | None,
    mesh: jax.sharding.Mesh | None = None,
  ) -> None:
    self.slots, self.mesh = config.slots, mesh
    self.place_width = min(self.slots, 16)
    self.traces: collections.Counter[str] = collections.Counter()
    self._in_thread = threading.local()
    self._model, self._config, self._vocab_limit = model_config, config, vocab_limit
    self.ways = 1 if mesh is None else row_multiple(mesh)
    self._count_pages()
    shapes = jax.tree.leaves(self._shapes)
    self._specs = [jax.P()] * len(shapes)
    self.params_spec: Any = None
    whole: Any = None
    read: Any = None  # by the host; where that is several, each has it whole
    if mesh is not None:
      if len(processes_of(tuple(mesh.devices.flat))) > 1:
        read = jax.sharding.NamedSharding(mesh, jax.P())
      whole = self._shardings(mesh)
      self._specs = [sharding.spec for sharding in jax.tree.leaves(whole)]
      self.params_spec = self.placed_spec()
    self.extend_rows = {
      tokens: -(-rows // self.ways) * self.ways
      for tokens, rows in zip(config.extend_buckets, config.extend_rows, strict=True)
    }
    self.initial = self._jit("initial", self._initial, out=whole)
    self.prepare = self._jit("prepare", self._prepare, own=False)
    self.prepare_adapters = self._jit("prepare_adapters", self._prepare, own=False)
    self.decode = self._jit("decode", self._decode, out=(whole, read), donate=True)
    self._group_of = [
      None if layers is None else self._group(v.dtype, spec)
      for v, layers, spec in zip(shapes, self._paged, self._specs, strict=True)
    ]
    self.state_spec = tuple(
      jax.P(None, *spec[1:]) for spec, p in zip(self._specs, self._paged, strict=True) if p is None
    )
    each = [math.prod(v.shape[1:]) * v.dtype.itemsize for v in shapes]
    self.state_bytes = sum(n for n, p in zip(each, self._paged, strict=True) if p is None)
    self.place = self._jit("place", self._place, out=whole, donate=True)
    self.read = self._jit("read", self._read, out=self._placed(self.state_spec))
    self.join = self._jit("join", self._join)
    for layers in self.layers:
      self._add_moves(layers, each, whole)
    self.extend = {
      tokens: self._jit(f"extend_{rows}x{tokens}", self._extend, out=(whole, read), donate=True)
      for tokens, rows in self.extend_rows.items()
    }

  def _count_pages(self) -> None:
    """Which arrays of the state lie in pages, and how many pages there are."""
    config, model = self._config, self._model
    shapes = jax.eval_shape(self._empty)
    held = models.in_pages(shapes)
    self.has_blocks = any(held)
    own = len(_WITHOUT_PAST) + (shapes.grammar_state is not None) + (shapes.history is not None)
    self.attention_only = held.count(False) == own
    self._length = padded_length(model, config.max_length)
    self.block_tokens = min(config.block_tokens, config.max_length)
    self.entries = -(-self._length // self.block_tokens) if self.has_blocks else 1
    self.unsettled = 0 if shapes.mtp_cache is None else len(shapes.mtp_cache.entries)
    self.max_tokens = config.max_length
    self._by_window: dict[int | None, PagedLayers] = {}
    windows = zip(models.cache_windows(shapes), held, strict=True)
    for window in sorted({window or 0 for window, paged in windows if paged}):
      self._add_layers(window or None)
    self.layers = tuple(dict.fromkeys(self._by_window.values()))
    laid_out = len(dataclasses.fields(Pieces)) if config.pieces else 0
    self.table_shape = (len(self.layers) + laid_out, self.slots, self.entries)
    self._held = self.layers_of(shapes)
    self.transfer_blocks = min(8, self.entries)
    self.copies = min([64, *(self.ways * layers.pages for layers in self.layers)])
    self._shapes = jax.eval_shape(self._initial)
    self._paged = self.layers_of(self._shapes)

  def _add_layers(self, window: int | None) -> None:
    """Counts the pages of the layers with a window.

    With a window they suffice for all slots while these draw, a chunk ahead of what the host knows,
    for as many contexts without a slot, and for one dispatch of any extension.
    """
    config, slots = self._config, self.slots // self.ways
    room = self.pages_of(config.cache_tokens // self.ways) or slots * self.entries
    most, back, follows = self.entries, None, True
    if window is not None:
      back = window - 1 + self.unsettled
      drawing = 1 + self.pages_of(back + 2 * config.chunk_tokens - 1)  # wherever a page begins
      # No context would ever give a page back; or none may, as its places are not its positions.
      if drawing >= self.entries or config.pieces:
        if None not in self._by_window:
          self._add_layers(None)
        self._by_window[window] = self._by_window[None]
        return
      sizes = zip(config.extend_buckets, config.extend_rows, strict=True)
      extending = max(min(rows, slots) * self.pages_of(tokens) for tokens, rows in sizes)
      most = min(most, drawing + self.pages_of(config.extend_buckets[-1]))
      keeping = 1 + self.pages_of(back - 1)
      need = slots * (drawing + keeping) + extending
      follows, room = room < need, min(room, need)
    # A context's last pages are copied where another goes on from them.
    spare = 1 + self.pages_of(self.unsettled)
    self._by_window[window] = PagedLayers(
      number=len(set(self._by_window.values())),
      window=window,
      back=back,
      block_tokens=self.block_tokens,
      pages=1 + room + spare,
      follows=follows,
    )
    if room < most:
      self.max_tokens = min(self.max_tokens, room * self.block_tokens)

  def _add_moves(self, layers: PagedLayers, each: Sequence[int], whole: Any) -> None:
    """The programs that move pages of some layers; ``each``: bytes of an array, by page or slot."""
    own = [i for i, found in enumerate(self._paged) if found is layers]
    groups = (self._group_of[i] for i in own)
    layers.groups = tuple(dict.fromkeys(group for group in groups if group is not None))
    layers.block_spec = tuple(
      jax.P(group.axes or None) if group.ways > 1 else jax.P() for group in layers.groups
    )
    layers.block_bytes = sum(each[i] for i in own)

    def jit(function: Callable[..., Any], out: Any, *, donate: bool) -> Any:
      name = function.__name__.removeprefix("_")
      name += "" if layers.window is None else f"_{layers.window}"
      return self._jit(name, functools.partial(function, layers), out=out, donate=donate)

    layers.copy = jit(self._copy, whole, donate=True)
    layers.write = jit(self._write, whole, donate=True)
    blocks = (self._placed(layers.block_spec),) * self.transfer_blocks
    layers.read_blocks = jit(self._read_blocks, blocks, donate=False)

  def layers_of(self, state: Any) -> list[PagedLayers | None]:
    """Of each array of a state, the layers it belongs to; None where it lies in the slot."""
    both = zip(models.cache_windows(state), models.in_pages(state), strict=True)
    return [self._by_window[window] if paged else None for window, paged in both]

  def pages_of(self, tokens: int) -> int:
    """Pages that so many tokens of one context take."""
    return -(-tokens // self.block_tokens) if self.has_blocks else 0

  def context_bytes(self, tokens: int) -> int:
    """What a context of so many tokens takes in the store."""
    pages = self.pages_of(tokens)
    kept = sum((pages - each.passed(tokens)) * each.block_bytes for each in self.layers)
    return self.state_bytes + kept

  @property
  def traces_here(self) -> int:
    """How often something was compiled in this thread."""
    return getattr(self._in_thread, "traces", 0)

  def _jit(
    self,
    name: str,
    function: Callable[..., Any],
    *,
    out: Any = None,
    donate: bool = False,
    own: bool = True,
  ) -> Any:
    """Jits; with ``own``, for the lane's mesh, and its result laid out as ``out`` says."""

    def counted(*args: Any) -> Any:
      self.traces[name] += 1
      self._in_thread.traces = self.traces_here + 1
      return function(*args)

    counted.__name__ = name
    donated = (0,) if donate else ()
    if self.mesh is None or not own:
      return jax.jit(counted, donate_argnums=donated)
    return _OnMesh(jax.jit(counted, donate_argnums=donated, out_shardings=out), name, self.mesh)

  def _shardings(self, mesh: jax.sharding.Mesh) -> DeviceState:
    shapes = self._shapes

    def place(x: Any, *axes: str | None) -> Any:
      return (
        None if x is None else jax.sharding.NamedSharding(mesh, fitting_spec(axes, x.shape, mesh))
      )

    return DeviceState(
      cache=models.cache_shardings(shapes.cache, mesh),
      logits=place(shapes.logits, "batch", "vocab"),
      stopped=place(shapes.stopped, "batch"),
      grammar_state=place(shapes.grammar_state, "batch"),
      history=place(shapes.history, "batch", None),
      mtp_cache=models.cache_shardings(shapes.mtp_cache, mesh),
    )

  def _params_specs(self, adapters: Any = None) -> models.DecodeParams:
    return models.decode_specs(self._model, **self._lane_params(), adapters=adapters)

  def _lane_params(self) -> dict[str, Any]:
    """What the lane needs of parameters, for ``prepare_decode_params``."""
    config = self._config
    return {"heads": config.speculate == "mtp", "mesh": self.mesh, "narrow": config.weight_dtype}

  def placed_spec(self, adapters: Any = None) -> Any:
    """How the decode parameters are split, or of ``split_adapters`` the adapters; on a mesh."""
    assert self.mesh is not None
    placed = models.decode_shardings(self._params_specs(adapters), self.mesh)
    return jax.tree.map(lambda sharding: sharding.spec, placed)

  def _placed(self, specs: Any) -> Any:
    """Shardings on the lane's mesh; None on one device."""
    if self.mesh is None:
      return None
    return tuple(jax.sharding.NamedSharding(self.mesh, spec) for spec in specs)

  def _group(self, dtype: Any, spec: jax.P) -> _Group:
    if self.mesh is None:
      return _Group(dtype)
    split = next((entry for entry in spec[1:] if entry is not None), ())
    axes = (split,) if isinstance(split, str) else tuple(split)
    return _Group(dtype, axes, math.prod(self.mesh.shape[axis] for axis in axes))

  def abstract_arguments(
    self, home: Home, adapters: Any = None
  ) -> tuple[DeviceState, models.DecodeParams, DecodePlan]:
    """Shapes, dtypes and places of what ``decode`` takes, for compilation without data.

    ``home`` may be of devices that are only described. ``adapters``, specs as from
    ``split_adapters``, are beside the weights.
    """

    def placed(x: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home.sharding(spec))

    leaves, tree = jax.tree.flatten(self._shapes)
    state = jax.tree.unflatten(tree, map(placed, leaves, self._specs))

    def laid_out(adapters: Any) -> Any:
      shapes = models.abstract(self._params_specs(adapters))
      whole = jax.tree.map(lambda _: jax.P(), shapes)
      return jax.tree.map(
        placed, shapes, whole if self.mesh is None else self.placed_spec(adapters)
      )

    params = laid_out(None)
    if adapters is not None:
      params = join_adapters(params, laid_out(adapters))
    config = self._config
    plan = DecodePlan.idle(self.slots, config.chunk_tokens, config.max_stop_ids, self.table_shape)
    return state, params, jax.tree.map(lambda v: placed(v, jax.P()), plan)

  def abstract_extension(self, home: Home, tokens: int, adapters: Any = None) -> tuple[Any, ...]:
    """The same of what ``extend[tokens]`` takes."""
    rows, whole = self.extend_rows[tokens], home.sharding(jax.P())
    given = [
      jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)
      for shape in ((rows,), (rows, tokens), (rows,), self.table_shape)
    ]
    return *self.abstract_arguments(home, adapters)[:2], *given, None

  def _initial(self) -> DeviceState:
    leaves, tree = jax.tree.flatten(jax.eval_shape(self._empty))
    rest = jax.tree.leaves(self._empty())  # zeros of this size are never made
    narrow = NARROW.get(self._config.cache_dtype or "")

    def pool(v: Any, pages: int) -> Any:
      shape = (self.ways * pages, *v.shape[1:-2], self.block_tokens, v.shape[-1])
      if narrow is None:
        return jnp.zeros(shape, v.dtype)
      return Quantised(jnp.zeros(shape, narrow), jnp.zeros(shape[:-1], jnp.float32))

    made = [
      own if layers is None else pool(v, layers.pages)
      for v, own, layers in zip(leaves, rest, self._held, strict=True)
    ]
    return jax.tree.unflatten(tree, made)

  def _empty(self) -> DeviceState:
    """Empty slots that share nothing."""
    length = self._config.max_length
    return DeviceState(
      cache=models.init_cache(self._model, self.slots, length),
      logits=jnp.zeros((self.slots, self._model.vocab_size), jnp.float32),
      stopped=jnp.zeros(self.slots, bool),
      grammar_state=jnp.zeros(self.slots, jnp.int32) if self._config.grammar_states else None,
      history=jnp.zeros((self.slots, length), jnp.int32)
      if self._config.speculate == "ngram"
      else None,
      mtp_cache=models.init_mtp_cache(self._model, self.slots, length, self._config.draft_tokens)
      if self._config.speculate == "mtp"
      else None,
    )

  def _with_tables(self, device: DeviceState, tables: Array) -> DeviceState:
    """The state as blocks read it."""
    leaves, tree = jax.tree.flatten(device, is_leaf=lambda v: isinstance(v, Quantised))
    pieces = Pieces(*tables[len(self.layers) :]) if self._config.pieces else None

    def held(v: Any, layers: PagedLayers | None) -> Any:
      if layers is None:
        return v
      table = tables[layers.number]
      if not isinstance(v, Quantised):
        return Paged(v, table, self._length, self.ways, pieces=pieces)
      return Paged(
        v.numbers,
        table,
        self._length,
        self.ways,
        scales=v.scales,
        dtype=self._model.dtype,
        pieces=pieces,
      )

    return jax.tree.unflatten(tree, map(held, leaves, self._held))

  @staticmethod
  def _pools(device: DeviceState) -> DeviceState:
    """Inverse of ``_with_tables``."""

    def pool(v: Any) -> Any:
      if not is_paged(v):
        return v
      return v.pool if v.scales is None else Quantised(v.pool, v.scales)

    return jax.tree.map(pool, device, is_leaf=is_paged)

  def _prepare(self, params: Any) -> Any:
    # Arrays that pass through unchanged would be shared with the trainer, which donates them.
    prepared = models.prepare_decode_params(params, self._model, **self._lane_params())
    return jax.tree.map(jnp.copy, prepared)

  def _extend(
    self,
    device: DeviceState,
    params: Any,
    rows: Array,
    token_ids: Array,
    counts: Array,
    tables: Array,
    policies: Array | None = None,
  ) -> tuple[DeviceState, Array | None]:
    """``counts[r]`` tokens into slot ``rows[r]``; a row that is not used names no slot.

    ``policies`` are those of the rows, where there are several (``lora.Shared``).

    Beside the state, what the routers chose, [rows, tokens, routers, choices], where recorded.
    """
    device = self._with_tables(device, tables)
    params = params if policies is None else params.for_rows(policies)
    out = models.extend(params, self._model, device.cache, rows, token_ids, counts)
    logits = device.logits.at[rows].set(out.logits, mode="drop")
    history, mtp_cache = device.history, device.mtp_cache
    starts = device.cache.lengths.at[rows].get(mode="clip")
    if history is not None:
      history = written(history, rows, starts, token_ids, counts)
    if mtp_cache is not None:
      where, limit = (rows, starts, counts), self._config.max_length
      mtp_cache = feed_heads(
        params, self._model, mtp_cache, where, out.hidden, token_ids, max_length=limit
      )
    device = dataclasses.replace(
      device, cache=out.cache, logits=logits, history=history, mtp_cache=mtp_cache
    )
    experts = compact_experts(self._model, out.experts, record=self._config.record_experts)
    return self._pools(device), experts

  def _place(
    self, device: DeviceState, state: tuple[Array, ...], rows: Array, count: Array
  ) -> DeviceState:
    """Every slot of ``rows[:count]`` gets this state."""
    leaves, tree = jax.tree.flatten(device)
    own = [i for i, layers in enumerate(self._paged) if layers is None]

    def one(i: Array, values: list[Array]) -> list[Array]:
      return [
        jax.lax.dynamic_update_slice_in_dim(value, fill, rows[i], axis=0)
        for value, fill in zip(values, state, strict=True)
      ]

    placed = jax.lax.fori_loop(0, count, one, [leaves[i] for i in own])
    for i, value in zip(own, placed, strict=True):
      leaves[i] = value
    return jax.tree.unflatten(tree, leaves)

  def _over_pages(
    self,
    layers: PagedLayers,
    device: DeviceState,
    count: Array,
    one: Callable[[Array, list[Array]], list[Array]],
  ) -> DeviceState:
    """``one(i, pools) -> pools`` for i of 0 to ``count``."""
    leaves, tree = jax.tree.flatten(device)
    at = [i for i, found in enumerate(self._paged) if found is layers]
    for i, pool in zip(at, jax.lax.fori_loop(0, count, one, [leaves[i] for i in at]), strict=True):
      leaves[i] = pool
    return jax.tree.unflatten(tree, leaves)

  def _copy(
    self, layers: PagedLayers, device: DeviceState, sources: Array, targets: Array, count: Array
  ) -> DeviceState:
    """Page ``targets[i]`` becomes what ``sources[i]`` was before; no target is also a source."""

    def one(i: Array, pools: list[Array]) -> list[Array]:
      return [
        jax.lax.dynamic_update_slice_in_dim(
          pool, jax.lax.dynamic_slice_in_dim(pool, sources[i], 1, axis=0), targets[i], axis=0
        )
        for pool in pools
      ]

    return self._over_pages(layers, device, count, one)

  def _write(
    self,
    layers: PagedLayers,
    device: DeviceState,
    blocks: tuple[tuple[Array, ...], ...],
    targets: Array,
    count: Array,
  ) -> DeviceState:
    """``blocks[:count]`` become the pages ``targets[:count]``."""
    own = self._pools_of(layers)
    stacked = {group: jnp.stack(v) for group, *v in zip(layers.groups, *blocks, strict=True)}

    def one(i: Array, pools: list[Array]) -> list[Array]:
      taken, written = dict.fromkeys(layers.groups, 0), []
      for pool, (group, spec) in zip(pools, own, strict=True):
        shape = (1, *pool.shape[1:])
        end = taken[group] + math.prod(shape) // group.ways
        flat = stacked[group][i, ..., taken[group] : end]
        part = self._unflatten(flat, shape, spec, group.ways)
        taken[group] = end
        written.append(jax.lax.dynamic_update_slice_in_dim(pool, part, targets[i], axis=0))
      return written

    return self._over_pages(layers, device, count, one)

  def _read(self, device: DeviceState, slot: Array) -> tuple[Array, ...]:
    """The part of a context that lies in the slot itself."""
    return tuple(
      jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)
      for leaf, layers in zip(jax.tree.leaves(device), self._paged, strict=True)
      if layers is None
    )

  def _read_blocks(
    self, layers: PagedLayers, device: DeviceState, pages: Array
  ) -> tuple[tuple[Array, ...], ...]:
    """Some pages.

    One is a flat array of each dtype: to hand over many small ones costs the host more.
    """
    leaves = zip(jax.tree.leaves(device), self._paged, strict=True)
    pools = [leaf for leaf, found in leaves if found is layers]

    def block(page: Array) -> tuple[Array, ...]:
      return self._flat(layers, [jax.lax.dynamic_slice_in_dim(v, page, 1, axis=0) for v in pools])

    return tuple(block(pages[i]) for i in range(self.transfer_blocks))

  def flat_blocks(self, pages: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """Pages of the host [pages, ..., tokens, width], an array for each pool, as ``write`` takes.

    With ``config.pieces``: all pools share one table.
    """
    (layers,) = self.layers
    narrow = NARROW.get(self._config.cache_dtype or "")
    every: list[Any] = list(pages)
    if narrow is not None:
      every = [part for v in pages for part in quantize_tokens(jnp.asarray(v), narrow)]
    blocks = (self._flat(layers, [v[i : i + 1] for v in every]) for i in range(len(pages[0])))
    return [tuple(np.asarray(v) for v in block) for block in blocks]

  def _read_as(self, state: Sequence[Array]) -> DeviceState:
    """What ``read`` gave, with 0 for all that lies in pages."""
    rest = iter(state)
    leaves = [0 if paged else next(rest) for paged in self._paged]
    return jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)

  def entries_of(self, state: Sequence[Array]) -> tuple[Any, ...]:
    """The entries of what ``read`` gave, None where they lie in pages."""
    return states(self._read_as(state).cache.blocks)

  def state_of(
    self, blank: Sequence[Array], entries: Sequence[Any], length: int
  ) -> tuple[Array, ...]:
    """What ``read`` would give of a slot with these entries, None where they lie in pages.

    ``blank`` is what it gives of an empty slot.
    """
    device = self._read_as(blank)
    blocks = tuple(
      own if new is None else new for own, new in zip(device.cache.blocks, entries, strict=True)
    )
    lengths = jnp.full(device.cache.lengths.shape, length, jnp.int32)
    cache = dataclasses.replace(device.cache, blocks=blocks, lengths=lengths)
    filled = jax.tree.leaves(dataclasses.replace(device, cache=cache))
    return tuple(v for v, paged in zip(filled, self._paged, strict=True) if not paged)

  def _join(self, params: Any, entries: Any, starts: Array) -> tuple[Any, ...]:
    return join_entries(params, self._model, entries, starts)

  def _pools_of(self, layers: PagedLayers) -> list[tuple[_Group, jax.P]]:
    """Groups and specs of some layers' pools."""
    every = zip(self._group_of, self._specs, self._paged, strict=True)
    return [(group, spec) for group, spec, found in every if found is layers and group is not None]

  def _flat(self, layers: PagedLayers, page: Sequence[Array]) -> tuple[Array, ...]:
    """One page of each of the layers' pools, each [1, ...], as one array for each group."""
    parts: dict[_Group, list[Array]] = {group: [] for group in layers.groups}
    for part, (group, spec) in zip(page, self._pools_of(layers), strict=True):
      parts[group].append(self._flatten(part, spec, group.ways))
    return tuple(jnp.concatenate(part, axis=-1) for part in parts.values())

  def _flatten(self, part: Array, spec: jax.P, ways: int) -> Array:
    """[n], or [ways, n / ways] of what lies on each device along the axis that is split."""
    if ways == 1:
      return part.reshape(-1)
    at = next(d for d in range(1, len(spec)) if spec[d] is not None)
    shape = (*part.shape[:at], ways, part.shape[at] // ways, *part.shape[at + 1 :])
    return jnp.moveaxis(part.reshape(shape), at, 0).reshape(ways, -1)

  def _unflatten(self, flat: Array, shape: tuple[int, ...], spec: jax.P, ways: int) -> Array:
    if ways == 1:
      return flat.reshape(shape)
    at = next(d for d in range(1, len(spec)) if spec[d] is not None)
    parts = (ways, *shape[:at], shape[at] // ways, *shape[at + 1 :])
    return jnp.moveaxis(flat.reshape(parts), 0, at).reshape(shape)

  def _decode(
    self, device: DeviceState, params: Any, plan: DecodePlan
  ) -> tuple[DeviceState, Chunk]:
    params = params if plan.policies is None else params.for_rows(plan.policies)
    plan = plan._replace(budget=jnp.where(plan.ahead & device.stopped, 0, plan.budget))
    decoding = Decoding(self._model, self._config, self._vocab_limit, params, plan)
    run = decoding.run if self._config.speculate == "none" else decoding.run_with_drafts
    paged = self._with_tables(device, plan.tables)
    # Laid out, a chunk would read its own tokens as they were before they became narrow.
    narrow = self._config.cache_dtype is not None
    if self._length > CACHE_BLOCK or narrow or self._config.pieces:
      after, chunk = run(paged)
    else:
      after, chunk = run(self._laid_out(paged))
      after = self._put_back(paged, after)
    return self._pools(after), chunk

  def _laid_out(self, device: DeviceState) -> DeviceState:
    """Every slot in one piece: it is short enough to be copied once and not in every step."""
    return jax.tree.map(
      lambda v: read_places(v, None, 0, self._length) if is_paged(v) else v,
      device,
      is_leaf=is_paged,
    )

  def _put_back(self, before: DeviceState, after: DeviceState) -> DeviceState:
    """What was decoded in slots ``_laid_out``, in their pages."""
    back, size = self.unsettled, self._config.chunk_tokens
    places = before.cache.lengths[:, None] + jnp.arange(-back, size)
    new = (places >= 0) & (places < after.cache.lengths[:, None])
    places = jnp.where(new, places, self._length)
    slots = jnp.arange(self.slots)[:, None]

    def put(held: Any, whole: Array) -> Any:
      if not is_paged(held):
        return whole
      values = whole.at[place_index(whole, slots, places)].get(mode="clip")
      return write_places(held, None, places, values)

    return jax.tree.map(put, before, after, is_leaf=is_paged)


class _OnMesh:
  """A jitted function that runs under its mesh, after what else exchanges data there."""

  def __init__(self, function: Any, name: str, mesh: jax.sharding.Mesh) -> None:
    self._function, self.__name__, self._mesh = function, name, mesh

  def __call__(self, *args: Any) -> Any:
    with dispatching(of_lane=True), jax.set_mesh(self._mesh):
      return in_order(self._function(*args))

  def trace(self, *args: Any) -> Any:
    """As of a jitted function."""
    with jax.set_mesh(self._mesh):
      return self._function.trace(*args)

  def lower(self, *args: Any) -> Any:
    """As of a jitted function."""
    with jax.set_mesh(self._mesh):
      return self._function.lower(*args)


def programs_of_lane(
  model_config: ModelConfig,
  config: EngineConfig,
  vocab_limit: int | None,
  mesh: jax.sharding.Mesh | None = None,
) -> Programs:
  """Programs for one lane of ``config``: one set for all lanes and engines of the same shapes.

  On a mesh they are those of its devices alone.
  """
  lane = EngineConfig(
    slots=config.slots // config.lanes,
    max_length=config.max_length,
    cache_tokens=config.cache_tokens // config.lanes,
    chunk_tokens=config.chunk_tokens,
    extend_buckets=config.extend_buckets,
    extend_rows=config.extend_rows,
    block_tokens=config.block_tokens,
    pieces=config.pieces,
    cache_dtype=config.cache_dtype,
    weight_dtype=config.weight_dtype,
    max_stop_ids=config.max_stop_ids,
    record_experts=config.record_experts,
    grammar_states=config.grammar_states,
    grammar_classes=config.grammar_classes,
    grammars=config.grammars,
    speculate=config.speculate,
    draft_tokens=config.draft_tokens,
  )
  return _programs(model_config, lane.freeze(), vocab_limit, mesh)


@functools.lru_cache(maxsize=16)
def _programs(
  model_config: ModelConfig,
  config: EngineConfig,
  vocab_limit: int | None,
  mesh: jax.sharding.Mesh | None,
) -> Programs:
  return Programs(model_config, config, vocab_limit, mesh)
