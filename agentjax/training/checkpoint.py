"""Checkpoints: device state and host state together, atomically, exactly.

One checkpoint is a directory ``checkpoints/STEP`` that orbax writes under another name and renames
when whole, so an interrupted or failed save leaves the earlier ones as they were.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from agentjax.config import Config, ConfigError, check, differing_fields
from agentjax.files import CheckpointError
from agentjax.models import ModelConfig, Params, abstract, param_specs
from agentjax.models.lora import LoraConfig
from agentjax.training.state import full_policy, network_specs

_OPTIONAL = ("reference", "process")  # parts of a TrainState that not every run has


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointConfig(Config):
  """When to save and what to keep.

  Attributes:
    every: steps between checkpoints; the last step of a stage is always saved.
    keep: newest checkpoints that are kept, besides the first one (replay starts from it).
  """

  every: int = 50
  keep: int = 2

  def validate(self, path: str = "config.checkpoint") -> None:
    super().validate(path)
    check(self.every >= 1, f"{path}.every", self.every, ">= 1")
    check(self.keep >= 1, f"{path}.keep", self.keep, ">= 1")


class CheckpointStore:
  """Saves and restores (device pytree, host dict) pairs by step.

  Args:
    directory: where the steps live; created when missing.
    keep: newest checkpoints kept besides the first.
    identity: plain dict that a checkpoint must match to be restored (model and tokenizer settings).
  """

  def __init__(self, directory: str | pathlib.Path, keep: int, identity: dict[str, Any]):
    self.directory = pathlib.Path(directory).absolute()
    self.identity = identity
    self._keep = keep

  def steps(self) -> list[int]:
    """Steps that are whole on disk, ascending."""
    if not self.directory.is_dir():
      return []
    found = [p for p in self.directory.iterdir() if p.name.isdigit() and ocp.is_orbax_checkpoint(p)]
    return sorted(int(p.name) for p in found)

  def save(self, step: int, state: Any, host: dict[str, Any], pending: bytes = b"") -> None:
    """Writes one checkpoint and then drops those no longer kept.

    Args:
      step: name of the checkpoint.
      state: a TrainState.
      host: JSON-able settings and iterator states.
      pending: serialised rollout state that the next step starts from.

    Raises:
      CheckpointError: the disk is full or the write failed; nothing of it remains and older
        checkpoints still load.
    """
    self.directory.mkdir(parents=True, exist_ok=True)
    payload = {
      "networks": state.networks,
      "rest": _rest(state),
      "pending": {"bytes": np.frombuffer(pending, np.uint8) if pending else np.zeros(1, np.uint8)},
    }
    payload |= {k: getattr(state, k) for k in _OPTIONAL if getattr(state, k) is not None}
    # JSON travels as text: orbax's own JSON would turn integer keys and tuples into other things.
    metadata = {
      "host": json.dumps(host),
      "identity": json.dumps(self.identity),
      "pending_bytes": len(pending),
    }
    try:
      ocp.save_checkpointables(
        self.directory / str(step), payload, overwrite=True, custom_metadata=metadata
      )
    except Exception as error:
      remaining = self.steps()
      raise CheckpointError(
        f"saving step {step} to {self.directory} failed: {error}. Checkpoints that still load: "
        f"{remaining or 'none'}. Free disk space or set --workdir to another disk, then start the "
        "same command again: it resumes."
      ) from error
    self._drop_old()

  def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any], bytes]:
    """Returns (state, host, pending) of a step, sharded as ``abstract_state`` says.

    Raises:
      CheckpointError: no such step, or it belongs to another model or tokenizer.
    """
    if step not in self.steps():
      raise CheckpointError(
        f"no checkpoint of step {step} in {self.directory}; available: {self.steps() or 'none'}."
      )
    path = self.directory / str(step)
    metadata = read_metadata(path)
    compare_identity(metadata["identity"], self.identity, path)
    wanted = {
      "networks": abstract_state.networks,
      "rest": _rest(abstract_state),
      "pending": None,
    }
    for name in _OPTIONAL:
      if getattr(abstract_state, name) is not None:
        wanted[name] = getattr(abstract_state, name)
    loaded = ocp.load_checkpointables(path, wanted)
    pending = np.asarray(loaded["pending"]["bytes"]).tobytes()[: metadata["pending_bytes"]]
    parts = {"networks": loaded["networks"]} | {name: loaded.get(name) for name in _OPTIONAL}
    state = dataclasses.replace(abstract_state, **(loaded["rest"] | parts))
    return state, metadata["host"], pending

  def _drop_old(self) -> None:
    steps = self.steps()
    for step in steps[1 : max(1, len(steps) - self._keep)]:
      ocp.delete(self.directory / str(step))


def _rest(state: Any) -> dict[str, Any]:
  """What every TrainState has beside its networks, with the keys that it has on disk."""
  return {"step": state.step, "networks": None, "opt_state": state.opt_state, "reference": None}


def latest_checkpoint(path: pathlib.Path) -> pathlib.Path:
  """``path`` if it is a checkpoint, else the newest one of the run directory it is.

  Raises:
    CheckpointError: it is neither.
  """
  path = path.absolute()
  steps = CheckpointStore(path / "checkpoints", keep=1, identity={}).steps()
  if steps:
    return path / "checkpoints" / str(steps[-1])
  if path.name.isdigit() and path.is_dir() and ocp.is_orbax_checkpoint(path):
    return path
  raise CheckpointError(
    f"--checkpoint={path} is not a checkpoint; give RUN/checkpoints/STEP or a run's directory."
  )


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
  """Host state and identity of one checkpoint directory."""
  metadata = ocp.checkpointables_metadata(path).custom_metadata
  if not isinstance(metadata, dict) or "identity" not in metadata:
    raise CheckpointError(f"{path} is not a checkpoint of agentjax (no identity in its metadata).")
  return {
    "host": json.loads(metadata["host"]),
    "identity": json.loads(metadata["identity"]),
    "pending_bytes": metadata["pending_bytes"],
  }


def load_networks(
  path: str | pathlib.Path, abstract_networks: Any, identity: dict[str, Any]
) -> Any:
  """Networks of a checkpoint (``RUN/checkpoints/STEP``, or ``RUN`` for its newest).

  Raises:
    CheckpointError: it is not a checkpoint, or of another model or tokenizer.
  """
  path = latest_checkpoint(pathlib.Path(path))
  compare_identity(read_metadata(path)["identity"], identity, path)
  return ocp.load_checkpointables(path, {"networks": abstract_networks})["networks"]


def load_reference(path: str | pathlib.Path, abstract_params: Any) -> Any:
  """Frozen policy of a checkpoint, what the adapters of a LoRA run are added to."""
  path = latest_checkpoint(pathlib.Path(path))
  return ocp.load_checkpointables(path, {"reference": abstract_params})["reference"]


def load_whole_policy(path: pathlib.Path, placed: Any = None) -> Params:
  """The policy of any checkpoint, adapters added in.

  Args:
    path: RUN/checkpoints/STEP.
    placed: shardings of ``param_specs`` of its model; None is the default device.
  """
  identity = read_metadata(path)["identity"]
  config = ModelConfig.from_dict(identity["model"], "checkpoint.model")
  lora = LoraConfig.from_dict(identity["lora"]).freeze() if "lora" in identity else None
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def target(specs: Any, placed: Any) -> Any:
    def leaf(shape: jax.ShapeDtypeStruct, sharding: Any = here) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(leaf, abstract(specs), *([] if placed is None else [placed]))

  critic = ocp.checkpointables_metadata(path).metadata["networks"]["value"] is not None
  specs = network_specs(config, critic, lora)
  wanted = target(specs, None)
  if lora is None and placed is not None:
    wanted = dataclasses.replace(wanted, policy=target(specs.policy, placed))
  networks = ocp.load_checkpointables(path, {"networks": wanted})["networks"]
  if lora is None:
    return networks.policy
  reference = load_reference(path, target(param_specs(config), placed))
  return jax.jit(full_policy, static_argnums=2, out_shardings=placed)(networks, reference, lora)


def compare_identity(saved: dict[str, Any], wanted: dict[str, Any], path: pathlib.Path) -> None:
  """Raises ConfigError naming every field in which a checkpoint differs from the config."""
  differences = list(differing_fields(saved, json.loads(json.dumps(wanted)), "config"))
  if differences:
    raise ConfigError(f"checkpoint {path} was made by another config: {'; '.join(differences)}.")


def abstract_like(tree: Any) -> Any:
  """ShapeDtypeStructs of a pytree of arrays, with their shardings: a restore target."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
