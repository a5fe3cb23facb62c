"""Finds the first array with NaN or inf in an update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from agentjax.objectives.objective import LossInputs

Array = jax.Array

PREFIX = "nonfinite/"
# What is computed from what: an array follows those that it depends on.
_ORDER = (
  "weights",
  "behaviour_log_probs",
  "old_log_probs",
  "reference_log_probs",
  "old_values",
  "returns",
  "value_coefficients",
  "clip_high_bonus",
  "advantages",
  "shares",
  "coefficients",
  "log_probs",
  "entropies",
  "values",
  "divergences",
  "per_token",
  "loss",
)


def count_nonfinite(inputs: LossInputs, loss: Array) -> dict[str, Array]:
  """Metrics ``nonfinite/NAME``, sums: weighted tokens on which an input of the loss is NaN or inf.

  ``nonfinite/loss`` is 1 where the loss itself is.
  """
  counts = {"loss": ~jnp.isfinite(loss)}
  fields = [f.name for f in dataclasses.fields(inputs) if f.name != "numbers"]
  arrays = {name: getattr(inputs, name) for name in fields}
  for name, value in (arrays | arrays.pop("columns")).items():
    if value is not None and jnp.issubdtype(value.dtype, jnp.inexact):
      bad = ~jnp.isfinite(value).reshape(*inputs.weights.shape, -1).all(axis=-1)
      counts[name] = jnp.sum((inputs.weights > 0) & bad)
  return {PREFIX + name: count.astype(jnp.float32) for name, count in counts.items()}


def first_nonfinite(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """``nonfinite/NAME`` of the first of several updates that met anything; empty where none did."""
  for values in every:
    found = {name: value for name, value in values.items() if name.startswith(PREFIX)}
    if found:
      return found
  return {}


def broken_update(values: Mapping[str, float]) -> str:
  """Which norm of a step's updates is NaN or inf, as "NAME=nan"; "" where none is.

  Updates with such gradients are skipped and have the norm 0. So if a norm is not finite, the
  optimiser's state or the parameters are not, and no later update repairs them.
  """
  norms = {name: values[name] for name in values if name.split("/")[-1] == "update_norm"}
  return next((f"{k}={v:g}" for k, v in sorted(norms.items()) if not math.isfinite(v)), "")


def describe_nonfinite(values: Mapping[str, float]) -> str:
  """Names the first array that is not finite; "" if all are."""
  found = [key.removeprefix(PREFIX) for key in values if key.startswith(PREFIX) and values[key]]
  # Columns of the batch come first: they were there before anything was computed.
  order = [*(name for name in found if name not in _ORDER), *_ORDER]
  name = next((name for name in order if name in found), None)
  if name is None:
    return ""
  if name == "loss":
    return "the loss is not finite, though every input of the loss function is"
  kind = "the loss function's result" if name == "per_token" else f"the loss input {name}"
  count = int(values[PREFIX + name])
  return f"{kind} is the first array that is not finite, on {count} weighted tokens of an update"
