"""Loss functions of one's own: by name, and what they may take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from agentjax import names
from agentjax.config import ConfigError

if TYPE_CHECKING:
  from agentjax.objectives.objective import LossInputs

Array = jax.Array

LossFunction: TypeAlias = "Callable[[LossInputs], Any]"
"""``LossInputs -> per_token``, ``(per_token, metrics)`` or ``(loss, metrics)``."""

_ALLOWED = (
  "a float array [B, T] (a loss a token), the same with a dict of [B, T] metrics, or a float "
  "scalar with a dict of scalar metrics"
)


def load_function(
  name: str, path: str = "objective.function", argument: str = "LossInputs"
) -> Callable[..., Any]:
  """The function of one argument that ``module:function`` names (``agentjax.names.load``).

  Args:
    name: of a config.
    path: the setting's dotted name, for messages.
    argument: what the function takes, for messages.

  Raises:
    ConfigError: no such module, an error while importing it, no such function in it, or one that
      takes other arguments than one.
  """
  allowed = f"a function of one argument, {argument}"
  function = names.load(name, path, allowed)
  names.check_callable(function, f"{path}={name!r}", allowed)
  return function


def function_name(function: LossFunction, name: str | None = None) -> str:
  """What messages call it.

  Raises:
    ConfigError: it cannot be called with one argument.
  """
  shown = f"objective.function={name!r}" if name else f"the objective {own_name(function)}"
  names.check_callable(function, shown, "a function of one argument, LossInputs")
  return shown


def returns_per_token(function: LossFunction, inputs: LossInputs, name: str) -> bool:
  """Traces a function without computing: whether it returns a loss a token, or else the whole loss.

  Raises:
    ConfigError: it raises, or returns something else.
  """
  shape = inputs.log_probs.shape
  given = f"{list(shape)} arrays"
  result = trace(
    function, inputs, name, given, "objective.with_reference=True gives reference_log_probs"
  )
  pair = isinstance(result, tuple) and len(result) == 2
  value, metrics = result if pair else (result, {})
  if not isinstance(value, jax.ShapeDtypeStruct) or not isinstance(metrics, dict):
    raise ConfigError(f"{name} returned {describe(result)}; allowed: {_ALLOWED}.")
  scalar = value.shape == () and isinstance(result, tuple)
  if not jnp.issubdtype(value.dtype, jnp.floating) or not (scalar or value.shape == shape):
    raise ConfigError(
      f"{name} returned {describe(result)} for inputs {list(shape)}; allowed: {_ALLOWED}."
    )
  for key, metric in metrics.items():
    if not isinstance(metric, jax.ShapeDtypeStruct) or metric.shape != value.shape:
      raise ConfigError(
        f"{name} returned the metric {key!r} as {describe(metric)}; allowed: an array "
        f"{list(value.shape)}, like the loss."
      )
  return not scalar


def trace(function: Callable[[Any], Any], inputs: Any, name: str, given: str, more: str) -> Any:
  """Shapes and dtypes that a function gives, without computing.

  Args:
    function: of one argument.
    inputs: it, or its shapes.
    name: what messages call the function.
    given: the size of the inputs, in words.
    more: what gives the inputs that are None.

  Raises:
    ConfigError: it raises.
  """
  try:
    return jax.eval_shape(function, inputs)
  except ConfigError:
    raise
  except Exception as error:
    absent = [k for k in dir(inputs) if not k.startswith("_") and getattr(inputs, k) is None]
    raise ConfigError(
      f"{name} raised {type(error).__name__}: {error}. It was given {type(inputs).__name__} of "
      f"{given}; None are {', '.join(absent) or 'none'} ({more})."
    ) from error


def per_token_result(result: Any) -> tuple[Array, dict[str, Array]]:
  """(loss, metrics) of what a function returned."""
  return result if isinstance(result, tuple) else (result, {})


def own_name(function: Callable[..., Any]) -> str:
  """The name that a function was defined with."""
  return getattr(function, "__qualname__", type(function).__name__)


def describe(value: Any) -> str:
  """A traced result in words."""
  if isinstance(value, jax.ShapeDtypeStruct):
    return f"{value.dtype.name}{list(value.shape)}"
  if isinstance(value, tuple):
    return f"({', '.join(map(describe, value))})"
  if isinstance(value, dict):
    return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
  return type(value).__name__
