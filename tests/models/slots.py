"""What engines do with slots of a cache, in three lines each: read, write, fork."""

import jax
import jax.numpy as jnp


def read_slots(cache, rows):
  """Copies of some slots, to be parked or written elsewhere. ``rows`` must be in range."""
  return jax.tree.map(lambda v: v[rows], cache)


def write_slots(cache, rows, states):
  """Puts ``states`` into the slots ``rows``; a row at or past the number of slots is dropped.

  Slots are emptied with what ``init_cache`` makes.
  """
  return jax.tree.map(lambda v, s: v.at[rows].set(s, mode="drop"), cache, states)


def copy_slot(cache, source, targets):
  """Forks one slot into others; a target at or past the number of slots is dropped."""
  return jax.tree.map(
    lambda v: v.at[targets].set(
      jnp.broadcast_to(v[source], (targets.shape[0], *v.shape[1:])), mode="drop"
    ),
    cache,
  )
