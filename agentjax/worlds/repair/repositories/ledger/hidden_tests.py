from ledger import (
  Account,
  compound,
  format_money,
  parse_money,
  payments,
  split_evenly,
  transfer,
)


def test_overdraft_edge():
  account = Account(100)
  account.deposit(50)
  assert account.withdraw(150) == -100
  assert account.withdraw(1) is False
  assert account.balance() == -100


def test_no_overdraft():
  account = Account()
  account.deposit(10)
  assert account.withdraw(11) is False
  assert account.withdraw(10) == 0


def test_amounts_must_be_positive():
  refused = 0
  for amount in (0, -5):
    try:
      Account().deposit(amount)
    except ValueError:
      refused += 1
    try:
      Account(10).withdraw(amount)
    except ValueError:
      refused += 1
  assert refused == 4


def test_statement():
  account = Account()
  account.deposit(100, "pay")
  account.withdraw(30, "rent")
  account.deposit(5, "gift")
  account.withdraw(1, "fee")
  assert account.statement(2) == [("fee", -1, 74), ("gift", 5, 75)]
  assert len(account.statement()) == 3


def test_spent():
  account = Account(50)
  account.deposit(100)
  account.withdraw(30)
  account.withdraw(90)
  assert account.spent() == 120


def test_transfer():
  assert transfer(45, 50, 5, 5) == (0, 50)
  assert transfer(46, 50, 5, 5) == (50, 5)
  assert transfer(10, 50, 5, 2) == (38, 15)


def test_parse_money():
  assert parse_money(" -1,234.5 ") == -123450
  assert parse_money("7") == 700
  assert parse_money(".05") == 5
  assert parse_money("3.50") == 350


def test_parse_money_refuses():
  raised = False
  try:
    parse_money("1.234")
  except ValueError:
    raised = True
  assert raised


def test_format_money():
  assert format_money(-123450) == "-1,234.50"
  assert format_money(5) == "0.05"
  assert format_money(0) == "0.00"
  assert format_money(100) == "1.00"


def test_split_evenly():
  assert split_evenly(100, 3) == [34, 33, 33]
  assert split_evenly(101, 3) == [34, 34, 33]
  assert split_evenly(5, 1) == [5]


def test_split_needs_people():
  raised = False
  try:
    split_evenly(10, 0)
  except ValueError:
    raised = True
  assert raised


def test_compound():
  assert compound(1000, 5, 3) == 1157
  assert compound(99, 1, 4) == 99
  assert compound(500, 20, 0) == 500


def test_payments():
  assert payments(100, 30) == 4
  assert payments(90, 30) == 3
  assert payments(100, 30, 10) == 5
  assert payments(1000, 100, 10) is None
  assert payments(0, 5) == 0
