"""Places of an array's elements inside a stored tensor, as views without copies."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

Box = tuple[slice, ...]  # start and stop a dimension, both set


@dataclasses.dataclass(frozen=True)
class Layout:
  """A strided view of a flat tensor: element i lies at ``offset + sum(i * strides)``.

  Attributes:
    offset: of the first element, in elements.
    shape: of the view.
    strides: a dimension, in elements; 0 where its size is 1.
  """

  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  def __getitem__(self, box: Box) -> Layout:
    """The part of the view inside ``box``."""
    return Layout(
      self.offset + sum(s.start * stride for s, stride in zip(box, self.strides, strict=True)),
      tuple(s.stop - s.start for s in box),
      self.strides,
    )

  def boxes(self, most: int) -> Iterator[Box]:
    """Cuts the view into boxes of at most ``most`` elements, in the order they are stored."""
    order = self.stored_order()
    steps = [1] * len(self.shape)
    held = 1
    for d in reversed(order):
      steps[d] = max(1, min(self.shape[d], most // held))
      held *= steps[d]
      if steps[d] < self.shape[d]:
        break
    for position in np.ndindex(*(-(-self.shape[d] // steps[d]) for d in order)):
      box = [slice(0, 0)] * len(self.shape)
      for d, i in zip(order, position, strict=True):
        box[d] = slice(i * steps[d], min((i + 1) * steps[d], self.shape[d]))
      yield tuple(box)

  def stored_order(self) -> list[int]:
    """Dimensions from the outermost to the innermost of the tensor."""
    return sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], d))

  def runs(self) -> Iterator[tuple[int, int]]:
    """Maximal runs (first, length) of elements that lie one behind the other in the tensor.

    Written in this order they are the view with its dimensions in ``stored_order``.
    """
    order = [d for d in self.stored_order() if self.shape[d] > 1]
    length = 1
    while order and self.strides[order[-1]] == length:
      length *= self.shape[order.pop()]
    for position in np.ndindex(*(self.shape[d] for d in order)):
      start = sum(i * self.strides[d] for i, d in zip(position, order, strict=True))
      yield self.offset + start, length

  def of(self, flat: np.ndarray) -> np.ndarray:
    """The view of a whole tensor given as one dimension."""
    return np.ndarray(
      self.shape,
      flat.dtype,
      flat.view(np.uint8).data,
      self.offset * flat.itemsize,
      tuple(stride * flat.itemsize for stride in self.strides),
    )


@dataclasses.dataclass(frozen=True)
class Pattern:
  """Axes of a stored tensor and of our array, as in ``"(heads width) embed -> embed heads width"``.

  Parentheses put axes into one stored dimension, the outermost first; ``1`` is a stored dimension
  of size one. Without an arrow both sides are the same. An axis of our array that the left side
  lacks is in the tensor's name: one tensor per index.

  ``+`` marks, once, what lies behind its like in a tensor that several arrays share:
  ``"(heads width)+ embed"`` joins whole dimensions, ``"(heads width+) embed"`` within each head.

  Attributes:
    stored: axes of every stored dimension.
    ours: one axis a dimension of our array.
    join: stored dimension, and the first of its axes, that are joined; None without ``+``.
  """

  stored: tuple[tuple[str, ...], ...]
  ours: tuple[str, ...]
  join: tuple[int, int] | None

  @classmethod
  def parse(cls, text: str) -> Pattern:
    """Reads a pattern.

    Raises:
      ValueError: an axis stands twice, the stored side has one that ours lacks, two ``+``.
    """
    left, arrow, right = text.partition("->")
    stored: list[tuple[str, ...]] = []
    joins: list[tuple[int, int]] = []
    for group in re.findall(r"\([^()]*\)\+?|[^\s()]+", left):
      axes = [axis for axis in group.removesuffix("+").strip("()").split() if axis != "1"]
      joins += [(len(stored), 0)] if group.endswith("+") else []
      joins += [(len(stored), i) for i, axis in enumerate(axes) if axis.endswith("+")]
      stored.append(tuple(axis.removesuffix("+") for axis in axes))
    named = [axis for axes in stored for axis in axes]
    ours = tuple(right.split()) if arrow else tuple(named)
    if len(set(named)) < len(named) or len(set(ours)) < len(ours) or not set(named) <= set(ours):
      raise ValueError(f"{text!r}: every axis stands once a side, and those on the left on both.")
    if len(joins) > 1:
      raise ValueError(f"{text!r}: at most one + is allowed.")
    return cls(tuple(stored), ours, joins[0] if joins else None)

  @property
  def listed(self) -> tuple[str, ...]:
    """Axes with one tensor an index."""
    named = {axis for axes in self.stored for axis in axes}
    return tuple(axis for axis in self.ours if axis not in named)

  def joined(self, sizes: Mapping[str, int]) -> int:
    """The share of the tensor that our array takes if it is joined with others."""
    if self.join is None:
      return 1
    dimension, first = self.join
    return math.prod(sizes[axis] for axis in self.stored[dimension][first:])

  def stored_shape(self, sizes: Mapping[str, int], total: int) -> tuple[int, ...]:
    """Shape of the tensor, ``total`` being the sum of ``joined`` over its arrays."""
    shape = [math.prod(sizes[axis] for axis in axes) for axes in self.stored]
    if self.join is not None:
      dimension, first = self.join
      shape[dimension] = total * math.prod(sizes[axis] for axis in self.stored[dimension][:first])
    return tuple(shape)

  def layout(self, sizes: Mapping[str, int], *, start: int, total: int) -> Layout:
    """The view of our array, with size 1 along ``listed`` axes.

    Args:
      sizes: of every axis.
      start: where our part begins, the sum of ``joined`` over the arrays before it.
      total: as in ``stored_shape``.
    """
    strides: dict[str, int] = {}
    offset, step = 0, 1
    for dimension in reversed(range(len(self.stored))):
      axes = self.stored[dimension]
      first = self.join[1] if self.join is not None and self.join[0] == dimension else None
      within = step
      for i in reversed(range(len(axes))):
        strides[axes[i]] = within if sizes[axes[i]] > 1 else 0
        within *= sizes[axes[i]]
        if i == first:
          offset, within = start * step, total * step
      step = within
    return Layout(
      offset,
      tuple(sizes[name] if name in strides else 1 for name in self.ours),
      tuple(strides.get(name, 0) for name in self.ours),
    )


def overlap(a: Box, b: Box) -> Box | None:
  """The part of two boxes that both have; None where there is none."""
  both = tuple(slice(max(p.start, q.start), min(p.stop, q.stop)) for p, q in zip(a, b, strict=True))
  return both if all(s.start < s.stop for s in both) else None


def relative(box: Box, origin: Box) -> Box:
  """``box`` counted from the start of ``origin``."""
  return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(box, origin, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
  """Sizes of a box."""
  return tuple(s.stop - s.start for s in box)
