"""An account with a limit, and what was booked on it."""


class Account:
  """Holds cents; the balance may fall to ``-overdraft``."""

  def __init__(self, overdraft=0):
    self.overdraft = overdraft
    self.entries = []

  def balance(self):
    """Sum of all entries."""
    return sum(amount for _, amount in self.entries)

  def deposit(self, amount, note="deposit"):
    """Adds a positive amount and returns the new balance."""
    if amount <= 0:
      raise ValueError("a deposit must be positive")
    self.entries.append((note, amount))
    return self.balance()

  def withdraw(self, amount, note="withdrawal"):
    """Takes a positive amount and returns the new balance; False where the limit forbids it."""
    if amount <= 0:
      raise ValueError("a withdrawal must be positive")
    if self.balance() - amount < -self.overdraft:
      return False
    self.entries.append((note, -amount))
    return self.balance()

  def statement(self, last=3):
    """The last entries with the balance after each, the newest first."""
    lines = []
    running = 0
    for note, amount in self.entries:
      running += amount
      lines.append((note, amount, running))
    return list(reversed(lines[-last:]))

  def spent(self):
    """Sum of all that was withdrawn, as a positive number."""
    return -sum(amount for _, amount in self.entries if amount < 0)


def transfer(amount, balance_from, balance_to, fee=0):
  """Balances after a transfer whose fee the sender pays; unchanged where that is too much."""
  if amount + fee > balance_from:
    return balance_from, balance_to
  return balance_from - amount - fee, balance_to + amount
