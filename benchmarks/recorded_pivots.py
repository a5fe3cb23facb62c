r"""PivotRL against supervised learning on recorded tool calls: what is learned, and forgotten.

  AGENTJAX_DATA=DIR JAX_PLATFORMS=cpu python benchmarks/recorded_pivots.py

Three domains of recorded tool calls, each with tools of its own:

  airline  200 conversations of an airline's agent with a simulated user (tau-bench's recordings)
  glaive   300 conversations about 51 kinds of functions
  swe      8 trajectories of SWE-agent on code, those that record calls

A policy learns turns of all three by supervised learning (the warm start). From it, two arms learn
further turns of one domain (--domain):

  sft      supervised learning on all of these turns
  pivotrl  GRPO on those of them that profiling keeps, as many updates

Printed for the warm start and both arms, as means over seeds with 95% intervals (Student's t): in
the domain and in each other domain, the share of held-out calls that the policy gets right, by
samples at temperature 1 (config.world.verifier; another --verifier is coarser or finer), and the
loss of the expert's turns in nats a token. Then the differences to the warm start, paired by seed:
in the other domains they are what an arm has forgotten. Conversations about one task or one issue
are never split over warm start, arms and held-out turns.

A small policy cannot read 30,000 characters. So each history is shortened to its first request and
its newest messages (--characters in all, --message_characters each), and tools lose their
descriptions. With --pretrained=FOLDER the policy is a model of a Hugging Face folder instead; then
raise --characters, --message_characters and --length, lower --learning_rate, and set
--warm_steps=0 to measure from the model as it is.

The default sizes (about 1M parameters, 1024 tokens) have not been run; no figures of them are
known. By their tokens against those of the proof below we guess one to three hours a seed on two
CPU cores. A proof that all parts work, some minutes long, whose figures mean nothing:

  python benchmarks/recorded_pivots.py --seed=0 --warm_steps=120 --warm_rate=5e-3 --steps=2 \
      --turns=24 --held_out=8 --groups=4 --width=32 --layers=1 --length=256 --characters=300 \
      --message_characters=120 --verifier=tool_name
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
import pathlib
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import cast, get_args

import numpy as np
from absl import app, flags, logging
from recipes import Estimate
from rich.console import Console

from agentjax import models
from agentjax.adapters.agent_trajectories import AgentTrajectory, read_trajectories
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.pivotrl.profiles import profile_checkpoint
from agentjax.recipes.pivotrl.staleness import mixed_shares
from agentjax.recipes.pivotrl.turns import candidates, observed_tools, select_pivots
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.text.build import build_chat
from agentjax.text.chat import Chat, conversation_texts
from agentjax.text.tokenizer import SentencePieceTokenizer, train_sentencepiece
from agentjax.tools import ToolsConfig
from agentjax.tools.declared import DeclaredTool, read_tools
from agentjax.training import (
  Experiment,
  Extensions,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
  SupervisedStage,
)
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import CheckpointConfig, latest_checkpoint
from agentjax.training.evaluation import evaluate_checkpoint, load_folder, load_policy
from agentjax.training.experiment import resolve
from agentjax.trajectory.record import Message, Task
from agentjax.worlds.pivot import PivotWorldConfig
from agentjax.worlds.pivot.environment import PivotEnvironment
from agentjax.worlds.pivot.tasks import PivotRow
from agentjax.worlds.pivot.verifier import PivotScorer, PivotVerifierConfig, VerifierKind

DOMAINS = ("airline", "glaive", "swe")

_DATA = flags.DEFINE_string("data", None, "Folder of recordings; AGENTJAX_DATA if not given.")
_DOMAIN = flags.DEFINE_enum("domain", "airline", DOMAINS, "What the arms learn.")
_SEEDS = flags.DEFINE_multi_integer("seed", [0, 1, 2], "Of splits, warm starts and arms.")
_WARM = flags.DEFINE_integer("warm_steps", 400, "Steps of the warm start.")
_STEPS = flags.DEFINE_integer("steps", 60, "Updates of each arm.")
_WARM_RATE = flags.DEFINE_float("warm_rate", 2e-3, "Learning rate of the warm start.")
_RATE = flags.DEFINE_float("learning_rate", 2e-4, "Of both arms.")
_TURNS = flags.DEFINE_integer("turns", 600, "Turns that the arms learn from, at most.")
_HELD_OUT = flags.DEFINE_integer("held_out", 96, "Held-out calls of each domain, at most.")
_SAMPLES = flags.DEFINE_integer("samples", 8, "Samples a turn of profiling, and of a group.")
_MAX_MEAN = flags.DEFINE_float("max_mean", 0.9, "Pivots have a lower mean reward.")
_GROUPS = flags.DEFINE_integer("groups", 16, "Groups an update of PivotRL.")
_VERIFIER = flags.DEFINE_enum("verifier", "arguments", get_args(VerifierKind), "Same actions.")
_LENGTH = flags.DEFINE_integer("length", 1024, "Tokens of a turn with its history, at most.")
_CHARACTERS = flags.DEFINE_integer("characters", 1600, "Of a history.")
_MESSAGE = flags.DEFINE_integer("message_characters", 500, "Of each message of a history.")
_WIDTH = flags.DEFINE_integer("width", 128, "Of the policy.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Of attention and MLP, of the policy.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 2048, "Pieces of the policy's vocabulary.")
_PRETRAINED = flags.DEFINE_string("pretrained", None, "Hugging Face folder of the policy.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Keep the runs here; a temporary folder if unset.")

_REPLY = 192  # tokens of a turn, at most
_ROWS = 32  # turns of a supervised update


# ------------------------------------------------------------------------------------------- data


def read_domain(name: str, data: pathlib.Path) -> list[AgentTrajectory]:
  """The conversations of a domain, with tools declared."""
  if name == "airline":
    tools = read_tools(json.loads((data / "tau_bench/airline/tools.json").read_text()))
    path = data / "tau_trajectories/gpt-4o-airline.jsonl.gz"
    return list(read_trajectories(path, "openai", tools=tools))
  if name == "glaive":
    path = data / "toolcall_sft/glaive_toolcall_en_300.json.gz"
    return list(read_trajectories(path, "sharegpt"))
  found: list[AgentTrajectory] = []
  with tempfile.TemporaryDirectory() as folder:
    with tarfile.open(data / "swe_trajectories/swe_trajectories.tar.gz") as archive:
      archive.extractall(folder, filter="data")
    for path in sorted(pathlib.Path(folder).rglob("*.traj")):
      found += read_trajectories(path, "openai")
  calling = [t for t in found if any(m.tool_calls for m in t.messages)]
  tools = observed_tools(calling)  # the files declare none
  return [dataclasses.replace(t, tools=tools) for t in calling]


def issue_of(trajectory: AgentTrajectory) -> str:
  """What a conversation is about: of one task or one issue there may be several."""
  return str(trajectory.metadata.get("task_id", trajectory.name))


def shorten(row: PivotRow, characters: int, each: int) -> PivotRow:
  """A turn with the beginning and the newest part of its history, and tools without descriptions.

  A result of a tool is never left without the call before it.
  """
  clipped = [dataclasses.replace(m, content=m.content[:each]) for m in row.history]
  first = next((i for i, m in enumerate(clipped) if m.role == "user"), 0)
  newest, spent = len(clipped), len(clipped[first].content)
  for i in range(len(clipped) - 1, first, -1):
    spent += _written(clipped[i])
    if spent > characters:
      break
    if clipped[i].role != "tool":
      newest = i
  kept = (clipped[first], *clipped[max(newest, first + 1) :])
  return dataclasses.replace(row, history=kept, tools=tuple(map(_bare, row.tools)))


def _written(message: Message) -> int:
  """Characters of a message and its calls."""
  return len(message.content) + sum(len(json.dumps(dict(c.arguments))) for c in message.tool_calls)


def _bare(tool: DeclaredTool) -> DeclaredTool:
  """A tool by name, arguments and their types."""
  schema = tool.parameters
  properties = {k: {"type": v["type"]} if "type" in v else {} for k, v in _properties(schema)}
  needed = {"required": schema["required"]} if "required" in schema else {}
  return DeclaredTool(tool.name, "", {"type": "object", "properties": properties, **needed})


def _properties(schema: Mapping) -> Sequence[tuple[str, Mapping]]:
  return list(schema.get("properties", {}).items())


@dataclasses.dataclass(frozen=True)
class Split:
  """Turns of a domain, by what they are for."""

  warm: list[PivotRow]
  arms: list[PivotRow]
  held_out: list[PivotRow]


def split_domain(name: str, trajectories: Sequence[AgentTrajectory], seed: int) -> Split:
  """Half of the issues for the warm start, a quarter for the arms, a quarter held out."""
  issues = sorted({issue_of(t) for t in trajectories})
  order = np.random.default_rng([seed, DOMAINS.index(name)]).permutation(len(issues))
  place = {issues[i]: at / len(issues) for at, i in enumerate(order)}
  parts: dict[str, list[PivotRow]] = collections.defaultdict(list)
  scorer = PivotScorer(PivotVerifierConfig(kind=cast(VerifierKind, _VERIFIER.value)))
  for trajectory in trajectories:
    share = place[issue_of(trajectory)]
    part = "warm" if share < 0.5 else "arms" if share < 0.75 else "held_out"
    for row in candidates([trajectory], name):
      short = shorten(row, _CHARACTERS.value, _MESSAGE.value)
      if scorer.refusal(short.task()) is None:
        parts[part].append(dataclasses.replace(short, id=len(parts[part])))
  return Split(parts["warm"], parts["arms"], parts["held_out"])


def fitting(rows: Sequence[PivotRow], chat: Chat, length: int) -> list[PivotRow]:
  """The turns whose history leaves room for a reply, and whose own text fits."""
  kept = []
  for row in rows:
    spans = chat.conversation(row.history, (row.expected,), row.tools)
    reply = sum(len(span.ids) for span in spans if span.weight > 0)
    total = sum(len(span.ids) for span in spans)
    if reply <= _REPLY and total - reply + _REPLY < length:
      kept.append(row)
  return kept


def some(rows: Sequence[PivotRow], count: int, seed: int) -> list[PivotRow]:
  """So many of them, drawn without repetition, in their order."""
  order = np.random.default_rng(seed).permutation(len(rows))[:count]
  return [rows[i] for i in sorted(order)]


# ------------------------------------------------------------------------------------------- runs


def experiment(seed: int, tokenizer: pathlib.Path | None, **changes) -> Experiment:
  """What all runs have in common."""
  length = _LENGTH.value
  made = Experiment(
    name="recorded_pivots",
    seed=seed,
    tools=ToolsConfig(names=()),
    world=PivotWorldConfig(
      PivotVerifierConfig(kind=cast(VerifierKind, _VERIFIER.value)),
    ),
    data=DataConfig(path="unused"),  # every run brings its tasks along
    reward=RewardConfig(parts=("pivot",)),
    engine=EngineConfig(
      slots=32, max_length=length, chunk_tokens=16, extend_buckets=(64, 256), extend_rows=(8, 4)
    ),
    rollout=RolloutConfig(
      group_size=_SAMPLES.value,
      max_turns=1,
      max_tokens_per_turn=_REPLY,
      max_total_tokens=length,
      concurrency=64,
    ),
    evaluation=HeldOutConfig(tasks=0),
    checkpoint=CheckpointConfig(every=1000),
    supervised=_supervised(0, 1e-3),
    rl=_reinforced(0, 1),
  )
  if tokenizer is None:
    made.pretrained, made.tokenizer = _PRETRAINED.value, TokenizerConfig(kind="huggingface")
  else:
    made.chat.tool_call_format = "json"  # calls have several arguments
    made.tokenizer = TokenizerConfig(kind="sentencepiece", path=str(tokenizer))
    made.model = models.ModelConfig(
      vocab_size=SentencePieceTokenizer(tokenizer).vocab_size,
      d_model=_WIDTH.value,
      pattern="*-" * _LAYERS.value,
      num_heads=4,
      num_kv_heads=4,
      head_dim=_WIDTH.value // 4,
      d_mlp=4 * _WIDTH.value,
    )
  for name, value in changes.items():
    setattr(made, name, value)
  return made


def _supervised(steps: int, rate: float, rows: int = _ROWS) -> SupervisedStage:
  return SupervisedStage(
    steps=steps,
    tasks_per_step=rows,
    row_length=_LENGTH.value,
    microbatch_rows=4,
    optimizer=OptimizerConfig(learning_rate=rate, schedule="constant", warmup_steps=2),
  )


def _reinforced(steps: int, groups: int) -> RLStage:
  return RLStage(
    steps=steps,
    tasks_per_step=groups,
    row_length=_LENGTH.value,
    microbatch_rows=4,
    objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_low=0.2, clip_high=0.2)),
    sampling=SamplingConfig(temperature=1.0),
    optimizer=OptimizerConfig(learning_rate=_RATE.value, schedule="constant", warmup_steps=2),
  )


def _extensions(train: Sequence[Task], test: Sequence[Task] = ()) -> Extensions:
  return Extensions(tasks=TaskSplits(train, test), make_environment=lambda task: PivotEnvironment())


def _train(made: Experiment, directory: pathlib.Path, tasks: Sequence[Task]) -> None:
  console = Console(file=io.StringIO())
  Run(made, directory, extensions=_extensions(tasks), console=console).train()


def _tasks(rows: Sequence[PivotRow]) -> list[Task]:
  """The turns as tasks, numbered anew: several domains have the same numbers."""
  return [dataclasses.replace(row, id=i).task() for i, row in enumerate(rows)]


# ---------------------------------------------------------------------------------------- measure


@dataclasses.dataclass(frozen=True)
class Scores:
  """By domain: the share of calls that are right, and the loss of the experts' turns, nats a
  token."""

  calls: Mapping[str, float]
  loss: Mapping[str, float]


def measure(made: Experiment, policy: pathlib.Path, held_out: Mapping[str, Sequence[PivotRow]]):
  """Scores of the newest policy of a run, or of a folder."""
  named = [(name, row) for name, rows in held_out.items() for row in rows]
  tasks = [dataclasses.replace(row, id=i).task(FIRST_TEST_ID) for i, (_, row) in enumerate(named)]
  owner = {task.id: name for task, (name, _) in zip(tasks, named, strict=True)}
  settings = HeldOutConfig(tasks=len(tasks), samples=4, pass_at=(), success_part="pivot")
  report = evaluate_checkpoint(
    dataclasses.replace(made, evaluation=settings), policy, extensions=_extensions([], tasks)
  )
  right: dict[str, list[float]] = collections.defaultdict(list)
  for episode in report.sampled_trajectories:
    right[owner[episode.task_id]].append(episode.reward_parts["pivot"].value or 0.0)
  loss: dict[str, list[float]] = collections.defaultdict(list)
  for task, value in zip(tasks, losses(made, policy, tasks), strict=True):
    loss[owner[task.id]].append(value)
  return Scores(
    {name: float(np.mean(values)) for name, values in right.items()},
    {name: float(np.mean(values)) for name, values in loss.items()},
  )


def losses(made: Experiment, policy: pathlib.Path, tasks: Sequence[Task]) -> list[float]:
  """Mean negative log-prob of the tokens of each expert's turn."""
  folder = (policy / "tokenizer.json").is_file()
  parts = build_parts(resolve(dataclasses.replace(made)), None, _extensions(tasks))
  if folder:
    params = load_folder(parts, policy)
  else:
    params = load_policy(parts, latest_checkpoint(policy))
  prefixes, replies = [], []
  for task in tasks:
    tools = read_tools(task.metadata["tools"])
    spans = parts.chat.conversation(task.prompt, task.demonstration, tools)
    prefixes.append([i for span in spans if not span.weight for i in span.ids])
    replies.append([i for span in spans if span.weight for i in span.ids])
  found = models.score_responses(
    params, parts.model, prefixes, replies, row_length=_LENGTH.value, rows=4
  )
  return [-float(np.mean(one.log_probs)) for one in found]


def one_seed(
  seed: int, recorded: Mapping[str, Sequence[AgentTrajectory]], place: pathlib.Path
) -> dict[str, Scores]:
  """The warm start and both arms."""
  begun = time.monotonic()
  splits = {name: split_domain(name, found, seed) for name, found in recorded.items()}
  tokenizer = None if _PRETRAINED.value else place / "tokenizer.model"
  if tokenizer is not None:
    _train_vocabulary([row for split in splits.values() for row in split.warm], tokenizer)
  base = experiment(seed, tokenizer)
  chat = build_chat(base.chat, base.tokenizer, pretrained=base.pretrained)
  fits = {
    name: Split(*(fitting(rows, chat, _LENGTH.value) for rows in vars(split).values()))
    for name, split in splits.items()
  }
  held_out = {
    name: some([r for r in split.held_out if r.expected.tool_calls], _HELD_OUT.value, seed)
    for name, split in fits.items()
  }
  turns = some(fits[_DOMAIN.value].arms, _TURNS.value, seed)
  counts = {name: (len(f.warm), len(f.arms), len(held_out[name])) for name, f in fits.items()}
  _say(seed, begun, f"turns for warm start, arms and held-out calls that fit: {counts}")

  start = pathlib.Path(_PRETRAINED.value or "")
  made = base
  if _WARM.value:
    made = experiment(seed, tokenizer, supervised=_supervised(_WARM.value, _WARM_RATE.value))
    _train(made, place / "warm", _tasks([row for f in fits.values() for row in f.warm]))
    start = place / "warm"
  results = {"warm start": measure(made, start, held_out)}
  _say(seed, begun, f"warm start: {results['warm start']}")
  for arm in ("sft", "pivotrl"):
    begun = time.monotonic()
    results[arm] = _run_arm(arm, seed, tokenizer, made, turns, held_out, place)
    _say(seed, begun, f"{arm}: {results[arm]}")
  return results


def _run_arm(
  arm: str,
  seed: int,
  tokenizer: pathlib.Path | None,
  warm: Experiment,
  turns: Sequence[PivotRow],
  held_out: Mapping[str, Sequence[PivotRow]],
  place: pathlib.Path,
) -> Scores:
  """Trains an arm from the warm start, and measures it."""
  begun, start = time.monotonic(), {}
  if _WARM.value:
    start = {"start_from": str(latest_checkpoint(place / "warm"))}
  if arm == "sft":
    rows = min(_ROWS, len(turns))
    made = experiment(
      seed, tokenizer, supervised=_supervised(_STEPS.value, _RATE.value, rows), **start
    )
    _train(made, place / arm, _tasks(turns))
    return measure(made, place / arm, held_out)
  checkpoint = place / "warm" if _WARM.value else None
  profiled = dataclasses.replace(warm, rl=_reinforced(1, 1))
  profiles = profile_checkpoint(profiled, checkpoint, turns, samples=_SAMPLES.value)
  pivots = select_pivots(profiles.rows, max_mean=_MAX_MEAN.value)
  _say(seed, begun, f"{len(pivots)} of {len(profiles.rows)} profiled turns are pivots")
  if not pivots:
    raise SystemExit(
      "no turn is a pivot: the policy gets each always or never right. Raise --warm_steps or "
      "--turns, or set --verifier=tool_name, which is coarser."
    )
  groups = min(_GROUPS.value, len(pivots))
  made = experiment(seed, tokenizer, rl=_reinforced(_STEPS.value, groups), **start)
  _train(made, place / arm, _tasks(pivots))
  mixed = float(np.mean(list(mixed_shares(place / arm).values())))
  _say(seed, begun, f"{100 * mixed:.0f}% of the groups had a gradient")
  return measure(made, place / arm, held_out)


def _train_vocabulary(rows: Sequence[PivotRow], path: pathlib.Path) -> None:
  """A vocabulary of what the warm start reads."""
  texts = (
    text
    for row in rows
    for text in conversation_texts((*row.history, row.expected), tool_call_format="json")
  )
  train_sentencepiece(texts, path, _VOCABULARY.value)


# ----------------------------------------------------------------------------------------- report


def table(results: Sequence[Mapping[str, Scores]], domain: str) -> str:
  """Means and 95% intervals over seeds, then differences to the warm start, paired by seed.

  Args:
    results: by seed.
    domain: what the arms learned; it stands first.
  """
  names = [domain, *(name for name in results[0]["warm start"].calls if name != domain)]
  lines = []
  for arm in results[0]:
    for name in names:
      calls = Estimate.of([result[arm].calls[name] for result in results])
      loss = Estimate.of([result[arm].loss[name] for result in results])
      lines.append(f"{arm:12s} {name:9s} calls right {calls!s:24s} loss {_nats(loss)}")
  lines.append("differences to the warm start")
  for arm in list(results[0])[1:]:
    for name in names:
      first = [result["warm start"] for result in results]
      calls = Estimate.of(
        [r[arm].calls[name] - w.calls[name] for r, w in zip(results, first, strict=True)]
      )
      loss = Estimate.of(
        [r[arm].loss[name] - w.loss[name] for r, w in zip(results, first, strict=True)]
      )
      kind = "learned" if name == domain else "kept"
      lines.append(f"{arm:12s} {name:9s} {kind:8s} calls right {calls!s:24s} loss {_nats(loss)}")
  return "\n".join(lines)


def _nats(estimate: Estimate) -> str:
  return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _say(seed: int, begun: float, what: str) -> None:
  print(f"seed {seed}, {time.monotonic() - begun:4.0f} s: {what}", flush=True)


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  data = _DATA.value or os.environ.get("AGENTJAX_DATA")
  if not data:
    raise SystemExit("--data=None; allowed: the folder of recordings, or AGENTJAX_DATA set to it.")
  if not _WARM.value and not _PRETRAINED.value:
    raise SystemExit("--warm_steps=0; allowed: >= 1, or --pretrained=FOLDER.")
  recorded = {name: read_domain(name, pathlib.Path(data)) for name in DOMAINS}
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(_WORKDIR.value or folder)
    results = []
    for seed in _SEEDS.value:
      (root / str(seed)).mkdir(parents=True)
      results.append(one_seed(seed, recorded, root / str(seed)))
  print("\n" + table(results, _DOMAIN.value))


if __name__ == "__main__":
  app.run(main)
