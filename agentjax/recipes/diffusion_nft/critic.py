"""Two critics of a drawing with its prompt: one writes a rationale, the other a number.

Both are the same transformer over four prompt tokens, sixteen patches and a start token. The
rational critic goes on from there: for each aspect it writes the value that it sees, then whether
that is what the prompt asks for (``AGREES`` or ``DIFFERS``), eight tokens in all. An aspect's grade
is 4 where it agrees and 1 where it differs, so the reward of RationalRewards, (mean grade - 1) / 3,
is the share of aspects that agree. The scalar critic has a linear head at the start token and is
trained by pairs alone.

Legend: B batch, A aspects, R = 2 A rationale tokens, D width.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from agentjax.models.spec import ParamSpec, Weight
from agentjax.recipes.diffusion_nft.blocks import (
  PATCH_VALUES,
  PATCHES,
  Blocks,
  blocks_spec,
  matrix,
  patches,
  run_blocks,
)
from agentjax.recipes.diffusion_nft.drawings import ASPECTS, SIZES, STARTS, TOTAL, UNCLEAR, VALUES

Array = jax.Array

NOT_CLEAR, DIFFERS, AGREES, START = TOTAL, TOTAL + 1, TOTAL + 2, TOTAL + 3
VOCABULARY = TOTAL + 4
LENGTH = 2 * len(ASPECTS)  # of a rationale
_BEFORE = len(ASPECTS) + PATCHES + 1  # tokens that all rationale tokens see
_WORDS = [value for values in VALUES.values() for value in values]


@flax.struct.dataclass
class Critic:
  """Attributes:
  patch_in: [192, D]. places: [tokens, D]. words: [vocabulary, D]. blocks: without condition.
  word_out: [D, vocabulary]. score_out: [D].
  """

  patch_in: Weight
  places: Weight
  words: Weight
  blocks: Blocks
  word_out: Weight
  score_out: Weight


def critic_spec(layers: int, width: int, heads: int) -> Critic:
  """Specs of a critic, with both heads."""
  return Critic(
    patch_in=matrix(PATCH_VALUES, width, fan_in=PATCH_VALUES),
    places=matrix(_BEFORE + LENGTH, width, fan_in=width),
    words=matrix(VOCABULARY, width, fan_in=width),
    blocks=blocks_spec(layers, width, heads, conditioned=False),
    word_out=matrix(width, VOCABULARY, fan_in=width),
    score_out=ParamSpec((width,), (None,), init="zeros"),
  )


def write_rationale(seen: Int[np.ndarray, "B A"], prompts: Int[np.ndarray, "B A"]) -> np.ndarray:
  """The rationale [B, R] of what somebody sees: for each aspect a value and a verdict."""
  values = np.where(seen == UNCLEAR, NOT_CLEAR, seen + STARTS)
  verdicts = np.where(seen == prompts, AGREES, DIFFERS)
  return np.stack([values, verdicts], axis=-1).reshape(len(seen), LENGTH)


def agreeing(rationales: Int[np.ndarray, "B R"]) -> Bool[np.ndarray, "B A"]:
  """The verdicts of rationales."""
  return np.asarray(rationales)[:, 1::2] == AGREES


def reward_of(rationales: Int[np.ndarray, "B R"]) -> Float[np.ndarray, " B"]:
  """``(mean grade - 1) / 3`` with grades 4 and 1: the share of aspects that agree."""
  return agreeing(rationales).mean(axis=1)


def seen_values(rationales: Int[np.ndarray, "B R"]) -> Int[np.ndarray, "B A"]:
  """The values that rationales name, ``UNCLEAR`` where they name none of the aspect."""
  values = np.asarray(rationales)[:, ::2] - STARTS
  return np.where((values >= 0) & (values < SIZES), values, UNCLEAR)


def read_rationale(rationale: Int[np.ndarray, " R"]) -> str:
  """A rationale in words, such as "shape: disc, agrees; colour: blue, differs; ..."."""
  parts = []
  for aspect, value, verdict in zip(ASPECTS, rationale[::2], rationale[1::2], strict=True):
    word = _WORDS[value] if value < TOTAL else "unclear"
    parts.append(f"{aspect}: {word}, {'agrees' if verdict == AGREES else 'differs'}")
  return "; ".join(parts)


def _encode(
  params: Critic,
  images: Float[Array, "B 32 32 3"],
  prompts: Int[Array, "B A"],
  rationales: Int[Array, "B R"],
) -> Float[Array, "B tokens D"]:
  """Outputs at the start token and at the rationale; each of these sees what is before it."""
  start = jnp.full((len(images), 1), START)
  first = params.words[prompts + STARTS]
  rest = params.words[jnp.concatenate([start, rationales], axis=1)]
  tokens = jnp.concatenate([first, patches(images) @ params.patch_in, rest], axis=1)
  count = tokens.shape[1]
  columns = jnp.arange(count)
  visible = (columns[None] <= columns[:, None]) | (columns[None] < _BEFORE - 1)
  hidden = run_blocks(params.blocks, tokens + params.places[:count], visible=visible)
  return hidden[:, _BEFORE - 1 :]


def rationale_loss(
  params: Critic,
  images: Float[Array, "B 32 32 3"],
  prompts: Int[Array, "B A"],
  rationales: Int[Array, "B R"],
) -> Float[Array, ""]:
  """Negative log-likelihood of a token, mean: supervised learning on rationales."""
  logits = _encode(params, images, prompts, rationales[:, :-1]) @ params.word_out
  return optax.softmax_cross_entropy_with_integer_labels(logits, rationales).mean()


@dataclasses.dataclass(frozen=True)
class Judged:
  """What the rational critic says of images.

  Attributes:
    rationales: [B, R], greedy.
    rewards: (mean grade - 1) / 3 with each grade its mean under the critic's own distribution of
      the verdict, so rationales of equal verdicts still rank images.
  """

  rationales: Int[np.ndarray, "B R"]
  rewards: Float[np.ndarray, " B"]


@jax.jit
def _write(
  params: Critic, images: Float[Array, "B 32 32 3"], prompts: Int[Array, "B A"]
) -> tuple[Int[Array, "B R"], Float[Array, " B"]]:
  written = jnp.zeros((len(images), 0), jnp.int32)
  grades = []
  for place in range(LENGTH):
    logits = (_encode(params, images, prompts, written) @ params.word_out)[:, -1]
    if place % 2:
      verdicts = logits[:, jnp.array([DIFFERS, AGREES])]
      grades.append(jax.nn.softmax(verdicts)[:, 1])
      token = jnp.array([DIFFERS, AGREES])[verdicts.argmax(axis=1)]
    else:
      token = logits.argmax(axis=1)
    written = jnp.concatenate([written, token[:, None].astype(jnp.int32)], axis=1)
  return written, jnp.stack(grades, axis=1).mean(axis=1)


def judge(
  params: Critic, images: Float[np.ndarray, "B 32 32 3"], prompts: Int[np.ndarray, "B A"]
) -> Judged:
  """Rationales and rewards; at a verdict's place only verdicts are allowed."""
  written, rewards = _write(params, images, prompts)
  return Judged(np.asarray(written), np.asarray(rewards))


@jax.jit
def score(
  params: Critic, images: Float[Array, "B 32 32 3"], prompts: Int[Array, "B A"]
) -> Float[Array, " B"]:
  """The scalar critic's number."""
  none = jnp.zeros((len(images), 0), jnp.int32)
  return _encode(params, images, prompts, none)[:, 0] @ params.score_out


def pair_loss(
  params: Critic,
  better: Float[Array, "B 32 32 3"],
  worse: Float[Array, "B 32 32 3"],
  prompts: Int[Array, "B A"],
) -> Float[Array, ""]:
  """``-log sigmoid(score(better) - score(worse))``, mean (Bradley and Terry)."""
  scores = score(params, jnp.concatenate([better, worse]), jnp.concatenate([prompts, prompts]))
  first, second = jnp.split(scores, 2)
  return -jax.nn.log_sigmoid(first - second).mean()
