"""Sets of tokens of your own, which the supervised loss runs over."""

import dataclasses

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.models import ModelConfig, TokenSets
from agentjax.training import Experiment, Extensions, RLStage
from agentjax.training.build import build_parts
from agentjax.training.learner import Learner
from agentjax.training.token_sets import TokenSetConfig
from tests.training.smoke import smoke_experiment


@dataclasses.dataclass(unsafe_hash=True)
class PairConfig(TokenSetConfig):
  """The demonstration's token, and perhaps one other."""

  other: int = 0
  alone: bool = True

  def build(self, tools):
    def lengths(params, token_ids, segment_ids, positions):
      return (positions,)

    (places,) = tools.read(lengths, tools.first_policy(), tools.tasks[:3])
    assert [list(p) for p in places] == [list(range(len(p))) for p in places]
    return Pairs(self)


class Pairs:
  def __init__(self, config):
    self.config = config

  def at(self, tasks, batch, places):
    own = np.take_along_axis(np.asarray(batch.token_ids), places, axis=1)
    ids = np.stack([own, np.full_like(own, self.config.other)], axis=-1).astype(np.int32)
    inside = np.ones(ids.shape, bool)
    inside[..., 1] = not self.config.alone
    return TokenSets(ids, inside)


def _loss(directory, sets):
  model = ModelConfig(d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16)
  experiment = smoke_experiment(rl=RLStage(), model=model)
  experiment.supervised = dataclasses.replace(
    experiment.supervised, token_sets=sets, mtp_coefficient=0.0, router_bias_rate=0.0
  )
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).supervised.token_sets == sets
  parts = build_parts(experiment.freeze(), directory, Extensions())
  learner = Learner(parts, lambda inputs: (0.0, {}))
  tasks = [task for task in parts.tasks.train if task.demonstration][:4]
  return learner.supervised_step(learner.initial_state("supervised"), tasks)[1]["loss"]


@pytest.mark.slow
def test_the_loss_runs_over_the_sets_alone(tmp_path):
  assert _loss(tmp_path, PairConfig()) == pytest.approx(0.0, abs=1e-6)
  assert 0.1 < _loss(tmp_path, PairConfig(alone=False)) < _loss(tmp_path, None) - 0.5


def test_sets_and_what_needs_all_logits_exclude_each_other():
  experiment = smoke_experiment()
  experiment.supervised.token_sets = PairConfig()
  experiment.supervised.z_loss_coefficient = 0.1
  with pytest.raises(ConfigError, match="z_loss_coefficient"):
    experiment.validate()
