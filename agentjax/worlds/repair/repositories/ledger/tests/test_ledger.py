import unittest

from ledger import Account, compound, format_money, parse_money, split_evenly, transfer


class LedgerTest(unittest.TestCase):
  def test_account(self):
    account = Account()
    self.assertEqual(account.deposit(500), 500)
    self.assertEqual(account.withdraw(200), 300)
    self.assertEqual(account.balance(), 300)

  def test_money(self):
    self.assertEqual(parse_money("12.34"), 1234)
    self.assertEqual(format_money(1234), "12.34")
    self.assertEqual(split_evenly(100, 2), [50, 50])

  def test_terms(self):
    self.assertEqual(compound(1000, 10, 1), 1100)
    self.assertEqual(transfer(10, 50, 5), (40, 15))


if __name__ == "__main__":
  unittest.main()
