"""SSD for TPUs: a Mosaic kernel that walks the chunks with the state in VMEM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementations import on_platform

Array = jax.Array

# Finite, so that a masked exponent gives exactly 0; -inf - -inf would be NaN.
_MASKED = -1e30
_LANES = 128
_SUBLANES = 8
# VMEM that every chip gives a kernel without being asked for more.
_VMEM_BYTES = 16 * 2**20

# Contractions of matrices: rows with columns, rows with rows, columns with columns.
_NN = (((1,), (0,)), ((), ()))
_NT = (((1,), (1,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


class _Sizes(NamedTuple):
  """Sizes of a call. Heads come in blocks that read one group, and those in packs."""

  batch: int
  chunks: int
  chunk: int  # Q tokens
  blocks: int  # K = H / h
  sharing: int  # blocks that read one group
  heads: int  # h of a block
  pack: int  # heads whose columns are handled together, to fill the lanes
  width: int  # P
  size: int  # N
  item: int  # bytes of the widest of x, b and c; 2: products of bfloat16 operands

  @property
  def lanes(self) -> int:
    return self.heads * self.width


def ssd(
  x: Array,
  dt: Array,
  a: Array,
  b: Array,
  c: Array,
  d: Array | None,
  initial_state: Array,
  resets: Array | None,
  chunk_size: int,
) -> tuple[Array, Array]:
  r"""One grid step a row, block of heads and chunk of Q tokens; the state stays in VMEM.

  With ``s`` the running sum of ``dt a`` inside the chunk and S the incoming state,
  ``y_i = sum_{j<=i} (c_i b_j) exp(s_i - s_j) dt_j x_j + exp(s_i) S c_i + d x_i`` and
  ``S <- exp(s_Q) S + sum_j exp(s_Q - s_j) dt_j x_j b_jᵀ``. Terms across a reset are masked in the
  exponent. A block of heads reads one group, so ``c_i b_j`` is computed once for all of them. The
  Q x Q matrices never leave VMEM; kept for the gradient are the inputs and one state a chunk.

  If x, b and c are bfloat16, products have bfloat16 operands and float32 sums (the state is rounded
  where it is multiplied, not where it is carried); else all products are in full float32. Time is
  padded with ``dt = 0`` to whole chunks, of a multiple of 8 tokens; 128 is best. The lanes are full
  where N, and some divisor of H/G times P, are multiples of 128; for other sizes the inputs are
  transposed in memory first. Reverse mode only; ``jax.shard_map`` needs ``check_vma=False``, as for
  every interpreted kernel.

  Raises:
    ValueError: x, b or c neither float32 nor bfloat16, or dt not float32.
  """
  dtypes = {"x": x.dtype, "dt": dt.dtype, "b": b.dtype, "c": c.dtype}
  for name, dtype in dtypes.items():
    if dtype != jnp.float32 and (name == "dt" or dtype != jnp.bfloat16):
      allowed = "float32" if name == "dt" else "float32 or bfloat16"
      raise ValueError(
        f"ssd: implementation='pallas_tpu' takes {name} in {allowed}, got {dtype}; "
        "use implementation='xla'."
      )
  batch, time = x.shape[:2]
  chunk = -(-min(chunk_size, time) // _SUBLANES) * _SUBLANES
  chunks = -(-time // chunk)

  def pad(v: Array) -> Array:
    return jnp.pad(v, [(0, 0), (0, chunks * chunk - time)] + [(0, 0)] * (v.ndim - 2))

  if resets is None:
    resets = jnp.zeros((batch, time), bool)
  run = jnp.cumsum(pad(resets).reshape(batch, chunks, 1, chunk), axis=-1, dtype=jnp.float32)
  skip = jnp.zeros_like(a) if d is None else d
  y, state = _scan(pad(x), pad(dt), a, pad(b), pad(c), skip, initial_state, run)
  return y[:, :time], state


def _sizes(x: Array, b: Array, c: Array, run: Array) -> _Sizes:
  """The largest block of heads of one group whose blocks fit in VMEM, and its packs."""
  batch, _, heads, width = x.shape
  groups, size = b.shape[2:]
  chunks, _, chunk = run.shape[1:]
  per_group = heads // groups

  def cut(block: int) -> _Sizes:
    return _Sizes(
      batch=batch,
      chunks=chunks,
      chunk=chunk,
      blocks=heads // block,
      sharing=per_group // block,
      heads=block,
      pack=next(h for h in full if block % h == 0),
      width=width,
      size=size,
      item=max(v.dtype.itemsize for v in (x, b, c)),
    )

  divisors = [h for h in range(1, per_group + 1) if per_group % h == 0]
  full = [h for h in divisors if h * width % _LANES == 0] or [per_group]
  # Half of VMEM for the blocks, of which the next ones are fetched while these are in use.
  fitting = [h for h in full if 2 * _block_bytes(cut(h)) <= _VMEM_BYTES // 2]
  return cut(max(fitting, default=full[0]))


def _block_bytes(sizes: _Sizes) -> int:
  """Of one grid step of the backward pass: three [Q, h P], four [Q, N], four [N, h P] float32."""
  tokens = sizes.chunk * (3 * sizes.lanes + 4 * sizes.size) * sizes.item
  return tokens + 4 * sizes.lanes * sizes.size * 4


_Inputs = tuple[Array, ...]  # the arguments of _scan


@jax.custom_vjp
def _scan(
  x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, state: Array, run: Array
) -> tuple[Array, Array]:
  """``ssd`` of whole chunks. run: float32 [B, C, 1, Q], the resets so far in the chunk."""
  return _forward((x, dt, a, b, c, d, state, run), 1)[:2]


def _scan_forward(*inputs: Array) -> tuple[tuple[Array, Array], tuple[_Inputs, Array]]:
  y, last, left = _forward(inputs, inputs[-1].shape[1])
  return (y, last), (inputs, left)


def _scan_backward(
  kept: tuple[_Inputs, Array], gradients: tuple[Array, Array]
) -> tuple[Array | None, ...]:
  return _backward(*kept, *gradients)


_scan.defvjp(_scan_forward, _scan_backward)


class _Tokens(NamedTuple):
  """How arrays [B, T, parts, width] lie in memory for the kernel to fetch [Q, width].

  Beside each other where ``width`` fills lanes: no copy. Else ``parts`` stands before T.
  """

  parts: int
  width: int

  @property
  def beside(self) -> bool:
    return self.parts == 1 or self.width % _LANES == 0

  def lay(self, v: Array) -> Array:
    v = v.reshape(*v.shape[:2], self.parts, self.width)
    return v.reshape(*v.shape[:2], -1) if self.beside else jnp.swapaxes(v, 1, 2)

  def read(self, v: Array) -> Array:
    v = v if self.beside else jnp.swapaxes(v, 1, 2)
    return v.reshape(*v.shape[:2], self.parts, self.width)

  def shape(self, batch: int, time: int) -> tuple[int, ...]:
    if self.beside:
      return (batch, time, self.parts * self.width)
    return (batch, self.parts, time, self.width)

  def spec(self, chunk: int, at: Callable[..., Array], sharing: int = 1) -> pl.BlockSpec:
    """Blocks of Q tokens; ``sharing`` grid blocks read one of ``parts``."""
    if self.beside:
      return pl.BlockSpec((None, chunk, self.width), lambda b, k, c: (b, at(c), _group(k, sharing)))
    return pl.BlockSpec(
      (None, None, chunk, self.width), lambda b, k, c: (b, _group(k, sharing), at(c), 0)
    )


def _group(block: Array, sharing: int) -> Array:
  return jax.lax.div(block, jnp.asarray(sharing, block.dtype))


def _to_rows(sizes: _Sizes, v: Array) -> Array:
  """[B, T, H] as [B, K, C, h, Q]: tokens on the lanes."""
  v = v.reshape(sizes.batch, sizes.chunks, sizes.chunk, sizes.blocks, sizes.heads)
  return jnp.transpose(v, (0, 3, 1, 4, 2))


def _from_rows(v: Array) -> Array:
  batch, blocks, chunks, heads, chunk = v.shape
  return jnp.transpose(v, (0, 2, 4, 1, 3)).reshape(batch, chunks * chunk, blocks * heads)


def _running_sums(rates: Array, run: Array) -> Array:
  """Sums of [B, K, C, h, Q] over the chunk so far, anew at every reset.

  As a product the sum starts anew: no rounding of one sequence reaches the next.
  """
  chunk = run.shape[-1]
  seen = (run[:, :, 0, :, None] == run) & jnp.tril(jnp.ones((chunk, chunk), bool))
  seen = seen.astype(jnp.float32)
  return jnp.einsum("zkchj,zcij->zkchi", rates, seen, precision=jax.lax.Precision.HIGHEST)


def _to_states(sizes: _Sizes, v: Array) -> Array:
  """[B, H, P, N] as [B, K, N, h P]."""
  v = v.reshape(sizes.batch, sizes.blocks, sizes.lanes, sizes.size)
  return jnp.swapaxes(v, 2, 3)


def _from_states(sizes: _Sizes, v: Array) -> Array:
  heads = sizes.blocks * sizes.heads
  return jnp.swapaxes(v, 2, 3).reshape(sizes.batch, heads, sizes.width, sizes.size)


def _forward(inputs: _Inputs, kept: int) -> tuple[Array, Array, Array]:
  """y, the last state, and the last ``kept`` outgoing states of chunks, [B, kept, K, N, h P]."""
  x, dt, a, b, c, d, state, run = inputs
  sizes = _sizes(x, b, c, run)
  x_tokens, group_tokens = _token_layouts(sizes)
  rows = _to_rows(sizes, dt)
  y, left = on_platform(
    "tpu",
    functools.partial(_forward_call, sizes, x.dtype, kept),
    x_tokens.lay(x),
    rows,
    _running_sums(rows * a.reshape(sizes.blocks, 1, sizes.heads, 1), run),
    group_tokens.lay(b),
    group_tokens.lay(c),
    jnp.repeat(d, sizes.width).reshape(sizes.blocks, 1, sizes.lanes),
    _to_states(sizes, state),
    run,
  )
  return x_tokens.read(y).reshape(x.shape), _from_states(sizes, left[:, -1]), left


def _backward(
  inputs: _Inputs, left: Array, to_y: Array, to_last: Array
) -> tuple[Array | None, ...]:
  """Gradients of the arguments of ``_scan``, from those of its results."""
  x, dt, a, b, c, d, state, run = inputs
  sizes = _sizes(x, b, c, run)
  x_tokens, group_tokens = _token_layouts(sizes)
  rows = _to_rows(sizes, dt)
  to_x, sums, to_b, to_c, to_d, to_state = on_platform(
    "tpu",
    functools.partial(_backward_call, sizes, x.dtype, b.dtype, c.dtype),
    x_tokens.lay(x),
    rows,
    _running_sums(rows * a.reshape(sizes.blocks, 1, sizes.heads, 1), run),
    group_tokens.lay(b),
    group_tokens.lay(c),
    jnp.repeat(d, sizes.width).reshape(sizes.blocks, 1, sizes.lanes),
    _to_states(sizes, state),
    run,
    left,
    x_tokens.lay(to_y),
    _to_states(sizes, to_last),
  )

  def to_group(v: Array, like: Array) -> Array:
    v = _Tokens(sizes.blocks, sizes.size).read(v)
    v = v.reshape(*like.shape[:3], sizes.sharing, sizes.size)
    return jnp.sum(v, axis=3).astype(like.dtype)

  inside, enters, leaves, to_scale = (sums[:, :, :, place] for place in range(4))
  # Outputs at and after t, tokens before t. No sum has terms that cancel by construction.
  leaves = jnp.pad(leaves[..., :-1], [(0, 0)] * 4 + [(1, 0)])
  to_rate = inside + jax.lax.cumsum(enters, 4, reverse=True) + jnp.cumsum(leaves, 4)
  to_rate, to_scale = _from_rows(to_rate), _from_rows(to_scale)
  return (
    x_tokens.read(to_x).reshape(x.shape),
    to_rate * a + to_scale,
    jnp.sum(to_rate * dt, axis=(0, 1)),
    to_group(to_b, b),
    to_group(to_c, c),
    jnp.sum(to_d.reshape(sizes.batch, -1, sizes.width), axis=(0, 2)),
    _from_states(sizes, to_state),
    None,
  )


def _token_layouts(sizes: _Sizes) -> tuple[_Tokens, _Tokens]:
  """Layouts of x and y, and of b and c."""
  groups = sizes.blocks // sizes.sharing
  return _Tokens(sizes.blocks, sizes.lanes), _Tokens(groups, sizes.size)


class _Specs(NamedTuple):
  """Blocks of one grid step (row, block of heads, chunk), as matrices."""

  x: pl.BlockSpec  # [Q, h P]
  group: pl.BlockSpec  # [Q, N] of the group that the block reads
  part: pl.BlockSpec  # [Q, N], one a block of heads
  rows: pl.BlockSpec  # [h, Q]
  sums: pl.BlockSpec  # [4, h, Q]
  skip: pl.BlockSpec  # [1, h P]
  run: pl.BlockSpec  # [1, Q]
  state: pl.BlockSpec  # [N, h P], one a row
  to_skip: pl.BlockSpec  # [1, h P], one a row

  @property
  def inputs(self) -> list[pl.BlockSpec]:
    """Of x, dt, its running sums, b, c, d, the initial state and run."""
    return [
      *(self.x, self.rows, self.rows, self.group, self.group),
      *(self.skip, self.state, self.run),
    ]


def _specs(sizes: _Sizes, at: Callable[..., Array]) -> _Specs:
  """``at``: grid step to chunk."""
  x_tokens, group_tokens = _token_layouts(sizes)
  chunk, heads, lanes = sizes.chunk, sizes.heads, sizes.lanes
  return _Specs(
    x=x_tokens.spec(chunk, at),
    group=group_tokens.spec(chunk, at, sizes.sharing),
    part=_Tokens(sizes.blocks, sizes.size).spec(chunk, at),
    rows=pl.BlockSpec((None, None, None, heads, chunk), lambda b, k, c: (b, k, at(c), 0, 0)),
    sums=pl.BlockSpec((None, None, None, 4, heads, chunk), lambda b, k, c: (b, k, at(c), 0, 0, 0)),
    skip=pl.BlockSpec((None, 1, lanes), lambda b, k, c: (k, 0, 0)),
    run=pl.BlockSpec((None, None, 1, chunk), lambda b, k, c: (b, at(c), 0, 0)),
    state=pl.BlockSpec((None, None, sizes.size, lanes), lambda b, k, c: (b, k, 0, 0)),
    to_skip=pl.BlockSpec((None, None, 1, lanes), lambda b, k, c: (b, k, 0, 0)),
  )


def _left_spec(sizes: _Sizes, at: Callable[..., Array]) -> pl.BlockSpec:
  """[N, h P], one a chunk. ``at``: grid step to chunk."""
  shape = (None, None, None, sizes.size, sizes.lanes)
  return pl.BlockSpec(shape, lambda b, k, c: (b, at(c), k, 0, 0))


def _compiler_params(sizes: _Sizes) -> pltpu.CompilerParams:
  # Beside the blocks live about forty matrices of pairs of tokens, as libtpu's reports show.
  needed = 2 * _block_bytes(sizes) + 40 * 4 * sizes.pack * sizes.chunk**2
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=needed if needed > _VMEM_BYTES else None,
  )


def _forward_call(
  sizes: _Sizes, dtype: jnp.dtype, kept: int, interpret: bool
) -> Callable[..., tuple[Array, Array]]:
  specs = _specs(sizes, lambda c: c)
  batch, time = sizes.batch, sizes.chunks * sizes.chunk
  block = (sizes.size, sizes.lanes)
  x_tokens, _ = _token_layouts(sizes)
  return pl.pallas_call(
    functools.partial(_forward_kernel, sizes),
    grid=(batch, sizes.blocks, sizes.chunks),
    in_specs=specs.inputs,
    # With one state kept, every chunk writes it and the last one stays.
    out_specs=[specs.x, _left_spec(sizes, lambda c: jnp.minimum(c, kept - 1))],
    out_shape=[
      jax.ShapeDtypeStruct(x_tokens.shape(batch, time), dtype),
      jax.ShapeDtypeStruct((batch, kept, sizes.blocks, *block), jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM(block, jnp.float32)],
    compiler_params=_compiler_params(sizes),
    cost_estimate=_cost(sizes, dtype, kept, products=1),
    interpret=interpret,
    name="ssd_forward",
  )


def _backward_call(
  sizes: _Sizes, x_dtype: jnp.dtype, b_dtype: jnp.dtype, c_dtype: jnp.dtype, interpret: bool
) -> Callable[..., tuple[Array, ...]]:
  last = sizes.chunks - 1
  specs = _specs(sizes, lambda c: last - c)
  batch, time = sizes.batch, sizes.chunks * sizes.chunk
  block = (sizes.size, sizes.lanes)
  x_tokens, _ = _token_layouts(sizes)
  parts = _Tokens(sizes.blocks, sizes.size).shape(batch, time)
  sums = (batch, sizes.blocks, sizes.chunks, 4, sizes.heads, sizes.chunk)
  whole = sizes.sharing == 1
  return pl.pallas_call(
    functools.partial(_backward_kernel, sizes),
    grid=(batch, sizes.blocks, sizes.chunks),
    in_specs=[
      *specs.inputs,
      _left_spec(sizes, lambda c: jnp.maximum(last - c - 1, 0)),
      specs.x,
      specs.state,
    ],
    out_specs=[
      *(specs.x, specs.sums, specs.part, specs.part),
      *(specs.to_skip, specs.state),
    ],
    out_shape=[
      jax.ShapeDtypeStruct(x_tokens.shape(batch, time), x_dtype),
      jax.ShapeDtypeStruct(sums, jnp.float32),
      # Parts of a group are added outside, in float32.
      jax.ShapeDtypeStruct(parts, b_dtype if whole else jnp.float32),
      jax.ShapeDtypeStruct(parts, c_dtype if whole else jnp.float32),
      jax.ShapeDtypeStruct((batch, sizes.blocks, 1, sizes.lanes), jnp.float32),
      jax.ShapeDtypeStruct((batch, sizes.blocks, *block), jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM(block, jnp.float32)],
    compiler_params=_compiler_params(sizes),
    cost_estimate=_cost(sizes, x_dtype, sizes.chunks, products=3),
    interpret=interpret,
    name="ssd_backward",
  )


def _cost(sizes: _Sizes, dtype: jnp.dtype, states: int, products: int) -> pl.CostEstimate:
  """Operations that the scan needs, and bytes moved; ``products``: of the backward, about."""
  chunks = sizes.batch * sizes.blocks * sizes.chunks
  tokens = sizes.chunk * (sizes.lanes * (sizes.chunk + 2 * sizes.size) + sizes.chunk * sizes.size)
  states_bytes = 4 * sizes.batch * sizes.blocks * (states + 1) * sizes.size * sizes.lanes
  item = jnp.dtype(dtype).itemsize
  moved = chunks * sizes.chunk * 2 * (sizes.lanes + sizes.size) * item
  return pl.CostEstimate(
    flops=2 * products * chunks * tokens,
    transcendentals=chunks * sizes.heads * sizes.chunk * (sizes.chunk + 2),
    bytes_accessed=products * moved + states_bytes,
  )


# In the kernels axes are: i output token, j input token, h head of the block, p head of the pack.


def _forward_kernel(
  sizes: _Sizes,
  x_ref: Array,
  dt_ref: Array,
  total_ref: Array,
  b_ref: Array,
  c_ref: Array,
  d_ref: Array,
  state_ref: Array,
  run_ref: Array,
  y_ref: Array,
  left_ref: Array,
  carry_ref: Array,
) -> None:
  @pl.when(pl.program_id(2) == 0)
  def _() -> None:
    carry_ref[...] = state_ref[...]

  product = _product(sizes)
  dt, total = dt_ref[...], total_ref[...]
  chunk = _chunk(sizes, dt, total, run_ref[...])
  seen = _masked(chunk.same & (_place(chunk.same.shape, 1) <= _place(chunk.same.shape, 0)))
  b, c = b_ref[...], c_ref[...]
  both = product(c, b, _NT)

  for heads, lanes in _packs(sizes):
    x = x_ref[:, lanes].astype(jnp.float32)
    state = carry_ref[:, lanes]
    scale, entering, leaving = _decays(sizes, chunk, heads)
    mixing = [
      both * jnp.exp(chunk.total[:, h : h + 1] - total[h : h + 1] + seen) * dt[h : h + 1]
      for h in heads
    ]
    y = product(jnp.concatenate(mixing, axis=1), _stacked(sizes, x), _NN)
    y += entering * product(c, state, _NN) + d_ref[:, lanes] * x
    y_ref[:, lanes] = y.astype(y_ref.dtype)
    # What the last token sees of the incoming state is what is left of it.
    state = entering[-1:] * state + product(b, leaving * scale * x, _TN)
    carry_ref[:, lanes] = state
    left_ref[:, lanes] = state


def _backward_kernel(
  sizes: _Sizes,
  x_ref: Array,
  dt_ref: Array,
  total_ref: Array,
  b_ref: Array,
  c_ref: Array,
  d_ref: Array,
  state_ref: Array,
  run_ref: Array,
  left_ref: Array,
  to_y_ref: Array,
  to_last_ref: Array,
  to_x_ref: Array,
  sums_ref: Array,
  to_b_ref: Array,
  to_c_ref: Array,
  to_d_ref: Array,
  to_state_ref: Array,
  carry_ref: Array,
) -> None:
  """Gradients of one chunk; Q x Q matrices are [j, i], so that only the one of a group turns.

  The gradient of ``log a_t`` is a sum of terms that all have ``a_t`` as a factor: what tokens
  j < t put into outputs i >= t and into the outgoing state, and what of the incoming state reaches
  outputs i >= t and the outgoing state. ``sums_ref`` takes, a head and token, the first of the
  four summed over j and i; the incoming state's part in output i, with what reaches the outgoing
  state added to the last; token j's part in the outgoing state; and the gradient of the factor dt.
  """

  @pl.when(pl.program_id(2) == 0)
  def _() -> None:
    carry_ref[...] = to_last_ref[...]
    to_d_ref[...] = jnp.zeros_like(to_d_ref)

  is_first = pl.program_id(2) == pl.num_programs(2) - 1
  product = _product(sizes)
  total = total_ref[...]
  chunk = _chunk(sizes, dt_ref[...], total, run_ref[...])
  square = chunk.same.shape
  seen = _masked(chunk.same & (_place(square, 0) <= _place(square, 1)))
  reached = (_place(square, 0) >= _place(square, 1)).astype(jnp.float32)  # [i, t]: t <= i
  before = (_place(square, 0) < _place(square, 1)).astype(jnp.float32)  # [j, t]: j < t
  b, c = b_ref[...], c_ref[...]
  both = product(b, c, _NT)
  to_both = jnp.zeros_like(both)
  to_b = jnp.zeros(b.shape, jnp.float32)
  to_c = jnp.zeros(c.shape, jnp.float32)
  through = jnp.zeros((sizes.chunk, 3 * sizes.heads), jnp.float32)

  for heads, lanes in _packs(sizes):
    x, to_y = x_ref[:, lanes].astype(jnp.float32), to_y_ref[:, lanes].astype(jnp.float32)
    state = jnp.where(is_first, state_ref[:, lanes], left_ref[:, lanes])
    to_left = carry_ref[:, lanes]
    scale, entering, leaving = _decays(sizes, chunk, heads)
    stacked = _stacked(sizes, to_y)

    # Through the pairs of tokens, [j, (p, i)].
    to_pairs = product(x, stacked, _NT)
    mixings = []
    for p, h in enumerate(heads):
      decay = jnp.exp(total[h : h + 1] - chunk.total[:, h : h + 1] + seen)
      mixings.append(decay * both)
      to_pair = to_pairs[:, p * sizes.chunk : (p + 1) * sizes.chunk] * chunk.scale[:, h : h + 1]
      to_both += to_pair * decay
      # Over i >= t by the product, over j < t by the sum.
      later = product(to_pair * mixings[p], reached, _NN)
      sums_ref[0, h : h + 1, :] = jnp.sum(later * before, axis=0, keepdims=True)
    to_input = product(jnp.concatenate(mixings, axis=1), stacked, _NN)

    # Through the states.
    entered, weighted = entering * to_y, leaving * scale * x
    to_weighted = product(b, to_left, _NN)
    to_input += leaving * to_weighted
    kept = entering[-1:]
    across = kept * jnp.sum(to_left * state, axis=0, keepdims=True)
    enters = entered * product(c, state, _NN)
    enters += jnp.where(_place(x.shape, 0) == sizes.chunk - 1, across, 0.0)
    parts = jnp.concatenate([enters, weighted * to_weighted, to_input * x], axis=1)
    through += product(parts, _of_heads(sizes, heads), _NN)

    to_x_ref[:, lanes] = (scale * to_input + d_ref[:, lanes] * to_y).astype(to_x_ref.dtype)
    to_d_ref[:, lanes] += jnp.sum(to_y * x, axis=0, keepdims=True)
    to_b += product(weighted, to_left, _NT)
    to_c += product(entered, state, _NT)
    to_left = kept * to_left + product(c, entered, _TN)
    carry_ref[:, lanes] = to_left
    to_state_ref[:, lanes] = to_left

  rows = jnp.transpose(through)
  for place in range(3):
    sums_ref[place + 1] = rows[place * sizes.heads : (place + 1) * sizes.heads]
  to_b_ref[...] = (to_b + product(to_both, c, _NN)).astype(to_b_ref.dtype)
  to_c_ref[...] = (to_c + product(to_both, b, _TN)).astype(to_c_ref.dtype)


class _Chunk(NamedTuple):
  """What the packs share. The masks are added to exponents: 0, or so low that exp gives 0."""

  total: Array  # [Q, h] running sums of dt a
  scale: Array  # [Q, h] dt
  same: Array  # bool [Q, Q] whether no reset is between two tokens
  unreset: Array  # [Q, pack P] mask of tokens after a reset
  resetless: Array  # [Q, pack P] mask of tokens before a reset


def _chunk(sizes: _Sizes, dt: Array, total: Array, run: Array) -> _Chunk:
  """dt, total: [h, Q]. run: [1, Q]."""
  columns = jnp.transpose(jnp.concatenate([total, dt, run], axis=0))
  runs = columns[:, 2 * sizes.heads :]
  shape = (sizes.chunk, sizes.pack * sizes.width)
  return _Chunk(
    total=columns[:, : sizes.heads],
    scale=columns[:, sizes.heads : 2 * sizes.heads],
    same=runs == run,
    unreset=jnp.broadcast_to(_masked(runs == 0.0), shape),
    resetless=jnp.broadcast_to(_masked(runs == run[:, sizes.chunk - 1 :]), shape),
  )


def _masked(allowed: Array) -> Array:
  return jnp.where(allowed, jnp.float32(0.0), jnp.float32(_MASKED))


def _decays(sizes: _Sizes, chunk: _Chunk, heads: range) -> tuple[Array, Array, Array]:
  """Of each token, over the lanes of its head, [Q, pack P].

  Returns:
    dt, how much of the incoming state it sees, and how much of it the outgoing state has.
  """
  total = _spread(sizes, chunk.total, heads)
  entering = jnp.exp(total + chunk.unreset)
  leaving = jnp.exp(total[-1:] - total + chunk.resetless)
  return _spread(sizes, chunk.scale, heads), entering, leaving


def _exact(left: Array, right: Array, contraction: tuple) -> Array:
  """A product in full float32."""
  return jax.lax.dot_general(
    left.astype(jnp.float32),
    right.astype(jnp.float32),
    contraction,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _rounded(left: Array, right: Array, contraction: tuple) -> Array:
  """A product of operands rounded to bfloat16, summed in float32."""
  return jax.lax.dot_general(
    left.astype(jnp.bfloat16),
    right.astype(jnp.bfloat16),
    contraction,
    preferred_element_type=jnp.float32,
  )


def _product(sizes: _Sizes) -> Callable[[Array, Array, tuple], Array]:
  return _rounded if sizes.item == 2 else _exact


def _packs(sizes: _Sizes) -> list[tuple[range, slice]]:
  """Heads of the block and columns of x of every pack."""
  step = sizes.pack * sizes.width
  return [
    (range(first, first + sizes.pack), slice(first * sizes.width, first * sizes.width + step))
    for first in range(0, sizes.heads, sizes.pack)
  ]


def _place(shape: tuple[int, ...], axis: int) -> Array:
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _spread(sizes: _Sizes, columns: Array, heads: range) -> Array:
  """Each head's column over its P lanes, [Q, pack P]."""
  shape = (sizes.chunk, sizes.pack * sizes.width)
  lane = _place(shape, 1)
  out = jnp.broadcast_to(columns[:, heads[0] : heads[0] + 1], shape)
  for place, h in enumerate(heads[1:], 1):
    out = jnp.where(lane >= place * sizes.width, columns[:, h : h + 1], out)
  return out


def _stacked(sizes: _Sizes, v: Array) -> Array:
  """[Q, pack P] as the block-diagonal [(p, Q), pack P]: each head's columns in its own rows."""
  if sizes.pack == 1:
    return v
  lane = _place(v.shape, 1)
  parts = [
    jnp.where((lane >= p * sizes.width) & (lane < (p + 1) * sizes.width), v, 0.0)
    for p in range(sizes.pack)
  ]
  return jnp.concatenate(parts, axis=0)


def _of_heads(sizes: _Sizes, heads: range) -> Array:
  """[3 pack P, 3 h], three times 1 where the lane belongs to the head: sums over lanes."""
  lanes = sizes.pack * sizes.width
  shape = (lanes, 3 * sizes.heads)
  parts = []
  for place in range(3):
    first = (_place(shape, 1) - place * sizes.heads - heads[0]) * sizes.width
    lane = _place(shape, 0)
    parts.append(((lane >= first) & (lane < first + sizes.width)).astype(jnp.float32))
  return jnp.concatenate(parts, axis=0)
