"""Where tasks come from, as settings."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal, get_args

from agentjax.config import Config, ConfigError, FilePath, check
from agentjax.data.code_tasks import load_mbpp, load_quixbugs
from agentjax.data.function_tasks import FunctionTaskConfig, function_tasks
from agentjax.data.gsm8k import load_gsm8k
from agentjax.data.jsonl_tasks import load_jsonl
from agentjax.data.mixture import mix
from agentjax.data.mle_tasks import MleTaskConfig, mle_tasks, read_mle_folder
from agentjax.data.pivots import pivot_tasks
from agentjax.data.reasoning_gym import ReasoningGymConfig, load_reasoning_gym
from agentjax.data.repair_tasks import RepairTaskConfig, repair_tasks
from agentjax.data.secret import read_secret
from agentjax.data.spider import SpiderConfig, load_spider
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.data.tfds_source import TfdsConfig, load_tfds
from agentjax.data.word_problems import WordProblemConfig, word_problems
from agentjax.names import check_callable, check_name, is_own, load, wrong

_GENERATED = ("word_problems", "reasoning_gym", "function_tasks", "repair", "environment")
_FROM_PATH = ("gsm8k", "jsonl", "tfds", "spider", "code_tasks", "pivots")
Source = Literal[
  "word_problems",
  "gsm8k",
  "jsonl",
  "reasoning_gym",
  "tfds",
  "spider",
  "code_tasks",
  "function_tasks",
  "repair",
  "mle",
  "pivots",
  "environment",
  "mixture",
]


@dataclasses.dataclass(unsafe_hash=True)
class JsonlConfig(Config):
  """Files of rows in the folder ``config.data.path``, a task a row (``data.jsonl_tasks``).

  Attributes:
    name: kept in the tasks as their source.
    train_file, test_file: each a JSONL file (.gz too), a Parquet file, a folder of either Parquet
      or Arrow files (``datasets`` writes them with ``save_to_disk``), or the name of a split,
      whose files are ``SPLIT-*.parquet``, here or in ``data/`` (as in a copy of a Hugging Face
      data set). Parquet and Arrow need the extra ``agentjax[parquet]``. test_file "" is none.
    question_field, answer_field: texts; answer_field "" where rows have no final answer.
    response_field: field with what the assistant answers, for supervised learning; "" reads none.
    messages_field: field with a whole conversation, in the place of question and response; what
      follows its first assistant's message, that included, is for supervised learning.
  """

  name: str = "jsonl"
  train_file: str = "train.jsonl"
  test_file: str = "test.jsonl"
  question_field: str = "question"
  answer_field: str = "answer"
  response_field: str = ""
  messages_field: str = ""

  def validate(self, path: str = "config.data.jsonl") -> None:
    super().validate(path)
    for field in ("name", "train_file", "question_field"):
      check(bool(getattr(self, field)), f"{path}.{field}", getattr(self, field), "a name")
    check(
      not (self.response_field and self.messages_field),
      f"{path}.response_field",
      self.response_field,
      f"'' with {path}.messages_field={self.messages_field!r}, whose conversation has it",
    )
    check(
      self.train_file != self.test_file,
      f"{path}.test_file",
      self.test_file,
      "another file than train_file",
    )


@dataclasses.dataclass(unsafe_hash=True)
class CodeTasksConfig(Config):
  """``mbpp.jsonl``, and for its tests perhaps ``quixbugs.jsonl``, in ``config.data.path``.

  Attributes:
    test: whose tasks are the test tasks; MBPP's own split, or QuixBugs.
    shown_tests: tests that stand in the prompt; one at least is kept back.
  """

  test: Literal["mbpp", "quixbugs"] = "mbpp"
  shown_tests: int = 1

  def validate(self, path: str = "config.data.code_tasks") -> None:
    super().validate(path)
    check(self.shown_tests >= 0, f"{path}.shown_tests", self.shown_tests, ">= 0")


@dataclasses.dataclass(unsafe_hash=True)
class MixtureConfig(Config):
  """Several sources at once, each with the settings it has on its own.

  Attributes:
    sources: at least two, at most one of which reads ``config.data.path``.
    weights: share of each source, one positive number each; needn't sum to 1.
  """

  sources: tuple[Literal["word_problems", "gsm8k", "jsonl", "reasoning_gym", "tfds"], ...] = (
    "word_problems",
    "reasoning_gym",
  )
  weights: tuple[float, ...] = (1.0, 1.0)

  def validate(self, path: str = "config.data.mixture") -> None:
    super().validate(path)
    check(
      len(self.sources) >= 2 and len(set(self.sources)) == len(self.sources),
      f"{path}.sources",
      self.sources,
      "two or more different sources",
    )
    check(
      sum(s in _FROM_PATH for s in self.sources) <= 1,
      f"{path}.sources",
      self.sources,
      f"at most one of {', '.join(_FROM_PATH)}, since there is one config.data.path",
    )
    check(
      len(self.weights) == len(self.sources) and all(w > 0 for w in self.weights),
      f"{path}.weights",
      self.weights,
      f"{len(self.sources)} positive numbers",
    )


@dataclasses.dataclass(unsafe_hash=True)
class DataConfig(Config):
  """Training and test tasks.

  Attributes:
    source: what makes them; its own settings stand in the field of that name. "environment" is the
      game of ``config.environment``; "module:attribute" a ``TaskSplits`` of your own, or a function
      of this config that returns one.
    path: folder of the sources that read files (gsm8k, jsonl, tfds, spider, code_tasks; pivots:
      pivots.jsonl, and perhaps test.jsonl; mle where it is set, and generated where not).
    train_size: tasks generated, or at most read; None reads all (files only).
    test_size: likewise for test tasks.
    seed: of generated tasks.
    secret_file: the file ``secret`` of a run, to have its labels where they depend on one
      (generated "mle" tasks); None is the run's own, drawn at its beginning.
  """

  source: Source | str = "word_problems"
  path: FilePath | None = None
  train_size: int | None = 10_000
  test_size: int | None = 256
  seed: int = 0
  secret_file: FilePath | None = None
  word_problems: WordProblemConfig = dataclasses.field(default_factory=WordProblemConfig)
  jsonl: JsonlConfig = dataclasses.field(default_factory=JsonlConfig)
  reasoning_gym: ReasoningGymConfig = dataclasses.field(default_factory=ReasoningGymConfig)
  tfds: TfdsConfig = dataclasses.field(default_factory=TfdsConfig)
  spider: SpiderConfig = dataclasses.field(default_factory=SpiderConfig)
  code_tasks: CodeTasksConfig = dataclasses.field(default_factory=CodeTasksConfig)
  function_tasks: FunctionTaskConfig = dataclasses.field(default_factory=FunctionTaskConfig)
  repair: RepairTaskConfig = dataclasses.field(default_factory=RepairTaskConfig)
  mle: MleTaskConfig = dataclasses.field(default_factory=MleTaskConfig)
  mixture: MixtureConfig = dataclasses.field(default_factory=MixtureConfig)

  def validate(self, path: str = "config.data") -> None:
    super().validate(path)
    check_name(self.source, f"{path}.source", get_args(Source))
    sources = self.mixture.sources if self.source == "mixture" else (self.source,)
    if any(s in _FROM_PATH for s in sources):
      check(
        bool(self.path),
        f"{path}.path",
        self.path,
        f"the folder that source {self.source!r} reads; set --{path}.path=DIR",
      )
    for name, least in (("train_size", 1), ("test_size", 0)):
      size = getattr(self, name)
      check(size is None or size >= least, f"{path}.{name}", size, f">= {least} or None")
      generated = self.source in (*_GENERATED, "mixture") or (
        self.source == "mle" and self.path is None
      )
      if generated:
        check(size is not None, f"{path}.{name}", size, f"a number, for source {self.source!r}")
    check(0 <= self.seed < 2**31, f"{path}.seed", self.seed, "0 <= seed < 2**31")
    if "tfds" in sources:
      check(bool(self.tfds.name), f"{path}.tfds.name", self.tfds.name, "a TFDS data set's name")

  @property
  def needs_secret(self) -> bool:
    """Whether labels are generated that depend on the run's secret (``data.secret``)."""
    return self.source == "mle" and self.path is None and self.secret_file is None


def load_tasks(config: DataConfig, *, secret: bytes | None = None) -> TaskSplits:
  """Reads or generates the tasks of a config; not those of a game (``envs.environment_tasks``).

  Args:
    config: see DataConfig.
    secret: of the run, for a config that ``needs_secret``.

  Raises:
    ConfigError: a setting that cannot be, or a missing extra.
    DataError: data that cannot be read, with file and line.
  """
  config.validate()
  check(config.source != "environment", "config.data.source", config.source, "a source of data")
  if is_own(config.source):
    return _named(config)
  if config.source == "mle":
    return _load_mle(config, secret)
  if config.source != "mixture":
    return _load(config, config.source)
  parts = [_load(config, source) for source in config.mixture.sources]
  weights = config.mixture.weights
  assert config.train_size is not None and config.test_size is not None
  return TaskSplits(
    train=mix([p.train for p in parts], weights, size=config.train_size, first_id=0),
    test=mix([p.test for p in parts], weights, size=config.test_size, first_id=FIRST_TEST_ID)
    if config.test_size
    else [],
  )


def _load(config: DataConfig, source: str) -> TaskSplits:
  train_size, test_size = config.train_size, config.test_size
  if source in _GENERATED:
    assert train_size is not None and test_size is not None
    if source == "word_problems":
      return word_problems(
        config.word_problems, train_size=train_size, test_size=test_size, seed=config.seed
      )
    if source == "function_tasks":
      return function_tasks(
        config.function_tasks, train_size=train_size, test_size=test_size, seed=config.seed
      )
    if source == "repair":
      return repair_tasks(
        config.repair, train_size=train_size, test_size=test_size, seed=config.seed
      )
    return load_reasoning_gym(
      config.reasoning_gym, train_size=train_size, test_size=test_size, seed=config.seed
    )
  assert config.path is not None
  if source == "gsm8k":
    return load_gsm8k(config.path, train_limit=train_size, test_limit=test_size)
  if source == "tfds":
    return load_tfds(config.tfds, config.path, train_limit=train_size, test_limit=test_size)
  if source == "spider":
    return load_spider(config.spider, config.path, train_limit=train_size, test_limit=test_size)
  if source == "code_tasks":
    return _load_code_tasks(config, config.path)
  if source == "pivots":
    train = pivot_tasks(os.path.join(config.path, "pivots.jsonl"), limit=train_size)
    held_out = os.path.join(config.path, "test.jsonl")
    if not os.path.exists(held_out):
      return TaskSplits(train, [])
    return TaskSplits(train, pivot_tasks(held_out, first_id=FIRST_TEST_ID, limit=test_size))
  files = config.jsonl
  parts = ((files.train_file, 0, train_size), (files.test_file, FIRST_TEST_ID, test_size))
  return TaskSplits(
    *(
      load_jsonl(
        os.path.join(config.path, name),
        source=files.name,
        first_id=first_id,
        limit=limit,
        question_field=files.question_field,
        answer_field=files.answer_field,
        response_field=files.response_field,
        messages_field=files.messages_field,
      )
      if name
      else []
      for name, first_id, limit in parts
    )
  )


def _load_mle(config: DataConfig, secret: bytes | None) -> TaskSplits:
  train_size, test_size = config.train_size, config.test_size
  if config.path is not None:
    return read_mle_folder(config.path, train_limit=train_size, test_limit=test_size)
  if config.secret_file is not None:
    secret = read_secret(config.secret_file)
  if secret is None:
    raise ConfigError(
      "config.data.secret_file=None: labels of generated 'mle' tasks depend on the secret of a "
      "run; name its file, --config.data.secret_file=RUN/secret"
    )
  assert train_size is not None and test_size is not None
  return mle_tasks(
    config.mle, train_size=train_size, test_size=test_size, seed=config.seed, secret=secret
  )


def _load_code_tasks(config: DataConfig, path: str) -> TaskSplits:
  settings = config.code_tasks
  mbpp = load_mbpp(
    os.path.join(path, "mbpp.jsonl"),
    shown_tests=settings.shown_tests,
    train_limit=config.train_size,
    test_limit=config.test_size,
  )
  if settings.test == "mbpp":
    return mbpp
  quixbugs = load_quixbugs(
    os.path.join(path, "quixbugs.jsonl"),
    shown_tests=settings.shown_tests,
    limit=config.test_size,
  )
  return TaskSplits(mbpp.train, quixbugs.test)


def _named(config: DataConfig) -> TaskSplits:
  """The tasks that ``module:attribute`` names."""
  path = "config.data.source"
  allowed = "a TaskSplits, or a function of a DataConfig that returns one"
  found = load(config.source, path, allowed)
  if not isinstance(found, TaskSplits):
    check_callable(found, f"{path}={config.source!r}", allowed)
    found = found(config)
  if not isinstance(found, TaskSplits):
    raise wrong(config.source, path, found, allowed)
  return found
