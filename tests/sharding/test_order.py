"""The order of what lanes and all processes dispatch."""

import threading

import pytest

from agentjax.sharding import dispatching, order


class Recorded:
  """A border that writes down how it is crossed."""

  def __init__(self):
    self.seen = []

  def approach(self):
    self.seen.append("approach")

  def enter(self):
    self.seen.append("enter")

  def leave(self):
    self.seen.append("leave")


@pytest.fixture
def border(monkeypatch):
  made = Recorded()
  monkeypatch.setattr(order, "BORDERS", [made])
  return made


def test_programs_of_all_processes_cross_a_border_once_however_deep_they_are(border):
  with dispatching(), dispatching(), dispatching(of_lane=True):
    border.seen.append("dispatched")
  assert border.seen == ["approach", "enter", "dispatched", "leave"]


def test_programs_of_a_lane_cross_none_and_neither_does_what_they_contain(border):
  with dispatching(of_lane=True), dispatching():
    border.seen.append("dispatched")
  assert border.seen == ["dispatched"]


def test_a_lane_may_dispatch_while_another_thread_waits_at_a_border_but_not_behind_it(border):
  waits, may_enter, entered, done = (threading.Event() for _ in range(4))

  def approach():
    waits.set()
    assert may_enter.wait(10)

  border.approach = approach

  def everyone():
    with dispatching():
      entered.set()
      assert done.wait(10)

  thread = threading.Thread(target=everyone)
  thread.start()
  assert waits.wait(10)
  with dispatching(of_lane=True):  # what comes before the border
    may_enter.set()
    assert not entered.wait(0.1)
  assert entered.wait(10)
  after = threading.Event()

  def lane():
    with dispatching(of_lane=True):
      after.set()

  other = threading.Thread(target=lane)
  other.start()
  assert not after.wait(0.1)
  done.set()
  assert after.wait(10)
  thread.join()
  other.join()


def test_an_error_inside_gives_the_lock_back_and_leaves_the_border(border):
  with pytest.raises(RuntimeError), dispatching():
    raise RuntimeError
  assert border.seen[-1] == "leave"
  with dispatching():
    pass
  assert border.seen == ["approach", "enter", "leave"] * 2
