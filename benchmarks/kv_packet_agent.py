r"""What packets save episodes of an agent that searches, on configs/kv_packet_search.py.

  export AGENTJAX_DATA=DIR
  JAX_PLATFORMS=cpu python benchmarks/kv_packet_agent.py --tasks=4 --group=4 --width=512

The policy is drawn, and so would never call a tool: it writes its turns as it likes, and after each
of them the question without its first words is searched for it. So an episode has two passages in
its prompt and two more behind every turn but the last. All questions are played twice with the same
weights. The first time packets are made, as after every update. The second time they are known, as
in evaluation and serving, and the passages of the prompts stand in the other order, so that the
engine cannot reuse whole prompts. Before, other questions are played with other weights, so that
everything is compiled. Printed are means over the episodes: tokens that were read (prompts and
results), tokens that ran through the model for them, those of packets that were made included, and
CPU seconds of the process, what the policy wrote included.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from agentjax import models
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Episode
from agentjax.training import Extensions, load_experiment
from agentjax.training.build import Parts, build_parts
from agentjax.training.evaluation import build_engine
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.record import Task, ToolCall, Trajectory

_TASKS = flags.DEFINE_integer("tasks", 4, "Questions.")
_GROUP = flags.DEFINE_integer("group", 4, "Episodes of a question.")
_WIDTH = flags.DEFINE_integer("width", 128, "d_model; heads and MLPs grow with it.")
_ROWS = flags.DEFINE_list("extend_rows", ["8", "4", "2"], "config.engine.extend_rows.")
_WRITTEN = flags.DEFINE_integer("written", 24, "config.rollout.max_tokens_per_turn.")
_CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "kv_packet_search.py"


async def searching(episode: Episode) -> None:
  """The policy writes, and the question is searched for it, until its turns are over."""
  words = episode.task.prompt[0].content.split("\n\n")[-1].split()
  await episode.open(await episode.reset())
  turn = 0
  while True:
    written = await episode.act()
    query = " ".join(words[turn:]) or words[-1]
    call = ToolCall("search", {"query": query})
    step = await episode.step(dataclasses.replace(written, tool_calls=(call,), truncated=False))
    await episode.observe(step.observation)
    turn += 1


def turned(task: Task) -> Task:
  """With the passages of its prompt in the other order."""
  (message,) = task.prompt
  *passages, question = message.content.split("\n\n")
  text = "\n\n".join([*reversed(passages), question])
  return dataclasses.replace(task, prompt=(dataclasses.replace(message, content=text),))


def made(trajectories: Sequence[Trajectory]) -> int:
  """Tokens of all packets of the records, each counted once."""
  lengths: dict[bytes, int] = {}
  for trajectory in trajectories:
    for path in token_paths(trajectory):
      names, places = path.column("packets"), path.column("packet_places")
      for at in np.flatnonzero(places >= 0):
        name = names[at].tobytes()
        lengths[name] = max(lengths.get(name, 0), int(places[at]) + 1)
  return sum(lengths.values())


async def measure(parts: Parts, engine: Any, *, group: int) -> list[dict[str, float]]:
  """Of each of the two times that the tasks are played."""
  await parts.start()
  player = parts.player(engine, parts.experiment.rl.sampling, 0)

  async def play(tasks: Sequence[Task]) -> list[Trajectory]:
    return await collect(
      tasks,
      step=1,
      samples_per_task=group,
      player=player,
      make_environment=parts.make_environment,
      rewards=parts.rewards,
      program=parts.program,
    )

  count = len(parts.tasks.train) // 2
  for seed, version in ((1, 0), (0, 1)):
    engine.publish(models.init(parts.model, jax.random.key(seed)), version)
    if not seed:
      break
    await play(parts.tasks.train[count:])
  found = []
  for repeated in (False, True):
    before, seconds = engine.stats.extended_tokens, time.process_time()
    tasks = parts.tasks.train[:count]
    trajectories = await play([turned(task) for task in tasks] if repeated else tasks)
    seconds = time.process_time() - seconds
    paths = [path for one in trajectories for path in token_paths(one)]
    ran = engine.stats.extended_tokens - before + (0 if repeated else made(trajectories))
    row = {
      "read": sum(int((~path.sampled).sum()) for path in paths),
      "of these in packets": sum(int((path.column("packet_places") >= 0).sum()) for path in paths),
      "written": sum(int(path.sampled.sum()) for path in paths),
      "ran through the model": ran,
      "CPU seconds": seconds,
    }
    found.append({key: value / len(trajectories) for key, value in row.items()})
  await parts.close()
  return found


def main(argv: list[str]) -> None:
  """Plays with and without packets."""
  del argv
  table = {}
  for name, recompute in (("packets", False), ("text", True)):
    experiment = load_experiment(_CONFIG)
    experiment.data.train_size, experiment.data.test_size = 2 * _TASKS.value, 0
    experiment.evaluation.tasks = 0
    experiment.likelihood.recompute = recompute
    experiment.engine.extend_rows = tuple(map(int, _ROWS.value))
    experiment.rollout.max_tokens_per_turn = _WRITTEN.value
    model, wider = experiment.model, _WIDTH.value // experiment.model.d_model
    for field in ("d_model", "d_mlp", "num_heads", "num_kv_heads", "mamba_heads"):
      setattr(model, field, getattr(model, field) * wider)
    experiment.validate()
    with tempfile.TemporaryDirectory() as folder:
      parts = build_parts(experiment.freeze(), pathlib.Path(folder), Extensions(program=searching))
      engine = build_engine(parts)
      both = asyncio.run(measure(parts, engine, group=_GROUP.value))
      engine.close()
    for when, row in zip(("first", "again"), both, strict=True):
      table[f"{name}, {when}"] = row
      print(f"{name}, {when}:" + "".join(f"  {key} {value:.4g}" for key, value in row.items()))
  print(json.dumps(table))


if __name__ == "__main__":
  app.run(main)
