"""One description of a family's tensors, for reading and writing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.layout import Box, Layout, Pattern
from agentjax.models.spec import ParamSpec, is_spec
from agentjax.models.stack import param_specs, pattern_units


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A stored tensor and the arrays of ours that it holds.

  Attributes:
    name: as published. An axis in braces, ``experts.{experts}.up_proj.weight``, stands for one
      tensor an index of that axis.
    fields: path of each array to its ``Pattern``. A path starts with ``blocks.I.``, the I-th
      character of the pattern, or is that of an array in ``Params``, ``[J]`` behind it being the
      J-th along its first axis. Several arrays lie one behind the other where their patterns have a
      ``+``, in this order.
    dtype: stored in this dtype ("F32") whatever the folder's; None follows the folder.
  """

  name: str
  fields: Mapping[str, str]
  dtype: str | None = None

  def at(self, number: int) -> Tensor:
    """The same of arrays that are stacked: their ``number``-th along the first axis."""
    fields = {f"{path}[{number}]": pattern for path, pattern in self.fields.items()}
    return dataclasses.replace(self, fields=fields)


@dataclasses.dataclass(frozen=True)
class OneOf:
  """Spellings of the same arrays: any is read, the first, the published one, is written."""

  options: tuple[tuple[Tensor, ...], ...]

  def at(self, number: int) -> OneOf:
    """As ``Tensor.at``."""
    return OneOf(tuple(tuple(t.at(number) for t in option) for option in self.options))


@dataclasses.dataclass(frozen=True)
class Absent:
  """An array the family has no tensor for: zeros on reading; refused on writing unless zero."""

  path: str


@dataclasses.dataclass(frozen=True)
class Family:
  """Everything specific to one ``model_type``.

  Attributes:
    model_type: of config.json.
    architecture: class that transformers builds, for ``architectures`` of config.json.
    config_from_hf: config.json to ModelConfig; raises ConfigError for what ModelConfig lacks.
    config_to_hf: the inverse, without ``model_type``, ``architectures`` and the dtype. It need not
      check what it cannot express: ``family_of`` compares the config that comes back.
    tensors: the map, in the order tensors are written.
    prefixes: starts of stored names that stand for other ones, ``{"model.": "backbone."}``.
    ignored: regular expressions of names, after ``prefixes``, of tensors that the model does not
      read.
  """

  model_type: str
  architecture: str
  config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
  config_to_hf: Callable[[ModelConfig], dict[str, Any]]
  tensors: Callable[[ModelConfig], Iterable[Tensor | OneOf | Absent]]
  prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
  """A box of one of our arrays and where a stored tensor holds it.

  Attributes:
    array: key of ``leaves``.
    box: part of the array, a slice per dimension.
    layout: of that part, in the tensor.
  """

  array: str
  box: Box
  layout: Layout


@dataclasses.dataclass(frozen=True)
class Stored:
  """One tensor of a checkpoint: ``Tensor`` with all names and sizes filled in."""

  name: str
  shape: tuple[int, ...]
  dtype: str | None
  pieces: tuple[Piece, ...]


def leaves(tree: Any) -> dict[str, Any]:
  """Arrays or specs of a parameter tree by dotted path, ``groups.0.1.mixer.query``."""
  found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
  return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in found}


def resolve(
  family: Family, config: ModelConfig, names: Collection[str] | None = None
) -> tuple[list[Stored], list[str]]:
  """Every tensor of a model, and the arrays that none holds.

  Args:
    family: whose map.
    config: the model.
    names: tensors that are there, which chooses the spelling; None takes the published one.

  Returns:
    Tensors in the order of the map, and the keys of ``leaves`` that are zeros.

  Raises:
    ValueError: the map is wrong: it names an unknown array, or does not cover every element once.
  """
  specs: dict[str, ParamSpec] = leaves(param_specs(config))
  places = _block_places(config)
  present = frozenset(names or ())
  tensors: list[Stored] = []
  absent: list[str] = []
  covered = dict.fromkeys(specs, 0)
  for entry in family.tensors(config):
    match entry:
      case Absent(path):
        key, repeat = _locate(path, places)
        spec = specs[key]
        covered[key] += math.prod(spec.shape if repeat is None else spec.shape[1:])
        absent.append(key)
        continue
      case OneOf(options):
        filled = [[_fill(t, specs, places) for t in option] for option in options]
        every = [[stored for group in option for stored in group] for option in filled]
        chosen = next((o for o in every if any(s.name in present for s in o)), every[0])
      case Tensor():
        chosen = _fill(entry, specs, places)
    for stored in chosen:
      for piece in stored.pieces:
        covered[piece.array] += piece.layout.size
    tensors += chosen
  wrong = [key for key, spec in specs.items() if covered[key] != math.prod(spec.shape)]
  if wrong:
    raise ValueError(
      f"the map of {family.model_type!r} does not hold every element of {', '.join(wrong)} once."
    )
  return tensors, sorted(set(absent))


def _block_places(config: ModelConfig) -> list[tuple[int, int, int]]:
  """(group, place in its unit, repeat) of every character of the pattern."""
  return [
    (group, place, repeat)
    for group, (unit, repeats) in enumerate(pattern_units(config))
    for repeat in range(repeats)
    for place in range(len(unit))
  ]


def _locate(path: str, places: list[tuple[int, int, int]]) -> tuple[str, int | None]:
  """Key of an array and, where it is one of several that are stacked, its number."""
  if path.startswith("blocks."):
    _, number, field = path.split(".", 2)
    group, place, repeat = places[int(number)]
    return f"groups.{group}.{place}.{field}", repeat
  key, bracket, number = path.removesuffix("]").partition("[")
  return key, int(number) if bracket else None


def _fill(
  tensor: Tensor, specs: Mapping[str, ParamSpec], places: list[tuple[int, int, int]]
) -> list[Stored]:
  """The tensors one entry of a map stands for."""
  arrays = []
  for path, text in tensor.fields.items():
    key, repeat = _locate(path, places)
    if key not in specs:
      raise ValueError(f"{tensor.name}: the model has no array {path!r} ({key!r}).")
    pattern = Pattern.parse(text)
    shape = specs[key].shape if repeat is None else specs[key].shape[1:]
    if len(shape) != len(pattern.ours):
      raise ValueError(f"{tensor.name}: {path} has shape {shape}, the pattern says {text!r}.")
    arrays.append((key, repeat, pattern, dict(zip(pattern.ours, shape, strict=True))))
  total = sum(pattern.joined(sizes) for _, _, pattern, sizes in arrays)
  shapes = {pattern.stored_shape(sizes, total) for _, _, pattern, sizes in arrays}
  if len(shapes) > 1 or (len(arrays) > 1 and any(a[2].join is None for a in arrays)):
    raise ValueError(f"{tensor.name}: its arrays do not join to one tensor, shapes {shapes}.")
  _, _, pattern, sizes = arrays[0]
  listed = pattern.listed
  found = []
  for position in itertools.product(*(range(sizes[axis]) for axis in listed)):
    index = dict(zip(listed, position, strict=True))
    pieces, start = [], 0
    for key, repeat, pattern, sizes in arrays:
      box: tuple[slice, ...] = tuple(
        slice(index[axis], index[axis] + 1) if axis in index else slice(0, sizes[axis])
        for axis in pattern.ours
      )
      layout = pattern.layout(sizes, start=start, total=total)
      if repeat is not None:
        box = (slice(repeat, repeat + 1), *box)
        layout = Layout(layout.offset, (1, *layout.shape), (0, *layout.strides))
      pieces.append(Piece(key, box, layout))
      start += pattern.joined(sizes)
    name = tensor.name.format(**index) if listed else tensor.name
    (shape,) = shapes
    found.append(Stored(name, shape, tensor.dtype, tuple(pieces)))
  return found
