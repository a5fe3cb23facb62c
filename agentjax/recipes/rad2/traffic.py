"""A road with traffic in two dimensions: scenarios, other drivers, and the car that is driven.

The road has three lanes along x. The car (the "ego" of the source) is a bicycle model. The others
follow their leaders by the intelligent driver model (IDM, Treiber et al., 2000) and a script: one
of them brakes hard, cuts in, crosses the road or stands in the way. Everything here is of one
scenario; callers map it over many.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.recipes.rad2.geometry import at_length, boxes_overlap, into_frame, path_lengths
from agentjax.recipes.rad2.settings import STEP_SECONDS, TrafficConfig

LANES, LANE = 3, 3.5  # how many, and their width in metres; y = 0 is the middle of the first
OTHERS = 5  # other vehicles, the first of which has the script
KINDS = ("brake", "cut_in", "crossing", "standing")
CAR = (4.6, 1.9)  # length, width
TOP_SPEED = 16.0
_WHEELBASE = 2.8
_NEVER = 1e6
_BRAKE, _ACCELERATE, _STEER = -8.0, 3.0, 0.5
_IDM_GAP, _IDM_TIME, _IDM_ACCELERATION, _IDM_BRAKING = 2.0, 1.0, 1.5, 2.5
_AHEAD = 0.5  # seconds that the car looks ahead in its plan to choose its acceleration
_SIDEWAYS = 1.8  # m/s, of a change of lanes


@flax.struct.dataclass
class Scenario:
  """How an episode begins and what the others will do, V of them.

  Attributes:
    kind: place in ``KINDS``.
    ego: x, y, heading, speed.
    others: x, y, heading, speed [V, 4]; one that is absent is far behind.
    present: [V].
    size: length, width [V, 2].
    desired: speed that each wants [V].
    brake_from, brake_until: seconds between which it brakes down to ``brake_to`` [V].
    change_at: seconds at which it begins to move to ``change_to``, a y [V].
    crosses: drives straight on without regard to anybody [V].
  """

  kind: Array
  ego: Array
  others: Array
  present: Array
  size: Array
  desired: Array
  brake_from: Array
  brake_until: Array
  brake_to: Array
  change_at: Array
  change_to: Array
  crosses: Array


@flax.struct.dataclass
class State:
  """What is true at a step: its number, the car, the others, whether the car has crashed."""

  step: Array
  ego: Array  # [4]
  others: Array  # [V, 4]
  crashed: Array


@flax.struct.dataclass
class Observation:
  """What a planner sees: numbers of the car [4], of the others [V, 11], who is there [V].

  The car's: speed, heading, distances to the edges of the road. Of another, as seen from the car:
  position, velocity, cosine and sine of the heading, length, width, and how near it is: on the
  whole, along the road, and to the side.
  """

  ego: Array
  others: Array
  present: Array


@flax.struct.dataclass
class Drive:
  """Steps that were driven, and the state after the last; a row of ``ego`` is after its step."""

  state: State
  ego: Array  # [steps, 4]
  others: Array  # [steps, V, 4]
  crashed: Array  # [steps]


def scenarios(seed: int, first: int, count: int) -> Scenario:
  """Scenarios ``first`` to ``first + count`` of a seed; each depends on its number alone."""
  key = jax.random.key(seed)
  numbers = first + jnp.arange(count)
  return _scenarios(key, numbers)


@jax.jit
def _scenarios(key: Array, numbers: Int[Array, " count"]) -> Scenario:
  return jax.vmap(lambda n: _scenario(jax.random.fold_in(key, n)))(numbers)


def _scenario(key: Array) -> Scenario:
  count = iter(range(100))

  def uniform(low: Any, high: Any, *shape: int) -> Array:
    return jax.random.uniform(jax.random.fold_in(key, next(count)), shape, minval=low, maxval=high)

  def choice(most: int) -> Array:
    return jax.random.randint(jax.random.fold_in(key, next(count)), (), 0, most)

  kind, lane, speed = choice(len(KINDS)), choice(LANES), uniform(8.0, 13.0)
  side = jnp.where(lane == 0, 1, jnp.where(lane == LANES - 1, -1, 2 * choice(2) - 1))
  beside, third = lane + side, 3 - lane - (lane + side)
  y, y_beside, y_third = lane * LANE, beside * LANE, third * LANE

  # The one with the script, for each kind.
  upwards = 2.0 * choice(2) - 1.0
  ahead, cross_speed = uniform(25.0, 70.0), uniform(3.0, 9.0)
  meets = ahead / speed + uniform(-1.2, 1.2)
  first = jnp.stack([
    jnp.stack([uniform(14.0, 28.0), y, 0.0, speed * uniform(0.8, 1.0)]),
    jnp.stack([uniform(6.0, 18.0), y_beside, 0.0, speed - uniform(0.0, 4.0)]),
    jnp.stack([ahead, y - upwards * cross_speed * meets, upwards * jnp.pi / 2, cross_speed]),
    jnp.stack([uniform(35.0, 75.0), y, 0.0, 0.0]),
  ])[kind]  # fmt: skip
  # The others: two beside, one in the third lane, one behind.
  xs = jnp.stack([uniform(26.0, 50.0), uniform(-30.0, -12.0), uniform(-8.0, 30.0)])
  rest = jnp.stack([
    jnp.concatenate([xs, uniform(-35.0, -18.0, 1)]),
    jnp.stack([y_beside, y_beside, y_third, y]),
    jnp.zeros(4),
    jnp.full(4, speed) + uniform(-2.0, 2.0, 4),
  ], axis=1)  # fmt: skip
  others = jnp.concatenate([first[None], rest])
  present = jnp.concatenate([jnp.ones(1, bool), uniform(0.0, 1.0, 4) < 0.7])
  far = -1000.0 * (1 + jnp.arange(OTHERS))
  others = others.at[:, 0].set(jnp.where(present, others[:, 0], far))
  is_first = jnp.arange(OTHERS) == 0

  def scripted(of_kind: str, value: Any, otherwise: float) -> Array:
    return jnp.where(is_first & (kind == KINDS.index(of_kind)), value, otherwise)

  begins, holds = uniform(0.3, 4.0), uniform(2.0, 5.0)
  return Scenario(
    kind=kind,
    ego=jnp.stack([0.0, y, 0.0, speed]),
    others=others,
    present=present,
    size=jnp.broadcast_to(jnp.array(CAR), (OTHERS, 2)),
    desired=scripted("standing", 0.0, 1.0) * jnp.maximum(others[:, 3], 0.0),
    brake_from=scripted("brake", begins, _NEVER),
    brake_until=scripted("brake", begins + holds, _NEVER),
    brake_to=jnp.full(OTHERS, uniform(0.0, 3.0)),
    change_at=scripted("cut_in", begins, _NEVER),
    change_to=jnp.full(OTHERS, y, jnp.float32),
    crosses=is_first & (kind == KINDS.index("crossing")),
  )


def start(scenario: Scenario) -> State:
  """The first state of an episode."""
  return State(jnp.int32(0), scenario.ego, scenario.others, jnp.bool_(False))


def step(scenario: Scenario, state: State, control: Float[Array, "2"]) -> State:
  """One step of 0.1 s; who has crashed stays where it is.

  Args:
    scenario: what the others do.
    state: before.
    control: acceleration in m/s², and the angle of the front wheels; cut to what a car can do.
  """
  others = _move_others(scenario, state)
  ego = jnp.where(state.crashed, state.ego, _move_ego(state.ego, control))
  crashed = state.crashed | touches(scenario, ego, others) | off_road(ego)
  return State(state.step + 1, ego.at[3].multiply(~crashed), others, crashed)


def touches(
  scenario: Scenario,
  ego: Float[Array, "*lead 4"],
  others: Float[Array, "*lead vehicles 4"],
  margin: float = 0.0,
) -> Bool[Array, "*lead"]:
  """Whether the car touches another; with ``margin`` metres added before and behind it."""
  size = jnp.array([CAR[0] + 2 * margin, CAR[1]])
  each = boxes_overlap(ego[..., None, :3], size, others[..., :3], scenario.size)
  return jnp.any(each & scenario.present, axis=-1)


def off_road(ego: Float[Array, "*lead 4"]) -> Bool[Array, "*lead"]:
  """Whether the middle of the car is beyond an edge of the road."""
  return (ego[..., 1] < -LANE / 2) | (ego[..., 1] > (LANES - 0.5) * LANE)


def observe(scenario: Scenario, state: State) -> Observation:
  """What the planner sees now; nothing of what the others will do."""
  x, y, heading, speed = state.ego
  pose = state.ego[:3]
  place = into_frame(state.others[:, :2], pose)
  turn = state.others[:, 2] - heading
  moving = state.others[:, 3:] * jnp.stack([jnp.cos(turn), jnp.sin(turn)], axis=-1)
  velocity = moving - jnp.array([speed, 0.0])
  present = scenario.present
  facts = jnp.concatenate([
    place / jnp.array([20.0, 5.0]), velocity / 5.0, jnp.cos(turn)[:, None], jnp.sin(turn)[:, None],
    scenario.size / 5.0, jnp.exp(-jnp.linalg.norm(place, axis=-1, keepdims=True) / 15.0),
    jnp.exp(-jnp.abs(place) / jnp.array([15.0, 1.5])),
  ], axis=-1)  # fmt: skip
  edges = jnp.stack([y + LANE / 2, (LANES - 0.5) * LANE - y]) / 5.0
  ego = jnp.concatenate([jnp.stack([speed / 10.0, heading * 5.0]), edges])
  return Observation(ego, jnp.where(present[:, None], facts, 0.0), present)


def drive(
  config: TrafficConfig,
  scenario: Scenario,
  state: State,
  plan: Float[Array, "points 2"],
  steps: int,
) -> Drive:
  """Follows one plan for some steps.

  The car keeps to the plan's path by pure pursuit, and to its clock by the acceleration that would
  bring it to where the plan is half a second later.

  Args:
    config: when the points of a plan are due.
    scenario: what the others do.
    state: at the first step.
    plan: positions as seen from where the car is now, one each ``plan_stride`` steps.
    steps: how long.
  """
  origin = state.ego[:3]
  points = jnp.concatenate([jnp.zeros((1, 2)), plan])
  lengths = path_lengths(points)
  due = STEP_SECONDS * config.plan_stride * jnp.arange(config.plan_points + 1)

  def wanted(seconds: Array) -> Array:
    inside = jnp.interp(seconds, due, lengths)
    speed = (lengths[-1] - lengths[-2]) / (due[-1] - due[-2])
    return inside + speed * jnp.maximum(seconds - due[-1], 0.0)

  def move(carry: tuple[State, Array], number: Array) -> tuple[tuple[State, Array], Any]:
    state, driven = carry
    now = STEP_SECONDS * number
    speed = state.ego[3]
    missing = wanted(now + _AHEAD) - driven - _AHEAD * speed
    accelerate = 2.0 * missing / _AHEAD**2  # constant for so long, it makes up for what is missing
    seen = at_length(points, driven + jnp.maximum(4.0, 0.7 * speed))
    pose = jnp.append(into_frame(state.ego[:2], origin), state.ego[2] - origin[2])
    goal = into_frame(seen, pose)
    steer = jnp.arctan(2.0 * _WHEELBASE * goal[1] / jnp.maximum(jnp.sum(goal**2), 1.0))
    after = step(scenario, state, jnp.stack([accelerate, steer]))
    driven = driven + STEP_SECONDS * speed
    return (after, driven), (after.ego, after.others, after.crashed)

  begin = (state, jnp.float32(0.0))
  (state, _), record = jax.lax.scan(move, begin, jnp.arange(steps, dtype=jnp.float32))
  return Drive(state, *record)


def _move_ego(ego: Array, control: Array) -> Array:
  x, y, heading, speed = ego
  accelerate = jnp.clip(control[0], _BRAKE, _ACCELERATE)
  steer = jnp.clip(control[1], -_STEER, _STEER)
  return jnp.stack([
    x + STEP_SECONDS * speed * jnp.cos(heading),
    y + STEP_SECONDS * speed * jnp.sin(heading),
    heading + STEP_SECONDS * speed / _WHEELBASE * jnp.tan(steer),
    jnp.clip(speed + STEP_SECONDS * accelerate, 0.0, TOP_SPEED),
  ])  # fmt: skip


def _move_others(scenario: Scenario, state: State) -> Array:
  others, now = state.others, STEP_SECONDS * state.step
  x, y, heading, speed = jnp.moveaxis(others, -1, 0)
  accelerate = _idm(scenario, state)
  brakes = (now >= scenario.brake_from) & (now < scenario.brake_until)
  hard = jnp.where(speed > scenario.brake_to, -6.0, 0.0)
  accelerate = jnp.where(brakes, jnp.minimum(accelerate, hard), accelerate)
  accelerate = jnp.where(scenario.crosses, 0.0, accelerate)
  after = jnp.maximum(speed + STEP_SECONDS * accelerate, 0.0)
  most = _SIDEWAYS * STEP_SECONDS
  changes = (now >= scenario.change_at) & (speed > 0.5)
  sideways = jnp.where(changes, jnp.clip(scenario.change_to - y, -most, most), 0.0)
  forward = STEP_SECONDS * speed
  moved_y = y + jnp.where(scenario.crosses, forward * jnp.sin(heading), sideways)
  moved_x = x + jnp.where(scenario.crosses, forward * jnp.cos(heading), forward)
  turned = jnp.arctan2(sideways, jnp.maximum(forward, 1e-3))
  heading = jnp.where(scenario.crosses, heading, turned)
  return jnp.stack([moved_x, moved_y, heading, after], axis=-1)


def _idm(scenario: Scenario, state: State) -> Float[Array, " vehicles"]:
  """Accelerations by the distance to the nearest one ahead in the lane, the car included."""
  everybody = jnp.concatenate([state.others, state.ego[None]])
  length = jnp.append(scenario.size[:, 0], CAR[0])
  ahead = everybody[None, :, 0] - state.others[:, None, 0]
  in_lane = jnp.abs(everybody[None, :, 1] - state.others[:, None, 1]) < 2.0
  leads = in_lane & (ahead > 0.0) & jnp.append(scenario.present, True)[None]
  gaps = jnp.where(leads, ahead - (length[None] + scenario.size[:, :1]) / 2, _NEVER)
  leader = jnp.argmin(gaps, axis=1)
  gap = jnp.maximum(jnp.min(gaps, axis=1), 0.1)
  speed = state.others[:, 3]
  closing = speed - everybody[leader, 3] * jnp.cos(everybody[leader, 2])
  needed = speed * closing / (2 * (_IDM_ACCELERATION * _IDM_BRAKING) ** 0.5)
  desired_gap = _IDM_GAP + jnp.maximum(speed * _IDM_TIME + needed, 0.0)
  free = (speed / jnp.maximum(scenario.desired, 0.1)) ** 4
  accelerate = _IDM_ACCELERATION * (1.0 - free - (desired_gap / gap) ** 2)
  stands = scenario.desired == 0.0
  return jnp.where(stands, _BRAKE, jnp.clip(accelerate, _BRAKE, _ACCELERATE))
