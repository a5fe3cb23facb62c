"""Hugging Face folder to checkpoint, or a run's checkpoint to Hugging Face folder.

  python -m agentjax.convert --input=Qwen3-0.6B --output=runs/start
  python -m agentjax.convert --input=runs/a --output=exported --tokenizer_from=Qwen3-0.6B
  python -m agentjax.convert --input=runs/a/checkpoints/300 --output=exported --dtype=bfloat16
  python -m agentjax.convert --input=runs/a --output=exported --policy=seat_right

The input decides the direction. From a folder, OUTPUT becomes the directory of a run of no steps:
``config.start_from=OUTPUT`` takes its networks over, ``OUTPUT/model.json`` holds the
``config.model`` to use, and ``OUTPUT/huggingface`` the tokenizer files for
``config.tokenizer.path``. (``config.pretrained`` starts from a folder without this detour.) To a
folder, tokenizer files come from ``--tokenizer_from``, else from where the run had them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import shutil
from typing import Any

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.files import CheckpointError, check_empty, written_beside

_INPUT = flags.DEFINE_string(
  "input", None, "Hugging Face folder, run directory or RUN/checkpoints/STEP.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "New or empty directory.", required=True)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  None,
  ["float32", "bfloat16", "float16"],
  "Dtype of the weights; that of the input if not given. A checkpoint has no float16.",
)
_POLICY = flags.DEFINE_string(
  "policy", "policy", "Name of the policy of a checkpoint, where its run had several."
)
_SHARD_GB = flags.DEFINE_float(
  "max_shard_gb", 5.0, "Largest file of a Hugging Face folder, in 10^9 bytes.", lower_bound=0.0
)
_OVERRIDE = flags.DEFINE_multi_string(
  "model",
  [],
  "FIELD=JSON of the ModelConfig that a checkpoint is made for, as --model='remat=\"block\"'.",
)
_TOKENIZER_FROM = flags.DEFINE_string(
  "tokenizer_from", None, "Folder whose tokenizer files go into the Hugging Face folder."
)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  None,
  "Vocabulary of the runs that will start from a folder without tokenizer.json: 'byte' or a "
  "sentencepiece file.",
)


@dataclasses.dataclass(frozen=True)
class Summary:
  """What was converted.

  Attributes:
    family: ``model_type`` of config.json.
    parameters: numbers in the model.
    tensors: tensors in the Hugging Face folder.
    size: bytes of the Hugging Face folder's weights.
    dtype: of the weights, several where they differ.
    output: directory written.
    companions: tokenizer files that were copied.
  """

  family: str
  parameters: int
  tensors: int
  size: int
  dtype: str
  output: str
  companions: tuple[str, ...]


def to_checkpoint(
  folder: str | os.PathLike[str],
  output: str | os.PathLike[str],
  *,
  overrides: dict[str, Any],
  tokenizer: str | None = None,
) -> Summary:
  """Writes the weights of a Hugging Face folder as the checkpoint of a run of no steps.

  Args:
    folder: with ``config.json`` and safetensors files.
    output: new or empty directory.
    overrides: fields of ModelConfig, which must be those of the runs that start from it.
    tokenizer: "byte" or a sentencepiece file, where the folder has no ``tokenizer.json``.

  Raises:
    ConfigError, CheckpointError: as ``load_pretrained``, or the vocabulary is not known.
  """
  import jax.numpy as jnp

  from agentjax.models import huggingface
  from agentjax.training.checkpoint import CheckpointStore
  from agentjax.training.state import Network, TrainState, Weights

  source = pathlib.Path(folder)
  fingerprint = _fingerprint(source, tokenizer)
  target = check_empty(output)
  params, config = huggingface.load_pretrained(source, overrides=overrides)
  with written_beside(target) as beside:
    beside.mkdir()
    described = config.to_dict()
    del described["exact_chunk"]  # as in the identity of a run: says how it is computed
    identity = {"model": described, "tokenizer": fingerprint}
    state = TrainState(jnp.zeros((), jnp.int32), {"policy": Network(Weights(params))})
    store = CheckpointStore(beside / "checkpoints", keep=1, identity=identity)
    store.save(0, state, {"iterators": {}, "evaluations": []})
    (beside / "model.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    (beside / "huggingface").mkdir()
    shutil.copyfile(source / "config.json", beside / "huggingface" / "config.json")
    companions = huggingface.copy_companions(source, beside / "huggingface")
  return _summary(source, params, target, companions)


def to_folder(
  checkpoint: str | os.PathLike[str],
  output: str | os.PathLike[str],
  *,
  dtype: str | None = None,
  max_shard_bytes: int = 5_000_000_000,
  tokenizer_from: str | os.PathLike[str] | None = None,
  policy: str = "policy",
) -> Summary:
  """Writes a policy of a checkpoint as a Hugging Face folder, adapters added in.

  Args:
    checkpoint: RUN/checkpoints/STEP, or RUN for its newest.
    output: new or empty directory.
    dtype, max_shard_bytes: as ``save_pretrained``.
    tokenizer_from: folder with tokenizer files; None takes those of the run, if it has any.
    policy: its name, of a snapshot or a further policy that was trained.

  Raises:
    ConfigError: no family of Hugging Face models has such a model.
    CheckpointError: there is no checkpoint, it has no such policy, or the output is in use.
  """
  from agentjax.models import ModelConfig, huggingface
  from agentjax.training.checkpoint import latest_checkpoint, load_whole_policy, read_metadata

  try:
    path = latest_checkpoint(pathlib.Path(checkpoint))
  except CheckpointError as error:
    raise CheckpointError(
      f"{checkpoint} is neither a Hugging Face folder (a config.json with a model_type) nor a "
      "run's directory nor RUN/checkpoints/STEP."
    ) from error
  identity = read_metadata(path)["identity"]
  config = ModelConfig.from_dict(identity["model"], "checkpoint.model")
  huggingface.family_of(config)
  run = path.parents[1]
  tokenizer_from = tokenizer_from or _tokenizer_folder(run)
  params = load_whole_policy(path, policy=policy)
  target = pathlib.Path(output).absolute()
  huggingface.save_pretrained(
    target,
    params,
    config,
    max_shard_bytes=max_shard_bytes,
    dtype=dtype,
    tokenizer_from=tokenizer_from,
  )
  companions = [name for name in huggingface.COMPANIONS if (target / name).is_file()]
  return _summary(target, params, target, companions)


def _tokenizer_folder(run: pathlib.Path) -> pathlib.Path | None:
  """Where a run's tokenizer files are: kept by ``to_checkpoint``, or named by its config."""
  from agentjax.training.experiment import load_experiment

  if (run / "huggingface").is_dir():
    return run / "huggingface"
  if not (run / "config.json").is_file():
    return None
  experiment = load_experiment(run / "config.json")
  if not experiment.tokenizer.reads_folder:
    return None
  folder = pathlib.Path(experiment.tokenizer.path or experiment.pretrained or run)
  if not folder.is_dir():
    raise CheckpointError(
      f"the run's tokenizer was in {folder}, which is gone; give --tokenizer_from=DIR."
    )
  return folder


def _fingerprint(folder: pathlib.Path, tokenizer: str | None) -> str:
  """The fingerprint of a vocabulary, as in checkpoints."""
  from agentjax.text import ByteTokenizer, SentencePieceTokenizer, read_chat

  if tokenizer == "byte":
    return ByteTokenizer().fingerprint()
  if tokenizer is not None:
    return SentencePieceTokenizer(tokenizer).fingerprint()
  if not (folder / "tokenizer.json").is_file():
    raise ConfigError(
      f"{folder} has no tokenizer.json; say with --tokenizer which vocabulary the runs that start "
      "from it have: 'byte' or a sentencepiece file."
    )
  return read_chat(folder).fingerprint()


def _summary(
  folder: pathlib.Path, params: Any, target: pathlib.Path, companions: list[str]
) -> Summary:
  import jax

  from agentjax.models.huggingface import tensor_entries

  entries = tensor_entries(folder)
  return Summary(
    family=json.loads((folder / "config.json").read_text())["model_type"],
    parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
    tensors=len(entries),
    size=sum(entry.size for entry in entries.values()),
    dtype=", ".join(sorted({entry.dtype for entry in entries.values()})),
    output=str(target),
    companions=tuple(companions),
  )


def _overrides() -> dict[str, Any]:
  found: dict[str, Any] = {}
  for text in _OVERRIDE.value:
    name, equals, value = text.partition("=")
    try:
      found[name] = json.loads(value)
    except json.JSONDecodeError as error:
      raise ConfigError(f"--model={text}: {error}; allowed: FIELD=JSON.") from error
    if not equals:
      raise ConfigError(f"--model={text}; allowed: FIELD=JSON.")
  if _DTYPE.value is not None:
    found.setdefault("param_dtype", _DTYPE.value)
  return found


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.models.huggingface import is_folder
  from agentjax.training.progress import print_table

  if is_folder(_INPUT.value):
    summary = to_checkpoint(
      _INPUT.value, _OUTPUT.value, overrides=_overrides(), tokenizer=_TOKENIZER.value
    )
  else:
    summary = to_folder(
      _INPUT.value,
      _OUTPUT.value,
      dtype=_DTYPE.value,
      max_shard_bytes=int(_SHARD_GB.value * 1e9),
      tokenizer_from=_TOKENIZER_FROM.value,
      policy=_POLICY.value,
    )
  rows = [
    ("family", summary.family),
    ("parameters", f"{summary.parameters:,}"),
    ("tensors", f"{summary.tensors:,}"),
    ("bytes", f"{summary.size:,}"),
    ("dtype", summary.dtype),
    ("with", ", ".join(summary.companions) or "no tokenizer files"),
  ]
  print_table(Console(), summary.output, ("", ""), rows)


if __name__ == "__main__":
  main(run)
