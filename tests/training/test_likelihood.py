"""A likelihood of one's own: it scores in both stages, and the run's own engine stays out."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.engine import Engine
from agentjax.models import ModelConfig, score_tokens
from agentjax.training import Extensions, RLStage
from agentjax.training.build import build_parts
from agentjax.training.evaluation import build_engine
from agentjax.training.learner import Learner
from agentjax.training.likelihood import LikelihoodConfig, noise_of
from tests.training.smoke import smoke_experiment

SEEN: list[Sequence[int]] = []


@dataclasses.dataclass(unsafe_hash=True)
class Aligned(LikelihoodConfig):
  """From left to right, ``scale`` times as large; every sequence starts at a multiple of 8."""

  scale: float = 1.0

  @property
  def align(self):
    return 8

  def demonstrations(self, model, chat):
    def score(params, config, token_ids, segment_ids, positions, *, marks, temperature):
      jax.debug.callback(lambda n, s, p: SEEN.append((n, s, p)), marks, segment_ids, positions)
      found = score_tokens(
        params, config, token_ids, segment_ids, positions, temperature=temperature
      )
      return found.replace(log_probs=self.scale * found.log_probs)

    return score

  episodes = demonstrations

  def engine(self, model, config, chat, **options):
    return _OwnEngine(model, config, **options)


class _OwnEngine(Engine):
  pass


def _loss(directory, likelihood, tasks=slice(0, 4)):
  model = ModelConfig(d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16)
  experiment = smoke_experiment(rl=RLStage(), model=model, likelihood=likelihood)
  experiment.supervised = dataclasses.replace(
    experiment.supervised, mtp_coefficient=0.0, router_bias_rate=0.0
  )
  experiment.validate()
  parts = build_parts(experiment.freeze(), directory, Extensions())
  learner = Learner(parts, lambda inputs: (0.0, {}))
  shown = [task for task in parts.tasks.train if task.demonstration]
  state = learner.initial_state("supervised")
  return learner.supervised_step(state, shown[tasks])[1]["loss"], parts


def test_a_run_scores_and_samples_with_its_likelihood(tmp_path):
  SEEN.clear()
  plain, _ = _loss(tmp_path, LikelihoodConfig())
  same, parts = _loss(tmp_path, Aligned())
  assert same == pytest.approx(plain, rel=1e-6)
  twice, _ = _loss(tmp_path, Aligned(scale=2.0))
  assert twice == pytest.approx(2 * plain, rel=1e-6)
  engine = build_engine(parts)
  engine.close()
  assert type(engine) is _OwnEngine
  jax.effects_barrier()
  noise, segments, positions = (np.asarray(v) for v in SEEN[0])
  assert set(np.unique(noise)) == {0, 1}  # the first step's number, on taught tokens alone
  assert (noise[segments == 0] == 0).all()
  starts = np.argwhere((segments > 0) & (positions == 0))
  assert len(starts) == 4
  assert (starts[:, 1] % 8 == 0).all()


def test_noise_is_zero_where_nothing_is_learned():
  weights = jnp.array([[0.0, 0.5, 2.0]])
  np.testing.assert_array_equal(noise_of(weights, jnp.int32(7)), [[0, 7, 7]])
