"""Two models write traces for the tasks of an experiment (TESSY, ``agentjax.data.tessy``)."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, cast

from agentjax.config import Config, ConfigError, check
from agentjax.data.synthesis_folder import Report, unreported
from agentjax.data.tessy import Author, TessyConfig, WordClassifier, Writer
from agentjax.data.tessy_folder import Written, write_traces
from agentjax.engine import Engine, SamplingConfig
from agentjax.models import ModelConfig, Params, param_specs
from agentjax.models.huggingface import load_pretrained
from agentjax.rewards.endpoint import EndpointConfig
from agentjax.rollout.writers import EngineWriter, HttpWriter, HttpWriterConfig
from agentjax.sharding import make_mesh, shardings
from agentjax.text.build import build_chat
from agentjax.text.chat import Chat
from agentjax.text.template import TemplateChat
from agentjax.training.checkpoint import (
  compare_identity,
  latest_checkpoint,
  load_whole_policy,
  read_metadata,
)
from agentjax.training.experiment import Experiment, load_experiment, resolve
from agentjax.training.fingerprint import fingerprint
from agentjax.training.loop_thread import LoopThread
from agentjax.training.parts import Extensions, load_task_splits
from agentjax.training.placement import place
from agentjax.training.pretrained import folder_fingerprint, runtime_overrides
from agentjax.training.workdir import CONFIG_FILE


@dataclasses.dataclass(unsafe_hash=True)
class WriterConfig(Config):
  """A model that writes: one on disk, or one behind an endpoint.

  Attributes:
    path: RUN, RUN/checkpoints/STEP, or a Hugging Face folder; "" where it is behind ``http``.
    sampling: of a model on disk; temperature .7, top-p .8 and top-k 20 are the source's.
    http: of a model behind an endpoint.
  """

  path: str = ""
  sampling: SamplingConfig = dataclasses.field(
    default_factory=lambda: SamplingConfig(temperature=0.7, top_p=0.8, top_k=20)
  )
  http: HttpWriterConfig = dataclasses.field(default_factory=HttpWriterConfig)

  def validate(self, path: str = "writer") -> None:
    check(
      bool(self.path) != bool(self.http.base_url),
      f"{path}.path",
      self.path,
      f"a run, a checkpoint or a Hugging Face folder, or '' with {path}.http.base_url set",
    )
    (self.sampling if self.path else self.http).validate(
      f"{path}.sampling" if self.path else f"{path}.http"
    )


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


def load_policy_with_chat(path: str | os.PathLike[str], experiment: Experiment) -> Policy:
  """A policy of a run, with the vocabulary of that run, or of a Hugging Face folder.

  Args:
    path: RUN, RUN/checkpoints/STEP, or the folder.
    experiment: its mesh, and for a folder how the model is run; what the policy is and how its
      conversations are written, is its own.

  Raises:
    CheckpointError: there is nothing to load.
    ConfigError: the run's vocabulary is no longer what its checkpoint was made with.
  """
  mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
  folder = pathlib.Path(path)
  if (folder / "tokenizer.json").is_file():
    chat: Chat = TemplateChat.from_folder(folder, thinking=experiment.chat.thinking)
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
  params = load_whole_policy(found, shardings(param_specs(model), mesh))
  return Policy(params, model, chat, fingerprint(params))


class ModelPool:
  """Models on disk, each loaded once, and the engines that serve them.

  Args:
    experiment: resolved; its mesh, its devices, and its engine for each model.
  """

  def __init__(self, experiment: Experiment):
    self._experiment = experiment
    self._served: dict[str, tuple[Engine, Chat, str]] = {}

  def serve(self, path: str) -> tuple[Engine, Chat, str]:
    """Engine, markup and identity of ``load_policy_with_chat(path)``, with its errors."""
    if path not in self._served:
      policy = load_policy_with_chat(path, self._experiment)
      tokenizer = policy.chat.tokenizer
      engine = Engine(
        policy.model,
        self._experiment.engine,
        decode=tokenizer.decode,
        vocab_limit=tokenizer.vocab_size,
        devices=place(self._experiment.devices).rollout,
      )
      self._served[path] = engine, policy.chat, policy.identity
      engine.publish(policy.params, 0)
    return self._served[path]

  def close(self) -> None:
    for engine, _, _ in self._served.values():
      engine.close()


def endpoint_identity(config: EndpointConfig) -> dict[str, Any]:
  """What of an endpoint's settings has to do with what it writes."""
  by_the_way = ("api_key_variable", "timeout", "attempts")
  return {name: value for name, value in config.to_dict().items() if name not in by_the_way}


def _open_writer(config: WriterConfig, pool: ModelPool) -> tuple[Writer, dict[str, Any]]:
  """A writer, and what tells it from others."""
  if not config.path:
    return HttpWriter(config.http), endpoint_identity(config.http)
  engine, chat, identity = pool.serve(config.path)
  made_with = {"policy": identity, "sampling": config.sampling.to_dict()}
  return EngineWriter(engine, chat, config.sampling), made_with


def synthesise_traces(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  writers: Mapping[Author, WriterConfig],
  predictors: Mapping[Author, WordClassifier],
  tessy: TessyConfig,
  tasks: int | None = None,
  concurrency: int = 16,
  extensions: Extensions | None = None,
  report: Report = unreported,
) -> Written:
  """Writes a folder of traces for the training tasks of an experiment; see ``write_traces``.

  Args:
    experiment: validated and frozen here; its data, seed, mesh and engine, which serves each model
      that is on disk.
    output: new, empty, or of an earlier call that was stopped.
    writers, predictors: of both authors.
    tessy: settings of the flow.
    tasks: the first so many; None is all.
    concurrency: tasks at once.
    extensions: may bring tasks, as in ``Run``.
    report: as in ``write_traces``.

  Raises:
    ConfigError: settings that cannot be, or an output of other settings.
    CheckpointError: no model to load.
    DataError: tasks, or an earlier output, that cannot be read.
    JudgeUnavailableError, JudgeRefusedError: an endpoint failed; the same call goes on.
  """
  resolve(experiment)
  for name, writer in writers.items():
    writer.validate(name)
  tessy.validate("tessy")
  wanted = load_task_splits(experiment, extensions or Extensions()).train[:tasks]
  if not wanted:
    raise ConfigError("config.data has no training tasks; allowed: at least one to write for.")
  pool, runner = ModelPool(experiment), LoopThread()
  try:
    opened = {name: _open_writer(config, pool) for name, config in writers.items()}
    made_with: dict[str, Any] = {name: identity for name, (_, identity) in opened.items()}
    made_with["predictors"] = {name: each.fingerprint() for name, each in predictors.items()}
    return runner.run(
      write_traces(
        output,
        wanted,
        {name: writer for name, (writer, _) in opened.items()},
        cast("Mapping[Author, Any]", predictors),
        tessy,
        seed=experiment.seed,
        concurrency=concurrency,
        made_with=made_with,
        report=report,
      )
    )
  finally:
    runner.close()
    pool.close()
