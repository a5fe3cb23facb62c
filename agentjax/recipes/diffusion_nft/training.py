"""Trains the generator, the two critics, and the generator again by the reward of a critic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from agentjax.models.spec import init_params
from agentjax.recipes.diffusion_nft.critic import (
  Critic,
  critic_spec,
  judge,
  pair_loss,
  rationale_loss,
  score,
)
from agentjax.recipes.diffusion_nft.drawings import (
  SIZES,
  agrees,
  corrupt,
  random_rows,
  read_drawings,
  render,
)
from agentjax.recipes.diffusion_nft.generator import (
  Generator,
  condition_of,
  draw,
  flow_loss,
  generator_spec,
  mix,
  velocity,
)
from agentjax.recipes.diffusion_nft.nft import follow, group_advantages, nft_loss, optimality
from agentjax.recipes.diffusion_nft.pairs import Pairs, anchored_rationales, compare, consistent
from agentjax.recipes.diffusion_nft.settings import DrawingsConfig, NetConfig, TuneConfig

Array = jax.Array
P = TypeVar("P")
Reward = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (images, prompts) -> a number each
Report = Callable[[str], None]

_DRAWN = 128  # images at once, so that one program draws them all


def fit(
  loss: Callable[..., Array], params: P, batches: Iterable[tuple[Any, ...]], net: NetConfig
) -> Iterable[tuple[P, float]]:
  """Params and loss after each batch; ``loss(params, *batch)``."""
  schedule = optax.cosine_decay_schedule(net.learning_rate, net.steps)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-2))

  @jax.jit
  def step(params: P, state: optax.OptState, *batch: Array) -> tuple[P, optax.OptState, Array]:
    value, gradient = jax.value_and_grad(loss)(params, *batch)
    change, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, change), state, value

  state = optimizer.init(params)
  for batch in itertools.islice(batches, net.steps):
    params, state, value = step(params, state, *batch)
    yield params, value


def train_generator(config: DrawingsConfig, report: Report) -> Generator:
  """A generator of drawings whose captions are wrong now and then."""
  rng = np.random.default_rng([config.seed, 1])
  rows = random_rows(rng, config.drawings)
  images = render(rng, rows)
  net = config.generator
  key = jax.random.key(config.seed)

  def batches() -> Iterable[tuple[Any, ...]]:
    for number in itertools.count():
      index = rng.integers(0, len(rows), net.batch)
      captions = corrupt(rng, rows[index], config.wrong_captions)
      yield jax.random.fold_in(key, number), images[index], condition_of(captions)

  def loss(params: Generator, key: Array, images: Array, condition: Array) -> Array:
    return flow_loss(params, key, images, condition, config.left_out)

  params = init_params(generator_spec(net.layers, net.width, net.heads), key)
  for number, (found, value) in enumerate(fit(loss, params, batches(), net), 1):
    params = found
    if number % max(net.steps // 5, 1) == 0:
      report(f"generator, step {number}: loss {float(value):.4f}")
  return params


def draw_images(
  params: Generator, key: Array, condition: Float[np.ndarray, "N V"], steps: int
) -> Float[np.ndarray, "N 32 32 3"]:
  """``draw`` in batches of one size."""
  count = len(condition)
  filled = np.concatenate([condition, np.zeros((-count % _DRAWN, condition.shape[1]), np.float32)])
  parts = [
    np.asarray(draw(params, jax.random.fold_in(key, number), filled[begin : begin + _DRAWN], steps))
    for number, begin in enumerate(range(0, len(filled), _DRAWN))
  ]
  return np.concatenate(parts)[:count]


def make_pairs(config: DrawingsConfig, generator: Generator) -> tuple[Pairs, Pairs]:
  """Pairs to train on and to measure with, half of them rendered and half from the generator."""
  rng = np.random.default_rng([config.seed, 2])
  wanted = max(config.pairs) + config.held_out_pairs
  key = jax.random.key(config.seed + 1)
  found: list[Pairs] = []
  for number in itertools.count():
    if sum(map(len, found)) >= wanted:
      break
    prompts = random_rows(rng, _DRAWN)
    rows = corrupt(rng, np.repeat(prompts, 2, axis=0), config.corrupted)
    images = render(rng, rows)
    found.append(_compared(rng, prompts, images, rows, config))
    prompts = random_rows(rng, _DRAWN)
    condition = condition_of(np.repeat(prompts, 2, axis=0))
    images = draw_images(generator, jax.random.fold_in(key, number), condition, config.draw_steps)
    found.append(_compared(rng, prompts, images, read_drawings(images), config))
  fields = [np.concatenate(parts) for parts in zip(*map(_fields, found), strict=True)]
  shuffled = Pairs(*fields).take(rng.permutation(len(fields[0]))[:wanted])
  return shuffled.take(slice(config.held_out_pairs, None)), shuffled.take(
    slice(config.held_out_pairs)
  )


def _compared(
  rng: np.random.Generator,
  prompts: np.ndarray,
  images: np.ndarray,
  rows: np.ndarray,
  config: DrawingsConfig,
) -> Pairs:
  """Pairs of neighbours."""
  pair = (len(prompts), 2)
  images, rows = images.reshape(*pair, *images.shape[1:]), rows.reshape(*pair, -1)
  return compare(rng, prompts, images, rows, config.teacher)


def _fields(pairs: Pairs) -> tuple[np.ndarray, ...]:
  return tuple(getattr(pairs, field.name) for field in dataclasses.fields(pairs))


@dataclasses.dataclass(frozen=True)
class Critics:
  """Both critics, trained on the same pairs.

  Attributes:
    rational, scalar: their parameters.
    kept: share of the pairs that the consistency filter kept for the rational one.
    middle: mean score of the training images; pairs leave the level of scores open.
  """

  rational: Critic
  scalar: Critic
  kept: float = 1.0
  middle: float = 0.0

  def rational_reward(self, images: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """(mean grade - 1) / 3 of the rationale."""
    return in_batches(lambda i, p: judge(self.rational, i, p).rewards, images, prompts)

  def scores(self, images: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Of the scalar critic."""
    return in_batches(lambda i, p: np.asarray(score(self.scalar, i, p)), images, prompts)

  def scalar_reward(self, images: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Sigmoid of score - middle, so that it lies in [0, 1] like the other reward."""
    return 1 / (1 + np.exp(self.middle - self.scores(images, prompts)))


def in_batches(
  call: Callable[[np.ndarray, np.ndarray], np.ndarray], images: np.ndarray, prompts: np.ndarray
) -> np.ndarray:
  """``call`` on batches of one size, joined along the first axis."""
  count, size = len(images), min(_DRAWN, len(images))
  index = np.arange(-(-count // size) * size) % count
  parts = [call(images[few], prompts[few]) for few in np.split(index, len(index) // size)]
  return np.concatenate(parts)[:count]


def prefers_second(reward: Reward, pairs: Pairs) -> Float[np.ndarray, " N"]:
  """1 where the reward of the second drawing is higher, 0 where it is lower, .5 where equal."""
  first, second = (reward(pairs.images[:, i], pairs.prompts) for i in (0, 1))
  return (1 + np.sign(second - first)) / 2


def train_critics(config: DrawingsConfig, pairs: Pairs) -> Critics:
  """Trains both on the same pairs; a tenth of them chooses each one's best step."""
  rng = np.random.default_rng([config.seed, 3, len(pairs)])
  order = rng.permutation(len(pairs))
  held = max(len(pairs) // 10, 1)
  check, learn = pairs.take(order[:held]), pairs.take(order[held:])
  rationales = anchored_rationales(rng, learn, config.teacher)
  kept = consistent(rationales, learn.second)
  student = learn.take(kept.nonzero()[0])
  flat = student.images.reshape(-1, *student.images.shape[2:])
  prompts, texts = np.repeat(student.prompts, 2, axis=0), rationales[kept].reshape(len(flat), -1)
  place = np.arange(len(learn))
  better = learn.images[place, learn.second.astype(int)]
  worse = learn.images[place, 1 - learn.second.astype(int)]
  net = config.critic
  rational = _train_critic(
    config,
    rationale_loss,
    _batches(rng, net.batch, flat, prompts, texts),
    check,
    lambda params: Critics(params, params).rational_reward,
  )
  scalar = _train_critic(
    config,
    pair_loss,
    _batches(rng, max(net.batch // 2, 1), better, worse, learn.prompts),
    check,
    lambda params: Critics(params, params).scores,
  )
  middle = float(Critics(scalar, scalar).scores(better, learn.prompts).mean()) / 2
  middle += float(Critics(scalar, scalar).scores(worse, learn.prompts).mean()) / 2
  return Critics(rational, scalar, float(kept.mean()), middle)


def _batches(
  rng: np.random.Generator, size: int, *arrays: np.ndarray
) -> Iterable[tuple[np.ndarray, ...]]:
  while True:
    index = rng.integers(0, len(arrays[0]), size)
    yield tuple(array[index] for array in arrays)


def _train_critic(
  config: DrawingsConfig,
  loss: Callable[..., Array],
  batches: Iterable[tuple[Any, ...]],
  check: Pairs,
  reward_of: Callable[[Critic], Reward],
) -> Critic:
  """The critic at the step whose preferences agree best with the labels of ``check``."""
  net = config.critic
  spec = critic_spec(net.layers, net.width, net.heads)
  best, most = init_params(spec, jax.random.key(config.seed)), -1.0
  for number, (params, _) in enumerate(fit(loss, best, batches, net), 1):
    if number % (net.steps // config.checks):
      continue
    said = prefers_second(reward_of(params), check)
    right = float(np.where(check.second, said, 1 - said).mean())
    if right >= most:
      best, most = params, right
  return best


@dataclasses.dataclass(frozen=True)
class Measured:
  """What a generator draws for prompts that no reward was computed for, read by measuring.

  Attributes:
    right: [prompts, A], share of images whose attribute is as wanted.
    reward: mean reward of these images, or None.
  """

  right: Float[np.ndarray, "prompts A"]
  reward: float | None


def held_out_prompts(config: DrawingsConfig) -> tuple[Int[np.ndarray, "P A"], np.ndarray]:
  """All prompts in a random order: those to measure on, and the others."""
  rng = np.random.default_rng([config.seed, 4])
  every = np.stack(np.unravel_index(np.arange(SIZES.prod()), SIZES), axis=1)
  every = every[rng.permutation(len(every))]
  return every[: config.held_out_prompts], every[config.held_out_prompts :]


def measure(config: DrawingsConfig, generator: Generator, reward: Reward | None = None) -> Measured:
  """Draws ``measured_images`` for each held-out prompt; the noise is always the same."""
  prompts = np.repeat(held_out_prompts(config)[0], config.measured_images, axis=0)
  key = jax.random.key(config.seed + 3)
  images = draw_images(generator, key, condition_of(prompts), config.draw_steps)
  right = agrees(read_drawings(images), prompts)
  mean = None if reward is None else float(reward(images, prompts).mean())
  return Measured(right.reshape(-1, config.measured_images, right.shape[1]).mean(axis=1), mean)


def tune(
  config: DrawingsConfig, generator: Generator, reward: Reward, report: Report
) -> tuple[Generator, list[dict[str, float]]]:
  """DiffusionNFT: the generator after learning from a reward, and a row for each measurement."""
  settings = config.tune
  rng = np.random.default_rng([config.seed, 5])
  prompts = held_out_prompts(config)[1]
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))
  update = _update(settings, optimizer)
  new = old = generator
  state = optimizer.init(new)
  key, rows = jax.random.key(config.seed + 2), []
  for step in range(settings.steps + 1):
    if step % settings.every == 0:
      rows.append({"step": step, **_measured(config, new, reward)})
      report("tuning, " + ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()))
    if step == settings.steps:
      break
    chosen = rng.choice(len(prompts), settings.prompts, replace=len(prompts) < settings.prompts)
    asked = np.repeat(prompts[chosen], settings.images, axis=0)
    condition = condition_of(asked)
    images = draw_images(old, jax.random.fold_in(key, 2 * step), condition, config.draw_steps)
    rewards = reward(images, asked).reshape(settings.prompts, settings.images)
    advantages, kept = group_advantages(jnp.asarray(rewards), settings.loss)
    good = optimality(advantages, settings.loss.advantage_clip).ravel()
    keep = jnp.repeat(kept, settings.images)
    for number in range(settings.updates):
      own = jax.random.fold_in(jax.random.fold_in(key, 2 * step + 1), number)
      new, state = update(new, state, old, generator, own, images, condition, good, keep)
    old = follow(old, new, step, settings.loss)
  return new, rows


def _measured(config: DrawingsConfig, generator: Generator, reward: Reward) -> dict[str, float]:
  found = measure(config, generator, reward)
  assert found.reward is not None
  return {"right": float(found.right.mean()), "reward": found.reward}


def _update(settings: TuneConfig, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
  """One step of the optimiser; a batch without a kept group changes nothing."""

  @jax.jit
  def update(
    new: Generator,
    state: optax.OptState,
    old: Generator,
    reference: Generator,
    key: Array,
    images: Array,
    condition: Array,
    good: Array,
    keep: Array,
  ) -> tuple[Generator, optax.OptState]:
    times, noises = jax.random.split(key)
    time = jax.random.uniform(times, images.shape[:1])
    noisy = mix(images, jax.random.normal(noises, images.shape), time)
    before = velocity(old, noisy, time, condition)
    first = velocity(reference, noisy, time, condition)

    def loss(params: Generator) -> Array:
      now = velocity(params, noisy, time, condition)
      return nft_loss(now, before, first, noisy, images, time, good, keep, settings.loss)[0]

    change, after = optimizer.update(jax.grad(loss)(new), state, new)
    moved = optax.apply_updates(new, change)
    learns = keep.any()
    return jax.tree.map(
      lambda changed, same: jnp.where(learns, changed, same), (moved, after), (new, state)
    )

  return update
