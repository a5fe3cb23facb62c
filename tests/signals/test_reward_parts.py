"""Parts of the reward: who lacks one, and what a breach of the policy leaves of them."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.signals.reward_parts import TurnRewards, counted_part, move_to_weights, need_parts
from agentjax.signals.signal import StepContext
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Status

_CONTEXT = StepContext(1, None)


def _episode(status=Status.OK, **parts):
  builder = TrajectoryBuilder(step=1, task_id=0, sample=0, source="x")
  builder.append_sampled([4, 5], [-1.0] * 2, [0.5] * 2, 0)
  made = builder.build(reward=Reward(0.0), status=status)
  made.reward_parts = parts
  return made


def test_an_episode_that_lacks_a_part_teaches_nothing_but_for_one_that_broke_the_rules():
  right, form = Reward(1.0), Reward.invalid("no verdict")
  episodes = [
    _episode(right=right, form=Reward(0.5)),
    _episode(right=right, form=form),
    _episode(Status.POLICY_ERROR, right=right, form=form),
    _episode(Status.POLICY_ERROR, right=Reward(-2.0)),
  ]
  found = need_parts(episodes, ("right", "form"))
  values = [[counted_part(one, name) for name in ("right", "form")] for one in found]
  assert values == [[1.0, 0.5], [1.0, None], [0.0, 0.0], [-2.0, 0.0]]
  assert [one.reward.valid for one in found] == [True, False, True, True]


@pytest.mark.parametrize("status", [Status.OK, Status.POLICY_ERROR])
def test_what_turns_were_paid_stays_valid_after_a_breach(status):
  one = _episode(status, environment=Reward(-1.0))
  one.turn_rewards = {"environment": [-1.0]}
  (found,), _ = TurnRewards({"environment": 1.0}).observe(_CONTEXT, [one])
  assert found.reward.valid and np.isclose(found.reward_parts["environment"].value, -1.0)


def test_a_turn_without_weight_is_paid_on_the_token_before_it():
  columns = {
    "weights": [[0, 1, 0, 0, 1, 0, 0, 0, 1, 0.0]],
    "positions": [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0]],
    "turn_rewards": [[0, 0, 2.0, 3, 0, 5, 0, 7, 0, 0]],
  }
  batch = SimpleNamespace(**{name: jnp.array(value) for name, value in columns.items()}, columns={})
  batch.column = lambda name: getattr(batch, name)
  moved = move_to_weights.__wrapped__(batch)
  # 7 stands before the second sequence's first weight: it stays, and is nobody's.
  np.testing.assert_array_equal(moved[0], [0, 5, 0, 0, 5, 0, 0, 7, 0, 0])
