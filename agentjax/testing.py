"""Checks for your own losses and advantages; agentjax runs the same on its own.

``check_objective(my_loss, seed=0)`` and ``check_advantage(my_advantage, seed=0)`` raise
AssertionError that begins with the name of the property that does not hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.objectives.advantage_function import AdvantageFunction
from agentjax.objectives.custom_loss import LossFunction
from agentjax.objectives.objective import ObjectiveConfig, Prepared, policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.schedules import at_end
from agentjax.trajectory.batch import Batch, filled_batch
from agentjax.trajectory.columns import Column, Level, registered_columns

_TIME = 20  # tokens a row in the checks; the longest sequence of an example has 8
_PER_TOKEN = ("log_probs", "old", "behaviour", "reference", "entropies", "values")
_DISTILLATION = ("teacher", "divergences")


def _own_columns(*levels: Level) -> tuple[Column, ...]:
  """Registered columns that losses are given beside the core ones, of a shape that is known."""
  return tuple(
    column
    for column in registered_columns(core=False)
    if column.in_loss
    and column.level in levels
    and not any(isinstance(size, str) for size in column.shape)
  )


def check_objective(
  objective: LossFunction,
  config: ObjectiveConfig | None = None,
  *,
  seed: int,
  tolerance: float = 1e-5,
) -> None:
  """Checks the promises that training, packing and sharding rely on, on a random packed batch.

  * finite: loss and gradients have no NaN or inf;
  * padding: more padding, with any values, changes nothing and has no gradient;
  * permutation: the order of sequences in the batch and their places in rows change nothing;
  * sibling exclusion: an invalid sequence has no gradient, and neither its content, nor its reward,
    nor its presence changes anything for its group or its row;
  * mask linearity: tokens of weight 0 have no gradient and their content does not matter, and the
    loss is linear in the coefficients;
  * micro-batch equality: losses and metrics of the rows add up to those of the batch.

  Args:
    objective: the loss, ``LossInputs -> (sum, metrics)`` or ``LossInputs -> per_token``, which
      ``policy_objective`` sums up.
    config: how the inputs are prepared (advantages, mismatch, aggregation); None is the default
      ``ObjectiveConfig()``.
    seed: of the random batch.
    tolerance: absolute and relative, for fp32 sums taken in another order.

  Raises:
    AssertionError: the name of the property, then what differed.
    ConfigError: it cannot be traced, or returns something else.
  """
  check = _Checker(objective, config or ObjectiveConfig(), tolerance)
  random = np.random.default_rng(seed)
  example = _Example.random(random)
  plain = check.run(example, _rows(example.order()))
  check.finite(plain)

  for name, other, rows, order in example.variants(random):
    check.same(name, plain, check.run(other, rows).renumbered(order))
  check.no_gradient("sibling exclusion", plain, example.on_invalid())
  check.no_gradient("mask linearity", plain, example.on_masked())
  check.linear(example, plain, random)
  check.microbatches(example, plain)


def check_advantage(function: AdvantageFunction, *, seed: int, tolerance: float = 1e-5) -> None:
  """Checks what training, packing and masking rely on, on a random packed batch.

  * finite: no NaN or inf on tokens with weight;
  * padding: more padding, with any values, and unused places change nothing;
  * permutation: the order of sequences, their places in rows and the numbers of groups change
    nothing;
  * sibling exclusion: neither the content of a masked sequence, nor its reward, nor its presence
    changes anything for its group or its row;
  * mask linearity: values on tokens of weight 0 do not matter.

  Args:
    function: ``AdvantageInputs -> advantages [B, T]``. It is given rewards of turns and steps and a
      reference.
    seed: of the random batch.
    tolerance: absolute and relative, for fp32 sums taken in another order.

  Raises:
    AssertionError: the name of the property, then what differed.
    ConfigError: it cannot be traced, or returns something else than a float array [B, T].
  """
  check = _AdvantageChecker(function, tolerance)
  random = np.random.default_rng(seed)
  example = _Example.random(random)
  plain = check.run(example, _rows(example.order()))
  for number, values in plain.items():
    if not np.isfinite(values).all():
      raise AssertionError(f"finite: advantages of sequence {number} are {values}")

  check.same("padding", plain, check.run(example.with_places(3), _rows(example.order())))
  for name, other, rows, order in example.variants(random):
    found = check.run(other, rows)
    check.same(name, plain, {order[i]: values for i, values in found.items()})


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """Per-token arrays of one sequence."""

  weights: np.ndarray
  turns: np.ndarray
  tokens: dict[str, np.ndarray]
  whole: dict[str, np.ndarray]  # columns of sequences

  def changed(self, where: np.ndarray, random: np.random.Generator) -> _Sequence:
    def noise(value: np.ndarray, at: np.ndarray) -> np.ndarray:
      inside = at.reshape((*at.shape, *(1,) * (value.ndim - at.ndim)))
      return np.where(inside, random.normal(size=value.shape), value)

    every = np.asarray(where.all())
    return dataclasses.replace(
      self,
      tokens={name: noise(value, where) for name, value in self.tokens.items()},
      whole={name: noise(value, every) for name, value in self.whole.items()},
    )


@dataclasses.dataclass(frozen=True)
class _Example:
  """Sequences by number, with their data in the batch. The last place is unused."""

  sequences: tuple[_Sequence | None, ...]
  rewards: np.ndarray
  valid: np.ndarray
  groups: np.ndarray
  garbage: float = 0.0  # scale of what stands on padding

  @classmethod
  def random(cls, random: np.random.Generator) -> _Example:
    sequences: list[_Sequence | None] = []
    for length in (5, 8, 3, 6, 4, 7, 8):
      # A prompt token, a turn, an observation token, another turn.
      cut = length // 2
      weights = np.where(np.isin(np.arange(length), (0, cut)), 0.0, 1.0)
      tokens = {name: random.normal(-1.0, 0.4, length) for name in _PER_TOKEN}
      for name in ("old", "behaviour", "reference"):
        tokens[name] = tokens["log_probs"] + random.normal(0, 0.2, length)
      for name in _DISTILLATION:
        tokens[name] = np.abs(random.normal(0, 0.4, length))
      for column in _own_columns("token", "turn"):
        tokens[column.name] = random.normal(0, 0.4, (length, *column.sizes))
      whole = {c.name: random.normal(size=c.sizes) for c in _own_columns("sequence")}
      sequences.append(_Sequence(weights, (np.arange(length) > cut).astype(int), tokens, whole))
    return cls(
      sequences=(*sequences, None),
      rewards=np.array([1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0]),
      valid=np.array([1, 1, 1, 0, 1, 1, 1, 0], bool),
      groups=np.array([0, 0, 0, 0, 1, 1, 1, -1]),
    )

  def variants(
    self, random: np.random.Generator
  ) -> Iterator[tuple[str, _Example, _Rows, Sequence[int]]]:
    """Examples that must give the same: the property, the example, its rows, and of each of its
    sequences the number here."""
    numbers = range(len(self.rewards))
    filled = dataclasses.replace(self, garbage=3.0)
    yield "padding", filled, _rows(self.order(), time=_TIME + 5, empty=2), numbers
    order = random.permutation(len(numbers)).tolist()
    moved = self.renumbered(order)
    yield "permutation", moved, _rows(random.permutation(moved.order()).tolist()), order
    for other in (self.with_changed_invalid(random), self.without_invalid()):
      yield "sibling exclusion", other, _rows(other.order()), numbers
    yield "mask linearity", self.with_changed_masked(random), _rows(self.order()), numbers

  def order(self) -> list[int]:
    return [i for i, sequence in enumerate(self.sequences) if sequence is not None]

  def renumbered(self, order: Sequence[int]) -> _Example:
    """Place i holds what place order[i] held; groups are numbered the other way round."""
    groups = np.where(self.groups >= 0, self.groups.max() - self.groups, -1)
    take = list(order)
    return dataclasses.replace(
      self,
      sequences=tuple(self.sequences[i] for i in take),
      rewards=self.rewards[take],
      valid=self.valid[take],
      groups=groups[take],
    )

  def with_changed_invalid(self, random: np.random.Generator) -> _Example:
    sequences = [
      s if s is None or ok else s.changed(np.ones(len(s.weights), bool), random)
      for s, ok in zip(self.sequences, self.valid, strict=True)
    ]
    rewards = np.where(self.valid, self.rewards, np.nan)
    return dataclasses.replace(self, sequences=tuple(sequences), rewards=rewards)

  def without_invalid(self) -> _Example:
    kept = [s if ok else None for s, ok in zip(self.sequences, self.valid, strict=True)]
    return dataclasses.replace(
      self, sequences=tuple(kept), groups=np.where(self.valid, self.groups, -1)
    )

  def with_places(self, more: int) -> _Example:
    """With further places that hold no sequence."""
    return dataclasses.replace(
      self,
      sequences=(*self.sequences, *[None] * more),
      rewards=np.append(self.rewards, np.full(more, 5.0)),
      valid=np.append(self.valid, np.zeros(more, bool)),
      groups=np.append(self.groups, np.full(more, -1)),
    )

  def with_changed_masked(self, random: np.random.Generator) -> _Example:
    changed = [s if s is None else s.changed(s.weights == 0, random) for s in self.sequences]
    return dataclasses.replace(self, sequences=tuple(changed))

  def of_sequences(self, column: Column) -> np.ndarray:
    """[N, ...] of a column of sequences."""
    nothing = column.filled(())
    return np.stack([nothing if s is None else s.whole[column.name] for s in self.sequences])

  def on_invalid(self) -> dict[int, np.ndarray]:
    return {
      i: np.ones(len(s.weights), bool)
      for i, s in enumerate(self.sequences)
      if s is not None and not self.valid[i]
    }

  def on_masked(self) -> dict[int, np.ndarray]:
    return {i: s.weights == 0 for i, s in enumerate(self.sequences) if s is not None}


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Which sequence stands where: per row, (number, start)."""

  places: tuple[tuple[int, int, int], ...]  # number, row, start
  rows: int
  time: int


def _rows(order: Sequence[int], *, time: int = _TIME, empty: int = 0) -> _Rows:
  """Fills rows in the given order, two sequences a row, a gap of one token before each."""
  places = tuple((number, i // 2, 1 + (i % 2) * 10) for i, number in enumerate(order))
  return _Rows(places, rows=4 + empty, time=time)


@dataclasses.dataclass(frozen=True)
class _Packed:
  """Arrays of an example laid out in rows."""

  batch: Batch
  scores: dict[str, np.ndarray]

  @classmethod
  def create(cls, example: _Example, rows: _Rows) -> _Packed:
    shape, random = (rows.rows, rows.time), np.random.default_rng(7)
    own = {c.name: (*shape, *c.sizes) for c in _own_columns("token", "turn")}
    shapes = dict.fromkeys((*_PER_TOKEN, *_DISTILLATION), shape) | own
    fields = {k: example.garbage * random.normal(size=v) for k, v in shapes.items()}
    segment_ids, turns = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    weights, positions = np.zeros(shape), np.zeros(shape, np.int32)
    for number, row, start in rows.places:
      sequence = example.sequences[number]
      if sequence is None:
        continue
      span = slice(start, start + len(sequence.weights))
      segment_ids[row, span] = number + 1
      positions[row, span] = np.arange(len(sequence.weights))
      weights[row, span], turns[row, span] = sequence.weights, sequence.turns
      for name, values in sequence.tokens.items():
        fields[name][row, span] = values
    as_float = {k: np.asarray(v, np.float32) for k, v in fields.items()}
    batch = dataclasses.replace(
      jax.tree.map(jnp.asarray, filled_batch(*shape, sequences=len(example.rewards))),
      segment_ids=jnp.asarray(segment_ids),
      positions=jnp.asarray(positions),
      weights=jnp.asarray(weights, jnp.float32),
      behaviour_log_probs=jnp.asarray(as_float["behaviour"]),
      entropies=jnp.asarray(as_float["entropies"]),
      versions=jnp.asarray(np.where(weights > 0, 0, -1), jnp.int32),
      turns=jnp.asarray(turns),
      rewards=jnp.asarray(example.rewards, jnp.float32),
      valid=jnp.asarray(example.valid),
      groups=jnp.asarray(example.groups, jnp.int32),
      columns={
        c.name: jnp.asarray(as_float[c.name] if c.name in own else example.of_sequences(c)).astype(
          c.dtypes[0]
        )
        for c in _own_columns("token", "turn", "sequence")
      },
    )
    return cls(batch, as_float)


@dataclasses.dataclass(frozen=True)
class _Result:
  """Loss, metrics and gradients; gradients by name and sequence, apart from where they stood."""

  loss: float
  metrics: dict[str, float]
  gradients: dict[str, dict[int, np.ndarray]]
  elsewhere: float  # largest gradient on padding
  rows: _Rows

  def renumbered(self, order: Sequence[int]) -> _Result:
    moved = {
      name: {order[i]: value for i, value in parts.items()}
      for name, parts in self.gradients.items()
    }
    return dataclasses.replace(self, gradients=moved)


class _Checker:
  """Runs one objective and compares results."""

  def __init__(self, function: LossFunction, config: ObjectiveConfig, tolerance: float):
    config = at_end(config)
    self.config, self.tolerance = config, tolerance
    objective = policy_objective(config, function)
    self._prepare = jax.jit(self._prepared)
    self._loss: Callable = jax.jit(
      jax.value_and_grad(
        lambda scores, prepared: objective(prepared.with_scores(**scores)), has_aux=True
      )
    )

  def _prepared(self, batch: Batch, scores: dict[str, jax.Array]) -> Prepared:
    return prepare(
      batch,
      self.config,
      old_log_probs=scores["old"],
      reference_log_probs=scores["reference"],
      teacher_log_probs=-scores["teacher"],
      values=scores["values"],
      baselines=jnp.full_like(batch.rewards, 0.25),
      turn_rewards=0.1 * batch.weights,
    )[0]

  def inputs(self, example: _Example, rows: _Rows) -> tuple[dict[str, np.ndarray], Prepared]:
    packed = _Packed.create(example, rows)
    scores = {k: packed.scores[k] for k in ("log_probs", "entropies", "values", "divergences")}
    return scores, self._prepare(packed.batch, packed.scores)

  def run(self, example: _Example, rows: _Rows) -> _Result:
    scores, prepared = self.inputs(example, rows)
    (loss, metrics), gradients = self._loss(scores, prepared)
    by_sequence: dict[str, dict[int, np.ndarray]] = {}
    elsewhere = 0.0
    for name, gradient in gradients.items():
      rest = np.array(gradient)
      by_sequence[name] = {}
      for number, row, start in rows.places:
        sequence = example.sequences[number]
        if sequence is not None:
          span = slice(start, start + len(sequence.weights))
          by_sequence[name][number] = rest[row, span].copy()
          rest[row, span] = 0
      elsewhere = max(elsewhere, float(np.abs(rest).max()))
    numbers = {name: float(value) for name, value in metrics.items()}
    return _Result(float(loss), numbers, by_sequence, elsewhere, rows)

  def finite(self, result: _Result) -> None:
    numbers = np.array([result.loss, *result.metrics.values()])
    gradients = [g for parts in result.gradients.values() for g in parts.values()]
    if not all(np.isfinite(x).all() for x in (numbers, *gradients)):
      raise AssertionError(f"finite: loss {result.loss}, metrics {result.metrics}")

  def same(self, name: str, one: _Result, other: _Result) -> None:
    self.close(name, "loss", one.loss, other.loss)
    for key in one.metrics:
      self.close(name, f"metric {key!r}", one.metrics[key], other.metrics[key])
    for score, parts in one.gradients.items():
      for number in parts.keys() & other.gradients[score].keys():
        what = f"gradient of {score} in sequence {number}"
        self.close(name, what, parts[number], other.gradients[score][number])
    if max(one.elsewhere, other.elsewhere) > 0:
      raise AssertionError(f"{name}: padding has a gradient; multiply by coefficients or weights")

  def no_gradient(self, name: str, result: _Result, where: dict[int, np.ndarray]) -> None:
    for score, parts in result.gradients.items():
      for number, mask in where.items():
        if np.any(parts[number][mask] != 0):
          raise AssertionError(
            f"{name}: {score} of sequence {number} has a gradient on tokens without weight; "
            "multiply by coefficients"
          )

  def linear(self, example: _Example, plain: _Result, random: np.random.Generator) -> None:
    scores, prepared = self.inputs(example, plain.rows)
    part = jnp.asarray(random.uniform(size=prepared.weights.shape), jnp.float32)
    total = 0.0
    for factor in (part, 1 - part):
      scaled: dict[str, Any] = {"coefficients": prepared.coefficients * factor}
      if prepared.value_coefficients is not None:
        scaled["value_coefficients"] = prepared.value_coefficients * factor
      total += float(self._loss(scores, dataclasses.replace(prepared, **scaled))[0][0])
    self.close("mask linearity", "loss of two parts of the coefficients", plain.loss, total)

  def microbatches(self, example: _Example, plain: _Result) -> None:
    scores, prepared = self.inputs(example, plain.rows)
    loss, metrics = 0.0, dict.fromkeys(plain.metrics, 0.0)
    for row in range(plain.rows.rows):
      one_row = jax.tree.map(lambda x, row=row: x[row : row + 1], (scores, prepared))
      (value, parts), _ = self._loss(*one_row)
      loss += float(value)
      metrics = {name: metrics[name] + float(parts[name]) for name in metrics}
    name = "micro-batch equality"
    self.close(name, "loss (return sum(coefficients * per_token), no mean)", plain.loss, loss)
    for key, value in plain.metrics.items():
      self.close(name, f"metric {key!r} (return sum(shares * per_token))", value, metrics[key])

  def close(
    self, name: str, what: str, expected: float | np.ndarray, got: float | np.ndarray
  ) -> None:
    try:
      np.testing.assert_allclose(got, expected, rtol=self.tolerance, atol=self.tolerance)
    except AssertionError as error:
      raise AssertionError(f"{name}: {what} differs.{error}") from None


class _AdvantageChecker:
  """Runs one advantage function and compares what it says of each sequence."""

  def __init__(self, function: AdvantageFunction, tolerance: float):
    self._tolerance = tolerance

    def advantages(batch: Batch, scores: dict[str, jax.Array]) -> jax.Array:
      return prepare(
        batch,
        ObjectiveConfig(),
        old_log_probs=scores["old"],
        reference_log_probs=scores["reference"],
        turn_rewards=scores["values"],
        token_rewards=scores["entropies"],
        advantage=function,
      )[0].advantages

    self._advantages = jax.jit(advantages)

  def run(self, example: _Example, rows: _Rows) -> dict[int, np.ndarray]:
    """Advantages of every valid sequence, by its number."""
    packed = _Packed.create(example, rows)
    found = np.asarray(self._advantages(packed.batch, packed.scores))
    by_sequence = {}
    for number, row, start in rows.places:
      sequence = example.sequences[number]
      if sequence is not None and example.valid[number]:
        by_sequence[number] = found[row, start : start + len(sequence.weights)]
    return by_sequence

  def same(self, name: str, one: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> None:
    for number, expected in one.items():
      try:
        np.testing.assert_allclose(
          other[number], expected, rtol=self._tolerance, atol=self._tolerance
        )
      except AssertionError as error:
        raise AssertionError(
          f"{name}: advantages of sequence {number} differ; use valid, weights, segment_ids and "
          f"groups in every sum.{error}"
        ) from None
