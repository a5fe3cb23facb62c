r"""KV packets against other ways to reuse documents: right answers, time, work and bytes.

  JAX_PLATFORMS=cpu python benchmarks/kv_packets.py --part=model --model=attention --workdir=DIR
  JAX_PLATFORMS=cpu python benchmarks/kv_packets.py --part=adapter --model=attention --workdir=DIR
  JAX_PLATFORMS=cpu python benchmarks/kv_packets.py --part=answers --model=attention --workdir=DIR
  JAX_PLATFORMS=cpu python benchmarks/kv_packets.py --part=cost --model=attention --documents=8 \
    --length=256

A small model learns to answer questions about eight documents that stand in its context, which is
what a large one does anyway; then an adapter is trained for it; then each method answers 512 new
questions of each task behind the same documents:

  recall      a document is names and their values in pairs; asked is the value of a name.
  biography   a document begins with a name, and attributes with values follow; asked is an
              attribute of a name. Every attribute is in many documents.
  needle      one document has a name and its value between words without meaning.

"model" goes on where it stopped, ``--seconds`` at a time. "answers" are exact matches, of one token
each, so that F1 is the same number. "cost" does not need a trained model: seconds to the first
token (median of ``--repeats`` calls, compiled before, from parts in memory to the drawn token of
one question), products and sums of matrix products in the optimised program
(``planning.hlo.program_cost``) of that and of the question alone, and the bytes that are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import serialization

from agentjax import models
from agentjax.files import write_atomically
from agentjax.models import ModelConfig
from agentjax.models.attend import CACHE_BLOCK
from agentjax.models.cache import HELD
from agentjax.planning.hlo import program_cost
from agentjax.recipes.kv_packets.adapter import (
  Adapter,
  init_adapter,
  read_adapter,
  write_adapter,
)
from agentjax.recipes.kv_packets.methods import (
  Part,
  joined,
  parts,
  whole,
  with_changed_tokens,
  with_first_tokens,
)
from agentjax.recipes.kv_packets.questions import Questions, continued, greedy
from agentjax.recipes.kv_packets.training import AdapterTraining, train_adapter

_PART = flags.DEFINE_enum("part", "answers", ["model", "adapter", "answers", "cost"], "what to do")
_MODEL = flags.DEFINE_enum("model", "attention", ["attention", "hybrid"], "which model")
_WORKDIR = flags.DEFINE_string("workdir", "runs/kv_packets", "where models and adapters are kept")
_SECONDS = flags.DEFINE_float("seconds", 100.0, "of training the model, in this call")
_RATE = flags.DEFINE_float("rate", 2e-3, "of training the model")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "of training the adapter")
_ADAPTER_RATE = flags.DEFINE_float("adapter_rate", 5e-3, "of training the adapter")
_QUESTIONS = flags.DEFINE_integer("questions", 512, "of each task, to train the adapter on")
_TOKENS = flags.DEFINE_integer("tokens", 4, "of the header, and of the trailer")
_DOCUMENTS = flags.DEFINE_integer("documents", 8, "of a question, for --part=cost")
_LENGTH = flags.DEFINE_integer("length", 256, "tokens of a document, for --part=cost")
_REPEATS = flags.DEFINE_integer("repeats", 9, "calls that are timed")

Array = jax.Array
Rng = np.random.Generator

BEGIN, BREAK, ASK, KEY = range(4)
NAMES, ATTRIBUTES, VALUES, WORDS = (8, 32), (32, 36), (36, 52), (52, 60)
VOCAB = 60
DOCUMENTS, LENGTH = 8, 8
_ASKED = 12  # questions about the documents of a context that the model learns from
_ROW = 128  # tokens of a row; short contexts share one
_SURE = 0.8  # share of answers it is sure of, in 100 steps, before contexts grow by a document

_SIZES: dict[str, Any] = {
  "vocab_size": VOCAB,
  "d_model": 64,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 16,
  "d_mlp": 128,
  "attention_block": 64,
  "logits_chunk": 256,
}
MODELS: Mapping[str, ModelConfig] = {
  "attention": ModelConfig(pattern="*-*-*-", rope_theta=1e4, **_SIZES),
  "hybrid": ModelConfig(
    pattern="M-*-M-*-",
    rope_theta=None,
    mamba_heads=4,
    mamba_head_dim=16,
    mamba_state=16,
    mamba_groups=1,
    chunk_size=16,
    **_SIZES,
  ),
}


def _draw(rng: Rng, span: tuple[int, int], count: int) -> np.ndarray:
  """Different tokens of a span."""
  return rng.permutation(np.arange(*span))[:count]


@dataclasses.dataclass(frozen=True)
class Example:
  """Documents, and every question that can be asked about them with its answer."""

  documents: np.ndarray  # [DOCUMENTS, LENGTH]
  asked: list[tuple[list[int], int]]  # three tokens and one
  of: list[int]  # document of each

  def about(self, count: int) -> list[tuple[list[int], int]]:
    """Questions about the first ``count`` documents."""
    return [one for one, document in zip(self.asked, self.of, strict=True) if document < count]


def recall(rng: Rng) -> Example:
  """Pairs of a name and a value, three a document."""
  names = _draw(rng, NAMES, 3 * DOCUMENTS)
  values = rng.integers(*VALUES, len(names))
  pairs = np.stack([names, values], axis=1).reshape(DOCUMENTS, 6)
  words = rng.integers(*WORDS, (DOCUMENTS, 1))
  documents = np.concatenate([np.full((DOCUMENTS, 1), BREAK), words, pairs], axis=1)
  asked = zip(names.tolist(), values.tolist(), strict=True)
  of = np.repeat(np.arange(DOCUMENTS), 3).tolist()
  return Example(documents, [([ASK, KEY, n], v) for n, v in asked], of)


def biography(rng: Rng) -> Example:
  """A name, and three of the attributes with their values."""
  documents, asked = [], []
  for name in _draw(rng, NAMES, DOCUMENTS).tolist():
    pairs = np.stack([_draw(rng, ATTRIBUTES, 3), rng.integers(*VALUES, 3)], axis=1)
    documents.append([BREAK, name, *pairs.reshape(-1).tolist()])
    asked += [([ASK, name, a], v) for a, v in pairs.tolist()]
  return Example(np.array(documents), asked, np.repeat(np.arange(DOCUMENTS), 3).tolist())


def needle(rng: Rng) -> Example:
  """One name and its value among words, anywhere."""
  documents = rng.integers(*WORDS, (DOCUMENTS, LENGTH))
  documents[:, 0] = BREAK
  name, value = _draw(rng, NAMES, 1)[0], rng.integers(*VALUES)
  document, at = int(rng.integers(DOCUMENTS)), rng.integers(1, LENGTH - 1)
  documents[document, at : at + 2] = name, value
  return Example(documents, [([ASK, KEY, int(name)], int(value))], [document])


TASKS: Mapping[str, Callable[[Rng], Example]] = {
  "recall": recall,
  "biography": biography,
  "needle": needle,
}


def questions(task: str, count: int, seed: int) -> Questions:
  """One question about the documents of each of ``count`` examples."""
  rng = np.random.default_rng([seed, sorted(TASKS).index(task)])
  made = [TASKS[task](rng) for _ in range(count)]
  chosen = [example.asked[rng.integers(len(example.asked))] for example in made]
  arrays = (
    np.full((count, 1), BEGIN),
    np.stack([example.documents for example in made]),
    np.array([prompt for prompt, _ in chosen]),
    np.array([[answer] for _, answer in chosen]),
  )
  return Questions(*(v.astype(np.int32) for v in arrays))


def training_rows(rng: Rng, rows: int, most: int) -> tuple[np.ndarray, ...]:
  """Ids, segments, positions and weights [rows, _ROW]: contexts of 1 to ``most`` documents, each
  with questions behind it and their answers.

  Positions jump by up to 12 between documents, so that the model knows longer contexts, too. With
  one document, half of the rows are tokens that come twice: attention learns there to look for what
  stood before, which answers in so short contexts hardly teach.
  """
  ids, segments, positions = (np.zeros((rows, _ROW), np.int32) for _ in range(3))
  weights = np.zeros((rows, _ROW), np.float32)
  copies = rows // 2 if most == 1 else 0
  half = _ROW // 2
  ids[:copies, :half] = ids[:copies, half:] = rng.integers(NAMES[0], VOCAB, (copies, half))
  segments[:copies], positions[:copies], weights[:copies, half + 1 :] = 1, np.arange(_ROW), 1.0
  for row in range(copies, rows):
    begin, segment = 0, 0
    while True:
      count, draw = int(rng.integers(1, most + 1)), list(TASKS.values())[rng.integers(len(TASKS))]
      example = draw(rng)
      said = example.about(count)
      if not said:
        continue
      order = rng.choice(len(said), min(_ASKED, 3 * len(said)))
      asked = [[*said[i][0], said[i][1]] for i in order]
      text = [BEGIN, *example.documents[:count].reshape(-1), *np.reshape(asked, -1)]
      end, segment = begin + len(text), segment + 1
      if end > _ROW:
        break
      jumps = np.zeros(len(text), np.int64)
      jumps[1 : 1 + count * LENGTH : LENGTH] = rng.integers(0, 13, count)
      ids[row, begin:end], segments[row, begin:end] = text, segment
      positions[row, begin:end] = np.arange(len(text)) + np.cumsum(jumps)
      weights[row, begin + 1 + count * LENGTH + 3 : end : 4] = 1.0
      begin = end
  return ids, segments, positions, weights


def _saved(path: pathlib.Path, like: Any) -> Any:
  return serialization.from_bytes(like, path.read_bytes()) if path.exists() else like


def train_model(config: ModelConfig, folder: pathlib.Path, seconds: float, rate: float) -> None:
  """Goes on for so long, and keeps what it reached."""
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
  params = models.init(config, jax.random.key(0))
  path = folder / "model.msgpack"
  params, state, done, most = _saved(path, (params, optimizer.init(params), 0, 1))

  @jax.jit
  def step(params: Any, state: Any, *rows: Array):
    ids, segments, positions, weights = rows

    def loss(params: Any) -> tuple[Array, Array]:
      scores = models.score_tokens(params, config, ids, segments, positions)
      right = jnp.exp(scores.log_probs) > 0.5
      asked = len(ids) // 2  # rows from here on are contexts with questions
      sure = jnp.average(right[asked:], weights=weights[asked:])
      return -jnp.average(scores.log_probs, weights=weights), sure

    (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    update, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value, right

  begin, recent = time.monotonic(), []
  while time.monotonic() < begin + seconds:
    rows = training_rows(np.random.default_rng([1, done]), 32, most)
    params, state, value, right = step(params, state, *rows)
    recent = [*recent[-99:], (float(value), float(right))]
    done += 1
    if done % 100 == 0:
      loss, share = np.mean(recent, axis=0)
      print(f"step {done}: {most} documents, loss {loss:.3f}, sure of {share:.3f}", flush=True)
      most = min(DOCUMENTS, most + bool(share >= _SURE))
  write_atomically(path, serialization.to_bytes(jax.device_get((params, state, done, most))))


def loaded(config: ModelConfig, folder: pathlib.Path) -> Any:
  """Decode parameters of the trained model; the drawn one where nothing was trained."""
  params = models.init(config, jax.random.key(0))
  path = folder / "model.msgpack"
  if path.exists():
    read = serialization.msgpack_restore(path.read_bytes())
    params = jax.tree.map(jnp.asarray, serialization.from_state_dict(params, read["0"]))
  return params, models.prepare_decode_params(params, config)


Assemble = Callable[[list[Part], Questions, int], Any]


def methods(params: Any, config: ModelConfig) -> Mapping[str, Assemble]:
  """Each way to have documents in a cache; packets are joined too, of parts with an adapter."""

  def all_again(made: list[Part], asked: Questions, room: int) -> Any:
    del made
    return whole(params, config, asked, room)

  def apart(made: list[Part], asked: Questions, room: int) -> Any:
    del asked
    return joined(params, config, made, room)

  found: dict[str, Assemble] = {"full recompute": all_again, "no recompute": apart}
  if "M" not in config.pattern:
    for tokens in (1, 2, 4):
      again = functools.partial(with_first_tokens, params, config, tokens=tokens)
      found[f"EPIC, first {tokens}"] = again
    for share in (0.1, 0.5):
      again = functools.partial(with_changed_tokens, params, config, share=share)
      found[f"CacheBlend, {share:.0%}"] = again
  return {**found, "KV packets": apart}


def right(params: Any, config: ModelConfig, folder: pathlib.Path) -> dict[str, dict[str, float]]:
  """Share of right answers by method and task."""
  adapter = _adapter(params, config, folder)
  decode = models.prepare_decode_params(params, config)
  found: dict[str, dict[str, float]] = {}
  for name, assemble in methods(decode, config).items():
    own = adapter if name == "KV packets" else None

    @jax.jit
    def answer(asked: Questions, assemble: Assemble = assemble, own: Adapter | None = own) -> Array:
      made = parts(decode, config, asked, own)
      room = asked.prompts.shape[1] + 1
      return greedy(decode, config, assemble(made, asked, room), asked.prompts, 1)

    found[name] = {}
    for task in TASKS:
      asked = questions(task, 512, seed=3)
      found[name][task] = float(np.mean(np.asarray(answer(asked)) == asked.answers))
  return found


def _adapter(params: Any, config: ModelConfig, folder: pathlib.Path) -> Adapter:
  tokens = _TOKENS.value
  drawn = init_adapter(params, jax.random.key(1), header=tokens, trailer=tokens)
  path = folder / f"adapter{tokens}.msgpack"
  return read_adapter(path) if path.exists() else drawn


def cost(params: Any, config: ModelConfig) -> dict[str, dict[str, float]]:
  """Seconds, products and bytes of one question, by method."""
  rng = np.random.default_rng(0)
  shape = (1, _DOCUMENTS.value, _LENGTH.value)
  asked = Questions(
    *(jnp.asarray(rng.integers(8, VOCAB, s), jnp.int32) for s in ((1, 1), shape, (1, 16), (1, 1)))
  )
  tokens = _TOKENS.value
  adapter = init_adapter(params, jax.random.key(1), header=tokens, trailer=tokens)
  decode = models.prepare_decode_params(params, config)
  found = {}
  for name, assemble in methods(decode, config).items():
    made = parts(decode, config, asked, adapter if name == "KV packets" else None)
    lengths, entries = [part.length for part in made], [part.entries for part in made]

    def first(entries: Any, asked: Questions, assemble: Any = assemble, lengths: Any = lengths):
      own = [Part(*pair) for pair in zip(entries, lengths, strict=True)]
      cache = assemble(own, asked, asked.prompts.shape[1])
      logits, _ = continued(decode, config, cache, asked.prompts)
      return jnp.argmax(logits[:, -1], axis=-1)

    compiled = jax.jit(first).lower(entries, asked).compile()
    # Of the loops, only those over the blocks of the cache know their end at run time.
    blocks = -(-(sum(lengths) + asked.prompts.shape[1]) // CACHE_BLOCK)
    seconds = []
    for _ in range(_REPEATS.value + 1):
      begin = time.perf_counter()
      jax.block_until_ready(compiled(entries, asked))
      seconds.append(time.perf_counter() - begin)
    held = [entry for part in made for entry in part.entries if isinstance(entry, HELD)]
    kept = sum(v.nbytes for v in jax.tree.leaves(entries))
    cached = sum(v.nbytes for v in jax.tree.leaves(held))
    found[name] = {
      "ms to first token": 1e3 * statistics.median(seconds[1:]),
      "MFLOP": program_cost(compiled.as_text(), dynamic_trips=blocks).flops / 1e6,
      "bytes kept": 0 if name == "full recompute" else kept,
      "of these, keys and values": 0 if name == "full recompute" else cached,
    }
  return found


def main(argv: list[str]) -> None:
  """Runs one part."""
  del argv
  config = MODELS[_MODEL.value]
  folder = pathlib.Path(_WORKDIR.value) / _MODEL.value
  if _PART.value == "model":
    train_model(config, folder, _SECONDS.value, _RATE.value)
    return
  params, decode = loaded(config, folder)
  if _PART.value == "adapter":
    sources = [questions(task, _QUESTIONS.value, seed=2) for task in TASKS]
    settings = AdapterTraining(learning_rate=_ADAPTER_RATE.value, epochs=_EPOCHS.value)
    begin = time.monotonic()
    drawn = init_adapter(params, jax.random.key(1), header=_TOKENS.value, trailer=_TOKENS.value)
    adapter, losses = train_adapter(drawn, decode, config, sources, settings)
    print(f"loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps,")
    print(f"{time.monotonic() - begin:.0f} s")
    write_adapter(folder / f"adapter{_TOKENS.value}.msgpack", adapter)
    return
  table = right(params, config, folder) if _PART.value == "answers" else cost(params, config)
  for name, row in table.items():
    print(f"{name:20s}" + "".join(f"  {key} {value:.4g}" for key, value in row.items()))
  print(json.dumps(table))


if __name__ == "__main__":
  app.run(main)
