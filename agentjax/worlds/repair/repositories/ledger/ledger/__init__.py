"""Accounts in whole cents."""

from .account import Account, transfer
from .money import format_money, parse_money, split_evenly
from .terms import compound, payments

__all__ = [
  "Account",
  "compound",
  "format_money",
  "parse_money",
  "payments",
  "split_evenly",
  "transfer",
]
