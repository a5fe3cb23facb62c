"""Tasks of reasoning-gym: over a hundred seeded generators with verifiers (2505.24760)."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from agentjax.config import ConfigError, check
from agentjax.data.config import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.text.answers import mark_answer
from agentjax.trajectory.record import Message, Task

# Sets whose verifier pays what is no answer, and why.
_REFUSED = {
  "propositional_logic": "its verifier pays any premise of the question that is said again",
}


@dataclasses.dataclass(unsafe_hash=True)
class ReasoningGymConfig(TaskSource):
  """One of reasoning-gym's data sets.

  Attributes:
    name: as reasoning-gym calls it, e.g. "basic_arithmetic", "chain_sum", "leg_counting".
    parameters: JSON object of the generator's own settings, e.g. '{"max_terms": 3}'.
    instruction: text put before every question; tells how to answer.
  """

  name: str = "chain_sum"
  parameters: str = "{}"
  instruction: str = ""

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(bool(self.name), "name", "the name of a reasoning-gym data set")
    if self.name in _REFUSED:
      raise ConfigError(
        f"{path}.name={self.name!r} is refused: {_REFUSED[self.name]}. Take another data set."
      )
    try:
      parsed = json.loads(self.parameters)
    except json.JSONDecodeError as error:
      raise ConfigError(f"{path}.parameters={self.parameters!r} is not JSON: {error}") from error
    require(isinstance(parsed, dict), "parameters", "a JSON object")
    for name in ("seed", "size"):
      require(
        name not in parsed,
        "parameters",
        f"settings other than {name!r}, which follows from config.data",
      )

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    sizes = {"train_size": data.train_size, "test_size": data.test_size}
    return load_reasoning_gym(self, **sizes, seed=data.seed)


def load_reasoning_gym(
  config: ReasoningGymConfig, *, train_size: int, test_size: int, seed: int
) -> TaskSplits:
  """Train and test tasks of one data set; a question of the train tasks is never a test task.

  ``metadata["entry"]`` holds what the verifier needs (``scoring``). Generators
  with few questions may repeat them within train.

  Raises:
    ConfigError: reasoning-gym is not installed, knows no such name, or refuses the parameters.
    DataError: the generator has too few different questions for ``test_size``.
  """
  config.validate()
  train = _generate(config, train_size, seed, "train")
  known = {entry["question"] for entry in train}
  test: list[dict[str, Any]] = []
  # A few extra, since some test questions may turn out to be train questions.
  for entry in _generate(config, 4 * test_size + 16 if test_size else 0, seed, "test"):
    if entry["question"] not in known and len(test) < test_size:
      known.add(entry["question"])
      test.append(entry)
  if len(test) < test_size:
    raise DataError(
      f"only {len(test)} test questions are not among {train_size} train questions; lower "
      "config.data.train_size or test_size, or make the questions harder",
      f"reasoning_gym/{config.name}",
    )
  return TaskSplits(
    train=[_task(config, i, entry) for i, entry in enumerate(train)],
    test=[_task(config, FIRST_TEST_ID + i, entry) for i, entry in enumerate(test)],
  )


def _generate(config: ReasoningGymConfig, size: int, seed: int, split: str) -> list[dict[str, Any]]:
  try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise ConfigError(
      "config.data.source='reasoning_gym' needs reasoning-gym; install the extra: "
      "pip install 'agentjax[envs]'"
    ) from error
  check(
    config.name in DATASETS,
    "config.data.source.name",
    config.name,
    ", ".join(sorted(DATASETS)),
  )
  if size == 0:
    return []
  # Many generators seed entry i with seed + i, so neighbouring seeds would repeat each other.
  first_seed = random.Random(f"{config.name}/{split}/{seed}").randrange(2**31)
  try:
    dataset = reasoning_gym.create_dataset(
      config.name, seed=first_seed, size=size, **json.loads(config.parameters)
    )
  except (TypeError, ValueError, AssertionError) as error:
    raise ConfigError(
      f"config.data.source.parameters={config.parameters!r}: {config.name} refuses them: {error}"
    ) from error
  return [dataset[i] for i in range(size)]


def _task(config: ReasoningGymConfig, task_id: int, entry: dict[str, Any]) -> Task:
  question = entry["question"]
  prompt = f"{config.instruction}\n{question}" if config.instruction else question
  answer = "" if entry["answer"] is None else str(entry["answer"])
  if "Integral(" in answer:  # intermediate_integration states some integrals as their own solution
    answer = ""
  # There are no worked solutions; the bare answer shows a warm start the form to answer in.
  shown = (Message("assistant", mark_answer(answer)),) if answer else ()
  return Task(
    id=task_id,
    prompt=(Message("user", prompt),),
    answer=answer,
    source=f"reasoning_gym/{config.name}",
    demonstration=shown,
    metadata={"entry": entry},
  )
