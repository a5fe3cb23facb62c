"""Every attack of the table is contained, and leaves the machine as it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sandbox.attacks.table import ATTACKS, Attack
from tests.sandbox.attacks.world import World
from tests.sandbox.machines import MACHINES, Machine, NoMachine

_FAST = ("native", "user")  # root, where the tests are, and an ordinary user
_BY_NAME = {attack.name: attack for attack in ATTACKS}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[tuple[str, str], tuple[World, dict[str, Any]]]]:
  """World and its census before any attack, by machine and disk; started when first asked for.

  In the end each machine must be as it was before the attacks.
  """
  started: dict[tuple[str, str], tuple[World, dict[str, Any]]] = {}
  yield started
  try:
    for world, before in started.values():
      world.machine.ask({"end_session": True})
      assert world.census() == before
  finally:
    for world, _ in started.values():
      world.close()
      world.machine.close()


def _world(worlds: Any, name: str, disk: str = "memory") -> World:
  if (name, disk) not in worlds:
    try:
      world = World(Machine(name, {"disk": disk}))
    except NoMachine as reason:
      pytest.skip(str(reason))
    worlds[name, disk] = world, world.census()
  return worlds[name, disk][0]


def _carry_out(
  worlds: Any, machine: str, attack: Attack, *, as_cells: bool = False, disk: str = "memory"
) -> None:
  world = _world(worlds, machine, disk)
  if attack.needs and not world.machine.grants(attack.needs):
    pytest.skip(f"machine {machine} does not promise {attack.needs}, and says so")
  assert world.carry_out(attack, as_cells=as_cells) == []


@pytest.mark.parametrize("machine", _FAST)
@pytest.mark.parametrize("name", _BY_NAME)
def test_attack_is_contained(worlds: Any, name: str, machine: str) -> None:
  _carry_out(worlds, machine, _BY_NAME[name])


_WALLS = ("fork bomb", "kills", "hinders the trainer", "memory of nobody", "reads files",
          "ways around", "writes outside")  # fmt: skip


# What rests on another wall in each machine.
@pytest.mark.parametrize("machine", [m for m in MACHINES if m not in _FAST])
@pytest.mark.parametrize("name", _WALLS)
def test_attack_is_contained_by_weaker_walls(worlds: Any, name: str, machine: str) -> None:
  _carry_out(worlds, machine, _BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("machine", [m for m in MACHINES if m not in _FAST])
@pytest.mark.parametrize("name", _BY_NAME)
def test_every_attack_is_contained_by_weaker_walls(worlds: Any, name: str, machine: str) -> None:
  _carry_out(worlds, machine, _BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", _BY_NAME)
def test_attack_from_a_cell_of_a_session_is_contained(worlds: Any, name: str, machine: str) -> None:
  _carry_out(worlds, machine, _BY_NAME[name], as_cells=True)


_OF_DISKS = ("many files", "deleted files", "sparse file", "inode flood", "deep directories",
             "mapped deleted files", "files behind a dead first thread", "files without a name",
             "descriptors in flight", "closes its own directory", "second slot",
             "changes the parent")  # fmt: skip


@pytest.mark.parametrize("machine", _FAST)
@pytest.mark.parametrize("name", _OF_DISKS)
def test_attack_is_contained_where_disks_are_watched(worlds: Any, name: str, machine: str) -> None:
  _carry_out(worlds, machine, _BY_NAME[name], disk="directory")


@pytest.mark.parametrize("name", ["kills", "daemon", "writes to every descriptor", "reads files"])
def test_attack_from_a_cell_is_contained(worlds: Any, name: str) -> None:
  _carry_out(worlds, "native", _BY_NAME[name], as_cells=True)


@pytest.mark.slow
@pytest.mark.parametrize("machine", _FAST)
def test_machine_is_unharmed_by_five_thousand_hostile_runs(worlds: Any, machine: str) -> None:
  world = _world(worlds, machine)
  attacks = [a for a in ATTACKS if not a.needs or world.machine.grants(a.needs)]
  world.results(attacks[:8])  # what is loaded once is
  before, resident = world.census(), world.resident_bytes()
  runs = 0
  for attack_round in itertools.count():
    # Those that end at a limit take the most time: every fifth round.
    chosen = attacks if attack_round % 5 == 0 else [a for a in attacks if a.expected == ("ok",)]
    for at in range(0, len(chosen), 4):
      batch = chosen[at : at + 4]
      for attack, results in zip(batch, world.results(batch), strict=True):
        runs += len(results)
        assert world.verdict(attack, results) == [], (attack.name, runs)
      assert world.harm() == [], ([attack.name for attack in batch], runs)
    if runs >= 5000:
      break
  assert world.census() == before
  assert world.resident_bytes() < resident + 2**24
