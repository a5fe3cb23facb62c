"""Two models write traces for the tasks of an experiment (``agentjax.recipes.tessy.flow``)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import endpoint_identity
from agentjax.config import Config, ConfigError
from agentjax.data.synthesis_folder import Report, unreported
from agentjax.engine import SamplingConfig
from agentjax.recipes.tessy.flow import Author, SavedPredictor, TessyConfig, Writer
from agentjax.recipes.tessy.folder import Written, write_traces
from agentjax.recipes.tessy.writers import EngineWriter, HttpWriter, HttpWriterConfig
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool


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
    require = self.requirements(path)
    require(
      bool(self.path) != bool(self.http.base_url),
      "path",
      f"a run, a checkpoint or a Hugging Face folder, or '' with {path}.http.base_url set",
    )
    (self.sampling if self.path else self.http).validate(
      f"{path}.sampling" if self.path else f"{path}.http"
    )


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
  predictors: Mapping[Author, SavedPredictor],
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
    tasks: the first ones, as many as this; None is all.
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
  scoring = build_scoring(experiment, extensions or Extensions())
  wanted = scoring.tasks.train[:tasks]
  asyncio.run(scoring.close())
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
        predictors,
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
