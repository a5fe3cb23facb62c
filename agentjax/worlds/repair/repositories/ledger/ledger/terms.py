"""Interest and repayment."""


def compound(cents, percent, years):
  """What a sum grows to with yearly interest, rounded down to a cent each year."""
  for _ in range(years):
    cents += cents * percent // 100
  return cents


def payments(debt, rate, percent=0):
  """Yearly payments until a debt is paid off; None where interest eats them up."""
  count = 0
  while debt > 0:
    interest = debt * percent // 100
    if interest >= rate:
      return None
    debt = debt + interest - rate
    count += 1
  return count
