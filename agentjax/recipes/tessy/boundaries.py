r"""A boundary predictor on the hidden states of a model, trained in a run on labelled texts.

A language model with a linear head reads a text. At token j it says whether token j + 1 is style:

    loss = mean over labelled tokens of the cross-entropy of sigmoid(w h_j + b) and style_{j+1}

so it needs no more than what stands before a boundary. Model and head learn together, from a copy
of the run's policy; the policy itself does not change, as all episodes of the run have one reward.
``write_boundary_data`` makes the episodes, ``BoundaryConfig`` is the signal of the run, and
``HiddenPredictor`` is what it trained, as a ``flow.BoundaryPredictor``.

TESSY (2604.14164) and its code: token classification by a 0.6B model, the label of a token is the
class of the next one, 10 000 samples at most, 3 epochs in batches of 32, learning rate 1e-5. Ours:
one output in the place of two, which is the same function; the length of the pieces that texts are
cut into; and that a token has the class of its word, white space that of the word behind it.

[B, T]: batch, time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.config import ConfigError, check
from agentjax.data.errors import DataError
from agentjax.data.splits import TaskSplits
from agentjax.files import CheckpointError, write_atomically
from agentjax.models import ModelConfig, forward, values
from agentjax.models.spec import abstract
from agentjax.recipes.tessy.flow import (
  SavedPredictor,
  WordClassifier,
  read_spans,
  word_accuracy,
)
from agentjax.sharding import fingerprint, with_shardings
from agentjax.signals.networks import check_start, descend, reader_model, reader_spec, steps_on
from agentjax.signals.signal import BatchContext, Result, Signal, SignalConfig, SignalTools
from agentjax.text.build import build_chat
from agentjax.text.tokenizer import Tokenizer
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import (
  compare_identity,
  latest_checkpoint,
  load_further,
  read_metadata,
)
from agentjax.training.experiment import Experiment, load_experiment, resolve
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.preferences import store_pairs
from agentjax.training.state import Network, NetworkSpec, Weights
from agentjax.training.workdir import CONFIG_FILE
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.record import Message, Reward, Task, Trajectory

Array = jax.Array
Spans = Sequence[tuple[int, int]]

BOUNDARY = "boundary"  # name of the network, and of the data set
_HELD_OUT = 10  # one labelled text in ten measures a classifier of words
CAPABILITY, STYLE = 1, 2  # values of the column; 0 is no label
CLASSES = register_column(
  Column("tessy_class", "int8", "TESSY's class: 1 capability, 2 style, 0 no label.", in_loss=False)
)


# ------------------------------------------------------------------------------------------ labels


def style_of_characters(text: str, spans: Spans) -> np.ndarray:
  """bool [characters]: a word is style where it begins in a span, and so is the white space before
  it; white space at the end is as the last word."""
  found = np.zeros(len(text), bool)
  at = 0
  for word in re.finditer(r"\S+", text):
    found[at : word.end()] = any(a <= word.start() < b for a, b in spans)
    at = word.end()
  found[at:] = found[at - 1] if at else False
  return found


def starts_of(ids: Sequence[int], text: str, token_bytes: Sequence[bytes | None]) -> np.ndarray:
  """int [tokens]: the character of the text in which each token begins.

  Raises:
    ValueError: the tokens do not spell the text, as with a vocabulary that changes it.
  """
  pieces = [token_bytes[i] or b"" for i in ids]
  data = text.encode("utf-8", "replace")
  if b"".join(pieces) != data:
    raise ValueError("the vocabulary does not spell this text byte for byte")
  begins = np.array([(byte & 0xC0) != 0x80 for byte in data], bool)  # the first byte of a character
  character = np.cumsum(begins) - 1
  offsets = np.cumsum([0, *map(len, pieces)])[:-1]
  return character[np.minimum(offsets, len(data) - 1)] if len(data) else np.zeros(0, np.int64)


# ------------------------------------------------------------------------------------------- data


@dataclasses.dataclass(frozen=True)
class BoundaryData:
  """What ``write_boundary_data`` wrote.

  Attributes:
    texts, left_out: those that the vocabulary spells byte for byte, and others.
    pieces: episodes.
    tokens: with a label.
    style: the share of them that is style.
  """

  texts: int
  left_out: int
  pieces: int
  tokens: int
  style: float


def write_boundary_data(
  experiment: Experiment,
  output: str | os.PathLike[str],
  texts: Sequence[str],
  spans: Sequence[Spans],
) -> BoundaryData:
  """Writes what a run with ``BoundaryConfig`` reads: ``train.jsonl`` and ``episodes``.

  Args:
    experiment: of the run; validated and frozen here. A piece has up to ``rl.row_length`` tokens.
    output: a new folder, or an empty one.
    texts, spans: labelled, as ``flow.read_spans`` gives them.

  Raises:
    DataError: no text is left, or only one class.
    CheckpointError: the folder is in use.
  """
  resolve(experiment)
  asked = (Message("user", BOUNDARY),)
  first = Task(0, asked, "", BOUNDARY)
  parts = build_parts(experiment, None, Extensions(tasks=TaskSplits([first], ())))
  tokenizer, length = parts.tokenizer, experiment.rl.row_length
  token_bytes = tokenizer.token_bytes()
  episodes: list[Trajectory] = []
  counts, left_out = np.zeros(3, np.int64), 0
  for text, own in zip(texts, spans, strict=True):
    ids = tokenizer.encode(text)
    try:
      starts = starts_of(ids, text, token_bytes)
    except ValueError:
      left_out += 1
      continue
    classes = np.where(style_of_characters(text, own)[starts], STYLE, CAPABILITY).astype(np.int8)
    counts += np.bincount(classes, minlength=3)
    for at in range(0, len(ids), length):
      piece = slice(at, at + length)
      builder = TrajectoryBuilder(step=0, task_id=len(episodes), sample=0, source=BOUNDARY)
      builder.append("assistant", ids[piece], weight=1.0, columns={CLASSES.name: classes[piece]})
      episodes.append(builder.build(reward=Reward(0.0)))
  if not counts[CAPABILITY] or not counts[STYLE]:
    raise DataError(
      f"{counts[STYLE]} of {counts.sum()} labelled tokens are style, {left_out} of {len(texts)} "
      "texts are not spelled by the vocabulary; allowed: tokens of both classes",
      output,
    )
  root = pathlib.Path(output)
  row = json.dumps({"messages": [{"role": "user", "content": BOUNDARY}], "answer": BOUNDARY}) + "\n"
  store_pairs(root / "episodes", episodes, parts)
  write_atomically(root / "train.jsonl", row * len(episodes))
  style = float(counts[STYLE] / counts.sum())
  return BoundaryData(len(texts) - left_out, left_out, len(episodes), int(counts.sum()), style)


# ----------------------------------------------------------------------------------------- signal


def _optimizer() -> OptimizerConfig:
  return OptimizerConfig(learning_rate=1e-5)


@dataclasses.dataclass(unsafe_hash=True)
class BoundaryConfig(SignalConfig):
  """The network that learns boundaries from stored episodes; see the module.

  Attributes:
    model: its size; None is the policy's.
    start: "policy", a copy of the run's policy, or "random". The head starts at 0.
    optimizer: of the network; 1e-5 is the source's for a model of 0.6B parameters.
  """

  model: ModelConfig | None = None
  start: Literal["policy", "random"] = "policy"
  optimizer: OptimizerConfig = dataclasses.field(default_factory=_optimizer)

  def validate(self, path: str = "config.rl.signals") -> None:
    super().validate(path)
    check_start(self.model, self.start, path)

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Labels stand in stored episodes only."""
    stored = experiment.rl.rollouts
    said = f"FOLDER/episodes of recipes.tessy.boundary with {path}"
    check(stored is not None, "config.rl.rollouts", stored, said)

  def networks(self, model: ModelConfig, updates: int) -> Mapping[str, NetworkSpec]:
    """See ``SignalConfig.networks``."""
    own = reader_model(self.model, model)
    return {BOUNDARY: reader_spec(own, self.optimizer, updates, self.start)}

  def optimizers(self) -> Mapping[str, tuple[OptimizerConfig, str, str]]:
    """See ``SignalConfig.optimizers``."""
    return {"optimizer": (self.optimizer, "the boundary predictor", "boundary/bad_steps")}

  def build(self, tools: SignalTools) -> BoundarySignal:
    """See ``SignalConfig.build``."""
    return BoundarySignal(self, tools)


class BoundarySignal(Signal):
  """Trains the network on the labels of each batch. Metrics: ``boundary/loss`` before its step, and
  ``boundary/grad_norm``, ``boundary/update_norm`` and ``boundary/bad_steps``."""

  name = BOUNDARY

  def __init__(self, config: BoundaryConfig, tools: SignalTools):
    model = reader_model(config.model, tools.model)
    self.networks = config.networks(tools.model, tools.updates)
    own = self.networks[BOUNDARY]
    assert own.optimizer is not None
    update = functools.partial(_update, model=model, optimizer=own.optimizer, rows=tools.rows)
    self._learn = steps_on(update, own, tools.mesh, 1)

  def learn(
    self, context: BatchContext, networks: Mapping[str, Any], batch: Batch, prepared: Any
  ) -> Result:
    del context, prepared
    network, metrics = self._learn(networks[BOUNDARY], batch)
    return Result(
      networks={BOUNDARY: network}, metrics={f"{BOUNDARY}/{k}": v for k, v in metrics.items()}
    )


def _update(
  network: Network,
  batch: Batch,
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  rows: int,
) -> tuple[Network, dict[str, Array]]:
  """One optimiser step on the mean cross-entropy of the tokens with a label and one before them."""
  segments = batch.segment_ids
  following = jnp.pad(batch.column(CLASSES.name)[:, 1:], ((0, 0), (0, 1)))
  same = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))
  counted = same & (following > 0)
  number = jnp.maximum(jnp.sum(counted), 1)

  def total(weights: Weights, one: Any) -> Array:
    ids, segments, positions, style, counted = one
    hidden = forward(weights.policy, model, ids, segments, positions).hidden
    loss = optax.sigmoid_binary_cross_entropy(values(weights.value, hidden), style)
    return jnp.sum(jnp.where(counted, loss, 0)) / number

  style = (following == STYLE).astype(jnp.float32)
  data = (batch.token_ids, segments, batch.positions, style, counted)
  return descend(network, optimizer, total, data, rows)


# -------------------------------------------------------------------------------------- predictor


class HiddenPredictor:
  """A trained network as a ``flow.BoundaryPredictor``.

  The first token of a text, which nothing predicts, counts as style, as the student begins.

  Args:
    weights: of the network, with its head.
    model: of the network.
    tokenizer: its vocabulary.
    max_tokens: of context and chunk that it reads, the last ones; compiled for powers of two.
  """

  def __init__(
    self, weights: Weights, model: ModelConfig, tokenizer: Tokenizer, max_tokens: int = 1024
  ):
    self._weights, self._tokenizer, self._most = weights, tokenizer, max_tokens
    self._bytes = tokenizer.token_bytes()

    @jax.jit
    def scores(weights: Weights, ids: Array, count: Array) -> Array:
      positions = jnp.arange(ids.shape[0])
      segments = jnp.where(positions < count, 1, 0)  # 0 is padding
      hidden = forward(weights.policy, model, ids[None], segments[None], positions[None]).hidden
      return values(weights.value, hidden)[0]

    self._scores = scores

  def style(self, context: str, chunk: str) -> list[tuple[int, bool]]:
    """As in ``BoundaryPredictor``: a piece is a token.

    A chunk that the vocabulary does not spell byte for byte is one piece of style.
    """
    if not chunk:
      return []
    text = context + chunk
    ids = self._tokenizer.encode(text)
    try:
      starts = starts_of(ids, text, self._bytes) - len(context)
    except ValueError:
      return [(0, True)]
    ids, starts = ids[-self._most :], starts[-self._most :]
    size = max(16, 1 << (len(ids) - 1).bit_length())
    padded = np.zeros(size, np.int32)
    padded[: len(ids)] = ids
    scores = np.asarray(self._scores(self._weights, padded, np.int32(len(ids))))[: len(ids)]
    said = np.concatenate([[True], scores[:-1] > 0])
    ends = np.append(starts[1:], len(chunk))
    return [
      (max(int(start), 0), bool(one))
      for start, end, one in zip(starts, ends, said, strict=True)
      if end > max(start, 0)
    ]

  def fingerprint(self) -> str:
    """Of the weights."""
    return fingerprint(self._weights)


def open_predictor(path: str, spans: str | None, say: Callable[[str], None]) -> SavedPredictor:
  """The predictor of a run, or of a file that is trained and written first where texts are given.

  Args:
    path: of either.
    spans: file of labelled texts.
    say: is told how well what was trained does.

  Raises:
    ConfigError: there is none, or the texts cannot train one.
  """
  if os.path.isdir(path):
    if spans is not None:
      raise ConfigError(
        f"{path} is a folder; allowed with labelled texts: a file of words (.npy) to write. "
        "configs/tessy_boundary.py trains the predictor of a run."
      )
    return load_predictor(path)
  if spans is None:
    try:
      return WordClassifier.load(path)
    except (OSError, ValueError) as error:
      raise ConfigError(
        f"{path} is no boundary predictor ({error}); train one with --spans."
      ) from error
  texts, found = read_spans(spans)
  try:
    if len(texts) >= _HELD_OUT:
      rest = [i for i in range(len(texts)) if i % _HELD_OUT]
      trial = WordClassifier.train([texts[i] for i in rest], [found[i] for i in rest])
      share, usual = word_accuracy(trial, texts[::_HELD_OUT], found[::_HELD_OUT])
      say(
        f"{spans}: {100 * share:.1f}% of the words of held-out texts are told right; "
        f"{100 * usual:.1f}% are of the more frequent class"
      )
    predictor = WordClassifier.train(texts, found)
  except ValueError as error:
    raise ConfigError(f"{spans}: {error}") from error
  predictor.save(path)
  say(f"{path}: trained on {len(texts)} texts")
  return predictor


def load_predictor(path: str | os.PathLike[str]) -> HiddenPredictor:
  """The network of a run with ``BoundaryConfig``: RUN, or RUN/checkpoints/STEP.

  Raises:
    CheckpointError: there is none.
    ConfigError: the run's vocabulary is no longer what it was trained with.
  """
  found = latest_checkpoint(pathlib.Path(path))
  run = found.parents[1]
  experiment = load_experiment(run / CONFIG_FILE)
  chosen = [one for one in experiment.rl.signals if isinstance(one, BoundaryConfig)]
  chat = build_chat(
    experiment.chat, experiment.tokenizer, directory=run, pretrained=experiment.pretrained
  )
  saved = read_metadata(found)["identity"]
  compare_identity(saved, {**saved, "tokenizer": chat.fingerprint()}, found)
  policy = ModelConfig.from_dict(saved["model"], "checkpoint.model")
  if not chosen:
    raise CheckpointError(
      f"{path} trained no boundary predictor; allowed: a run with {BoundaryConfig.__name__} in "
      "config.rl.signals, such as one of configs/tessy_boundary.py."
    )
  model = reader_model(chosen[0].model, policy)
  spec = chosen[0].networks(policy, experiment.rl.steps)[BOUNDARY]
  assert spec.optimizer is not None
  shapes = abstract(spec.specs)  # a network is saved with its optimiser
  whole = Network(shapes, jax.eval_shape(spec.optimizer.init, shapes))
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  wanted = with_shardings(whole, jax.tree.map(lambda _: here, whole))
  network = load_further(found, BOUNDARY, wanted)
  if network is None:
    raise CheckpointError(f"{found} has no boundary predictor; allowed: a checkpoint of its stage.")
  return HiddenPredictor(network.weights, model, chat.tokenizer)
