"""Attention over pieces in pages, and states after pieces: signatures, mathematics, checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.implementations import check_shape, choose
from pallas_kernels.kv_packet import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.kv_packet.rotary import Rotary
from pallas_kernels.paged_attention.api import check_pools

Array = jax.Array


class PageTable(NamedTuple):
  """Pages that a row reads; int32 [R, M] each.

  Attributes:
    pages: numbers of pages; any number where ``valid`` is 0.
    firsts: position of a page's first token in the row's context.
    valid: how many tokens of a page count, from its first one on.
    turns: by how many positions a page's tokens stand behind where their keys were rotated for.
  """

  pages: Array
  firsts: Array
  valid: Array
  turns: Array


IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
  "reference": reference.packet_attention,
  "xla": xla.packet_attention,
  "pallas_tpu": pallas_tpu.packet_attention,
  "pallas_gpu": pallas_gpu.packet_attention,
}
# Of ``compose_states``, which reads every state once: nothing is left for a kernel to gain.
STATE_IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
  "reference": reference.compose_states,
  "xla": xla.compose_states,
}


def packet_attention(
  query: Array,
  keys: Array,
  values: Array | None,
  table: PageTable,
  starts: Array,
  counts: Array,
  *,
  scale: float,
  shared: PageTable | None = None,
  rotary: Rotary | None = None,
  window: int | None = None,
  value_dim: int | None = None,
  key_scales: Array | None = None,
  value_scales: Array | None = None,
  implementation: str | None = None,
) -> Array:
  r"""``softmax(scale q kᵀ) v`` of new tokens over pieces and a tail, where keys are moved as read.

  As ``paged_attention``, but pages need not follow each other. Token s of entry e of a row stands
  at position ``firsts[r, e] + s`` if ``s < valid[r, e]``, else it is not there. Its key was rotated
  for a position that lies ``turns[r, e]`` before that, and is read as if turned by the rest:
  ``<R(m) q, R(t) R(n) k> = <R(-t) R(m) q, R(n) k>``. So pages stay as they are, quantised ones too,
  and any number of rows may read one page at different positions. Few queries are turned for each
  page, otherwise the keys are, in float32 and cast back.

  Query t of row r stands at position ``starts[r] + t``, is rotated for it, and sees the tokens at
  positions up to its own, with a ``window`` only those less than ``window`` before it. No two
  tokens of a row stand at one position.

  What a row does not see changes none of its bits, NaN included, but for the contents of ``shared``
  pages that only others of its group see.

  Args:
    query: [R, T, H, D]; head h reads key head ``h // (H / C)``.
    keys, values, value_dim, key_scales, value_scales: pools as of ``paged_attention``.
    table: of each row.
    starts: int32 [R], position of the first query.
    counts: int32 [R], tokens of the row that are not right padding, 0..T.
    scale: on the products.
    shared: pages that all rows of a group read, which are loaded once for the group: of J groups of
      R / J consecutive rows each. They come in addition to those of ``table``.
    rotary: of the keys; None where keys have no positions, and ``turns`` mean nothing.
    window: at least 1, or None for all positions.
    implementation: None (the fastest measured for this backend) or a key of ``IMPLEMENTATIONS``.

  Returns:
    [R, T, H, V] in the dtype of the query; 0 at padding and where a query sees nothing.

  Raises:
    ValueError: shapes, dtypes or options that do not fit, or an unknown implementation.

  References: Chen et al., 2604.13226 (KV Packet).
  """
  run = choose("packet_attention", implementation, IMPLEMENTATIONS, default="xla")
  value_dim = check_pools(
    "packet_attention", query, keys, values, value_dim, key_scales, value_scales
  )
  rows, time = query.shape[:2]
  _check_tables(table, shared, starts, counts, rows)
  _check_options(window, rotary, keys, None if values is not None else value_dim)
  tables = [part for part in (shared, table) if part is not None]
  out = run(
    query,
    keys,
    values,
    key_scales,
    key_scales if values is None else value_scales,
    [_clipped(part, keys.shape[0]) for part in tables],
    starts,
    counts,
    scale,
    window,
    value_dim,
    rotary,
  )
  real = jnp.arange(time) < counts[:, None]
  return jnp.where(real[..., None, None], out, 0.0).astype(query.dtype)


def compose_states(
  log_decays: Array,
  states: Array,
  *,
  initial_state: Array | None = None,
  counts: Array | None = None,
  implementation: str | None = None,
) -> Array:
  r"""The state after K pieces in a row, each known by what it does to a state.

  A piece turns S into ``exp(log_decay) S + state``; maps of this form follow each other
  associatively: ``S = exp(sum_k l_k) S_0 + sum_k exp(sum_{j>k} l_j) S_k``. Of one piece from an
  empty state that is its own state, bit for bit.

  Args:
    log_decays: float32 [R, K, H], at most 0.
    states: [R, K, H, P, N], what each piece leaves of an empty state.
    initial_state: [R, H, P, N]; None is zeros.
    counts: int32 [R], pieces of the row, its first ones; None is all K.
    implementation: None or a key of ``STATE_IMPLEMENTATIONS``.

  Returns:
    [R, H, P, N] float32 (float64 if an input is).

  Raises:
    ValueError: shapes that do not fit, or an unknown implementation.
  """
  run = choose("compose_states", implementation, STATE_IMPLEMENTATIONS, default="xla")
  if states.ndim != 5 or 0 in states.shape:
    raise ValueError(
      f"compose_states: states must be [R, K, H, P, N] without an empty axis, got {states.shape}."
    )
  check_shape("compose_states", "log_decays", log_decays, states.shape[:3])
  row = (states.shape[0], *states.shape[2:])
  check_shape("compose_states", "initial_state", initial_state, row)
  check_shape("compose_states", "counts", counts, states.shape[:1])
  dtype = jnp.result_type(jnp.float32, states, log_decays)
  log_decays, states = log_decays.astype(dtype), states.astype(dtype)
  if counts is not None:
    used = jnp.arange(states.shape[1]) < counts[:, None]
    log_decays = jnp.where(used[..., None], log_decays, 0.0)
    states = jnp.where(used[..., None, None, None], states, 0.0)
  return run(log_decays, states, None if initial_state is None else initial_state.astype(dtype))


def _check_tables(
  table: PageTable, shared: PageTable | None, starts: Array, counts: Array, rows: int
) -> None:
  _check_table("table", table, rows)
  check_shape("packet_attention", "starts", starts, (rows,))
  check_shape("packet_attention", "counts", counts, (rows,))
  if shared is not None:
    groups = shared.pages.shape[0]
    if not groups or rows % groups:
      raise ValueError(
        f"packet_attention: shared has {groups} groups; allowed: a divisor of R={rows} rows."
      )
    _check_table("shared", shared, groups)


def _check_options(
  window: int | None, rotary: Rotary | None, keys: Array, value_dim: int | None
) -> None:
  """``value_dim`` where values are the first channels of keys."""
  if window is not None and window < 1:
    raise ValueError(f"packet_attention: window={window}; allowed: at least 1, or None.")
  if rotary is not None and rotary.first + 2 * len(rotary.frequencies) > keys.shape[3]:
    raise ValueError(
      f"packet_attention: rotary turns {2 * len(rotary.frequencies)} channels from "
      f"{rotary.first} on; keys have D={keys.shape[3]}."
    )
  if value_dim is not None and rotary is not None and rotary.first < value_dim:
    raise ValueError(
      f"packet_attention: value_dim={value_dim} without values; allowed: at most the first turned "
      f"channel {rotary.first}, for values are read as they are."
    )


def _check_table(name: str, table: PageTable, rows: int) -> None:
  if table.pages.ndim != 2 or table.pages.shape[0] != rows or not table.pages.shape[1]:
    raise ValueError(
      f"packet_attention: {name}.pages must be int32 [{rows}, M >= 1], got {table.pages.shape}."
    )
  for field in PageTable._fields:
    check_shape("packet_attention", f"{name}.{field}", getattr(table, field), table.pages.shape)


def _clipped(table: PageTable, pages: int) -> PageTable:
  return table._replace(pages=jnp.clip(table.pages, 0, pages - 1))
