"""Machine-learning engineering: small data sets made by seed, or read from folders.

The policy gets ``train.csv`` (``id``, features, ``target``) and ``test.csv`` without the target,
and hands in ``submission.csv`` with the columns ``id,target``. ``task.metadata`` holds

  files      path -> text: what the policy is given
  labels     {id: target} of the test rows, as texts; they never leave the host
  metric     "accuracy" (targets are names) or "rmse" (numbers)
  constant   the metric of the best constant answer, best for the test rows
  strong     the metric of a good answer: what counts as reaching the last milestone
  level      1..3 for generated data

A folder of tasks has a folder for each: ``train.csv``, ``test.csv``, ``labels.csv`` (``id,target``)
and ``task.json`` ({"description", "metric", "strong"}).
"""

from __future__ import annotations

import csv
import dataclasses
import hmac
import io
import json
import math
import os
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from agentjax.config import ConfigError, FilePath, Range, check
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.worlds.mle.secret import read_secret, run_secret

SOURCE = "mle"
Kind = Literal["regression", "classification", "text"]
KINDS: tuple[Kind, ...] = ("regression", "classification", "text")
# Share of the way from a constant answer to one that knows the law; ours, chosen so that the worked
# solutions, which are simple models, reach it on hundreds of drawn data sets.
_STRONG = 0.4
_METRICS = ("accuracy", "rmse")
_WORDS = (
  "amber basin cedar delta ember fjord grove haven inlet jetty kelp larch meadow north oasis pine "
  "quarry ridge shoal tundra upland valley willow yarrow zephyr"
).split()


@dataclasses.dataclass(unsafe_hash=True)
class MleTaskConfig(TaskSource):
  """Generated data sets; the figures are ours.

  Attributes:
    kinds: "regression": numbers from features with products of them; "classification": one of three
      names from where features lie; "text": one of two names from words.
    train_rows, test_rows: of each data set.
    noise: standard deviation of what is added to a regression target, whose own is about 1, and
      share of flipped names elsewhere.
    demonstrate: whether tasks carry a worked solution, by the tool ``python``.
    secret_file: the file ``world/secret`` of a run, to have its labels; None is the run's own,
      drawn at its beginning.
  """

  kinds: tuple[Kind, ...] = KINDS
  train_rows: Annotated[int, Range(30)] = 200
  test_rows: Annotated[int, Range(30)] = 100
  noise: Annotated[float, Range(0, 0.3)] = 0.1
  demonstrate: bool = True
  secret_file: FilePath | None = None

  def validate(self, path: str = "config.world.tasks") -> None:
    super().validate(path)
    check(bool(self.kinds), f"{path}.kinds", self.kinds, f"some of {', '.join(KINDS)}")

  def check_data(self, data: DataConfig, path: str) -> None:
    if data.path is None:
      super().check_data(data, path)

  def load(self, data: DataConfig, folder: pathlib.Path | None = None) -> TaskSplits:
    """As ``TaskSource.load``; ``folder`` is the world's in a run, which keeps its secret there."""
    if data.path is not None:
      return read_mle_folder(data.path, train_limit=data.train_size, test_limit=data.test_size)
    if self.secret_file is not None:
      secret = read_secret(self.secret_file)
    elif folder is not None:
      secret = run_secret(folder)
    else:
      raise ConfigError(
        "config.world.tasks.secret_file=None: labels of generated 'mle' tasks depend on the secret "
        "of a run; name its file, --config.world.tasks.secret_file=RUN/world/secret"
      )
    assert data.train_size is not None and data.test_size is not None
    return mle_tasks(
      self, train_size=data.train_size, test_size=data.test_size, seed=data.seed, secret=secret
    )


def mle_tasks(
  config: MleTaskConfig, *, train_size: int, test_size: int, seed: int, secret: bytes
) -> TaskSplits:
  """So many data sets, each of its own law; the kinds take turns.

  Args:
    config: see MleTaskConfig.
    train_size, test_size: how many.
    seed: chooses the data sets, with the secret.
    secret: not known in any box (``secret``); with it and the seed the labels can be generated.
  """
  return TaskSplits(
    train=[_generated(config, i, i, seed, secret) for i in range(train_size)],
    test=[_generated(config, i, FIRST_TEST_ID + i, seed, secret) for i in range(test_size)],
  )


def read_mle_folder(
  directory: str | os.PathLike[str],
  *,
  train_limit: int | None = None,
  test_limit: int | None = None,
) -> TaskSplits:
  """Tasks of the folders ``train/*`` and ``test/*`` of a directory, by name.

  Raises:
    DataError: no such folder, or a file that is missing or not as the module says.
  """
  root = pathlib.Path(directory)
  splits = []
  for name, first_id, limit in (("train", 0, train_limit), ("test", FIRST_TEST_ID, test_limit)):
    folders = sorted(p for p in (root / name).glob("*") if p.is_dir()) if root.is_dir() else []
    if not folders and name == "train":
      raise DataError("no folder train/ with a folder for each task", root)
    splits.append([_read(folder, first_id + i) for i, folder in enumerate(folders[:limit])])
  return TaskSplits(*splits)


def metric_value(metric: str, labels: Mapping[str, str], answers: Mapping[str, str]) -> float:
  """Accuracy, or root mean squared error, of answers to exactly the rows of ``labels``."""
  if metric == "accuracy":
    return sum(answers[i] == label for i, label in labels.items()) / len(labels)
  errors = [float(answers[i]) - float(label) for i, label in labels.items()]
  return math.sqrt(sum(e * e for e in errors) / len(errors))


def _constant(metric: str, labels: Mapping[str, str]) -> float:
  """What the best constant answer gets: the most frequent name, or the mean."""
  targets = list(labels.values())
  if metric == "accuracy":
    best = Counter(targets).most_common(1)[0][0]
  else:
    best = repr(math.fsum(map(float, targets)) / len(targets))
  return metric_value(metric, labels, dict.fromkeys(labels, best))


def mle_task(
  *,
  id: int,
  description: str,
  train: str,
  test: str,
  labels: Mapping[str, str],
  metric: str,
  strong: float,
  demonstration: tuple[Message, ...] = (),
  metadata: Mapping[str, Any] | None = None,
) -> Task:
  """A task of the texts of its files.

  Raises:
    ValueError: files that do not fit together, or a strong answer no better than a constant one.
  """
  rows = list(csv.DictReader(io.StringIO(train)))
  tested = list(csv.DictReader(io.StringIO(test)))
  if metric not in _METRICS:
    raise ValueError(f"metric {metric!r}; allowed: {', '.join(_METRICS)}")
  if not rows or not {"id", "target"} <= set(rows[0]):
    raise ValueError("train.csv needs rows, and the columns id and target")
  if not tested or "id" not in tested[0] or "target" in tested[0]:
    raise ValueError("test.csv needs rows and a column id, and must not have target")
  if sorted(row["id"] for row in tested) != sorted(labels):
    raise ValueError("labels.csv must have the ids of test.csv, each once")
  constant = _constant(metric, labels)
  if (strong <= constant) if metric == "accuracy" else (strong >= constant):
    raise ValueError(f"strong {metric} {strong:g} is no better than the constant's {constant:g}")
  goal = "accuracy, the higher the better" if metric == "accuracy" else "RMSE, the lower the better"
  prompt = (
    f"{description.strip()}\nLearn from train.csv (columns {','.join(rows[0])}), predict target "
    f"for the {len(tested)} rows of test.csv (no target there) and write submission.csv with the "
    f"columns id,target. Only numpy is installed. Measured by {goal}; a constant gets "
    f"{constant:.3g}, a good model {strong:.3g}."
  )
  return Task(
    id=id,
    prompt=(Message("user", prompt),),
    answer="",  # any submission is measured
    source=SOURCE,
    demonstration=demonstration,
    metadata={
      "files": {"train.csv": train, "test.csv": test},
      "labels": dict(labels),
      "metric": metric,
      "constant": constant,
      "strong": strong,
      **(metadata or {}),
    },
  )


def _generated(config: MleTaskConfig, number: int, id: int, seed: int, secret: bytes) -> Task:
  kind = config.kinds[number % len(config.kinds)]
  # Keyed: the policy may know this file, the features and the seed, but not the secret.
  digest = hmac.digest(secret, f"mle/{seed}/{id}/{kind}".encode(), "sha256")
  random = np.random.default_rng(np.frombuffer(digest, np.uint32))
  count = config.train_rows + config.test_rows
  make = {"regression": _regression, "classification": _classification, "text": _text}[kind]
  columns, rows, targets, ideal = make(random, count, config.noise)
  ids = [str(i) for i in random.choice(10**6, size=count, replace=False)]
  split = config.train_rows
  labels = dict(zip(ids[split:], targets[split:], strict=True))
  metric = "rmse" if kind == "regression" else "accuracy"
  constant = _constant(metric, labels)
  reached = metric_value(metric, labels, dict(zip(ids[split:], ideal[split:], strict=True)))
  train = _csv(["id", *columns, "target"], zip(ids, rows, targets, strict=True), 0, split)
  test = _csv(["id", *columns], zip(ids, rows, [None] * count, strict=True), split, count)
  return mle_task(
    id=id,
    description=f"A {kind} task.",
    train=train,
    test=test,
    labels=labels,
    metric=metric,
    strong=constant + _STRONG * (reached - constant),
    demonstration=_demonstration(kind) if config.demonstrate else (),
    metadata={"level": 1 + KINDS.index(kind)},
  )


_Made = tuple[list[str], list[list[str]], list[str], list[str]]


def _regression(random: np.random.Generator, count: int, noise: float) -> _Made:
  """Linear in four features and one product of two; targets have a deviation of about 1."""
  x = random.normal(size=(count, 4))
  weights = random.normal(size=4)
  a, b = random.choice(4, size=2, replace=False)
  law = x @ weights + random.uniform(0.5, 1.0) * x[:, a] * x[:, b]
  law = (law - law.mean()) / law.std()
  target = law + noise * random.normal(size=count)
  rows = [[f"{v:.4f}" for v in row] for row in x]
  return ["a", "b", "c", "d"], rows, [f"{v:.4f}" for v in target], [repr(float(v)) for v in law]


def _classification(random: np.random.Generator, count: int, noise: float) -> _Made:
  """The nearest of three centres in the first two of four features."""
  x = random.normal(size=(count, 4))
  angle = random.uniform(0, 2 * np.pi)
  turns = angle + 2 * np.pi * np.arange(3) / 3
  centres = np.stack([np.cos(turns), np.sin(turns)], axis=1)
  places = random.choice(4, size=2, replace=False)
  law = np.argmin(((x[:, None, places] - centres) ** 2).sum(-1), axis=1)
  flipped = np.where(random.random(count) < noise, random.integers(0, 3, count), law)
  names = [_WORDS[i] for i in random.choice(len(_WORDS), size=3, replace=False)]
  rows = [[f"{v:.4f}" for v in row] for row in x]
  return ["a", "b", "c", "d"], rows, [names[i] for i in flipped], [names[i] for i in law]


def _text(random: np.random.Generator, count: int, noise: float) -> _Made:
  """Twelve words a text; those of one half of the vocabulary are likelier in one class."""
  words = [_WORDS[i] for i in random.permutation(len(_WORDS))[:20]]
  law = random.integers(0, 2, count)
  likely = np.repeat([0.7, 0.3], 10)
  odds = np.stack([likely, 1 - likely])
  odds /= odds.sum(axis=1, keepdims=True)
  rows = [[" ".join(random.choice(words, size=12, p=odds[c]))] for c in law]
  flipped = np.where(random.random(count) < noise, 1 - law, law)
  names = ("yes", "no")
  return ["text"], rows, [names[i] for i in flipped], [names[i] for i in law]


def _csv(header: Sequence[str], rows: Any, start: int, end: int) -> str:
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(header)
  for identity, features, target in list(rows)[start:end]:
    writer.writerow([identity, *features, *([] if target is None else [target])])
  return out.getvalue()


_LOAD = """import csv
import numpy as np
train = list(csv.DictReader(open('train.csv')))
test = list(csv.DictReader(open('test.csv')))
"""
_SAVE = """
with open('submission.csv', 'w') as file:
  print('id,target', file=file)
  for row, target in zip(test, answers):
    print(row['id'], target, sep=',', file=file)
"""
_NUMBERS = """def features(rows):
  x = np.array([[float(row[c]) for c in 'abcd'] for row in rows])
  products = [x[:, i] * x[:, j] for i in range(4) for j in range(i, 4)]
  return np.column_stack([np.ones(len(x)), x, *products])
"""
_SOLUTIONS = {
  "regression": _LOAD
  + _NUMBERS
  + """y = np.array([float(row['target']) for row in train])
weights = np.linalg.lstsq(features(train), y, rcond=None)[0]
answers = features(test) @ weights"""
  + _SAVE,
  "classification": _LOAD
  + _NUMBERS
  + """names = sorted({row['target'] for row in train})
y = np.array([[row['target'] == name for name in names] for row in train], float)
weights = np.linalg.lstsq(features(train), y, rcond=None)[0]
answers = [names[i] for i in (features(test) @ weights).argmax(axis=1)]"""
  + _SAVE,
  "text": _LOAD
  + """words = sorted({word for row in train for word in row['text'].split()})
def features(rows):
  return np.array([[row['text'].split().count(word) for word in words] for row in rows], float)
names = sorted({row['target'] for row in train})
y = np.array([row['target'] for row in train])
x = features(train)
counts = np.array([x[y == name].sum(axis=0) + 1 for name in names])
odds = np.log(counts / counts.sum(axis=1, keepdims=True))
answers = [names[i] for i in (features(test) @ odds.T).argmax(axis=1)]"""
  + _SAVE,
}


def _demonstration(kind: str) -> tuple[Message, ...]:
  """Least squares on squares and products, or naive Bayes; then the end."""
  return (
    Message("assistant", "", (ToolCall("python", {"code": _SOLUTIONS[kind]}),)),
    Message("tool", "(no output)"),
    Message("assistant", "Done."),
  )


def _read(folder: pathlib.Path, id: int) -> Task:
  texts = {}
  for name in ("train.csv", "test.csv", "labels.csv", "task.json"):
    try:
      texts[name] = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
      raise DataError(f"cannot be read: {error}", folder / name) from error
  try:
    about = json.loads(texts["task.json"])
    labels = {r["id"]: r["target"] for r in csv.DictReader(io.StringIO(texts["labels.csv"]))}
    return mle_task(
      id=id,
      description=str(about["description"]),
      train=texts["train.csv"],
      test=texts["test.csv"],
      labels=labels,
      metric=about["metric"],
      strong=float(about["strong"]),
      metadata={"name": folder.name},
    )
  except (ValueError, KeyError, TypeError) as error:
    raise DataError(f"not a task: {error!r}", folder) from error
