"""Prints the table attack | expected | seen for a machine: ``python -m tests.sandbox.attacks``.

  --machine NAME  one of tests.sandbox.machines.MACHINES (default native)
  --session       each attack as a cell of an interpreter session
  --only TEXT     attacks whose name contains TEXT

Exits with 1 where an attack was not contained.
"""

from __future__ import annotations

import argparse
import sys

from tests.sandbox.attacks.table import ATTACKS
from tests.sandbox.attacks.world import World
from tests.sandbox.machines import MACHINES, Machine, NoMachine


def main() -> int:
  parser = argparse.ArgumentParser(description="Attacks on the embedded sandbox.")
  parser.add_argument("--machine", choices=MACHINES, default="native")
  parser.add_argument("--session", action="store_true")
  parser.add_argument("--only", default="")
  options = parser.parse_args()
  try:
    machine = Machine(options.machine)
  except NoMachine as reason:
    print(reason)
    return 1
  world = World(machine)
  print(f"machine {machine.name}; protections: {', '.join(machine.hello['protections'])}\n")
  print(f"{'attack':28} | {'expected':22} | {'seen':14} | what it tries\n{'-' * 110}")
  escaped = 0
  before = world.census()
  for attack in ATTACKS:
    if options.only not in attack.name:
      continue
    expected = "/".join(attack.expected)
    if attack.needs and not machine.grants(attack.needs):
      print(f"{attack.name:28} | {expected:22} | {'not promised':14} | {attack.tries}")
      continue
    results = world.results([attack], as_cells=options.session)[0]
    problems = world.verdict(attack, results) + world.harm()
    escaped += bool(problems)
    seen = results[-1 if attack.after else 0]["status"]
    print(f"{attack.name:28} | {expected:22} | {seen:14} | {attack.tries}")
    for problem in problems[:5]:
      print(f"{'':28} > NOT CONTAINED: {problem}")
  machine.ask({"end_session": True})
  after = world.census()
  print(f"\n{'the machine':28} | {'before':22} | after")
  for name, count in before.items():
    print(f"{name:28} | {count:<22} | {after[name]}")
    escaped += after[name] != count
  world.close()
  machine.close()
  print(f"\n{'all contained' if not escaped else f'{escaped} not contained'}")
  return 1 if escaped else 0


if __name__ == "__main__":
  sys.exit(main())
