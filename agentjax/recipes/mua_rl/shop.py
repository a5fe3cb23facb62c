"""A shop with orders, a user who wants one of them changed, and the tools of the one who serves.

The user opens with what is wanted in general. The number of the order and the new size are told
when they are asked for. When the assistant says that it is done, the user ends the conversation.
Every episode has a database of its own. It pays 1 if the database is then in the state that it
should be in, and every text that had to be said stands in a message of the assistant, in small
letters and without commas; else 0.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Mapping
from typing import Any

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.config import AtLeastTwo
from agentjax.recipes.mua_rl.tools import Database, shop_tools
from agentjax.rewards.judges import Judge, ask, question_key
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Reward, Status, Task, ToolCall
from agentjax.world.cheats import Turns, claims, each
from agentjax.world.environment import Action, Observation, Step
from agentjax.world.games import GameConfig, GameWorld
from agentjax.world.question import QuestionEnvironment

STOP = "###STOP###"
_ITEMS = ("shirt", "coat", "hat", "shoe")
_SIZES = ("small", "medium", "large")
_SYSTEM = "You serve a shop. Ask for what you need, use the tools, and say when it is done."


@dataclasses.dataclass(unsafe_hash=True)
class ShopConfig(GameConfig):
  """Settings of the shop; all figures are ours.

  Attributes:
    orders: in the database.
    max_turns: of the assistant.
    user: a model behind an endpoint that plays the user; None is a script.
  """

  orders: AtLeastTwo = 3
  max_turns: AtLeastTwo = 6
  user: HttpJudgeConfig | None = None

  def build(self, site: Any) -> ShopWorld:
    return ShopWorld(self)

  def game(self) -> Shop:
    return Shop(self, None if self.user is None else HttpJudge(self.user))

  def make_tasks(self, count: int, **place: Any) -> list[Task]:
    seed = f"{place['seed']}/{place['split']}"
    first = place["first_id"]
    return [self._task(random.Random(f"{seed}/{i}"), first + i) for i in range(count)]

  def _task(self, draw: random.Random, id: int) -> Task:
    numbers = draw.sample(range(100, 1000), self.orders)
    orders = {
      str(n): {"item": draw.choice(_ITEMS), "size": draw.choice(_SIZES), "price": 10 * i + 11}
      for i, n in enumerate(numbers)
    }
    number = str(draw.choice(numbers))
    order = orders[number]
    size = draw.choice([s for s in _SIZES if s != order["size"]])
    goal = {"order": number, "size": size}
    opening = f"Please change the size of my {order['item']}."
    prompt = (Message("system", _SYSTEM), Message("user", opening))
    metadata = {"orders": orders, "goal": goal, "outputs": [str(order["price"])]}
    task = Task(id, prompt, "", "shop", metadata=metadata)
    return dataclasses.replace(task, demonstration=self._demonstration(task))

  def solution(self, task: Task) -> Turns:
    """What the assistant says and calls."""
    return tuple(message for message in task.demonstration if message.role == "assistant")

  def _demonstration(self, task: Task) -> tuple[Message, ...]:
    goal, said = task.metadata["goal"], task.metadata["outputs"]
    call = ToolCall("change_size", {"order": goal["order"], "size": goal["size"]})
    result = _changed(task.metadata["orders"][goal["order"]], goal)
    return (
      Message("assistant", "Which order is it?"),
      Message("user", _order_answer(goal)),
      Message("assistant", "Which size do you want?"),
      Message("user", _size_answer(goal)),
      Message("assistant", "", (call,)),
      Message("tool", result),
      Message("assistant", f"It is done, the price is {said[0]}."),
    )

  def cheats(self, task: Task) -> Mapping[str, Turns]:
    """Claims, wrong changes, a right change with a wrong one, and prices without a change."""
    goal, orders = task.metadata["goal"], task.metadata["orders"]
    right = ToolCall("change_size", dict(goal))
    other = next(n for n in orders if n != goal["order"])
    sizes = [s for s in _SIZES if s != orders[other]["size"]]
    wrong = ToolCall("change_size", {"order": other, "size": sizes[0]})
    prices = " ".join(str(order["price"]) for order in orders.values())
    done = Message("assistant", f"It is done, the price is one of {prices}.")
    cancel = ToolCall("cancel_order", {"order": goal["order"]})
    return {
      **each(claims(task), lambda text: f"done {text}"),
      "nothing": (done,),
      "another_order": (Message("assistant", "", (wrong,)), done),
      "both_orders": (Message("assistant", "", (right, wrong)), done),
      "cancelled": (Message("assistant", "", (cancel,)), done),
      "without_the_price": (
        Message("assistant", "", (right,)),
        Message("assistant", "It is done."),
      ),
    }


class ShopWorld(GameWorld):
  """The world of a ShopConfig."""

  def __init__(self, config: ShopConfig):
    super().__init__(config)
    self.tools = tuple(shop_tools(Database({})))


class Shop(QuestionEnvironment):
  """One conversation; see the module.

  Args:
    config: see ShopConfig; its ``user`` is not used.
    user: plays the user; None is the script.
  """

  def __init__(self, config: ShopConfig, user: Judge | None = None):
    self._database, self._user = Database({}), user
    super().__init__(ToolRegistry(shop_tools(self._database)), max_turns=config.max_turns)
    self._spoken: list[str] = []

  async def reset(self, task: Task, key: int) -> Observation:
    self._database.orders = copy.deepcopy(task.metadata.get("orders", {}))
    self._spoken = []
    return await super().reset(task, key)

  async def step(self, action: Action) -> Step:
    self._spoken.append(action.text)
    talks = not action.tool_calls and not action.truncated and self._turn + 1 < self._max_turns
    if not talks:
      step = await super().step(action)
      over = step.terminated or step.truncated
      # The last turn may only close: who was never answered has not served.
      return dataclasses.replace(step, reward=Reward(self._paid(step.status) if over else 0.0))
    self._turn += 1
    self._conversation.append(Message("assistant", action.text))
    reply = await self._answer_of_user()
    if STOP in reply:
      self._ended = True
      return Step(Observation(()), Reward(self._paid(Status.OK)), terminated=True)
    message = Message("user", reply)
    self._conversation.append(message)
    return Step(Observation((message,)), Reward(0.0))

  def snapshot(self) -> Any:
    return None  # a user behind an endpoint has none

  def _paid(self, status: Status) -> float:
    assert self._task is not None
    if status is not Status.OK:
      return 0.0
    right = copy.deepcopy(self._task.metadata["orders"])
    goal = self._task.metadata["goal"]
    right[goal["order"]]["size"] = goal["size"]
    said = "\n".join(self._spoken).lower().replace(",", "")
    told = all(_stands_in(text, said) for text in self._task.metadata["outputs"])
    return float(told and state_hash(right) == state_hash(self._database.orders))

  async def _answer_of_user(self) -> str:
    assert self._task is not None
    goal = self._task.metadata["goal"]
    if self._user is None:
      return scripted_user(goal, self._spoken[-1])
    wanted = f"order {goal['order']} in size {goal['size']}"
    rules = (
      f"You are a customer. You want {wanted}. Tell a detail only when you are asked for it. When "
      f"you are told that it is done, answer {STOP}."
    )
    # To the user's model the assistant is the one who asks.
    turned = [
      Message("user" if m.role == "assistant" else "assistant", m.content)
      for m in self._conversation
      if m.role in ("assistant", "user") and m.content
    ]
    key = question_key(self._key, self._turn)
    return await ask(self._user, [Message("system", rules), *turned], key=key)


def scripted_user(goal: Mapping[str, str], text: str) -> str:
  """What the script answers: the end if it is done, else what was asked for."""
  words = set(re.findall(r"[a-z]+", text.lower()))
  if "done" in words:
    return STOP
  answers = [
    answer(goal)
    for asked, answer in (({"order", "number"}, _order_answer), ({"size"}, _size_answer))
    if asked & words
  ]
  return " ".join(answers) or "What do you need to know?"


def state_hash(orders: Mapping[str, Any]) -> str:
  """Of a database: equal states have one hash."""
  return hashlib.sha256(json.dumps(orders, sort_keys=True).encode()).hexdigest()


def _stands_in(text: str, said: str) -> bool:
  """Whether the words of an output stand in what was said, not as part of a longer word."""
  wanted = re.escape(text.lower().replace(",", ""))
  return re.search(rf"(?<!\w){wanted}(?!\w)", said) is not None


def _order_answer(goal: Mapping[str, str]) -> str:
  return f"It is order {goal['order']}."


def _size_answer(goal: Mapping[str, str]) -> str:
  return f"I want {goal['size']}."


def _changed(order: Mapping[str, Any], goal: Mapping[str, str]) -> str:
  return Database({goal["order"]: dict(order)}).change_size(goal["order"], goal["size"])
