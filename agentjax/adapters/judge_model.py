"""A judge chosen by settings: a model on disk, or one behind an endpoint."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig, endpoint_identity
from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.adapters.engine_judge import EngineJudge
from agentjax.config import Config, FilePath, check
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.rewards.judges import LetterJudge
from agentjax.threads import LoopThread
from agentjax.training.experiment import Experiment
from agentjax.training.model_pool import ModelPool


@dataclasses.dataclass(unsafe_hash=True)
class JudgeModelConfig(Config):
  """A model (``rewards.judges.Judge``) on disk or behind an endpoint.

  Attributes:
    path: RUN, RUN/checkpoints/STEP, or a Hugging Face folder; "" where it is behind ``http``.
    sampling: of its replies.
    max_tokens: of a reply.
    http: of a model behind an endpoint, which does not get top_k and min_p.
  """

  path: FilePath = ""
  sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
  max_tokens: int = 1024
  http: EndpointConfig = dataclasses.field(default_factory=EndpointConfig)

  def validate(self, path: str = "judge") -> None:
    require = self.requirements(path)
    require(
      bool(self.path) != bool(self.http.base_url),
      "path",
      f"a run, a checkpoint or a Hugging Face folder, or '' with {path}.http.base_url set",
    )
    self.sampling.validate(f"{path}.sampling")
    require(self.max_tokens >= 1, "max_tokens", ">= 1")
    if not self.path:
      self.http.validate(f"{path}.http")
      for name in ("top_k", "min_p"):
        value = getattr(self.sampling, name)
        check(value == 0, f"{path}.sampling.{name}", value, f"0 with {path}.http")


def open_judge(
  config: JudgeModelConfig,
  pool: ModelPool,
  seed: int,
  loop: asyncio.AbstractEventLoop | None = None,
) -> tuple[LetterJudge, dict[str, Any]]:
  """A judge, and what tells it from others.

  Args:
    config: validated.
    pool: serves a model on disk.
    seed: of its randomness, with the keys of questions.
    loop: as in ``EngineJudge``.
  """
  sampling, tokens = config.sampling, config.max_tokens
  made_with = {"sampling": sampling.to_dict(), "max_tokens": tokens}
  if config.path:
    engine, chat, identity = pool.serve(config.path)
    judge = EngineJudge(engine, chat, sampling, max_tokens=tokens, seed=seed, loop=loop)
    return judge, {"policy": identity, **made_with}
  http = HttpJudgeConfig(
    **config.http.to_dict(),
    temperature=sampling.temperature,
    top_p=sampling.top_p,
    max_tokens=tokens,
  )
  return HttpJudge(http), {**endpoint_identity(config.http), **made_with}


class RunJudges:
  """The judges of a part of a run's reward. Scorers ask them from any thread.

  Models on disk are loaded here, before the run allocates its own arrays, and each is served by an
  engine for as long as the run lasts.

  Args:
    configs: name -> settings; validated. Two with the same path share an engine.
    engine: of each model on disk. With one device, so that its programs never wait for those of the
      run on other devices.
    seed: of the judges' randomness, with the keys of questions.
    where: path of the settings, for messages.

  Raises:
    CheckpointError: there is no model to load.
    ConfigError: a model on disk in a run of several processes, or on several devices.

  Attributes:
    judges: by name.
  """

  def __init__(
    self, configs: Mapping[str, JudgeModelConfig], engine: EngineConfig, seed: int, where: str
  ):
    self._pool, self._runner = ModelPool(Experiment(engine=engine).freeze()), LoopThread("judges")
    for name, config in configs.items():
      alone = jax.process_count() == 1 or not config.path
      allowed = f"'' with {where}.{name}.http in a run of several processes: serve it apart"
      check(alone, f"{where}.{name}.path", config.path, allowed)
    ways = engine.mesh.size * engine.lanes
    served = any(config.path for config in configs.values())
    check(not served or ways == 1, f"{where}.engine.mesh", engine.mesh, "one device and one lane")
    try:
      loop = self._runner.run(_running_loop()) if served else None
      opened = {name: open_judge(c, self._pool, seed, loop)[0] for name, c in configs.items()}
    except BaseException:
      self.close()
      raise
    self.judges: Mapping[str, LetterJudge] = opened

  def close(self) -> None:
    """Ends the engines."""
    self._runner.close()
    self._pool.close()


async def _running_loop() -> asyncio.AbstractEventLoop:
  return asyncio.get_running_loop()
