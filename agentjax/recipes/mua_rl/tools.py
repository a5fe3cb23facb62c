"""The tools of the shop, on the database of one episode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus

_TEXT = {"type": "string"}


@dataclasses.dataclass
class Database:
  """Orders by number: item, size and price."""

  orders: dict[str, dict[str, Any]]

  def show_order(self, order: str) -> str:
    found = self._find(order)
    return f"{found['item']}, size {found['size']}, price {found['price']}"

  def change_size(self, order: str, size: str) -> str:
    self._find(order)["size"] = size
    return f"changed: {self.show_order(order)}"

  def cancel_order(self, order: str) -> str:
    self._find(order)
    del self.orders[order]
    return f"cancelled: order {order}"

  def _find(self, order: str) -> dict[str, Any]:
    if order not in self.orders:
      raise KeyError(f"there is no order {order!r}")
    return self.orders[order]


@dataclasses.dataclass
class ShopTool:
  """One operation on a database."""

  name: str
  description: str
  parameters: Mapping[str, Any]
  operation: Callable[..., str]
  stateful: bool = True

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    try:
      return ToolResult(ToolStatus.OK, self.operation(**arguments))
    except KeyError as error:
      return ToolResult(ToolStatus.ERROR, f"error: {error.args[0]}")


def shop_tools(database: Database) -> list[Tool]:
  """All operations."""

  def tool(operation: Callable[..., str], description: str, *names: str) -> ShopTool:
    schema = {
      "type": "object",
      "properties": dict.fromkeys(names, _TEXT),
      "required": list(names),
      "additionalProperties": False,
    }
    return ShopTool(operation.__name__, description, schema, operation)

  return [
    tool(database.show_order, "Shows an order.", "order"),
    tool(database.change_size, "Changes the size of an order.", "order", "size"),
    tool(database.cancel_order, "Cancels an order.", "order"),
  ]
