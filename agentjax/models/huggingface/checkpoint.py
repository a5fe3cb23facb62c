"""Reading and writing folders of Hugging Face checkpoints."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from agentjax.config import ConfigError, check
from agentjax.files import CheckpointError, check_empty, written_beside
from agentjax.models.config import BUILT_IN, GEMMA_KINDS, ModelConfig
from agentjax.models.huggingface.families import find_family, model_types
from agentjax.models.huggingface.files import (
  BLOCK_BYTES,
  DTYPES,
  TensorEntry,
  read_header,
  write_file,
)
from agentjax.models.huggingface.layout import Box, Layout, overlap, relative, shape_of
from agentjax.models.huggingface.mapping import Family, Piece, Stored, leaves, resolve
from agentjax.models.spec import ParamSpec, is_spec
from agentjax.models.stack import Params, param_specs
from agentjax.sharding import replicated, shardings

Array = jax.Array

CONFIG_FILE = "config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
  "tokenizer.json",
  "tokenizer_config.json",
  "chat_template.jinja",
  "special_tokens_map.json",
  "generation_config.json",
  "added_tokens.json",
  "merges.txt",
  "tokenizer.model",
  "vocab.json",
)
# Keys of config.json that no family's map knows but that go with a tokenizer.
_COMPANION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")

# Fields of ModelConfig that say how a model is run, trained or initialised, not what it computes.
RUNTIME_FIELDS = frozenset((
  "compute_dtype param_dtype init_scale remat unrolled_blocks logits_chunk kernels attention_block "
  "record_max_scores dt_min dt_max dt_floor frozen_router router_bias_rule active_experts "
  "expert_block expert_capacity exact_chunk"
).split())  # fmt: skip
# Fields that have no meaning without a block of one of these kinds.
_FIELDS_OF_KINDS = {
  "M": "mamba_heads mamba_head_dim mamba_state mamba_groups conv_kernel chunk_size "
  "dt_limit_low dt_limit_high",
  "*": "qk_norm attention_bias",
  "*" + GEMMA_KINDS: "num_kv_heads head_dim",
  "*AS" + GEMMA_KINDS: "num_heads rope_theta rope_scaling_factor rope_low_freq_factor "
  "rope_high_freq_factor rope_original_length",
  "AS": "mla",
  "-S" + GEMMA_KINDS: "d_mlp",
  "ESxX": "num_experts experts_per_token d_expert d_shared_expert latent_size router_scores "
  "num_expert_groups expert_groups_per_token routed_scaling norm_topk expert_scale zero_experts",
  "-ES" + GEMMA_KINDS: "mlp_activation",
}
_MOST_LISTED = 20
_APART = 32  # elements between rows, so that they fall on different lines of the cache


def load_pretrained(
  directory: str | os.PathLike[str],
  *,
  mesh: jax.sharding.Mesh | None = None,
  overrides: Mapping[str, Any] | None = None,
) -> tuple[Params, ModelConfig]:
  """Reads a folder with ``config.json`` and safetensors files.

  Each process reads the bytes of its own shards only, and holds one block of a tensor besides the
  arrays it builds. Weights keep the dtype they are stored in, float16 becomes float32.

  Args:
    directory: the folder; one file or several with an index.
    mesh: where the arrays are placed, by their logical axes; None is the default device.
    overrides: fields of ModelConfig that differ from what ``config.json`` says, as
      ``{"compute_dtype": "bfloat16", "remat": "block"}``. ``param_dtype`` rounds to that dtype.

  Returns:
    Parameters and their config, which is validated.

  Raises:
    ConfigError: ``config.json`` asks for something that ModelConfig lacks, or an override is wrong.
    CheckpointError: files or tensors are missing, superfluous, damaged, misshapen or of a wrong
      dtype; all of them are named, and no array is made.
  """
  folder = pathlib.Path(directory)
  overrides = overrides or {}
  family, config = _read_family(folder, overrides)
  specs = param_specs(config)
  placements = leaves(shardings(specs, mesh)) if mesh is not None else {}
  entries, problems = _read_entries(folder, family)
  tensors, zeros = resolve(family, config, entries)
  problems += _compare(tensors, entries, family, config, "param_dtype" in overrides)
  if problems:
    raise CheckpointError(
      _describe(f"{folder} does not hold the model its config.json says", problems)
    )
  sources: dict[str, list[tuple[TensorEntry, Piece]]] = {key: [] for key in leaves(specs)}
  for stored in tensors:
    for piece in stored.pieces:
      sources[piece.array].append((entries[stored.name], piece))
  arrays: dict[str, Array] = {}
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)))
    files = {entry.file: _open(entry.file, stack) for entry in entries.values()}
    # The largest first: this needs the least memory while they are placed.
    by_size = sorted(leaves(specs).items(), key=lambda item: -math.prod(item[1].shape))
    for key, spec in by_size:
      shards = _shards(spec, placements.get(key))
      if key in zeros:
        for shard in shards:
          shard.buffer.fill(0)
      tasks = [
        pool.submit(_fill, entry, files[entry.file], piece, shards) for entry, piece in sources[key]
      ]
      for task in tasks:
        task.result()
      arrays[key] = _place(spec, shards, placements.get(key))
  structure = jax.tree.structure(specs, is_leaf=is_spec)
  return jax.tree.unflatten(structure, [arrays[key] for key in leaves(specs)]), config


def save_pretrained(
  directory: str | os.PathLike[str],
  params: Params,
  config: ModelConfig,
  *,
  max_shard_bytes: int = 5_000_000_000,
  dtype: str | None = None,
  tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
  """Writes a folder that transformers and others read; all of it or nothing.

  The family follows from the config (``family_of``). One tensor is held at a time. Where there are
  several processes all of them call this and the first one writes.

  Args:
    directory: a new or empty folder.
    params: as from ``init`` or ``load_pretrained``; sharded or not.
    config: of the params.
    max_shard_bytes: a file's tensors are at most this large together, or a single tensor.
    dtype: "float32", "float16" or "bfloat16" for all tensors but the router's bias; None keeps that
      of the arrays, so that they load again bit for bit.
    tokenizer_from: folder whose tokenizer and generation files are copied, if it has them; the ids
      of special tokens and the longest context are taken from its ``config.json``.

  Raises:
    ConfigError: no family can express this config; the error says what each of them would lose.
    CheckpointError: the folder is in use, the params are not of this config, or an array that the
      family has no tensor for is not zero.
  """
  known = [kind.name for kind in DTYPES.values()]
  check(dtype is None or dtype in known, "dtype", dtype, f"{', '.join(known)} or None")
  family = family_of(config)
  tensors, zeros = resolve(family, config)
  arrays = leaves(params)
  _check_arrays(arrays, config, zeros, family)
  target = check_empty(directory)
  dtypes = {stored.name: _dtype_name(stored, arrays, dtype) for stored in tensors}
  files = _split_into_files(tensors, dtypes, max_shard_bytes)
  values = _config_json(family, config, dtypes)
  if tokenizer_from is not None:
    values |= _companion_keys(pathlib.Path(tokenizer_from))
  _wait(f"checked {target}")
  if jax.process_index() == 0:
    _write_folder(target, files, dtypes, arrays, values, tokenizer_from)
  else:
    for group in files.values():
      for _ in _gather(group, arrays, dtypes):
        pass
  _wait(f"saved {target}")


def is_folder(path: str | os.PathLike[str]) -> bool:
  """Whether this is a Hugging Face folder; a run's config.json has no ``model_type``.

  Raises:
    CheckpointError: its ``config.json`` is no JSON.
  """
  file = pathlib.Path(path) / CONFIG_FILE
  return file.is_file() and "model_type" in _read_json(file)


def read_config(
  directory: str | os.PathLike[str], *, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
  """The validated config of a folder, as ``load_pretrained`` returns it.

  Of the weights it reads only the output projection, and only if the file holds one although
  ``config.json`` says that it need not.

  Raises:
    CheckpointError: ``config.json`` is not there or no JSON.
    ConfigError: as ``load_pretrained``.
  """
  return _read_family(pathlib.Path(directory), overrides or {})[1]


def _read_family(folder: pathlib.Path, overrides: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
  family, found = config_of(_read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
  if found.tie_embeddings and _holds_another_head(folder, family, found):
    found = dataclasses.replace(found, tie_embeddings=False)
  config = ModelConfig.from_dict({**found.to_dict(), **overrides}, "overrides")
  config.validate()
  return family, config


def config_of(values: Mapping[str, Any], file: pathlib.Path) -> tuple[Family, ModelConfig]:
  """Family and validated config of the keys of a ``config.json``; errors name ``file``."""
  try:
    family = find_family(values.get("model_type", ""))
    config = family.config_from_hf(values)
    config.validate()
  except ConfigError as error:
    raise ConfigError(f"{file}: {error}") from error
  return family, config


def _holds_another_head(folder: pathlib.Path, family: Family, config: ModelConfig) -> bool:
  """Whether the file of a model with tied embeddings holds an ``lm_head`` that differs from them.

  transformers then uses it, for any value of ``tie_word_embeddings``.
  """
  if not any((folder / name).exists() for name in (_SINGLE, _INDEX)):
    return False
  entries, _ = _read_entries(folder, family)
  untied = dataclasses.replace(config, tie_embeddings=False)
  both = [
    entries[stored.name]
    for stored in resolve(family, untied)[0]
    if stored.pieces[0].array in ("embedding", "lm_head") and stored.name in entries
  ]
  if len(both) < 2 or any(entry.dtype not in DTYPES for entry in both):
    return False  # load_pretrained says what is missing or wrong
  size, width = both[0].shape
  if both[1].shape != (size, width):
    return True
  whole = Layout(0, (size, width), (width, 1))
  with contextlib.ExitStack() as stack:
    files = [_open(entry.file, stack) for entry in both]
    for box in whole.boxes(BLOCK_BYTES // 4):
      first, second = (
        next(entry.blocks(file, whole[box]))[1] for entry, file in zip(both, files, strict=True)
      )
      if not np.array_equal(first, second):
        return True
  return False


def family_of(config: ModelConfig) -> Family:
  """The first family whose ``config.json`` can express this config.

  Raises:
    ConfigError: none can; the error says what each of them would lose.
  """
  if own := sorted(set(config.pattern) - BUILT_IN):
    raise ConfigError(f"no family of Hugging Face models has the blocks {', '.join(own)}.")
  lost = {}
  for family in map(find_family, model_types()):
    try:
      values = json.loads(json.dumps(family.config_to_hf(config)))
      differing = _differing(config, family.config_from_hf(values))
    except ConfigError as error:
      differing = [str(error)]
    if not differing:
      return family
    lost[family.model_type] = ", ".join(differing)
  raise ConfigError(
    "no family of Hugging Face models can say this config: "
    + "; ".join(f"{name} would change {fields}" for name, fields in lost.items())
    + "."
  )


def _differing(config: ModelConfig, back: ModelConfig) -> list[str]:
  """Fields in which a config that went through config.json computes another function."""
  skipped = set(RUNTIME_FIELDS)
  kinds = set(config.pattern + (config.mtp.pattern if config.mtp is not None else ""))
  for users, names in _FIELDS_OF_KINDS.items():
    skipped |= set() if kinds & set(users) else set(names.split())
  if config.rope_scaling_factor is None and back.rope_scaling_factor is None:
    skipped |= {"rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"}
  if config.mtp is not None and back.mtp is not None:
    mtp = dataclasses.replace(back.mtp, detach=config.mtp.detach)  # of its loss
    back = dataclasses.replace(back, mtp=mtp)
  return [
    f"{f.name}={getattr(config, f.name)!r} to {getattr(back, f.name)!r}"
    for f in dataclasses.fields(config)
    if f.name not in skipped and getattr(config, f.name) != getattr(back, f.name)
  ]


def tensor_entries(directory: str | os.PathLike[str]) -> dict[str, TensorEntry]:
  """Dtype, shape and place of every tensor of a folder, by its name in the family's map.

  Raises:
    ConfigError, CheckpointError: as ``load_pretrained``.
  """
  folder = pathlib.Path(directory)
  entries, problems = _read_entries(folder, _read_family(folder, {})[0])
  if problems:
    raise CheckpointError(_describe(f"{folder} is damaged", problems))
  return entries


# Reading.


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  try:
    values = json.loads(file.read_text())
  except (OSError, ValueError, RecursionError) as error:
    raise CheckpointError(f"{file} cannot be read: {error}.") from error
  if not isinstance(values, dict):
    raise CheckpointError(f"{file} holds {type(values).__name__}; allowed: a mapping.")
  return values


def _read_entries(folder: pathlib.Path, family: Family) -> tuple[dict[str, TensorEntry], list[str]]:
  """All tensors of a folder by their name in the map, and what is wrong with the files."""
  if (folder / _SINGLE).exists():
    listed: dict[str, str] = {}
    names = [_SINGLE]
  elif (folder / _INDEX).exists():
    listed = _read_json(folder / _INDEX).get("weight_map", {})
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
      raise CheckpointError(f"{folder / _INDEX} has no weight_map from tensors to files.")
    names = sorted(set(listed.values()))
  else:
    others = sorted(p.name for p in folder.iterdir())
    raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}; it holds {others[:10]}.")
  entries: dict[str, TensorEntry] = {}
  problems: list[str] = []
  for name in names:
    if pathlib.PurePath(name).name != name or not (folder / name).is_file():
      problems.append(f"{_INDEX} names {name!r}, which is no file of the folder")
      continue
    found, wrong = read_header(folder / name)
    problems += wrong
    for tensor, entry in found.items():
      if listed and listed.get(tensor) != name:
        problems.append(f"{name} holds {tensor}, which {_INDEX} does not say")
      renamed = _renamed(tensor, family)
      if renamed in entries:
        problems.append(f"{tensor} stands twice, in {entries[renamed].file.name} and {name}")
      entries[renamed] = entry
  return entries, problems


def _renamed(name: str, family: Family) -> str:
  for prefix, published in family.prefixes.items():
    if name.startswith(prefix):
      return published + name.removeprefix(prefix)
  return name


def _compare(
  tensors: Sequence[Stored],
  entries: Mapping[str, TensorEntry],
  family: Family,
  config: ModelConfig,
  may_round: bool,
) -> list[str]:
  """Differences between the tensors of the folder and those of the model."""
  problems = []
  specs: dict[str, ParamSpec] = leaves(param_specs(config))
  for stored in tensors:
    entry = entries.get(stored.name)
    if entry is None:
      problems.append(f"{stored.name} {list(stored.shape)} is missing")
      continue
    if entry.shape != stored.shape:
      problems.append(
        f"{stored.name} has shape {list(entry.shape)}, config.json asks for {list(stored.shape)}"
      )
    if entry.dtype not in DTYPES:
      problems.append(f"{stored.name} is {entry.dtype}; supported: {', '.join(DTYPES)}")
    elif not may_round and entry.dtype != "BF16":
      if any(specs[piece.array].dtype == "bfloat16" for piece in stored.pieces):
        problems.append(
          f"{stored.name} is {entry.dtype}, the dtype in config.json is bfloat16; say "
          "overrides={'param_dtype': 'float32'} to keep it or 'bfloat16' to round it"
        )
  ignored = [*family.ignored, *([r"lm_head\.weight"] if config.tie_embeddings else [])]
  used = {stored.name for stored in tensors}
  for name in entries:
    if name not in used and not any(re.fullmatch(pattern, name) for pattern in ignored):
      problems.append(f"{name} is no tensor of this model")
  return problems


def _describe(what: str, problems: Sequence[str]) -> str:
  shown = "\n  ".join(problems[:_MOST_LISTED])
  more = len(problems) - _MOST_LISTED
  return f"{what} ({len(problems)} problems):\n  {shown}" + (
    f"\n  and {more} more" if more > 0 else ""
  )


@dataclasses.dataclass(frozen=True)
class _Shard:
  """Part of an array on its way to the devices that hold it."""

  box: Box
  buffer: np.ndarray
  devices: tuple[jax.Device, ...]


def _open(file: pathlib.Path, stack: contextlib.ExitStack) -> int:
  descriptor = os.open(file, os.O_RDONLY)
  stack.callback(os.close, descriptor)
  return descriptor


def _shards(spec: ParamSpec, sharding: jax.sharding.Sharding | None) -> list[_Shard]:
  """Buffers for the parts of an array that this process holds, one for all copies of a part."""
  everywhere = tuple(slice(0, size) for size in spec.shape)
  if sharding is None:
    return [_Shard(everywhere, _aligned(spec.shape, spec.dtype), ())]
  holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
    bounds = (s.indices(size)[:2] for s, size in zip(index or everywhere, spec.shape, strict=True))
    holders.setdefault(tuple(bounds), []).append(device)
  shards = []
  for sides, devices in holders.items():
    box = tuple(slice(*side) for side in sides)
    shards.append(_Shard(box, _aligned(shape_of(box), spec.dtype), tuple(devices)))
  return shards


def _aligned(shape: Sequence[int], dtype: str) -> np.ndarray:
  """Uninitialised memory that a CPU device takes over without a copy."""
  kind = np.dtype(jax.numpy.dtype(dtype))
  size = math.prod(shape) * kind.itemsize
  raw = np.empty(size + 64, np.uint8)
  start = -raw.ctypes.data % 64
  return raw[start : start + size].view(kind).reshape(shape)


def _fill(entry: TensorEntry, descriptor: int, piece: Piece, shards: Sequence[_Shard]) -> None:
  """Reads what the shards need of one tensor, each byte once where they lie side by side."""
  wanted = [box for shard in shards if (box := overlap(piece.box, shard.box)) is not None]
  if not wanted:
    return
  bounds = tuple(
    slice(min(s.start for s in sides), max(s.stop for s in sides))
    for sides in zip(*wanted, strict=True)
  )
  if sum(math.prod(shape_of(box)) for box in wanted) == math.prod(shape_of(bounds)):
    wanted = [bounds]
  for box in wanted:
    for part, data in entry.blocks(descriptor, piece.layout[relative(box, piece.box)]):
      at = tuple(slice(p.start + b.start, p.stop + b.start) for p, b in zip(part, box, strict=True))
      for shard in shards:
        both = overlap(at, shard.box)
        if both is not None:
          _copy(shard.buffer[relative(both, shard.box)], data[relative(both, at)])


def _copy(target: np.ndarray, source: np.ndarray) -> None:
  """``target[...] = source``, of a size that stays in a core's cache."""
  if target.dtype == source.dtype and target.itemsize == 2:
    # numpy moves its own kinds of numbers faster than bfloat16.
    target, source = target.view(np.uint16), source.view(np.uint16)
  if _innermost(target) != _innermost(source):
    # A transpose of rows that lie a power of two apart would use a few lines of the cache only.
    order = sorted(range(source.ndim), key=lambda d: -source.strides[d])
    source, target = source.transpose(order), target.transpose(order)
    apart = np.empty((*source.shape[:-1], source.shape[-1] + _APART), source.dtype)
    apart = apart[..., : source.shape[-1]]
    apart[...] = source
    source = apart
  target[...] = source


def _innermost(array: np.ndarray) -> int | None:
  """Dimension of size above 1 with the smallest stride."""
  wide = [d for d in range(array.ndim) if array.shape[d] > 1]
  return min(wide, key=lambda d: array.strides[d], default=None)


def _place(
  spec: ParamSpec, shards: Sequence[_Shard], sharding: jax.sharding.Sharding | None
) -> Array:
  if sharding is None:
    array = jax.device_put(shards[0].buffer)
  else:
    parts = [jax.device_put(s.buffer, device) for s in shards for device in s.devices]
    array = jax.make_array_from_single_device_arrays(spec.shape, sharding, parts)
  return jax.block_until_ready(array)


# Writing.


def _wait(name: str) -> None:
  """Returns when every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def _check_arrays(
  arrays: Mapping[str, Any], config: ModelConfig, zeros: Collection[str], family: Family
) -> None:
  specs: dict[str, ParamSpec] = leaves(param_specs(config))
  problems = [f"{key} is missing" for key in specs if key not in arrays]
  problems += [f"{key} is no array of this config" for key in arrays if key not in specs]
  for key in specs.keys() & arrays.keys():
    if tuple(arrays[key].shape) != specs[key].shape:
      problems.append(f"{key} has shape {arrays[key].shape}, the config says {specs[key].shape}")
  if not problems:
    problems = [
      f"{key} is not zero, and {family.model_type} has no tensor for it"
      for key in zeros
      if bool(np.any(_host_rows(arrays[key], 0, arrays[key].shape[0])))
    ]
  if problems:
    raise CheckpointError(_describe("the parameters cannot be saved", problems))


def _dtype_name(stored: Stored, arrays: Mapping[str, Any], dtype: str | None) -> str:
  if stored.dtype is not None:
    return stored.dtype
  wanted = dtype or np.result_type(*(np.dtype(arrays[p.array].dtype) for p in stored.pieces)).name
  return next(name for name, known in DTYPES.items() if known.name == wanted)


def _bytes_of(stored: Stored, dtype: str) -> int:
  return math.prod(stored.shape) * DTYPES[dtype].itemsize


def _split_into_files(
  tensors: Sequence[Stored], dtypes: Mapping[str, str], most: int
) -> dict[str, list[Stored]]:
  """Tensors of every file; within one the wide dtypes come first, so that all are aligned."""
  groups: list[list[Stored]] = [[]]
  held = 0
  for stored in tensors:
    size = _bytes_of(stored, dtypes[stored.name])
    if groups[-1] and held + size > most:
      groups.append([])
      held = 0
    groups[-1].append(stored)
    held += size
  for group in groups:
    group.sort(key=lambda s: -DTYPES[dtypes[s.name]].itemsize)
  if len(groups) == 1:
    return {_SINGLE: groups[0]}
  return {
    f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)
  }


def _config_json(family: Family, config: ModelConfig, dtypes: Mapping[str, str]) -> dict[str, Any]:
  used = list(dtypes.values())
  main = DTYPES[max(used, key=used.count)].name
  return {
    "architectures": [family.architecture],
    "model_type": family.model_type,
    "torch_dtype": main,
    **family.config_to_hf(config),
  }


def _companion_keys(folder: pathlib.Path) -> dict[str, Any]:
  if not folder.is_dir():
    raise CheckpointError(f"tokenizer_from={str(folder)!r} is no folder.")
  if not (folder / CONFIG_FILE).exists():
    return {}
  values = _read_json(folder / CONFIG_FILE)
  return {key: values[key] for key in _COMPANION_KEYS if key in values}


def _write_folder(
  target: pathlib.Path,
  files: Mapping[str, Sequence[Stored]],
  dtypes: Mapping[str, str],
  arrays: Mapping[str, Any],
  values: Mapping[str, Any],
  tokenizer_from: str | os.PathLike[str] | None,
) -> None:
  """Writes everything to a temporary folder and renames it to ``target``."""
  with written_beside(target) as beside:
    beside.mkdir()
    for name, group in files.items():
      entries = [(s.name, dtypes[s.name], s.shape) for s in group]
      write_file(beside / name, entries, _gather(group, arrays, dtypes))
    if len(files) > 1:
      total = sum(_bytes_of(s, dtypes[s.name]) for group in files.values() for s in group)
      places = {s.name: name for name, group in files.items() for s in group}
      index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
      (beside / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (beside / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
    if tokenizer_from is not None:
      copy_companions(pathlib.Path(tokenizer_from), beside)


def copy_companions(source: pathlib.Path, target: pathlib.Path) -> list[str]:
  """Copies tokenizer and generation files unchanged, those that are there; their names."""
  found = [name for name in COMPANIONS if (source / name).is_file()]
  for name in found:
    shutil.copyfile(source / name, target / name)
  return found


def _gather(
  group: Sequence[Stored], arrays: Mapping[str, Any], dtypes: Mapping[str, str]
) -> Iterator[np.ndarray]:
  """Tensors as they are stored, one at a time."""
  held: dict[tuple[str, int, int], np.ndarray] = {}
  for stored in group:
    flat = np.empty(math.prod(stored.shape), DTYPES[dtypes[stored.name]])
    # Many tensors may be of the same rows (experts of a layer), which are fetched once.
    rows = [(p.array, p.box[0].start, p.box[0].stop) for p in stored.pieces]
    held = {key: held[key] for key in rows if key in held}
    for piece, key in zip(stored.pieces, rows, strict=True):
      if key not in held:
        held[key] = _host_rows(arrays[piece.array], *key[1:])
      host = held[key][(slice(None), *piece.box[1:])]
      view = piece.layout.of(flat)
      for box in piece.layout.boxes(BLOCK_BYTES // flat.itemsize):
        _copy(view[box], host[box])
    yield flat
    del flat, view  # before the next one is made


def _host_rows(array: Any, start: int, stop: int) -> np.ndarray:
  """Rows of an array, the whole of them in every process."""
  if isinstance(array, np.ndarray):
    return array[start:stop]
  if stop - start < array.shape[0]:
    array = _rows(array, start, stop - start)
  if not array.is_fully_addressable:
    array = jax.device_put(array, replicated(array.sharding.mesh))
  return np.asarray(array)


@functools.partial(jax.jit, static_argnums=2)
def _rows(array: Array, start: int, count: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(array, start, count)
