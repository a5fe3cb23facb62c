"""What several processes do together, checked from inside; each process runs this module.

The last process ends by a signal or by an error, as the fourth argument says.
"""

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

INDEX, COUNT = int(sys.argv[1]), int(sys.argv[2])


class Watched(np.ndarray):
  """Counts the numbers that are read."""

  read = 0

  def __getitem__(self, at):
    part = super().__getitem__(at)
    Watched.read += part.size
    return part


def encoded(trajectories) -> bytes:
  from agentjax.trajectory.recordlog import encode_record
  from agentjax.trajectory.store import to_record

  return encode_record({"all": [to_record(t) for t in trajectories]})


def keep_order() -> list[str]:
  """Lets programs of all devices start only under the lock; names of those that did."""
  from agentjax.sharding import order

  started: list[str] = []

  def watched(name, function):
    def call(*args, **kwargs):
      free: list[bool] = []
      other = threading.Thread(target=lambda: free.append(order._lock.acquire(blocking=False)))
      other.start()
      other.join()
      assert free == [False], f"{name} starts a program of all devices outside of the order"
      started.append(name)
      return function(*args, **kwargs)

    return call

  for name in ("process_allgather", "broadcast_one_to_all"):  # ours and orbax's
    setattr(multihost_utils, name, watched(name, getattr(multihost_utils, name)))
  return started


def lanes_go_on_while_the_last_is_late() -> None:
  from agentjax.sharding import dispatching
  from agentjax.training import processes

  dispatched: list[float] = []

  def lane() -> None:
    with dispatching():
      dispatched.append(time.monotonic())

  assert processes.all_agree(True)  # which compiles
  processes.wait("compiled")
  if INDEX == COUNT - 1:
    time.sleep(4)
  else:
    threading.Timer(0.5, lane).start()
  assert processes.all_agree(True)
  assert INDEX == COUNT - 1 or dispatched[0] < time.monotonic() - 1


def routed(task: int):
  """An episode of some length with what routers chose, in all its segments but the second."""
  from agentjax.trajectory.builder import TrajectoryBuilder
  from agentjax.trajectory.record import Reward

  rng, builder = (
    np.random.default_rng(task),
    TrajectoryBuilder(step=3, task_id=task, sample=0, source="s"),
  )
  for turn in range(3):
    count = int(rng.integers(1, 6))
    known = {"experts": rng.integers(0, 8, (count, 3, 2)).astype(np.uint8)} if turn != 1 else {}
    if task % 2:
      known["teacher_top_ids"] = rng.integers(0, 99, (count, 4)).astype(np.int32)
      known["teacher_top_log_probs"] = rng.normal(size=(count, 4)).astype(np.float32)
    numbers = np.zeros(count, np.float32)
    builder.append_sampled(range(count), numbers, numbers, 3, columns=known)
  return builder.build(reward=Reward(1.0))


def wide_columns_reach_the_devices_that_train_them_and_no_others() -> None:
  from agentjax.sharding import MeshConfig, make_mesh
  from agentjax.training import processes
  from agentjax.training.rows import MeshRows
  from agentjax.training.wide_columns import WideColumns
  from agentjax.trajectory.columns import REFERENCE, ColumnError
  from agentjax.trajectory.packing import pack, to_sequences

  def packed(episodes):
    return pack(to_sequences(episodes), row_length=32, pad_id=0, rows=2 * COUNT)

  tasks = list(range(5 * COUNT))
  straight = packed([routed(task) for task in tasks])
  own = [routed(task) for task in tasks if task % COUNT == INDEX and INDEX < COUNT - 1]
  own += [routed(t) for t in tasks if t % COUNT == COUNT - 1 and INDEX == 0]  # one has none
  wide, sent = WideColumns(), []
  whole, send = (processes._AT_ONCE, processes.send)

  def watched(parts, sizes):
    sent.append(sizes)
    return send(parts, sizes)

  rows = MeshRows(make_mesh(MeshConfig(data=COUNT, fsdp=1)), 2, wide)
  batch = packed(wide.gather(own, 3))
  assert batch.columns["experts"].dtype == REFERENCE  # the host has numbers only
  processes.send, processes._AT_ONCE = watched, 16 * COUNT  # in many parts, the last not full
  placed = rows.place(batch)
  processes.send, processes._AT_ONCE = send, whole
  assert placed.columns.keys() == straight.columns.keys() and len(placed.columns) == 3
  for name, wanted in straight.columns.items():
    got = placed.columns[name]
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    for shard in got.addressable_shards:
      np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
  # Each gets no more than its rows, and what it has is not sent.
  tokens = (straight.segment_ids > 0).reshape(COUNT, -1).sum(axis=1)
  assert (sum(sent).sum(axis=0) <= tokens * (3 * 2 + 4 * 4 + 4 * 4)).all()
  assert all(sizes.any() and not sizes.diagonal().any() for sizes in sent) and len(sent) == 3
  wide.gather(own, 4)
  try:
    rows.place(batch)
  except ColumnError as error:
    assert "keeps_episodes" in str(error)
  else:
    raise AssertionError("columns of an earlier step")


def main(address: str, folder: pathlib.Path, ending: str) -> None:
  jax.distributed.initialize(address, COUNT, INDEX, heartbeat_timeout_seconds=60)
  from agentjax.sharding import fingerprint, upload
  from agentjax.training import processes
  from agentjax.training.checkpoint import CheckpointStore
  from agentjax.training.interrupt import Interrupt
  from agentjax.training.journal import Journal, StepRecord
  from agentjax.training.state import Network, TrainState, Weights
  from tests.training.machine import abstract_like
  from tests.training.test_journal import episode

  started = keep_order()
  lanes_go_on_while_the_last_is_late()

  # Episodes: all by their addresses, with all that is known of tokens, also where one has none.
  own = [episode(3, task) for task in processes.share(range(COUNT - 1))]
  every = processes.gather_trajectories(own)
  assert [t.task_id for t in every] == list(range(COUNT - 1)) and bool(own) == (INDEX < COUNT - 1)
  assert all(t.segments[1].behaviour_log_probs[0] == np.float32(-0.5) for t in every)
  whole, processes._AT_ONCE = processes._AT_ONCE, 100 * COUNT  # in many parts, the last not full
  assert encoded(processes.gather_trajectories(own)) == encoded(every)
  processes._AT_ONCE = whole
  measured = processes.gather_outcomes(own)
  assert [t.reward for t in measured] == [t.reward for t in every]
  assert all(not t.segments[1].behaviour_log_probs.any() for t in measured)
  assert [t.segments[1].sampled.sum() for t in measured] == [2] * len(measured)

  wide_columns_reach_the_devices_that_train_them_and_no_others()

  # The journal: a file each, one index.
  journal = Journal(folder / "journal.log")
  for trajectory in own:
    journal.add_trajectory(trajectory)
  journal.sync()
  processes.wait("written")
  journal.finish_step(StepRecord(3, "rl", tuple(t.address for t in every), "hash"))
  journal.close()
  processes.wait("closed")
  journal = Journal(folder / "journal.log")
  assert journal.lost_steps(3) == [1, 2] and journal.steps[3].fingerprint == "hash"
  assert journal.trajectories(lambda address: True).keys() == {t.address for t in every}
  journal.close()

  # Hashes and checkpoints of arrays that no process holds whole; changed while they are written.
  # Each process sends its part of the host's array to its devices, no more.
  mesh = jax.make_mesh((COUNT,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  values = np.random.default_rng(0).normal(size=(COUNT * 64, 32)).astype(np.float32)
  split = jax.sharding.NamedSharding(mesh, jax.P("fsdp"))
  array = upload(values.view(Watched), split)
  assert Watched.read == values.size // COUNT
  assert fingerprint({"w": array}) == fingerprint({"w": jnp.asarray(values)})
  state = TrainState(
    upload(np.zeros((), np.int32), jax.sharding.NamedSharding(mesh, jax.P())),
    {"policy": Network(Weights({"w": array}), ())},
  )
  store, target = CheckpointStore(folder / "checkpoints", 2, {}), abstract_like(state)
  wanted = fingerprint(state)
  change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
  for step in (1, 2):
    store.begin_save(step, state, {"step": step})
    state = change(state)
  store.wait()
  assert {"process_allgather", "broadcast_one_to_all"} == set(started)
  found = store.restore(1, target)
  assert fingerprint(found.state) == wanted and found.host == {"step": 1}

  # A signal to one: the other's sampling is cancelled, and both know it at the next border.
  async def sample() -> None:
    import asyncio

    await asyncio.sleep(60)

  from agentjax.threads import LoopThread

  runner, started, stopped = LoopThread(), time.monotonic(), False
  with Interrupt() as interrupt:
    assert not processes.any_asks(interrupt.requested)
    if INDEX == COUNT - 1:
      os.kill(os.getpid(), signal.SIGTERM)
    try:
      runner.run(interrupt.cancellable(sample()))
    except BaseException as error:
      stopped = type(error).__name__ == "CancelledError"
    assert stopped and processes.any_asks(interrupt.requested) and time.monotonic() - started < 30
  runner.close()

  # The last one dies, in a program of all, or has an error while all others wait for it on their
  # hosts: these get an error that says what to do, and end.
  processes.wait("end")
  if INDEX == COUNT - 1 and ending == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  try:
    with processes.failing_together():
      if INDEX == COUNT - 1:
        time.sleep(1)
        raise OSError("its disk is full")
      while True:
        fingerprint(state) if ending == "kill" else processes.any_asks(False)
  except processes.ProcessLostError as error:
    print(error)
    raise


if __name__ == "__main__":
  with contextlib.suppress(KeyboardInterrupt):
    main(sys.argv[3], pathlib.Path(sys.argv[4]), sys.argv[5])
