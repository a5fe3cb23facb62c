"""A shop's service desk: its records, and the tools that read and change them.

Records are those of tau-bench's retail domain (2406.12045): ``db_orders.json``,
``db_products.json``, ``db_users.json``. An episode sees the records as they are in the files, with
its own changes on top.
"""

from __future__ import annotations

import ast
import copy
import json
import operator
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from agentjax.data.errors import DataError
from agentjax.tools.function import FunctionTool, ToolError
from agentjax.tools.protocol import Tool, ToolContext

KINDS = ("orders", "products", "users")
Records = Mapping[str, Mapping[str, Any]]  # kind -> id -> record
_LONGEST = 200  # characters of an expression
_OPERATIONS: Mapping[type, Callable[[float, float], float]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}


def read_records(folder: pathlib.Path) -> Records:
  """The records of a folder.

  Raises:
    DataError: a file that is missing or no JSON object.
  """
  records = {}
  for kind in KINDS:
    path = folder / f"db_{kind}.json"
    try:
      records[kind] = json.loads(path.read_bytes())
    except FileNotFoundError:
      raise DataError("no such file", path) from None
    except (OSError, ValueError) as error:
      raise DataError(f"not JSON: {error}", path) from error
    if not isinstance(records[kind], dict):
      raise DataError(f"holds a {type(records[kind]).__name__}; allowed: an object", path)
  return records


class Visit:
  """The records as one episode sees them.

  Args:
    records: as they are at the beginning; never changed.
  """

  def __init__(self, records: Records):
    self._records = records
    self._own: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

  def find(self, kind: str, id: str) -> dict[str, Any]:
    """A record to read or to change.

    Raises:
      ToolError: there is none.
    """
    own = self._own[kind]
    if id not in own:
      if id not in self._records[kind]:
        raise ToolError(f"{kind[:-1]} not found")
      own[id] = copy.deepcopy(self._records[kind][id])
    return own[id]

  def records(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All records of a kind with their ids, to read alone."""
    own = self._own[kind]
    for id, record in self._records[kind].items():
      yield id, own[id] if id in own else record

  @property
  def changed(self) -> dict[str, dict[str, Any]]:
    """The records that differ from the beginning, by kind and id."""
    found = {
      kind: {id: record for id, record in own.items() if record != self._records[kind][id]}
      for kind, own in self._own.items()
    }
    return {kind: records for kind, records in found.items() if records}


class Desk:
  """The tools of a shop, for many episodes at once.

  Attributes:
    records: of the shop; set before the first episode.
    tools: in the order of their names.
  """

  READING = (
    "calculate",
    "find_user_id_by_email",
    "find_user_id_by_name_zip",
    "get_order_details",
    "get_product_details",
    "get_user_details",
    "list_all_product_types",
  )
  WRITING = (
    "cancel_pending_order",
    "exchange_delivered_order_items",
    "modify_pending_order_address",
    "modify_pending_order_items",
    "modify_pending_order_payment",
    "modify_user_address",
    "return_delivered_order_items",
    "transfer_to_human_agents",
  )

  def __init__(self) -> None:
    self.records: Records = {kind: {} for kind in KINDS}
    self._visits: dict[str, Visit] = {}
    self.tools: tuple[Tool, ...] = tuple(map(self._tool, (*self.READING, *self.WRITING)))

  def visit(self, episode: str) -> Visit:
    """The records of an episode."""
    if episode not in self._visits:
      self._visits[episode] = Visit(self.records)
    return self._visits[episode]

  async def end_episode(self, episode: str) -> None:
    """Forgets the changes of an episode."""
    self._visits.pop(episode, None)

  def _tool(self, name: str) -> Tool:
    tool: Any = FunctionTool(getattr(self, name))
    tool.stateful = name in self.WRITING
    tool.end_episode = self.end_episode
    return tool

  # Tools that read.

  async def calculate(self, expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses, to two decimals."""
    if len(expression) > _LONGEST:  # reading it costs the trainer time
      raise ToolError(f"{len(expression)} characters; allowed: at most {_LONGEST}")
    try:
      return str(round(_value(ast.parse(expression, mode="eval").body), 2))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
      raise ToolError(f"no value: {error}"[:200]) from error

  async def find_user_id_by_email(self, context: ToolContext, email: str) -> str:
    """The id of the user with an email address."""
    for id, user in self.visit(context.episode).records("users"):
      if user["email"].lower() == email.lower():
        return id
    raise ToolError("user not found")

  async def find_user_id_by_name_zip(
    self, context: ToolContext, first_name: str, last_name: str, zip: str
  ) -> str:
    """The id of the user with a name and a zip code."""
    wanted = (first_name.lower(), last_name.lower(), zip)
    for id, user in self.visit(context.episode).records("users"):
      name = user["name"]
      known = (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"])
      if known == wanted:
        return id
    raise ToolError("user not found")

  async def get_order_details(self, context: ToolContext, order_id: str) -> str:
    """Status, items, address and payments of an order.

    Args:
      order_id: such as #W0000000.
    """
    return _shown(self.visit(context.episode).find("orders", order_id))

  async def get_product_details(self, context: ToolContext, product_id: str) -> str:
    """All variants of a product, with item ids, prices and whether they are available."""
    return _shown(self.visit(context.episode).find("products", product_id))

  async def get_user_details(self, context: ToolContext, user_id: str) -> str:
    """Name, address, payment methods and orders of a user."""
    return _shown(self.visit(context.episode).find("users", user_id))

  async def list_all_product_types(self) -> str:
    """Name and product id of all products."""
    products = self.records["products"].values()
    return json.dumps({p["name"]: p["product_id"] for p in products}, sort_keys=True)

  # Tools that write.

  async def cancel_pending_order(
    self,
    context: ToolContext,
    order_id: str,
    reason: Literal["no longer needed", "ordered by mistake"],
  ) -> str:
    """Cancels a pending order and refunds what was paid."""
    visit = self.visit(context.episode)
    order = _order(visit, order_id, "pending", "cancelled")
    refunds = [
      _paid("refund", payment["amount"], payment["payment_method_id"])
      for payment in order["payment_history"]
    ]
    for refund in refunds:
      _move(visit, order, refund["payment_method_id"], refund["amount"])
    order["status"], order["cancel_reason"] = "cancelled", reason
    order["payment_history"] += refunds
    return _shown(order)

  async def exchange_delivered_order_items(
    self,
    context: ToolContext,
    order_id: str,
    item_ids: list[str],
    new_item_ids: list[str],
    payment_method_id: str,
  ) -> str:
    """Asks for items of a delivered order to be exchanged for others of the same products."""
    visit = self.visit(context.episode)
    order = _order(visit, order_id, "delivered", "exchanged")
    difference = sum(
      new["price"] - old["price"] for old, new in _pairs(visit, order, item_ids, new_item_ids)
    )
    difference = round(difference, 2)
    _check_balance(visit, order, payment_method_id, difference, "the price difference")
    order |= {
      "status": "exchange requested",
      "exchange_items": sorted(item_ids),
      "exchange_new_items": sorted(new_item_ids),
      "exchange_payment_method_id": payment_method_id,
      "exchange_price_difference": difference,
    }
    return _shown(order)

  async def modify_pending_order_address(
    self,
    context: ToolContext,
    order_id: str,
    address1: str,
    address2: str,
    city: str,
    state: str,
    country: str,
    zip: str,
  ) -> str:
    """Changes where a pending order is sent."""
    order = _order(self.visit(context.episode), order_id, "pending", "modified")
    order["address"] = _address(address1, address2, city, state, country, zip)
    return _shown(order)

  async def modify_pending_order_items(
    self,
    context: ToolContext,
    order_id: str,
    item_ids: list[str],
    new_item_ids: list[str],
    payment_method_id: str,
  ) -> str:
    """Changes items of a pending order to others of the same products; possible once."""
    visit = self.visit(context.episode)
    order = _order(visit, order_id, "pending", "modified", exactly=True)
    pairs = _pairs(visit, order, item_ids, new_item_ids)
    difference = sum(new["price"] - old["price"] for old, new in pairs)
    _check_balance(visit, order, payment_method_id, difference, "the new item")
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_paid(kind, abs(difference), payment_method_id))
    _move(visit, order, payment_method_id, -difference)
    for old, new in pairs:
      old |= {name: new[name] for name in ("item_id", "price", "options")}
    order["status"] = "pending (item modified)"
    return _shown(order)

  async def modify_pending_order_payment(
    self, context: ToolContext, order_id: str, payment_method_id: str
  ) -> str:
    """Changes what a pending order is paid with."""
    visit = self.visit(context.episode)
    order = _order(visit, order_id, "pending", "modified")
    _method(visit, order, payment_method_id)
    history = order["payment_history"]
    if len(history) != 1 or history[0]["transaction_type"] != "payment":
      raise ToolError("there should be exactly one payment for a pending order")
    before, amount = history[0]["payment_method_id"], history[0]["amount"]
    if before == payment_method_id:
      raise ToolError("the new payment method should be different from the current one")
    _check_balance(visit, order, payment_method_id, amount, "the order")
    history += [_paid("payment", amount, payment_method_id), _paid("refund", amount, before)]
    _move(visit, order, payment_method_id, -amount)
    _move(visit, order, before, amount)
    return _shown(order)

  async def modify_user_address(
    self,
    context: ToolContext,
    user_id: str,
    address1: str,
    address2: str,
    city: str,
    state: str,
    country: str,
    zip: str,
  ) -> str:
    """Changes the address of a user."""
    user = self.visit(context.episode).find("users", user_id)
    user["address"] = _address(address1, address2, city, state, country, zip)
    return _shown(user)

  async def return_delivered_order_items(
    self, context: ToolContext, order_id: str, item_ids: list[str], payment_method_id: str
  ) -> str:
    """Asks for items of a delivered order to be returned."""
    visit = self.visit(context.episode)
    order = _order(visit, order_id, "delivered", "returned")
    _method(visit, order, payment_method_id)
    original = order["payment_history"][0]["payment_method_id"]
    if payment_method_id != original and not payment_method_id.startswith("gift_card"):
      raise ToolError("payment method should be either the original payment method or a gift card")
    _check_items(order, item_ids)
    order |= {
      "status": "return requested",
      "return_items": sorted(item_ids),
      "return_payment_method_id": payment_method_id,
    }
    return _shown(order)

  async def transfer_to_human_agents(self, summary: str) -> str:
    """Hands the user over to a person, with a summary."""
    return "Transfer successful"


def _order(
  visit: Visit, id: str, status: str, done: str, *, exactly: bool = False
) -> dict[str, Any]:
  order = visit.find("orders", id)
  fits = order["status"] == status if exactly else status in order["status"]
  if not fits:
    raise ToolError(f"non-{status} order cannot be {done}")
  return order


def _method(visit: Visit, order: Mapping[str, Any], id: str) -> dict[str, Any]:
  methods = visit.find("users", order["user_id"])["payment_methods"]
  if id not in methods:
    raise ToolError("payment method not found")
  return methods[id]


def _check_balance(
  visit: Visit, order: Mapping[str, Any], id: str, amount: float, what: str
) -> None:
  method = _method(visit, order, id)
  if method["source"] == "gift_card" and method["balance"] < amount:
    raise ToolError(f"insufficient gift card balance to pay for {what}")


def _move(visit: Visit, order: Mapping[str, Any], id: str, amount: float) -> None:
  """Puts money on a gift card; other methods hold none."""
  method = _method(visit, order, id)
  if method["source"] == "gift_card":
    method["balance"] = round(method["balance"] + amount, 2)


def _check_items(order: Mapping[str, Any], item_ids: list[str]) -> None:
  known = Counter(item["item_id"] for item in order["items"])
  for id, count in Counter(item_ids).items():
    if count > known[id]:
      raise ToolError(f"{id[:40]} not found")


def _pairs(
  visit: Visit, order: Mapping[str, Any], item_ids: list[str], new_item_ids: list[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
  """Items of an order, each with the variant that takes its place."""
  _check_items(order, item_ids)
  if len(item_ids) != len(new_item_ids):
    raise ToolError("the number of items to be exchanged should match")
  pairs, left = [], list(order["items"])
  for id, new in zip(item_ids, new_item_ids, strict=True):
    item = next(item for item in left if item["item_id"] == id)
    left = [other for other in left if other is not item]
    variant = visit.find("products", item["product_id"])["variants"].get(new)
    if variant is None or not variant["available"]:
      raise ToolError(f"new item {new[:40]} not found or available")
    pairs.append((item, variant))
  return pairs


def _paid(kind: str, amount: float, method: str) -> dict[str, Any]:
  return {"transaction_type": kind, "amount": amount, "payment_method_id": method}


def _address(*values: str) -> dict[str, str]:
  names = ("address1", "address2", "city", "state", "country", "zip")
  return dict(zip(names, values, strict=True))


def _shown(record: Mapping[str, Any]) -> str:
  return json.dumps(record)


def _value(node: ast.expr) -> float:
  value = node.value if isinstance(node, ast.Constant) else None
  if isinstance(value, int | float) and not isinstance(value, bool):
    return float(value)
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
    operand = _value(node.operand)
    return -operand if isinstance(node.op, ast.USub) else operand
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
  raise ValueError("only numbers, + - * / and parentheses")
