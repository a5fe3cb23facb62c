"""Trains header and trailer so that a model answers behind packets as it does behind the text.

The model stays as it is and teaches itself: it answers greedily with everything in its context, and
the divergence of its own distribution there and behind packets is lowered over the whole vocabulary
at every token of that answer. Nobody needs to know the right answers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from agentjax.config import Config, PositiveFloat, PositiveInt
from agentjax.models.config import ModelConfig
from agentjax.models.stack import DecodeParams
from agentjax.objectives.distillation import divergence
from agentjax.recipes.kv_packets.adapter import Adapter
from agentjax.recipes.kv_packets.methods import joined, parts, whole
from agentjax.recipes.kv_packets.questions import Questions, continued, greedy

Array = jax.Array


@dataclasses.dataclass(unsafe_hash=True)
class AdapterTraining(Config):
  """How an adapter is trained: AdamW without decay, linearly to 0; defaults of the paper.

  Attributes:
    learning_rate: at first; 1e-3 for HotpotQA with Llama 3.1.
    epochs: passes over all questions; 10 for long documents.
    batch: questions a step, all of one source.
    seed: of the order.
  """

  learning_rate: PositiveFloat = 5e-4
  epochs: PositiveInt = 30
  batch: PositiveInt = 64
  seed: int = 0


@functools.partial(jax.jit, static_argnums=1)
def own_answers(
  params: DecodeParams, config: ModelConfig, questions: Questions
) -> Int[Array, "questions tokens"]:
  """What the model answers with everything in its context, as long as the right answers are."""
  tokens = questions.answers.shape[1]
  cache = whole(params, config, questions, questions.prompts.shape[1] + tokens)
  return greedy(params, config, cache, questions.prompts, tokens)


def distillation_loss(
  adapter: Adapter | None,
  params: DecodeParams,
  config: ModelConfig,
  questions: Questions,
  answers: Int[Array, "questions tokens"],
) -> Float[Array, ""]:
  """``sum_t KL(teacher || student)`` at the tokens of the answers, mean over questions, nats."""
  tail = jnp.concatenate([questions.prompts, answers[:, :-1]], axis=1)
  room, tokens = tail.shape[1], answers.shape[1]
  behind = whole(params, config, questions, room)
  teacher = jax.lax.stop_gradient(continued(params, config, behind, tail)[0][:, -tokens:])
  behind = joined(params, config, parts(params, config, questions, adapter), room)
  student = continued(params, config, behind, tail)[0][:, -tokens:]
  each = divergence(jax.nn.log_softmax(student), jax.nn.log_softmax(teacher), "forward_kl")
  return jnp.mean(jnp.sum(each, axis=1))


def measured_divergence(
  adapter: Adapter | None,
  params: DecodeParams,
  config: ModelConfig,
  questions: Questions,
  batch: int,
) -> float:
  """Mean of ``distillation_loss`` over questions, ``batch`` at a time; None is no adapter."""
  loss = jax.jit(distillation_loss, static_argnums=2)
  found = []
  for begin in range(0, len(questions.prompts), batch):
    few = jax.tree.map(lambda v, begin=begin: v[begin : begin + batch], questions)
    answers = own_answers(params, config, few)
    found += [float(loss(adapter, params, config, few, answers))] * len(few.prompts)
  return float(np.mean(found))


def train_adapter(
  adapter: Adapter,
  params: DecodeParams,
  config: ModelConfig,
  sources: Sequence[Questions],
  settings: AdapterTraining,
) -> tuple[Adapter, list[float]]:
  """The adapter after training on a mixture of sources, and the loss of every step.

  Args:
    adapter: where it begins.
    params: of the model, from ``prepare_decode_params``.
    config: of the params.
    sources: each of one shape; a step takes its questions from one of them.
    settings: of the training.
  """
  settings.validate("training")
  batches = _batches(sources, settings)
  optimizer = optax.adamw(
    optax.linear_schedule(settings.learning_rate, 0.0, len(batches)), weight_decay=0.0
  )
  answers = []
  for source in sources:
    cuts = range(settings.batch, len(source.prompts), settings.batch)
    cut = jax.tree.map(lambda v, cuts=cuts: np.split(v, cuts), source)
    each = map(Questions, *cut)
    answers.append(np.concatenate([own_answers(params, config, few) for few in each]))

  @jax.jit
  def step(
    adapter: Adapter,
    state: optax.OptState,
    params: DecodeParams,
    questions: Questions,
    answers: Array,
  ):
    loss, gradient = jax.value_and_grad(distillation_loss)(
      adapter, params, config, questions, answers
    )
    update, state = optimizer.update(gradient, state, adapter)
    return optax.apply_updates(adapter, update), state, loss

  state, losses = optimizer.init(adapter), []
  for number, chosen in batches:
    questions = jax.tree.map(lambda v, chosen=chosen: v[chosen], sources[number])
    adapter, state, loss = step(adapter, state, params, questions, answers[number][chosen])
    losses.append(loss)
  return adapter, [float(loss) for loss in losses]


def _batches(
  sources: Sequence[Questions], settings: AdapterTraining
) -> list[tuple[int, np.ndarray]]:
  """Source and questions of each step; what does not fill a batch waits for the next epoch."""
  rng = np.random.default_rng(settings.seed)
  found = []
  for _ in range(settings.epochs):
    epoch = []
    for number, source in enumerate(sources):
      order = rng.permutation(len(source.prompts))
      size = min(settings.batch, len(order))
      whole = len(order) // size * size
      epoch += [(number, part) for part in order[:whole].reshape(-1, size)]
    found += [epoch[i] for i in rng.permutation(len(epoch))]
  return found
