"""The shop: what the user tells, what is paid, and that episodes do not share a database."""

import asyncio
import pathlib

import pytest

from agentjax.recipes.mua_rl import ShopConfig
from agentjax.recipes.mua_rl.shop import STOP, Shop, scripted_user
from agentjax.training import load_experiment
from agentjax.training.reward_gates import check_experiment
from agentjax.trajectory.record import Status, ToolCall
from agentjax.world.environment import Action
from tests.rewards.judging import Scripted

CONFIG = ShopConfig()
(TASK,) = CONFIG.make_tasks(1, split="train", seed=0, first_id=0)
GOAL, PRICE = TASK.metadata["goal"], TASK.metadata["outputs"][0]
CHANGE = ToolCall("change_size", dict(GOAL))
_FILE = pathlib.Path(__file__).parents[3] / "configs" / "mua_rl_shop.py"


def play(*turns, user=None):
  """Steps of a conversation; a turn is a text or calls."""

  async def conversation():
    shop = Shop(CONFIG, user)
    await shop.reset(TASK, 1)
    steps = []
    for turn in turns:
      action = Action(turn) if isinstance(turn, str) else Action("", tuple(turn))
      steps.append(await shop.step(action))
      if steps[-1].terminated or steps[-1].truncated:
        break
    await shop.close()
    return steps

  return asyncio.run(conversation())


def test_who_asks_and_changes_and_says_the_price_is_paid():
  steps = play("Which order?", "Which size?", [CHANGE], f"Done, {PRICE}.")
  assert GOAL["order"] in steps[0].observation.messages[0].content
  assert GOAL["size"] in steps[1].observation.messages[0].content
  assert [step.reward.value for step in steps] == [0, 0, 0, 1] and steps[-1].terminated


@pytest.mark.parametrize(
  "turns",
  [
    (f"Done, {PRICE}.",),
    ([CHANGE], "Done."),  # the price was not said
    ([CHANGE], f"Done, 1{PRICE}."),
    ([CHANGE, ToolCall("cancel_order", {"order": GOAL["order"]})], f"Done, {PRICE}."),
    ([CHANGE], *["Hello?"] * 9),  # never closed
  ],
)
def test_another_state_or_silence_earns_nothing(turns):
  assert sum(step.reward.value for step in play(*turns)) == 0


def test_the_user_tells_what_is_asked_for_alone():
  """A policy that never asks can only guess among the orders."""
  assert GOAL["order"] not in scripted_user(GOAL, "Hello!")
  assert GOAL["order"] not in scripted_user(GOAL, "Which size?")
  assert scripted_user(GOAL, "It is DONE.") == STOP
  opening = TASK.prompt[-1].content
  assert GOAL["order"] not in opening and GOAL["size"] not in opening


def test_two_episodes_share_no_database():
  before = str(TASK.metadata)
  play([CHANGE], "Done.")
  fresh = play([ToolCall("show_order", {"order": GOAL["order"]})], "Done.")
  order = TASK.metadata["orders"][GOAL["order"]]
  assert f"size {order['size']}" in fresh[0].tools[0].output and str(TASK.metadata) == before


def test_an_unknown_order_is_an_error_that_the_policy_reads():
  (step, *_) = play([ToolCall("show_order", {"order": "1"})], "Done.")
  assert step.tools[0].status == "error" and "no order" in step.tools[0].output


def test_a_model_may_play_the_user():
  judge = Scripted(lambda messages, key: STOP if "ready" in messages[-1].content else "Order?")
  steps = play("Which order?", [CHANGE], f"ready {PRICE}", user=judge)
  assert steps[-1].reward.value == 1
  rules, opening, asked = judge.asked[0][0]
  assert GOAL["order"] in rules.content and opening.role == "assistant" and asked.role == "user"


def test_the_last_turn_may_close_and_a_call_in_it_is_cut():
  steps = play(*["Hm?"] * 4, [CHANGE], f"Done, {PRICE}.")
  assert len(steps) == 6 and steps[-1].reward.value == 1
  cut = play(*["Hm?"] * 5, [CHANGE])[-1]
  assert cut.status is Status.TRUNCATED and cut.reward.value == 0


def test_the_worked_solution_is_paid_and_cheats_are_not():
  experiment = load_experiment(_FILE)
  experiment.data.train_size = experiment.data.test_size = 2
  results = asyncio.run(check_experiment(experiment, tasks=2))
  assert len(results) > 20
  assert [(r.attempt, r.reward, r.detail) for r in results if not r.held] == []
