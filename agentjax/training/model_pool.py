"""Models on disk, each loaded once and served by an engine, for commands that generate data."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from agentjax.config import check
from agentjax.engine import Engine
from agentjax.files import CheckpointError
from agentjax.models import ModelConfig, Params, param_specs
from agentjax.models.huggingface import load_pretrained
from agentjax.sharding import fingerprint, make_mesh, shardings
from agentjax.text.build import build_chat, read_chat
from agentjax.text.chat import Chat
from agentjax.training.checkpoint import (
  compare_identity,
  latest_checkpoint,
  load_whole_policy,
  read_metadata,
)
from agentjax.training.experiment import Experiment, load_experiment
from agentjax.training.placement import place
from agentjax.training.pretrained import folder_fingerprint, runtime_overrides
from agentjax.training.workdir import CONFIG_FILE
from agentjax.trajectory.record import POLICY


@dataclasses.dataclass(frozen=True)
class Policy:
  """A model on disk with the markup that it writes.

  Attributes:
    params, model, chat: the policy.
    identity: tells it from other policies.
  """

  params: Params
  model: ModelConfig
  chat: Chat
  identity: str


def load_policy_with_chat(
  path: str | os.PathLike[str], experiment: Experiment, policy: str = POLICY
) -> Policy:
  """A policy of a run, with the vocabulary of that run, or of a Hugging Face folder.

  Args:
    path: RUN, RUN/checkpoints/STEP, or the folder.
    experiment: its mesh, and for a folder how the model is run. Architecture and chat format are
      those of the policy on disk.
    policy: name of it in the run.

  Raises:
    CheckpointError: there is nothing to load, or no policy of that name.
    ConfigError: the run's vocabulary is no longer what its checkpoint was made with.
  """
  mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
  folder = pathlib.Path(path)
  if (folder / "tokenizer.json").is_file():
    if policy != POLICY:
      raise CheckpointError(f"{path} is a folder with one policy; {policy!r} is none of it.")
    chat: Chat = read_chat(folder, thinking=experiment.chat.thinking)
    params, model = load_pretrained(
      folder, mesh=mesh, overrides=runtime_overrides(experiment.model)
    )
    return Policy(params, model, chat, folder_fingerprint(folder))
  found = latest_checkpoint(folder)
  run = found.parents[1]
  own = load_experiment(run / CONFIG_FILE)
  chat = build_chat(own.chat, own.tokenizer, directory=run, pretrained=own.pretrained)
  saved = read_metadata(found)["identity"]
  compare_identity(saved, {**saved, "tokenizer": chat.fingerprint()}, found)
  model = ModelConfig.from_dict(saved["model"], "checkpoint.model").freeze()
  params = load_whole_policy(found, shardings(param_specs(model), mesh), policy)
  return Policy(params, model, chat, fingerprint(params))


class ModelPool:
  """Models on disk, each loaded once, and the engines that serve them.

  Args:
    experiment: resolved; its mesh, its devices, and its engine for each model.
  """

  def __init__(self, experiment: Experiment):
    self._experiment = experiment
    self._served: dict[tuple[str, str], tuple[Engine, Chat, str]] = {}

  def serve(self, path: str, name: str = POLICY) -> tuple[Engine, Chat, str]:
    """Engine, markup and identity of ``load_policy_with_chat``, with its errors."""
    if (path, name) not in self._served:
      check(
        self._experiment.engine.processes == 1,
        "config.engine.processes",
        self._experiment.engine.processes,
        f"1, as {path} is served as well: each process asks it on its own",
      )
      policy = load_policy_with_chat(path, self._experiment, name)
      tokenizer = policy.chat.tokenizer
      engine = Engine(
        policy.model,
        self._experiment.engine,
        decode=tokenizer.decode,
        vocab_limit=tokenizer.vocab_size,
        devices=place(self._experiment.devices).rollout,
      )
      self._served[path, name] = engine, policy.chat, policy.identity
      engine.publish(policy.params, 0)
    return self._served[path, name]

  def close(self) -> None:
    for engine, _, _ in self._served.values():
      engine.close()
