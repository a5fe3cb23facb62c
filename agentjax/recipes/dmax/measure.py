"""How many tokens a forward pass decides, and how often the answers are right."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence

from agentjax.config import check
from agentjax.recipes.dmax.config import DecodingConfig, DMaxConfig
from agentjax.recipes.dmax.engine import BlockEngine, BlockStats
from agentjax.rollout.evaluation import Estimate
from agentjax.rollout.viewer import write_trajectories
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import load_newest, newest_first
from agentjax.training.evaluation import Evaluation, load_policy
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.placement import place


@dataclasses.dataclass(frozen=True)
class Measured:
  """One way to decode, on the held-out tasks.

  Attributes:
    decoding: the way.
    success: of the greedy episodes; None where nothing was judged.
    stats: of the engine.
  """

  decoding: DecodingConfig
  success: Estimate | None
  stats: BlockStats


def measure(
  experiment: Experiment,
  checkpoint: str | os.PathLike[str],
  ways: Sequence[DecodingConfig],
  *,
  samples_file: str | os.PathLike[str] | None = None,
) -> list[Measured]:
  """Decodes the first ``config.evaluation.tasks`` held-out tasks greedily, each way.

  Args:
    experiment: its ``likelihood`` is a DMaxConfig; validated and frozen here.
    checkpoint: RUN/checkpoints/STEP, or RUN for its newest.
    ways: to decode.
    samples_file: text file for readable episodes of the last way.

  Raises:
    ConfigError: another likelihood, or no task to measure on.
    CheckpointError: there is no checkpoint, or none that is whole.
  """
  likelihood = experiment.likelihood
  check(isinstance(likelihood, DMaxConfig), "config.likelihood", likelihood, "a DMaxConfig")
  assert isinstance(likelihood, DMaxConfig)
  resolve(experiment)
  settings = experiment.evaluation
  check(settings.tasks > 0, "config.evaluation.tasks", settings.tasks, "at least 1")
  directory = newest_first(pathlib.Path(checkpoint))[0].parents[1]
  parts = build_parts(experiment, directory, Extensions())
  path, policy = load_newest(
    pathlib.Path(checkpoint), lambda found: (found, load_policy(parts, found))
  )
  step, result = int(path.name), list[Measured]()
  plan = dataclasses.replace(settings, samples=0)
  with contextlib.ExitStack() as stack:
    runner = LoopThread()
    stack.callback(runner.close)
    stack.callback(lambda: runner.run(parts.close()))
    runner.run(parts.start())
    for way in ways:
      engine = BlockEngine(
        parts.model,
        experiment.sampling_engine,
        dataclasses.replace(likelihood, decoding=way),
        vocab_limit=parts.tokenizer.vocab_size,
        devices=place(experiment.devices).rollout,
      )
      with contextlib.closing(engine):
        engine.publish(policy, step + 1)
        report = Evaluation(parts, engine, runner, step, plan).report()
      result.append(Measured(way, report.overall.greedy, engine.stats))
  if samples_file is not None:
    write_trajectories(
      samples_file,
      report.greedy_trajectories,
      tasks=parts.tasks.test,
      tokenizer=parts.tokenizer,
      title=f"{experiment.name}: held-out episodes of {path}",
    )
  return result
