r"""PivotRL against random turns and supervised learning, at a size of minutes on a CPU.

  JAX_PLATFORMS=cpu python benchmarks/pivots.py

A made world: things are put away in five turns with tools. For a policy after its warm start three
of the turns are easy, one cannot be guessed (a random code), and one it gets right now and then:
only the experts know where each of 24 things belongs. The policy also has a skill that none of this
needs, sums up to 6 + 6. Arms, all from one warm start:

  pivots   single-turn GRPO on the turns that profiling keeps (PivotRL)
  random   the same on turns drawn at random from all of them, as many steps, groups and samples
  sft      supervised learning on the experts' actions at the pivots, as many updates and rows

Printed: the share of held-out turns that are right, of the mixed kind and of all, and of sums that
are right, by samples at temperature 1 (mean over seeds, least and most); the share of groups that
had a gradient; and what profiling cost.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from absl import app, flags, logging
from rich.console import Console

from agentjax.adapters.agent_trajectories import AgentTrajectory
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.pivotrl.profiles import profile_checkpoint
from agentjax.recipes.pivotrl.staleness import mixed_shares
from agentjax.recipes.pivotrl.turns import candidates, select_pivots
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.text.chat import conversation_texts
from agentjax.text.tokenizer import SentencePieceTokenizer, train_sentencepiece
from agentjax.tools import ToolsConfig
from agentjax.tools.declared import read_tool
from agentjax.training import (
  Experiment,
  Extensions,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
  SupervisedStage,
)
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.evaluation import evaluate_checkpoint
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.worlds.pivot import PivotWorldConfig
from agentjax.worlds.pivot.environment import PivotEnvironment
from agentjax.worlds.pivot.tasks import PivotRow

_SEEDS = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Of worlds, warm starts and arms.")
_WARM = flags.DEFINE_integer("warm_steps", 160, "Steps of the warm start.")
_STEPS = flags.DEFINE_integer("steps", 60, "Updates of every arm.")
_RATE = flags.DEFINE_float("learning_rate", 3e-4, "Of every arm.")
_TURNS = flags.DEFINE_integer("turns", 400, "Expert turns that are profiled.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Keep the runs here; a temporary folder if unset.")

_GROUPS, _SIZE, _SAMPLES, _MAX_MEAN = 8, 8, 8, 0.75
_MIXED = 1  # the turn that says where a thing belongs
_THINGS = """cup pen hat box key map jar fan rug pan mug bag net bow cap coin lamp book sock ring
  drum kite rope vase""".split()
_COLOURS = "red blue green black white pink".split()
_PLACES = "shelf drawer attic cellar closet garage".split()


def _tool(name: str, *parameters: str):
  properties = {parameter: {"type": "string"} for parameter in parameters}
  schema = {"type": "object", "properties": properties, "required": list(parameters)}
  return read_tool({"name": name, "parameters": schema})


TOOLS = (
  _tool("find", "item"),
  _tool("store", "item", "place"),
  _tool("log", "item"),
  _tool("badge", "code"),
)


class World:
  """Where every thing belongs, and those who put things away."""

  def __init__(self, seed: int):
    self._random = np.random.default_rng(seed)
    self._place = {thing: int(self._random.integers(len(_PLACES))) for thing in _THINGS}

  def conversation(self, *, expert: bool) -> tuple[Message, ...]:
    """An expert knows the place and says what it does; others try one of three places."""
    random = self._random
    thing, colour = self._one_of(_THINGS), self._one_of(_COLOURS)
    place = _PLACES[(self._place[thing] + (0 if expert else random.integers(3))) % len(_PLACES)]
    code = "".join(str(digit) for digit in random.integers(10, size=4))
    ask = self._one_of(["please put the {} {} away", "tidy up the {} {}"]).format(colour, thing)
    words = expert or random.random() < 0.1
    talk = iter(
      ["let me look for it", "i know where it goes", "now i write it down", "i close the door"]
    )

    def act(name: str, **arguments: str) -> Message:
      text = next(talk)
      return Message("assistant", text if words else "", (ToolCall(name, arguments),))

    return (
      Message("user", ask),
      act("find", item=thing),
      Message("tool", f"{colour} {thing} found"),
      act("store", item=thing, place=place),
      Message("tool", "stored"),
      act("log", item=thing),
      Message("tool", "logged"),
      act("badge", code=code),
      Message("tool", "accepted"),
      Message("assistant", f"the {thing} is put away"),
    )

  def _one_of(self, options: Sequence[str]) -> str:
    return options[int(self._random.integers(len(options)))]

  def turns(self, conversations: int) -> list[PivotRow]:
    """All turns of so many conversations of an expert."""
    talks = (self.conversation(expert=True) for _ in range(conversations))
    return candidates((AgentTrajectory("world", talk, TOOLS) for talk in talks), "world")

  def warm_tasks(self, count: int) -> list[Task]:
    """Conversations as the policy has them, one in three, and sums."""
    tasks = []
    for i in range(count):
      if i % 3:
        tasks.append(_sum(i, *self._random.integers(7, size=2)))
      else:
        talk = self.conversation(expert=False)
        metadata = {"tools": [tool.to_dict() for tool in TOOLS]}
        tasks.append(Task(i, talk[:1], "", "warm", demonstration=talk[1:], metadata=metadata))
    return tasks


def _sum(number: int, left: int, right: int) -> Task:
  answer = str(left + right)
  prompt = (Message("user", f"what is {left} plus {right}"),)
  metadata = {"tools": [tool.to_dict() for tool in TOOLS]}
  return Task(
    number,
    prompt,
    answer,
    "sums",
    demonstration=(Message("assistant", answer),),
    metadata=metadata,
  )


def experiment(seed: int, tokenizer: pathlib.Path, **changes) -> Experiment:
  """What all runs have in common."""
  size = SentencePieceTokenizer(tokenizer).vocab_size
  made = Experiment(
    name="pivots",
    seed=seed,
    model=ModelConfig(
      vocab_size=size,
      d_model=64,
      pattern="*-*-",
      num_heads=4,
      num_kv_heads=4,
      head_dim=16,
      d_mlp=256,
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece", path=str(tokenizer)),
    tools=ToolsConfig(names=()),
    world=PivotWorldConfig(),
    data=DataConfig(path=str(tokenizer.parent)),  # every run brings its tasks along
    reward=RewardConfig(parts=("pivot", "exact_match"), weights=(1.0, 0.0)),
    engine=EngineConfig(
      slots=64, max_length=192, chunk_tokens=8, extend_buckets=(32, 128), extend_rows=(16, 8)
    ),
    rollout=RolloutConfig(
      group_size=_SIZE,
      max_turns=1,
      max_tokens_per_turn=32,
      max_total_tokens=192,
      concurrency=128,
    ),
    evaluation=HeldOutConfig(tasks=0),
    checkpoint=CheckpointConfig(every=1000),
  )
  for name, value in changes.items():
    setattr(made, name, value)
  return made


def _supervised(
  steps: int, rate: float, schedule: Literal["constant", "cosine"], rows: int = 64
) -> SupervisedStage:
  return SupervisedStage(
    steps=steps,
    tasks_per_step=rows,
    row_length=192,
    microbatch_rows=16,
    optimizer=OptimizerConfig(learning_rate=rate, schedule=schedule, warmup_steps=2),
  )


def _reinforced(steps: int) -> RLStage:
  return RLStage(
    steps=steps,
    tasks_per_step=_GROUPS,
    row_length=192,
    microbatch_rows=16,
    objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
    sampling=SamplingConfig(temperature=1.0),
    optimizer=OptimizerConfig(learning_rate=_RATE.value, schedule="constant", warmup_steps=2),
  )


def _extensions(train: Sequence[Task], test: Sequence[Task] = ()) -> Extensions:
  return Extensions(tasks=TaskSplits(train, test), make_environment=lambda task: PivotEnvironment())


def _train(made: Experiment, directory: pathlib.Path, tasks: Sequence[Task]) -> None:
  console = Console(file=io.StringIO())
  Run(made, directory, extensions=_extensions(tasks), console=console).train()


@dataclasses.dataclass
class Scores:
  """Shares that are right, sampled: turns of the mixed kind, all turns, sums."""

  mixed: float
  turns: float
  sums: float


def measure(made: Experiment, run: pathlib.Path, turns: Sequence[PivotRow]) -> Scores:
  """Scores of a run's last policy."""
  tasks = [row.task(FIRST_TEST_ID) for row in turns]
  first = FIRST_TEST_ID + len(tasks)
  sums = [_sum(first + 7 * i + j, i, j) for i in range(7) for j in range(7)]
  held_out = HeldOutConfig(
    tasks=len(tasks) + len(sums), samples=4, pass_at=(), success_part="pivot"
  )
  report = evaluate_checkpoint(
    dataclasses.replace(made, evaluation=held_out), run, extensions=_extensions([], tasks + sums)
  )

  def share(chosen: Sequence[Task], part: str) -> float:
    ids = {task.id for task in chosen}
    parts = (t.reward_parts[part] for t in report.sampled_trajectories if t.task_id in ids)
    return float(np.mean([reward.value for reward in parts]))

  mixed = [task for task in tasks if task.metadata["turn"] == _MIXED]
  return Scores(share(mixed, "pivot"), share(tasks, "pivot"), share(sums, "exact_match"))


def one_seed(seed: int, place: pathlib.Path) -> dict[str, Scores]:
  """The warm start and its three arms."""
  world, begun = World(seed), time.monotonic()
  known = world.warm_tasks(4000)
  schemas = {tool.name: tool.parameters for tool in TOOLS}
  texts = (
    text
    for task in known
    for text in conversation_texts((*task.prompt, *task.demonstration), schemas=schemas)
  )
  tokenizer = place / "tokenizer.model"
  train_sentencepiece(texts, tokenizer, 448)
  warm = experiment(
    seed, tokenizer, supervised=_supervised(_WARM.value, 3e-3, "cosine"), rl=_reinforced(0)
  )
  # Whole conversations are no single turns: the part "pivot" would refuse them.
  _train(dataclasses.replace(warm, reward=RewardConfig()), place / "warm", known)
  turns, held_out = world.turns(_TURNS.value // 5), world.turns(32)
  results = {"warm start": measure(warm, place / "warm", held_out)}
  _report(seed, begun, "warm start", results["warm start"])

  begun = time.monotonic()
  profiles = profile_checkpoint(
    experiment(seed, tokenizer, supervised=warm.supervised, rl=_reinforced(1)),
    place / "warm",
    turns,
    samples=_SAMPLES,
  )
  pivots = select_pivots(profiles.rows, max_mean=_MAX_MEAN)
  kinds = np.bincount([row.turn for row in pivots], minlength=5).tolist()
  _report(seed, begun, f"{len(turns)} turns, {len(pivots)} pivots, by kind {kinds}")
  chosen = {
    "pivots": [row.task() for row in pivots],
    "random": [row.task() for row in turns],
    "sft": [row.task() for row in pivots],
  }
  start = str(place / "warm" / "checkpoints" / str(_WARM.value))
  for arm, tasks in chosen.items():
    begun, directory = time.monotonic(), place / arm
    made = experiment(seed, tokenizer, start_from=start, rl=_reinforced(_STEPS.value))
    if arm == "sft":
      rows = min(64, len(tasks))
      made.supervised = _supervised(_STEPS.value, _RATE.value, "constant", rows)
      made.rl = _reinforced(0)
    _train(made, directory, tasks)
    results[arm] = measure(made, directory, held_out)
    mixed = "" if arm == "sft" else f", {np.mean(list(mixed_shares(directory).values())):.2f} mixed"
    _report(seed, begun, arm + mixed, results[arm])
  return results


def _report(seed: int, begun: float, what: str, scores: Scores | None = None) -> None:
  shown = (
    ""
    if scores is None
    else ", ".join(
      f"{name} {100 * value:.1f}%" for name, value in dataclasses.asdict(scores).items()
    )
  )
  print(f"seed {seed}, {time.monotonic() - begun:4.0f} s: {what}  {shown}", flush=True)


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(_WORKDIR.value or folder)
    results = []
    for seed in _SEEDS.value:
      (root / str(seed)).mkdir(parents=True)
      results.append(one_seed(seed, root / str(seed)))
  print(f"\n{'':12s} {'mixed turns':>18s} {'all turns':>18s} {'sums':>18s}")
  for arm in results[0]:
    columns = []
    for field in ("mixed", "turns", "sums"):
      values = 100 * np.array([getattr(result[arm], field) for result in results])
      columns.append(f"{values.mean():.1f} ({values.min():.1f}-{values.max():.1f})")
    print(f"{arm:12s} " + " ".join(f"{c:>18s}" for c in columns))


if __name__ == "__main__":
  app.run(main)
