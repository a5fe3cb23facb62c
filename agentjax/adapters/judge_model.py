"""A judge that a command names by flags: a model on disk, or one behind an endpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig, endpoint_identity
from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.adapters.engine_judge import EngineJudge
from agentjax.config import Config, check
from agentjax.engine import SamplingConfig
from agentjax.rewards.judges import LetterJudge
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

  path: str = ""
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
  config: JudgeModelConfig, pool: ModelPool, seed: int
) -> tuple[LetterJudge, dict[str, Any]]:
  """A judge, and what tells it from others.

  Args:
    config: validated.
    pool: serves a model on disk.
    seed: of its randomness, with the keys of questions.
  """
  sampling, tokens = config.sampling, config.max_tokens
  made_with = {"sampling": sampling.to_dict(), "max_tokens": tokens}
  if config.path:
    engine, chat, identity = pool.serve(config.path)
    judge = EngineJudge(engine, chat, sampling, max_tokens=tokens, seed=seed)
    return judge, {"policy": identity, **made_with}
  http = HttpJudgeConfig(
    **config.http.to_dict(),
    temperature=sampling.temperature,
    top_p=sampling.top_p,
    max_tokens=tokens,
  )
  return HttpJudge(http), {**endpoint_identity(config.http), **made_with}
