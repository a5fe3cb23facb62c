"""Costs of a compiled program, read from its text, with loops counted as often as they run.

The compiler's own cost analysis counts the body of a loop once. Our programs loop over layers and
micro-batches, so it would miss nearly everything.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([^\s=]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%([^\s(]+) \(.*\{$")
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast while conditional call call-done after-all "
  "partition-id replica-id".split()
)

_UNKNOWN = 2**63 - 1  # cycles of what runs on sparse cores

# Operations that read only a part of their first operand.
_SLICES = ("dynamic-slice", "gather")
# Operations that write a part of their first operand in place: which operand that part is.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class ProgramCost:
  """What one device does in one run of a program.

  Attributes:
    flops: products and sums of matrix products and kernels.
    hbm_bytes: read from and written to main memory.
    cycles: the compiler's estimate, one operation after the other; collectives are not in it.
    collective_bytes: bytes a device receives, by kind of collective.
  """

  flops: float
  hbm_bytes: float
  cycles: float
  collective_bytes: Mapping[str, float]

  def plus(self, other: ProgramCost, times: float = 1.0) -> ProgramCost:
    """This cost plus ``times`` runs of another program."""
    kinds = dict.fromkeys((*self.collective_bytes, *other.collective_bytes))
    received = {
      k: self.collective_bytes.get(k, 0) + times * other.collective_bytes.get(k, 0) for k in kinds
    }
    return ProgramCost(
      self.flops + times * other.flops,
      self.hbm_bytes + times * other.hbm_bytes,
      self.cycles + times * other.cycles,
      {kind: size for kind, size in received.items() if size},
    )


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  shape: str
  opcode: str
  arguments: str
  attributes: str

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    return tuple(re.findall(r"%([^\s,()]+)", self.arguments))

  def attribute(self, name: str) -> str | None:
    found = re.search(rf"\b{name}=%([^\s,)}}]+)", self.attributes)
    return found.group(1) if found else None


_Computation = Mapping[str, _Instruction]
_Sums = dict[str, float]  # "flops", "bytes", "cycles", and bytes by kind of collective


def program_cost(text: str, *, dynamic_trips: int = 1) -> ProgramCost:
  """Costs of the entry computation of an optimised module.

  Args:
    text: ``compiled.as_text()``.
    dynamic_trips: trips of a loop whose number of trips is not in the program.
  """
  computations, entry = _parse(text)
  total = _Walk(computations, dynamic_trips).cost(entry)
  return ProgramCost(
    flops=total["flops"],
    hbm_bytes=total["bytes"],
    cycles=total["cycles"],
    collective_bytes={kind: total[kind] for kind in COLLECTIVES if total.get(kind)},
  )


def _add(total: _Sums, more: _Sums, times: int = 1) -> None:
  for name, value in more.items():
    total[name] += value * times


class _Walk:
  """Sums over the operations of a computation and of all it calls."""

  def __init__(self, computations: Mapping[str, _Computation], dynamic_trips: int) -> None:
    self._computations, self._dynamic_trips = computations, dynamic_trips
    self.cost = functools.cache(self._cost)

  def _cost(self, name: str) -> _Sums:
    here = self._computations[name]
    total: _Sums = collections.defaultdict(float)
    seen: set[tuple[str, ...]] = set()
    for op in here.values():
      if op.opcode == "while":
        trips = _trips(op, here, self._computations, self._dynamic_trips)
        body = op.attribute("body")
        assert body is not None
        _add(total, self.cost(body), trips)
      elif op.opcode in ("call", "call-start"):  # the latter on the sparse cores of a TPU
        _add(total, self.cost(op.attribute("to_apply") or op.attribute("calls") or ""))
      elif op.opcode == "conditional":
        branches = [self.cost(b) for b in _branches(op)]
        _add(total, max(branches, key=lambda c: (c["flops"], c["bytes"])))
      elif op.opcode not in _FREE:
        total["cycles"] += _estimated_cycles(op)
        total["bytes"] += _hbm_bytes(op, here, self._computations)
        # A collective appears in every part of its asynchronous chain.
        for inner, where in self._flat(op, here):
          total["flops"] += _flops(inner, where)
          kind = inner.opcode.removesuffix("-start")
          if kind in COLLECTIVES:
            chain = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', inner.attributes)
            key = (kind, *chain.groups()) if chain else (kind, inner.name)
            if key not in seen:
              seen.add(key)
              total[kind] += _received_bytes(inner, kind)
    return total

  def _flat(
    self, op: _Instruction, here: _Computation
  ) -> Iterator[tuple[_Instruction, _Computation]]:
    """The operation and, if it is a fusion, its parts."""
    yield op, here
    inside = self._computations.get(op.attribute("calls") or "")
    if inside is not None:
      for inner in inside.values():
        yield from self._flat(inner, inside)


def _parse(text: str) -> tuple[Mapping[str, _Computation], str]:
  computations: dict[str, dict[str, _Instruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header:
      current = computations.setdefault(header.group(2), {})
      entry = header.group(2) if header.group(1) else entry
      continue
    found = _INSTRUCTION.match(line)
    if found and current is not None:
      op = _instruction(found.group(1), found.group(2))
      current[op.name] = op
  if not entry:
    raise ValueError("the text holds no ENTRY computation; pass compiled.as_text().")
  return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
  end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
  shape, rest = rest[:end], rest[end:].lstrip()
  opening = rest.index("(")
  closing = _closing(rest, opening)
  return _Instruction(name, shape, rest[:opening], rest[opening + 1 : closing - 1], rest[closing:])


def _closing(text: str, opening: int) -> int:
  """Place after the parenthesis that closes the one at ``opening``."""
  depth = 0
  for i in range(opening, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if not depth:
      return i + 1
  raise ValueError(f"unbalanced parentheses in {text[:80]!r}.")


def _arrays(shape: str) -> Iterator[tuple[int, bool]]:
  """(bytes, whether in main memory) of every array of a shape."""
  for dtype, dims, layout in _ARRAY.findall(shape):
    bits = re.search(r"\d+", dtype)
    size = 1 if dtype == "pred" or bits is None else int(bits.group()) / 8
    yield math.ceil(size * math.prod(_dims(dims))), "S(" not in layout


def _dims(text: str) -> list[int]:
  return [int(d) for d in text.split(",") if d]


def _array_dims(shape: str) -> list[int]:
  found = _ARRAY.search(shape)
  return _dims(found.group(2)) if found else []


def _size(shape: str, *, hbm_only: bool) -> int:
  return sum(size for size, in_hbm in _arrays(shape) if in_hbm or not hbm_only)


def _received_bytes(op: _Instruction, kind: str) -> float:
  sizes = [size for size, _ in _arrays(op.shape)]
  if op.opcode.endswith("-start") and len(sizes) > 1:
    sizes = sizes[len(sizes) // 2 :]  # (operands, results, ...)
  # Ring algorithms: a reduction sends what it gathers once more.
  return sum(sizes) * (2 if kind == "all-reduce" else 1)


def _estimated_cycles(op: _Instruction) -> int:
  found = re.search(r'"estimated_cycles":"(\d+)"', op.attributes)
  cycles = int(found.group(1)) if found else 0
  return 0 if cycles == _UNKNOWN else cycles


def _hbm_bytes(
  op: _Instruction, here: _Computation, computations: Mapping[str, _Computation]
) -> int:
  """Bytes of operands and results in main memory; of those only sliced, the slice's."""
  if op.opcode in ("copy-done", "async-done") or op.opcode.endswith("-done"):
    return 0
  inside = computations.get(op.attribute("calls") or "")
  if inside is None:
    if op.opcode in _SLICES:
      return 2 * _size(op.shape, hbm_only=True)
    if op.opcode in _UPDATES:
      return 2 * _size(here[op.operands[_UPDATES[op.opcode]]].shape, hbm_only=True)
    if op.opcode.endswith("slice-start"):  # ((source), slice, handle): reads the slice alone
      size, in_hbm = list(_arrays(op.shape))[1]
      return size * (1 + in_hbm)
    if op.opcode == "copy-start":  # (copy, source, handle)
      return _size(op.shape, hbm_only=True)
    return _size(op.shape, hbm_only=True) + sum(
      _size(here[o].shape, hbm_only=True) for o in op.operands if o in here
    )
  total, updated = 0, False
  for inner in inside.values():
    if inner.opcode == "parameter" and _size(inner.shape, hbm_only=True):
      part, written = _moved(inner.name, inside, computations)
      total += _size(inner.shape, hbm_only=True) if part is None else part
      updated |= written
  return total + (0 if updated else _size(op.shape, hbm_only=True))


def _moved(
  name: str, inside: _Computation, computations: Mapping[str, _Computation]
) -> tuple[int | None, bool]:
  """Bytes of a fusion's operand that are read or written, and whether it is written in place.

  None means all of it; if it is only sliced or updated, they are those of the slices or updates.
  """
  total, updated = 0, False
  users = [op for op in inside.values() if name in op.operands]
  for op in users:
    part: int | None = None
    written = False
    nested = computations.get(op.attribute("calls") or "")
    if op.opcode == "bitcast":
      part, written = _moved(op.name, inside, computations)
    elif op.opcode in _SLICES and op.operands.index(name) == 0:
      part = _size(op.shape, hbm_only=False)
    elif op.opcode in _UPDATES and op.operands.index(name) == 0:
      part = _size(inside[op.operands[_UPDATES[op.opcode]]].shape, hbm_only=False)
      written = True
    elif nested is not None and op.operands.count(name) == 1:
      place = str(op.operands.index(name))
      inner = next(p for p in nested.values() if p.opcode == "parameter" and p.arguments == place)
      part, written = _moved(inner.name, nested, computations)
    if part is None:
      return None, False
    total, updated = total + part, updated | written
  return (total if users else None), updated


def _flops(op: _Instruction, here: _Computation) -> float:
  if op.opcode == "custom-call":
    found = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', op.attributes)
    return float(found.group(1)) if found else 0.0
  if op.opcode == "dot":
    left = _array_dims(here[op.operands[0]].shape)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
    over = math.prod(left[i] for i in _dims(contracted.group(1))) if contracted else 1
    return 2.0 * math.prod(_array_dims(op.shape)) * over
  if op.opcode == "convolution":
    return _convolution_flops(op, here)
  return 0.0


def _convolution_flops(op: _Instruction, here: _Computation) -> float:
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
  assert labels is not None, op.attributes
  left, right, out = (
    dict(zip(names, _array_dims(shape), strict=True))
    for names, shape in zip(
      labels.groups(), (*(here[o].shape for o in op.operands[:2]), op.shape), strict=True
    )
  )
  total = 2.0 * out["b"] * out["f"] * right["i"]
  for i, (size, stride, pad, lhs_dilate, rhs_dilate) in enumerate(_windows(op.attributes)):
    axis = str(i)
    total *= _valid_pairs(left[axis], out[axis], size, stride, pad, lhs_dilate, rhs_dilate)
  return total


def _windows(attributes: str) -> Iterator[tuple[int, int, int, int, int]]:
  """(size, stride, low padding, left dilation, right dilation) per spatial dimension."""
  window = re.search(r"window=\{([^}]*)\}", attributes)
  if window is None:
    return
  fields = dict(part.split("=") for part in window.group(1).split())
  sizes = [int(v) for v in fields["size"].split("x")]

  def each(name: str) -> list[int]:
    given = fields.get(name)
    return [int(v) for v in given.split("x")] if given else [1] * len(sizes)

  pads = [int(v.split("_")[0]) for v in fields["pad"].split("x")] if "pad" in fields else None
  yield from zip(
    sizes,
    each("stride"),
    pads or [0] * len(sizes),
    each("lhs_dilate"),
    each("rhs_dilate"),
    strict=True,
  )


@functools.lru_cache(maxsize=4096)
def _valid_pairs(
  left: int, out: int, size: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
  """Pairs (output place, window place) that meet an element; XLA writes batched products so."""
  places = np.arange(out)[:, None] * stride + np.arange(size) * rhs_dilate - pad
  inside = (places >= 0) & (places < (left - 1) * lhs_dilate + 1) & (places % lhs_dilate == 0)
  return int(inside.sum())


def _branches(op: _Instruction) -> list[str]:
  listed = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
  if listed:
    return re.findall(r"%([^\s,}]+)", listed.group(1))
  return [b for name in ("true_computation", "false_computation") if (b := op.attribute(name))]


def _trips(
  op: _Instruction, here: _Computation, computations: Mapping[str, _Computation], dynamic: int
) -> int:
  """How often the body runs: as annotated, or by ``counter < constant`` in the condition."""
  known = re.search(r"known_trip_count[^\d]*(\d+)", op.attributes)
  if known:
    return int(known.group(1))
  condition = computations[op.attribute("condition") or ""]
  compare = next((c for c in condition.values() if "direction=L" in c.attributes), None)
  if compare is None:
    return dynamic
  sides = [condition[name] for name in compare.operands]
  limit = next((value for side in sides if (value := _constant(side)) is not None), None)
  counter = next((side for side in sides if side.opcode == "get-tuple-element"), None)
  if limit is None or counter is None:
    return dynamic
  found = re.search(r"index=(\d+)", counter.attributes)
  assert found is not None
  index = int(found.group(1))
  start = _constant(_element(here.get(op.operands[0]), index, here)) or 0
  # Unrolled loops count in larger steps.
  body = computations[op.attribute("body") or ""]
  after = _element(list(body.values())[-1], index, body)
  step = 1
  if after is not None and after.opcode == "add":
    step = next((v for o in after.operands if (v := _constant(_origin(o, body)))), 1)
  last = limit + ("direction=LE" in compare.attributes)
  return max(-(-(last - start) // step), 0)


def _element(tuple_op: _Instruction | None, index: int, here: _Computation) -> _Instruction | None:
  if tuple_op is None or tuple_op.opcode != "tuple":
    return None
  return _origin(tuple_op.operands[index], here)


def _origin(name: str, here: _Computation) -> _Instruction | None:
  """The operation of a name, or the one that it copies."""
  op = here.get(name)
  while op is not None and op.opcode in ("copy", "bitcast"):
    op = here.get(op.operands[0])
  return op


def _constant(op: _Instruction | None) -> int | None:
  if op is None or op.opcode != "constant" or not op.arguments.lstrip("-").isdigit():
    return None
  return int(op.arguments)
