"""Batches of tasks in a fixed, resumable order (grain underneath)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentjax.trajectory.record import Task


class TaskIterator(Iterator[list[Task]]):
  """Endless batches of distinct tasks; every epoch is shuffled anew from the same seed.

  The last tasks of an epoch that do not fill a batch are left out of that epoch, so that no batch
  holds one task twice: (step, task, sample) addresses an episode.

  Args:
    tasks: the data; only its length and order matter to the state.
    batch_size: tasks a batch, 1..len(tasks).
    seed: of the order, 0 <= seed < 2**32.
    shuffle: False keeps the order of ``tasks`` in every epoch.
  """

  def __init__(self, tasks: Sequence[Task], *, batch_size: int, seed: int, shuffle: bool = True):
    if not 1 <= batch_size <= len(tasks):
      raise ValueError(
        f"batch_size={batch_size} with {len(tasks)} tasks; allowed: 1..{len(tasks)}. Lower "
        "config.rl.tasks_per_step or config.supervised.tasks_per_step, or load more tasks."
      )
    if not 0 <= seed < 2**32:
      raise ValueError(f"seed={seed}; allowed: 0 <= seed < 2**32")
    # grain imports jax; a process that only reads tasks (a tool worker) must not import it.
    import grain

    self._tasks = tasks
    self._identity = {
      "tasks": len(tasks),
      "batch_size": batch_size,
      "seed": seed,
      "shuffle": shuffle,
    }
    order = grain.MapDataset.source(range(len(tasks))).seed(seed)
    if shuffle:
      order = order.shuffle()
    batches = order.batch(batch_size, drop_remainder=True, batch_fn=list).repeat()
    # No reader threads: indices are cheap, and so the state is exactly what was read.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._indices = iter(batches.to_iter_dataset(options))

  def __next__(self) -> list[Task]:
    return [self._tasks[i] for i in next(self._indices)]

  def get_state(self) -> dict[str, Any]:
    """Plain JSON: grain's position and what it belongs to."""
    return {"position": self._indices.get_state(), **self._identity}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where ``get_state`` was taken, also in a fresh iterator over the same tasks.

    Raises:
      ValueError: the state is of other data, another batch size or another seed.
    """
    for name, value in self._identity.items():
      if state.get(name) != value:
        raise ValueError(
          f"the saved data position has {name}={state.get(name)!r}, this run {value!r}; resume "
          "with the configuration the run was started with"
        )
    self._indices.set_state(state["position"])
