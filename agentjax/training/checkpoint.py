"""Checkpoints: device state and host state together, atomically, exactly.

One checkpoint is a directory ``checkpoints/STEP`` that orbax writes under another name and renames
when whole, so an interrupted or failed save leaves the earlier ones as they were. A save returns
when the arrays are copied to the host; training goes on while threads write them.

Its metadata hold a hash of every part (``sharding.fingerprint``) and a seal, the SHA-256 of the
metadata themselves. Whatever is loaded is compared with them: a flipped bit, a missing or a cut-off
file raises DamagedCheckpointError. Checkpoints from before there were seals have neither.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from agentjax.config import Config, ConfigError, PositiveInt, differing_fields
from agentjax.files import CheckpointError
from agentjax.models import ModelConfig, Params, abstract, param_specs
from agentjax.models.lora import LoraConfig
from agentjax.sharding import dispatching, fingerprint, with_shardings
from agentjax.training import processes
from agentjax.training.state import Network, Weights, merged_policy, network_specs
from agentjax.trajectory.record import POLICY

T = TypeVar("T")

_FURTHER = "network_"  # begins the name of a network beside policy and reference
_OPTIMIZER = "optimizer_"  # begins that of the optimiser's state of a further policy
_UNSEALED = {"host", "identity", "pending_bytes"}  # metadata from before there were seals


class DamagedCheckpointError(CheckpointError):
  """What is on disk is not what was saved."""

  def __init__(self, path: pathlib.Path, reason: str):
    super().__init__(f"{path} is damaged: {reason}.")
    self.path, self.reason = path, reason


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointConfig(Config):
  """When to save and what to keep.

  Attributes:
    every: steps between checkpoints; the last step of a stage is always saved.
    keep: newest checkpoints that are kept, besides the first one (replay starts from it).
  """

  every: PositiveInt = 50
  keep: PositiveInt = 2


class Restored(NamedTuple):
  """A checkpoint that was read whole: TrainState, host state, serialised rollout state."""

  state: Any
  host: dict[str, Any]
  pending: bytes


class CheckpointStore:
  """Saves and restores (device pytree, host dict) pairs by step.

  Args:
    directory: where the steps live; created when missing.
    keep: newest checkpoints kept besides the first.
    identity: plain dict that a checkpoint must match to be restored (model and tokenizer settings).
    policies: networks that are policies, beside "policy": their optimiser's state is saved apart
      from their weights, which can so be loaded alone.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    keep: int,
    identity: dict[str, Any],
    policies: Collection[str] = (),
  ):
    self.directory = pathlib.Path(directory).absolute()
    self.identity = identity
    self._keep, self._policies = keep, policies
    self._writing: tuple[int, Any] | None = None  # the step that is being saved

  def steps(self) -> list[int]:
    """Steps that have a directory, ascending; what is in it shows when it is restored.

    Waits for one that is being written, as all that reads does.
    """
    self.wait()
    return self._written()

  def _written(self) -> list[int]:
    if not self.directory.is_dir():
      return []
    return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit())

  def save(self, step: int, state: Any, host: dict[str, Any], pending: bytes = b"") -> None:
    """``begin_save`` and ``wait``."""
    self.begin_save(step, state, host, pending)
    self.wait()

  def begin_save(self, step: int, state: Any, host: dict[str, Any], pending: bytes = b"") -> None:
    """Begins to write one checkpoint, once an earlier one is whole; ``wait`` ends it.

    The arrays may be donated or deleted as soon as this returns.

    Args:
      step: name of the checkpoint.
      state: a TrainState.
      host: JSON-able settings and iterator states.
      pending: serialised rollout state that the next step starts from.

    Raises:
      CheckpointError: as ``wait``.
    """
    self.wait()
    processes.wait("checkpoint")  # before the lock below, as lanes wait for that
    self.directory.mkdir(parents=True, exist_ok=True)
    payload = {
      "networks": state.weights,
      "rest": _rest(state),
      "pending": {"bytes": np.frombuffer(pending, np.uint8) if pending else np.zeros(1, np.uint8)},
    }
    payload |= _further(state, self._policies)
    # JSON travels as text: orbax's own JSON would turn integer keys and tuples into other things.
    metadata = {
      "host": json.dumps(host),
      "identity": json.dumps(self.identity),
      "pending_bytes": len(pending),
      "fingerprints": json.dumps({k: fingerprint(v) for k, v in _parts(payload).items()}),
    }
    metadata["seal"] = _seal(metadata)
    try:
      with dispatching():  # orbax compares the directories of all processes on their devices
        writing = ocp.save_checkpointables_async(
          self.directory / str(step), payload, overwrite=True, custom_metadata=metadata
        )
    except Exception as error:
      self._raise_failed(step, error)
    self._writing = (step, writing)

  def wait(self) -> None:
    """Returns when what ``begin_save`` began is whole on disk, and those no longer kept are gone.

    Raises:
      CheckpointError: the disk is full or the write failed; nothing of it remains and older
        checkpoints still load.
    """
    if self._writing is None:
      return
    (step, writing), self._writing = self._writing, None
    try:
      writing.result()
    except Exception as error:
      self._raise_failed(step, error)
    self._drop_old()

  def _raise_failed(self, step: int, error: Exception) -> NoReturn:
    if processes.failed_together(error):  # the disk is not to blame
      raise error
    raise CheckpointError(
      f"saving step {step} to {self.directory} failed: {error}. Checkpoints that still load: "
      f"{self._written() or 'none'}. Free disk space or set --workdir to another disk, then start "
      "the same command again: it resumes."
    ) from error

  def restore(self, step: int, abstract_state: Any, recorded: str | None = None) -> Restored:
    """Reads and verifies a step; its arrays are sharded as ``abstract_state`` says.

    Args:
      step: which one.
      abstract_state: shapes, dtypes and shardings of what was saved.
      recorded: hash that the trained networks must have beside the checkpoint's own, if known.

    Raises:
      CheckpointError: no such step.
      DamagedCheckpointError: it is not what was saved.
      ConfigError: it belongs to another model or tokenizer.
    """
    if step not in self.steps():
      raise CheckpointError(
        f"no checkpoint of step {step} in {self.directory}; available: {self.steps() or 'none'}."
      )
    path = self.directory / str(step)
    metadata = read_metadata(path)
    compare_identity(metadata["identity"], self.identity, path)
    if "process" in (metadata["fingerprints"] or {}):
      raise CheckpointError(
        f"{path} holds its reward model as 'process', as earlier releases wrote it; allowed: "
        f"'{_FURTHER}reward_model'. Go on with the release that wrote it, or begin anew in another "
        "--workdir with config.start_from set to this checkpoint."
      )
    wanted = {
      "networks": abstract_state.weights,
      "rest": _rest(abstract_state),
      "pending": None,
    }
    loaded = _load(path, wanted | _further(abstract_state, self._policies))
    pending = np.asarray(loaded["pending"]["bytes"]).tobytes()[: metadata["pending_bytes"]]
    rest = loaded["rest"]
    networks = {"policy": Network(loaded["networks"], rest["opt_state"])}
    for name in abstract_state.networks.keys() - {"policy"}:
      if name == "reference":
        networks[name] = Network(Weights(loaded[name]))
      elif name in self._policies:
        opt_state = loaded[_OPTIMIZER + name]["opt_state"]
        networks[name] = Network(loaded[_FURTHER + name].weights, opt_state)
      else:
        networks[name] = loaded[_FURTHER + name]
    state = dataclasses.replace(abstract_state, step=rest["step"], networks=networks)
    if recorded is not None and (found := fingerprint(state.trained)) != recorded:
      raise DamagedCheckpointError(
        path, f"its networks have the hash {found} and the journal says {recorded} of that step"
      )
    return Restored(state, metadata["host"], pending)

  def restore_newest(
    self,
    abstract_state: Callable[[int], Any],
    recorded: Mapping[int, str],
    *,
    at_most: int | None = None,
    set_aside: bool = True,
  ) -> tuple[int, Restored] | None:
    """The newest step that is whole, as of ``restore``; None where there is no checkpoint at all.

    Args:
      abstract_state: of a step.
      recorded: hashes of trained networks by step, as far as known.
      at_most: the last step that is looked at.
      set_aside: renames newer ones that are damaged to ``damaged-STEP``.

    Raises:
      CheckpointError: none of them is whole; they are left as they are.
      ConfigError: as ``restore``.
    """
    damaged: list[DamagedCheckpointError] = []
    for step in reversed(self.steps()):
      if at_most is not None and step > at_most:
        continue
      try:
        found = self.restore(step, abstract_state(step), recorded.get(step))
      except DamagedCheckpointError as error:
        damaged.append(error)
        continue
      for one in damaged:
        kept = _move_aside(one.path) if set_aside else one.path
        logging.warning("%s Kept as %s; step %d is taken instead.", one, kept, step)
      return step, found
    if damaged:
      raise CheckpointError(
        f"no checkpoint in {self.directory} is whole: "
        + " ".join(str(error) for error in damaged)
        + " Put back a copy of one of them, or begin anew in another --workdir."
      )
    return None

  def _drop_old(self) -> None:
    steps = self._written()
    for step in steps[1 : max(1, len(steps) - self._keep)]:
      ocp.delete(self.directory / str(step))


def _rest(state: Any) -> dict[str, Any]:
  """What every TrainState has beside its networks, with the keys that it has on disk."""
  opt_state = state.networks["policy"].opt_state
  return {"step": state.step, "networks": None, "opt_state": opt_state, "reference": None}


def _further(state: Any, policies: Collection[str]) -> dict[str, Any]:
  """The networks that not every run has, with the names that they have on disk."""
  found: dict[str, Any] = {}
  for name, network in state.networks.items():
    if name == "reference":
      found[name] = network.weights.policy
    elif name in policies:
      found[_FURTHER + name] = Network(network.weights)
      found[_OPTIMIZER + name] = {"opt_state": network.opt_state}
    elif name != "policy":
      found[_FURTHER + name] = network
  return found


def _parts(payload: dict[str, Any]) -> dict[str, Any]:
  """What has a hash of its own: the networks one by one, so that each can be loaded alone."""
  parts = {name: tree for name, tree in payload.items() if name != "networks"}
  if (networks := payload.get("networks")) is not None:
    parts |= {"policy": networks.policy, "value": networks.value}
  return {name: tree for name, tree in parts.items() if tree is not None}


def _seal(metadata: dict[str, Any]) -> str:
  rest = {name: value for name, value in metadata.items() if name != "seal"}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _load(path: pathlib.Path, wanted: dict[str, Any], *, some: bool = False) -> dict[str, Any]:
  """Parts of a checkpoint, each compared with the hash that it was saved with.

  Args:
    path: RUN/checkpoints/STEP.
    wanted: what each is restored to.
    some: they may have arrays that are not wanted.

  Raises:
    DamagedCheckpointError: they cannot be read or are not the same.
  """
  fingerprints = read_metadata(path)["fingerprints"]
  loaded: dict[str, Any] | None = None
  reason = "another process could not read it"
  context = ocp.Context()
  context.pytree.loading.partial_load = some
  try:
    with context:
      loaded = ocp.load_checkpointables(path, wanted)
  except Exception as error:  # orbax, tensorstore and their codecs raise errors of many kinds
    text = " ".join(str(error).split())
    reason = f"it cannot be read ({type(error).__name__}: {text[:300]})"
  # Arrays may span processes: only together can they be hashed.
  if not processes.all_agree(loaded is not None) or loaded is None:
    raise DamagedCheckpointError(path, reason)
  for name, tree in _parts(loaded).items():
    if fingerprints is not None and fingerprint(tree) != fingerprints.get(name):
      raise DamagedCheckpointError(path, f"{name!r} does not have the hash that it was saved with")
  return loaded


def _move_aside(path: pathlib.Path) -> pathlib.Path:
  """Renames a damaged checkpoint to a free name; done by the first process."""
  aside = path.with_name(f"damaged-{path.name}")
  if processes.is_first():
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    path.rename(aside)
  processes.wait(f"set aside {path.name}")
  return aside


def newest_first(path: pathlib.Path) -> list[pathlib.Path]:
  """``path`` if it is a checkpoint, else those of the run directory it is, the newest first.

  Raises:
    CheckpointError: it is neither.
  """
  path = path.absolute()
  steps = CheckpointStore(path / "checkpoints", keep=1, identity={}).steps()
  if steps:
    return [path / "checkpoints" / str(step) for step in reversed(steps)]
  if path.name.isdigit() and path.is_dir():
    return [path]
  raise CheckpointError(
    f"--checkpoint={path} is not a checkpoint; give RUN/checkpoints/STEP or a run's directory."
  )


def latest_checkpoint(path: pathlib.Path) -> pathlib.Path:
  """``path`` if it is a checkpoint, else the newest one of the run directory it is.

  Those of a run whose metadata are damaged are passed over with a warning.

  Raises:
    CheckpointError: it is neither, or damaged.
  """
  return load_newest(path, lambda found: (read_metadata(found), found)[1])


def load_newest(path: pathlib.Path, load: Callable[[pathlib.Path], T]) -> T:
  """``load`` of the first of ``newest_first(path)`` that is not damaged.

  Raises:
    CheckpointError: there is none.
  """
  damaged: list[DamagedCheckpointError] = []
  for candidate in newest_first(path):
    try:
      loaded = load(candidate)
    except DamagedCheckpointError as error:
      damaged.append(error)
      continue
    for one in damaged:
      logging.warning("%s Passed over; %s is taken instead.", one, candidate)
    return loaded
  raise CheckpointError(" ".join(map(str, damaged)))


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
  """Host state, identity and hashes of one checkpoint directory; hashes are None in old ones.

  Raises:
    DamagedCheckpointError: they are not what was saved, or not there.
  """
  try:
    metadata: Any = ocp.checkpointables_metadata(path).custom_metadata
  except Exception as error:  # as in _load
    text = " ".join(str(error).split())
    reason = f"its metadata cannot be read ({type(error).__name__}: {text[:300]})"
    raise DamagedCheckpointError(path, reason) from error
  if not isinstance(metadata, dict) or "identity" not in metadata:
    raise DamagedCheckpointError(path, "it has no metadata of agentjax")
  sealed = set(metadata) != _UNSEALED
  if sealed and metadata.get("seal") != _seal(metadata):
    raise DamagedCheckpointError(path, "its metadata do not have the seal they were saved with")
  return {
    "host": json.loads(metadata["host"]),
    "identity": json.loads(metadata["identity"]),
    "pending_bytes": metadata["pending_bytes"],
    "fingerprints": json.loads(metadata["fingerprints"]) if sealed else None,
  }


def load_networks(
  path: str | pathlib.Path,
  abstract_networks: Weights,
  identity: dict[str, Any],
  policy: str = POLICY,
) -> Weights:
  """Weights of a checkpoint's policy (``RUN/checkpoints/STEP``, or ``RUN`` for its newest).

  The value head is None where the checkpoint has none.

  Raises:
    CheckpointError: it is not a checkpoint, damaged, or has no policy of that name.
    ConfigError: it is of another model or tokenizer.
  """

  def load(found: pathlib.Path) -> Weights:
    compare_identity(read_metadata(found)["identity"], identity, found)
    return _load_weights(found, abstract_networks, policy)

  return load_newest(pathlib.Path(path), load)


def _load_weights(path: pathlib.Path, abstract_weights: Weights, policy: str) -> Weights:
  """Of "policy", a snapshot or a further policy that was trained."""
  if policy == POLICY:
    saved = read_metadata(path)["fingerprints"]
    head = saved is not None and "value" in saved
    if saved is not None and not head:
      abstract_weights = dataclasses.replace(abstract_weights, value=None)
    some = head and abstract_weights.value is None
    weights: Weights = _load(path, {"networks": abstract_weights}, some=some)["networks"]
    return weights
  found = load_further(path, policy, Network(abstract_weights))
  if found is None:
    fingerprints = read_metadata(path)["fingerprints"] or ()
    saved = [n.removeprefix(_FURTHER) for n in fingerprints if n.startswith(_FURTHER)]
    raise CheckpointError(
      f"{path} has no policy {policy!r}; its networks beside {POLICY!r}: "
      f"{', '.join(saved) or 'none'}."
    )
  return found.weights


def load_further(path: pathlib.Path, name: str, abstract_network: Any) -> Any:
  """A network beside policy and reference; None where the checkpoint has none of that name.

  Args:
    path: RUN/checkpoints/STEP.
    name: of the network.
    abstract_network: what it is restored to.
  """
  saved = f"{_FURTHER}{name}"
  if saved not in (read_metadata(path)["fingerprints"] or ()):
    return None
  return _load(path, {saved: abstract_network})[saved]


def load_reference(path: str | pathlib.Path, abstract_params: Any) -> Any:
  """Frozen policy of a checkpoint, what the adapters of a LoRA run are added to."""
  path = latest_checkpoint(pathlib.Path(path))
  return _load(path, {"reference": abstract_params})["reference"]


def load_whole_policy(path: pathlib.Path, placed: Any = None, policy: str = POLICY) -> Params:
  """A policy of any checkpoint, adapters added in.

  Args:
    path: RUN/checkpoints/STEP.
    placed: shardings of ``param_specs`` of its model; None is the default device.
    policy: name of it, of a snapshot, or of a further policy that was trained.

  Raises:
    CheckpointError: it has none of that name.
  """
  metadata = read_metadata(path)
  identity, fingerprints = metadata["identity"], metadata["fingerprints"]
  config = ModelConfig.from_dict(identity["model"], "checkpoint.model")
  lora = LoraConfig.from_dict(identity["lora"]).freeze() if "lora" in identity else None
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def target(specs: Any, where: Any) -> Any:
    shapes = abstract(specs)
    return with_shardings(shapes, jax.tree.map(lambda _: here, shapes) if where is None else where)

  if fingerprints is not None:
    critic = "value" in fingerprints
  else:
    critic = ocp.checkpointables_metadata(path).metadata["networks"]["value"] is not None
  critic = critic and (policy == POLICY or _OPTIMIZER + policy in (fingerprints or ()))
  specs = network_specs(config, critic, lora)
  wanted = target(specs, None)
  if lora is None and placed is not None:
    wanted = dataclasses.replace(wanted, policy=target(specs.policy, placed))
  networks = _load_weights(path, wanted, policy)
  if lora is None:
    return networks.policy
  reference = load_reference(path, target(param_specs(config), placed))
  return jax.jit(merged_policy, static_argnums=2, out_shardings=placed)(networks, reference, lora)


def compare_identity(saved: dict[str, Any], wanted: dict[str, Any], path: pathlib.Path) -> None:
  """Raises ConfigError naming every field in which a checkpoint differs from the config."""
  differences = list(differing_fields(_comparable(saved), _comparable(wanted), "config"))
  if differences:
    raise ConfigError(f"checkpoint {path} was made by another config: {'; '.join(differences)}.")


def _comparable(identity: dict[str, Any]) -> dict[str, Any]:
  """As JSON has it, without what older checkpoints still name: which gradients flow."""
  found: dict[str, Any] = json.loads(json.dumps(identity))
  model = found.get("model") or {}
  model.pop("frozen_router", None)
  (model.get("mtp") or {}).pop("detach", None)
  return found
