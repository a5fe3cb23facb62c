"""Numbers that change during a run: what they are at each step, and where they may stand."""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import Config, ConfigError, PositiveInt, Table, with_numbers
from agentjax.names import Choice
from agentjax.objectives import preset
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.rollout import RolloutConfig
from agentjax.schedules import (
  CosineSchedule,
  LinearSchedule,
  PiecewiseSchedule,
  Schedule,
  Scheduled,
  ThresholdSchedule,
  at_end,
  at_most,
  is_on,
  schedules_in,
)
from agentjax.training.flags import set_field
from agentjax.training.optimizer import OptimizerConfig


def numbers(schedule, steps):
  return [schedule.number(step, None) for step in steps]


@pytest.mark.parametrize(
  ("schedule", "steps", "expected"),
  [
    # Atom-Searcher's weight of its process reward: 0.5 (1 - t / T)
    (LinearSchedule(start=0.5, steps=100), (0, 50, 100, 101), (0.5, 0.25, 0.0, 0.0)),
    (LinearSchedule(start=1.0, end=3.0, steps=4, wait=2), (0, 2, 3, 6, 9), (1, 1, 1.5, 3, 3)),
    # SPEAR's two ramps
    (CosineSchedule(end=1.0, steps=100), (0, 50, 100, 999), (0.0, 0.5, 1.0, 1.0)),
    (CosineSchedule(start=1.0, steps=200), (0, 50, 100, 200), (1.0, 0.8535534, 0.5, 0.0)),
    # ScalingInter-RL's horizon
    (
      PiecewiseSchedule(values=(6, 13, 20), at=(100, 200)),
      (0, 99, 100, 199, 200, 10_000),
      (6, 6, 13, 13, 20, 20),
    ),
  ],
)
def test_numbers_of_published_schedules(schedule, steps, expected):
  schedule.validate()
  assert numbers(schedule, steps) == pytest.approx(expected, abs=1e-6)
  assert schedule.ends()[-1] == expected[-1]


def observed(schedule, values):
  state, found = None, []
  for value in values:
    state = json.loads(json.dumps(schedule.observe(state, value)))
    found.append((state["average"], schedule.number(0, state)))
  return found


def test_a_threshold_compares_the_moving_average_of_its_metric():
  schedule = ThresholdSchedule(metric="reward/mean", at=(0.5, 0.75), values=(8, 16, 32), decay=0.5)
  schedule.validate()
  assert schedule.number(99, None) == 8
  assert observed(schedule, (0.25, 0.75, 1.0, 1.0, 0.0)) == [
    (0.25, 8), (0.5, 16), (0.75, 32), (0.875, 32), (0.4375, 8)
  ]  # fmt: skip
  held = dataclasses.replace(schedule, hold=True)
  assert [n for _, n in observed(held, (0.25, 0.75, 1.0, 1.0, 0.0))] == [8, 16, 32, 32, 32]


_NUMBER = st.floats(-100, 100)
_SCHEDULES = st.one_of(
  st.builds(
    LinearSchedule,
    start=_NUMBER,
    end=_NUMBER,
    steps=st.integers(1, 50),
    wait=st.integers(0, 50),
  ),
  st.builds(CosineSchedule, start=_NUMBER, end=_NUMBER, steps=st.integers(1, 50)),
  st.builds(
    PiecewiseSchedule,
    values=st.tuples(_NUMBER, _NUMBER, _NUMBER),
    at=st.sets(st.integers(1, 60), min_size=2, max_size=2).map(lambda s: tuple(sorted(s))),
  ),
)


@settings(deadline=None)
@given(_SCHEDULES, st.integers(0, 200))
def test_no_number_is_outside_the_bounds_and_the_last_one_stays(schedule, step):
  low, high = schedule.bounds()
  assert low <= schedule.number(step, None) <= high
  assert schedule.number(10_000, None) == schedule.ends()[-1]


@pytest.mark.parametrize(
  ("schedule", "field"),
  [
    (LinearSchedule(end=1.0), "steps"),
    (LinearSchedule(end=1.0, steps=-1), "steps"),
    (CosineSchedule(start=1.0, end=1.0, steps=3), "end"),
    (LinearSchedule(end=math.inf, steps=3), "end"),
    (PiecewiseSchedule(), "values"),
    (PiecewiseSchedule(values=(1.0, 2.0)), "at"),
    (PiecewiseSchedule(values=(1.0, 2.0, 3.0), at=(5, 5)), "at"),
    (ThresholdSchedule(values=(1.0, 2.0), at=(0.5,)), "metric"),
    (ThresholdSchedule(values=(1.0, 2.0), at=(0.5,), metric="eval/greedy"), "metric"),
    (ThresholdSchedule(values=(1.0, 2.0), at=(0.5,), metric="reward/mean", decay=1.0), "decay"),
  ],
)
def test_wrong_settings_of_a_schedule_are_refused_with_the_field(schedule, field):
  where = "config.rl.objective.policy_loss.entropy_coefficient"
  loss = PolicyLossConfig(entropy_coefficient=schedule)
  with pytest.raises(ConfigError, match=rf"{re.escape(where)}\.{field}="):
    loss.validate("config.rl.objective.policy_loss")


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    # every number has to lie in the field's range, and to go with the other fields
    (PolicyLossConfig(kl_coefficient=LinearSchedule(0.1, -0.1, 9)), "x.kl_coefficient=.* >= 0"),
    (PolicyLossConfig(clip_low=LinearSchedule(0.2, 1.5, 9)), "x.clip_low=1.5; allowed: 0 to 1"),
    (
      PolicyLossConfig(dual_clip=3.0, clip_high=PiecewiseSchedule((0.2, 4.0), (5,))),
      r"x.dual_clip=3.0; allowed: above 1",
    ),
    (RolloutConfig(max_turns=LinearSchedule(0, 8, 9)), "x.max_turns=.*allowed: >= 1"),
    (OptimizerConfig(eps=LinearSchedule(0.1, 1.0, 9)), "x.eps=.*LinearSchedule; allowed: float"),
  ],
)
def test_a_schedule_whose_numbers_do_not_fit_is_refused_with_the_field(settings, message):
  with pytest.raises(ConfigError, match=message):
    settings.validate("x")


def test_a_term_may_fade_out_though_it_may_not_be_off():
  loss = PolicyLossConfig(kl_coefficient=LinearSchedule(0.1, 0.0, 9), kl_weight="current")
  loss.validate()
  assert ObjectiveConfig(policy_loss=loss).needs_reference
  with pytest.raises(ConfigError, match="kl_weight"):
    dataclasses.replace(loss, kl_coefficient=0.0).validate()


def test_flags_choose_a_schedule_and_set_its_fields():
  config, path = preset("dapo"), ["policy_loss", "kl_coefficient"]
  set_field(config, path, "cosine")
  for field, text in (("start", "0.1"), ("steps", "200")):
    set_field(config, [*path, field], text)
  assert config.policy_loss.kl_coefficient == CosineSchedule(start=0.1, steps=200)
  assert ObjectiveConfig.from_dict(json.loads(json.dumps(config.to_short_dict()))) == config
  saved = config.to_short_dict()["policy_loss"]["kl_coefficient"]
  assert saved == {"use": "cosine", "start": 0.1, "steps": 200}
  set_field(config, path, "0.25")
  assert config.policy_loss.kl_coefficient == 0.25
  set_field(config, ["policy_loss", "dual_clip"], "none")
  assert config.policy_loss.dual_clip is None
  with pytest.raises(
    ConfigError, match="'linear', 'cosine', 'piecewise', 'threshold', .* or a number"
  ):
    set_field(config, path, "quadratic")
  with pytest.raises(ConfigError, match="kl_coefficient.*has no field 'end'|single value"):
    set_field(config, [*path, "end"], "1")


@dataclasses.dataclass(unsafe_hash=True)
class Tree(Config):
  turns: Scheduled[PositiveInt] = 4
  share: Scheduled[float] | None = None
  named: Table[Schedule] = dataclasses.field(default_factory=Table)
  inner: tuple[PolicyLossConfig, ...] = ()


def tree():
  made = Tree(turns=LinearSchedule(4, 9, 10), share=LinearSchedule(end=1.0, steps=2))
  made.named = {"w": CosineSchedule(end=2.0, steps=4)}
  made.inner = (PolicyLossConfig(), PolicyLossConfig(clip_high=PiecewiseSchedule((0.2, 0.3), (7,))))
  made.validate("tree")
  return made


def test_schedules_are_found_by_dotted_names_and_give_way_to_numbers():
  names = ["turns", "share", "named.w", "inner[1].clip_high"]
  assert list(schedules_in(tree())) == names
  assert list(schedules_in(tree(), "config")) == [f"config.{name}" for name in names]
  now = with_numbers(tree(), lambda name, schedule: schedule.number(3, None))
  assert (now.turns, now.share, now.inner[1].clip_high) == (round(5.5), 1.0, 0.2)
  assert isinstance(now.turns, int)
  assert now.inner[0] == PolicyLossConfig() and now.named["w"] == pytest.approx(1.7071068)
  plain = at_end(tree())
  assert (plain.turns, plain.share, plain.named["w"], plain.inner[1].clip_high) == (
    9,
    1.0,
    2.0,
    0.3,
  )
  assert at_most(Tree(turns=LinearSchedule(9, 4, 10))).turns == 9
  assert with_numbers(plain, lambda *_: 1 / 0) is plain


def test_what_may_become_another_number_than_0_is_on():
  assert not is_on(0) and not is_on(0.0)
  assert is_on(-0.5) and is_on(LinearSchedule(0.1, 0.0, 3))


class Square(Schedule):
  """One of the user's own."""

  def ends(self):
    return 0.0, 100.0

  def number(self, step, state):
    return float(min(step, 10) ** 2)


def test_a_schedule_of_ones_own_is_named_like_any_choice():
  config = ObjectiveConfig()
  set_field(config, ["advantage", "multiplier"], f"{__name__}:Square")
  config.validate()
  assert config.advantage.multiplier.number(3, None) == 9.0
  assert isinstance(config.advantage.multiplier, Choice)
