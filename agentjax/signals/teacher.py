"""Teachers: other policies that score the student's tokens.

A teacher reads the ids that the student wrote, so it must share the student's vocabulary. Before an
update it scores the whole batch once; the update itself only needs the scores and, for the exact
divergence, the teacher's output projection.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from agentjax.config import Config, ConfigError, FilePath, check
from agentjax.models import (
  ModelConfig,
  Params,
  Readout,
  forward,
  over_vocabulary,
  param_specs,
  put_tokens,
  readout,
  score_tokens,
  take_tokens,
)
from agentjax.models.huggingface import load_pretrained
from agentjax.objectives.distillation import (
  CandidateInputs,
  DistillationConfig,
  at,
  candidate_divergence,
  candidate_set,
  compare,
  divergence,
  entropy,
  without_absent,
)
from agentjax.sharding import batch_sharding, fingerprint, shardings, split_rows, upload
from agentjax.signals.signal import SignalTools
from agentjax.text.build import read_chat
from agentjax.text.chat import Chat
from agentjax.training import processes
from agentjax.training.checkpoint import latest_checkpoint, load_whole_policy, read_metadata
from agentjax.training.pretrained import folder_fingerprint, runtime_overrides
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import TEACHER_COLUMNS
from agentjax.trajectory.packing import PackedSequence, repack, to_sequences, unpack
from agentjax.trajectory.record import Trajectory

Array = jax.Array


@dataclasses.dataclass(unsafe_hash=True)
class TeacherConfig(Config):
  """A policy to learn from.

  Attributes:
    path: RUN, RUN/checkpoints/STEP, or a Hugging Face folder.
    sources: data sets (``Task.source``) whose episodes it scores; empty means all that no other
      teacher names.
  """

  path: FilePath = ""
  sources: tuple[str, ...] = ()

  def validate(self, path: str = "teacher") -> None:
    super().validate(path)
    check(bool(self.path), f"{path}.path", self.path, "a run, a checkpoint or a folder")


def check_teachers(teachers: Sequence[TeacherConfig], path: str) -> None:
  """Raises ConfigError if it is not clear which teacher a data set has."""
  named: set[str] = set()
  for i, teacher in enumerate(teachers):
    where = f"{path}[{i}]"
    again = sorted(named & set(teacher.sources))
    check(
      not again, f"{where}.sources", teacher.sources, f"without {', '.join(again)}, taken above"
    )
    named |= set(teacher.sources)
  rest = [i for i, teacher in enumerate(teachers) if not teacher.sources]
  check(len(rest) <= 1, f"{path}[{rest[-1] if rest else 0}].sources", (), "empty for one teacher")


def route(teachers: Sequence[TeacherConfig], sources: Sequence[str]) -> list[int]:
  """Index of the teacher of every source.

  Raises:
    ConfigError: a source without a teacher.
  """
  owner = {source: i for i, teacher in enumerate(teachers) for source in teacher.sources}
  rest = next((i for i, teacher in enumerate(teachers) if not teacher.sources), None)
  result = []
  for source in sources:
    found = owner.get(source, rest)
    if found is None:
      raise ConfigError(
        f"no teacher takes episodes of {source!r}; config.rl.teachers name {', '.join(owner)}. Add "
        "the source to one, or leave the sources of one empty."
      )
    result.append(found)
  return result


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A loaded teacher.

  Attributes:
    params, model: the policy, on the mesh.
    identity: tells it from other policies: of the weights' bits, or of a folder's files.
  """

  params: Params
  model: ModelConfig
  identity: str


def load_teacher(
  config: TeacherConfig, chat: Chat, student: ModelConfig, mesh: jax.sharding.Mesh
) -> Teacher:
  """Loads a teacher onto the mesh.

  Args:
    config: where it is.
    chat: how the student's conversations are written.
    student: its dtypes and chunks are the teacher's as well, in a Hugging Face folder.
    mesh: that of the updates.

  Raises:
    ConfigError: it has another vocabulary.
    CheckpointError: there is nothing to load.
  """
  path = pathlib.Path(config.path)
  if (path / "config.json").is_file() and "model_type" in json.loads(
    (path / "config.json").read_text()
  ):
    theirs = read_chat(path)
    _check_vocabulary(config, theirs.tokenizer.fingerprint(), chat.tokenizer.fingerprint())
    if theirs.fingerprint() != chat.fingerprint():
      logging.warning(
        "the teacher %s has another chat template than the student, whose conversations it will "
        "read: it may say less of them than it knows",
        config.path,
      )
    params, model = load_pretrained(path, mesh=mesh, overrides=runtime_overrides(student))
    return Teacher(params, _plain(model), folder_fingerprint(path))
  found = latest_checkpoint(path)
  identity = read_metadata(found)["identity"]
  _check_vocabulary(config, identity["tokenizer"], chat.fingerprint())
  model = ModelConfig.from_dict(identity["model"], "teacher.model").freeze()
  params = load_whole_policy(found, shardings(param_specs(model), mesh))
  return Teacher(params, _plain(model), fingerprint(params))


def _plain(model: ModelConfig) -> ModelConfig:
  """A teacher does not sample, so its log-probs need not equal a sampler's."""
  return dataclasses.replace(model, exact_chunk=0).freeze()


def _check_vocabulary(config: TeacherConfig, theirs: str, ours: str) -> None:
  if theirs != ours:
    raise ConfigError(
      f"the teacher {config.path} has another tokenizer than the student (fingerprints "
      f"{theirs[:12]} and {ours[:12]}): its log-probs would be of other words. Allowed: a teacher "
      "of the same vocabulary and markup, or a student made for that of the teacher."
    )


def template_fingerprint(chat: Chat, settings: Config) -> str:
  """SHA-256 hex: equal where the same messages become the same ids.

  Args:
    chat: vocabulary and markup.
    settings: ``ChatConfig``, whose system prompt and switches the markup is used with.
  """
  text = json.dumps({"markup": chat.fingerprint(), "settings": settings.to_dict()}, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


@flax.struct.dataclass
class TeacherTargets:
  """The teacher's scores at K tokens per row (``UpdateBatch.kept``), for an update.

  Attributes:
    hidden: [B, K, teacher embed], the states that predict the tokens; None except for form "full".
    ids, log_probs: int32 and float32 [B, K, k], candidates and the teacher's log-probs of them;
      None except for form "top_k".
    inside: bool [B, K, k], which of them are in the set; None if all are.
    old_log_probs: the student's at the start of the step, for ``candidate_loss``.
  """

  hidden: Array | None = None
  ids: Array | None = None
  log_probs: Array | None = None
  inside: Array | None = None
  old_log_probs: Array | None = None


@flax.struct.dataclass
class TeacherHead:
  """Output projection [embed, vocab] of the teacher, and its ``logit_softcap``."""

  weight: Array
  softcap: Any


Ask = Callable[[Params | None, Params, Array, Array, Array], dict[str, Array]]


def make_ask(
  settings: DistillationConfig, student: ModelConfig, teacher: ModelConfig, temperature: float
) -> Ask:
  """Builds ``ask(student_params, teacher_params, token_ids, segment_ids, positions)``.

  Arguments and results are rows [B, T, ...]. Results are aligned with the token that they are
  about, ``hidden`` is the state before it. Depending on the settings: ``log_probs`` of the tokens;
  ``hidden``; ``ids`` and ``candidates`` [B, T, k], with ``inside`` where the set is of both models
  and ``old_log_probs``, the student's, for a ``candidate_loss``; ``entropies`` and ``divergences``;
  the diagnostics of ``distillation.compare``. The student's parameters are used only for
  comparisons.
  """
  student = _plain(student)

  def top_k(log_p: Array, log_q: Array) -> dict[str, Array]:
    ids, inside = candidate_set(log_p, log_q, settings.top_k, settings.candidates)
    found = {"ids": ids, "candidates": at(log_q, ids)}
    if settings.of_both:
      found["inside"] = inside
    if settings.candidate_loss is not None:
      found["old_log_probs"] = at(log_p, ids)
    return found

  def each(log_p: Array, log_q: Array) -> dict[str, Array]:
    found: dict[str, Array] = {}
    if settings.keep < 1:
      found["entropies"] = entropy(log_p)
      found["divergences"] = divergence(log_p, log_q, settings.divergence, settings.beta)
    if settings.overlap_top_k:
      found |= compare(log_p, log_q, settings.overlap_top_k)
    if settings.form == "top_k":
      found |= top_k(log_p, log_q)
    return found

  def ask(
    student_params: Params | None,
    teacher_params: Params,
    token_ids: Array,
    segment_ids: Array,
    positions: Array,
  ) -> dict[str, Array]:
    rows = (token_ids, segment_ids, positions)
    answers: dict[str, Array] = {}
    if settings.form == "sampled":
      scores = score_tokens(teacher_params, teacher, *rows, temperature=temperature)
      hidden, answers["log_probs"] = scores.hidden, scores.log_probs
    else:
      hidden = forward(teacher_params, teacher, *rows).hidden
    states: dict[str, Array] = {"hidden": hidden} if settings.form == "full" else {}
    if settings.needs_comparison:
      assert student_params is not None
      own = forward(student_params, student, *rows).hidden
      states |= over_vocabulary(
        each,
        [
          readout(student_params, student, own, temperature),
          readout(teacher_params, teacher, hidden, temperature),
        ],
        size=student.logits_chunk,
      )
    elif settings.form == "top_k":
      states |= over_vocabulary(
        lambda log_q: top_k(log_q, log_q),
        [readout(teacher_params, teacher, hidden, temperature)],
        size=student.logits_chunk,
      )
    # The values of a state refer to the token after it.
    return answers | {name: jnp.roll(value, 1, axis=1) for name, value in states.items()}

  return jax.jit(ask)


class Teachers:
  """Lets each teacher score the episodes of its data sets.

  Args:
    configs: where they are; they are loaded at their first use.
    tools: of the run: the student, how it writes, and its rows. Its temperature divides the
      teachers' logits too.
  """

  def __init__(self, configs: Sequence[TeacherConfig], tools: SignalTools):
    mesh = tools.mesh
    self._configs, self._tools = configs, tools
    self._loaded: dict[int, Teacher] = {}
    self._asks: dict[tuple[int, DistillationConfig], Ask] = {}
    self._join = jax.jit(
      lambda parts: jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts),
      out_shardings=batch_sharding(mesh),
    )
    self._spread = jax.jit(_spread, out_shardings=batch_sharding(mesh))
    cut = jax.sharding.NamedSharding(mesh, jax.P(None, *batch_sharding(mesh).spec))
    self._cut = jax.jit(functools.partial(split_rows, rows=tools.rows), out_shardings=cut)
    self._take = jax.jit(
      lambda grids, at: [grid[at] for grid in grids], out_shardings=batch_sharding(mesh)
    )

  def __len__(self) -> int:
    return len(self._configs)

  def __getitem__(self, number: int) -> Teacher:
    if number not in self._loaded:
      tools = self._tools
      assert tools.chat is not None
      self._loaded[number] = load_teacher(
        self._configs[number], tools.chat, tools.model, tools.mesh
      )
    return self._loaded[number]

  def head(self) -> TeacherHead:
    """Output projection of the only teacher."""
    (number,) = range(len(self))
    teacher = self[number]
    read = readout(teacher.params, teacher.model, jnp.zeros((1, 1, teacher.model.d_model)))
    return TeacherHead(read.weight, read.softcap)

  def ask(
    self,
    settings: DistillationConfig,
    policy: Params | None,
    batch: Batch,
    sequences: Sequence[PackedSequence],
    placed: Batch | None = None,
  ) -> dict[str, Array]:
    """The teachers' scores of a batch, on its grid [B, T, ...] and on the mesh; see ``make_ask``.

    Stored scores are used if they suffice. Each of several teachers reads rows of its own sequences
    only.

    Args:
      settings: what to ask.
      policy: the student, where it is compared with.
      batch: rows of the sequences, on the host.
      sequences: what was packed, in the order of the batch.
      placed: the batch on the mesh; None places what is read of it.

    Raises:
      ConfigError: a sequence has no teacher; a weighted token has no stored score, or fewer
        candidates than needed.
    """
    placed = batch if placed is None else placed
    stored = _stored_columns(settings, batch, placed)
    if stored is not None:
      return _readable({name: placed.columns[column] for name, column in stored.items()}, settings)
    mesh = self._tools.mesh
    owners = route(self._configs, [s.source for s in sequences])
    found: dict[str, Array] | None = None
    for number in sorted(set(owners)):
      own = [i for i, owner in enumerate(owners) if owner == number]
      if len(own) == len(sequences):
        return self._answers(number, settings, policy, batch, placed)
      part = self._tools.pack([sequences[i] for i in own])
      answers = self._answers(number, settings, policy, part, part)
      cells = upload(_cells(part, own, batch, sequences), batch_sharding(mesh))
      found = self._spread(answers, cells, found)
    assert found is not None
    return found

  def score(
    self,
    trajectories: Sequence[Trajectory],
    settings: DistillationConfig,
    policy: Params | None = None,
  ) -> list[dict[str, np.ndarray]]:
    """The teachers' scores of all tokens of episodes: arrays [n, ...] each, see ``make_ask``.

    Args:
      trajectories: to be scored; scores stored with them are ignored.
      settings: what they are asked.
      policy: the student, where it is compared with.

    Raises:
      ValueError: an episode has several leaves, or no token.
    """
    sequences = to_sequences(trajectories)
    if len(sequences) != len(trajectories):
      raise ValueError("an episode has several branches, or no token; give episodes of one path.")
    batch = self._tools.pack(sequences).without(*TEACHER_COLUMNS)
    answers = processes.local_copy(self.ask(settings, policy, batch, sequences))
    each = {k: unpack(v, batch.segment_ids, len(sequences)) for k, v in answers.items()}
    return [{k: values[i] for k, values in each.items()} for i in range(len(sequences))]

  def _answers(
    self,
    number: int,
    settings: DistillationConfig,
    policy: Params | None,
    batch: Batch,
    placed: Batch,
  ) -> dict[str, Array]:
    """Scores of one teacher for all rows, one micro-batch at a time; ``batch`` is on the host."""
    teacher, student, mesh = self[number], self._tools.model, self._tools.mesh
    logits = settings.form != "sampled" or settings.needs_comparison
    if logits and teacher.model.vocab_size != student.vocab_size:
      raise ConfigError(
        f"the teacher {self._configs[number].path} has {teacher.model.vocab_size} logits and the "
        f"student {student.vocab_size}; allowed: equally many, or distillation.form='sampled' with "
        "keep=1 and overlap_top_k=0."
      )
    key = number, settings
    if key not in self._asks:
      self._asks[key] = make_ask(settings, student, teacher.model, self._tools.temperature)
    grids = (placed.token_ids, placed.segment_ids, placed.positions)
    rows = self._cut(tuple(upload(grid, batch_sharding(mesh)) for grid in grids))
    parts: list[dict[str, Array]] = []
    with jax.set_mesh(mesh):
      for at, segment_ids in enumerate(split_rows(batch.segment_ids, self._tools.rows)):
        if parts and not np.any(segment_ids):
          parts.append(jax.tree.map(jnp.zeros_like, parts[0]))
          continue
        parts.append(self._asks[key](policy, teacher.params, *self._take(rows, at)))
    return self._join(parts)


def _cells(
  part: Batch, own: Sequence[int], batch: Batch, sequences: Sequence[PackedSequence]
) -> np.ndarray:
  """int32 [B, T], for every token of ``batch`` the cell of ``part`` that has it, counted row by
  row; -1 for the tokens of sequences that ``part`` does not have, and padding.

  Args:
    part: rows of some of the sequences, on the host.
    own: which of the sequences, in the order of ``part``.
    batch: rows of all sequences, on the host.
    sequences: in the order of ``batch``.
  """
  numbers = np.arange(part.segment_ids.size, dtype=np.int32).reshape(part.segment_ids.shape)
  cells = [np.full(len(sequence), -1, np.int32) for sequence in sequences]
  for i, places in zip(own, unpack(numbers, part.segment_ids, len(own)), strict=True):
    cells[i] = places
  return repack(cells, batch.segment_ids, fill=-1)


def _spread(
  answers: dict[str, Array], cells: Array, others: dict[str, Array] | None
) -> dict[str, Array]:
  """Scores [b, t, ...] on the grid [B, T, ...] of ``cells``; ``others``, or 0, where that is -1."""

  def place(values: Array, other: Array | None) -> Array:
    flat = values.reshape(-1, *values.shape[2:])
    inside = jnp.expand_dims(cells >= 0, tuple(range(2, values.ndim)))
    found = flat[jnp.maximum(cells, 0)]
    return jnp.where(inside, found, jnp.zeros_like(found) if other is None else other)

  return {k: place(v, None if others is None else others[k]) for k, v in answers.items()}


def _stored_columns(
  settings: DistillationConfig, batch: Batch, placed: Batch
) -> dict[str, str] | None:
  """The stored columns that hold the result of ``make_ask``, by its names; None if none do.

  Args:
    settings: what is asked.
    batch: on the host; its columns are used.
    placed: the same with values, on the mesh.
  """
  names = {"log_probs": "teacher_log_probs"}
  if settings.form == "top_k":
    names = {"candidates": "teacher_top_log_probs", "ids": "teacher_top_ids"}
  if settings.needs_live_teacher or not batch.columns.keys() >= set(names.values()):
    return None
  known = placed.columns[next(iter(names.values()))]
  if settings.form == "top_k":
    if settings.top_k > known.shape[-1]:
      raise ConfigError(
        f"config.rl.objective.distillation.top_k={settings.top_k} and {known.shape[-1]} candidates "
        "a token were stored; allowed: up to "
        f"{known.shape[-1]}, or store config.rl.rollouts anew with more."
      )
  missing = int(_missing(known, placed.weights, settings.top_k))
  if missing:
    raise ConfigError(
      f"{missing} of the trained tokens have no stored log-prob of a teacher; store "
      "config.rl.rollouts anew with its teachers."
    )
  return names


@functools.partial(jax.jit, static_argnums=2)
def _missing(known: Array, weights: Array, top_k: int) -> Array:
  """int32 [], tokens with weight of which no log-prob [B, T] or [B, T, candidates] is known."""
  unknown = jnp.isnan(known)
  if known.ndim > 2:
    unknown = unknown[..., :top_k].any(axis=-1)
  return jnp.sum(unknown & (weights > 0))


@functools.partial(jax.jit, static_argnums=1)
def _readable(stored: dict[str, Array], settings: DistillationConfig) -> dict[str, Array]:
  """Stored scores as an update reads them: as many candidates as it asks for, the likeliest first,
  and on tokens without weight any id and number that a gradient of 0 can pass."""
  if settings.form == "top_k":
    stored = {name: known[..., : settings.top_k] for name, known in stored.items()}
  return {
    name: jnp.maximum(known, 0) if name == "ids" else jnp.nan_to_num(known)
    for name, known in stored.items()
  }


def kept_count(most: int, time: int, multiple: int) -> int:
  """Places a row for ``most`` tokens: one of about eight sizes, so that few shapes are compiled."""
  size = max(multiple, -(-time // 8 // multiple) * multiple)
  return min(max(-(-most // size), 1) * size, time)


def kept_places(weights: np.ndarray, multiple: int) -> np.ndarray:
  """int32 [B, K], places of the weighted tokens of every row, 0 where a row has fewer.

  K is ``kept_count`` of the most of any row.

  Args:
    weights: [B, T].
    multiple: K and T are multiples of it.
  """
  rows, time = weights.shape
  count = kept_count(int((weights > 0).sum(axis=1).max()), time, multiple)
  places = np.zeros((rows, count), np.int32)
  for row, weighted in enumerate(weights > 0):
    found = np.flatnonzero(weighted)
    places[row, : len(found)] = found
  return places


def targets_at(answers: Mapping[str, Array], places: Array, form: str) -> TeacherTargets:
  """The scores that the update needs, only for the tokens at ``places``."""

  def take(name: str) -> Array | None:
    index = places[:, :, None]
    return jnp.take_along_axis(answers[name], index, axis=1) if name in answers else None

  if form == "full":
    return TeacherTargets(hidden=take("hidden"))
  return TeacherTargets(
    ids=take("ids"),
    log_probs=take("candidates"),
    inside=take("inside"),
    old_log_probs=take("old_log_probs"),
  )


def teacher_divergences(
  params: Params,
  config: ModelConfig,
  hidden: Array,
  kept: Array,
  targets: TeacherTargets,
  head: TeacherHead | None,
  settings: DistillationConfig,
  temperature: float,
) -> tuple[Array, dict[str, Array]]:
  """Float32 [B, T]: divergence from the teacher (or the loss over candidates) at the kept tokens,
  0 at the others; and metrics of the latter, [B, T].

  The student's hidden states of the kept tokens are gathered first, so that logits are computed
  only for these, ``config.logits_chunk`` time steps at once.

  Args:
    params, config: the student.
    hidden: [B, T, embed], its states.
    kept: int32 [B, K], see ``kept_places``.
    targets: of the teacher at the kept tokens.
    head: of the teacher, for form "full".
    settings: which divergence.
    temperature: divides the logits of both.
  """
  states = take_tokens(hidden, jnp.maximum(kept - 1, 0))
  own = readout(params, config, states, temperature)
  kind, beta = settings.divergence, settings.beta
  if settings.form == "full":
    assert head is not None and targets.hidden is not None
    other = Readout(targets.hidden, head.weight, temperature, head.softcap)
    values = over_vocabulary(
      lambda log_p, log_q: divergence(log_p, log_q, kind, beta),
      [own, other],
      size=config.logits_chunk,
    )
    return put_tokens(values, kept, hidden.shape[1]), {}
  known = {k: v for k, v in vars(targets).items() if v is not None}

  def of_candidates(log_p: Array, *arrays: Array) -> tuple[Array, dict[str, Array]]:
    found = TeacherTargets(**dict(zip(known, arrays, strict=True)))
    return _candidate_loss(log_p, found, settings)

  values, metrics = over_vocabulary(of_candidates, [own], *known.values(), size=config.logits_chunk)
  return jax.tree.map(lambda x: put_tokens(x, kept, hidden.shape[1]), (values, metrics))


def _candidate_loss(
  log_p: Array, targets: TeacherTargets, settings: DistillationConfig
) -> tuple[Array, dict[str, Array]]:
  """The loss that the settings name over candidates, from the student's log-probs [..., vocab]."""
  assert targets.ids is not None and targets.log_probs is not None
  own, log_q = at(log_p, targets.ids), targets.log_probs
  inside = jnp.ones(own.shape, bool) if targets.inside is None else targets.inside
  if settings.candidate_loss is not None:
    assert targets.old_log_probs is not None
    return settings.candidate_loss(
      CandidateInputs(
        log_probs=own,
        old_log_probs=targets.old_log_probs,
        teacher_log_probs=log_q,
        inside=inside,
      )
    )
  if targets.inside is not None:
    own, log_q = without_absent(own, inside), without_absent(log_q, inside)
  entropies = entropy(log_p) if settings.rest == "floor" else None
  kind, rest = settings.divergence, settings.rest
  return candidate_divergence(own, log_q, kind, rest, settings.beta, entropies), {}
