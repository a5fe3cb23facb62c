"""A folder of actions to imitate.

  settings.json      what the candidates were drawn with
  candidates.jsonl   a row a state, with the candidate actions that the policy drew
  train.jsonl        a conversation a state whose best candidate is imitated
  report.json        how many, and with what settings

Candidates are drawn once and kept, each row on the disk before the next; another call with another
``used``, ``threshold`` or critic chooses among the same ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.data.synthesis_folder import Report, Row, RowFile, claim, fill, unreported
from agentjax.engine import Engine, Finish, SampleRequest
from agentjax.files import write_atomically
from agentjax.recipes.digi_q.conversations import ConversationReader
from agentjax.recipes.digi_q.critic import both_values
from agentjax.recipes.digi_q.features import read_features
from agentjax.recipes.digi_q.learning import Learnt, read_critic
from agentjax.recipes.digi_q.recording import read_transitions
from agentjax.recipes.digi_q.selection import Selection, advantages, select
from agentjax.recipes.digi_q.settings import ExtractionConfig, RecordConfig
from agentjax.recipes.digi_q.transitions import (
  Transition,
  TransitionReader,
  question,
  state_prompt,
)
from agentjax.rollout import keys
from agentjax.schedules import at_end
from agentjax.text.chat import Chat
from agentjax.threads import LoopThread
from agentjax.tools.declared import DECLARED_TOOLS, declared_tools
from agentjax.training.build import Extensions, Scoring, build_scoring
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool, Policy, load_policy_with_chat
from agentjax.trajectory.messages import message_to_json
from agentjax.trajectory.record import Task

CANDIDATES, TRAIN, REPORT = "candidates.jsonl", "train.jsonl", "report.json"


@dataclasses.dataclass(frozen=True)
class Extracted:
  """What ``extract`` found.

  Attributes:
    states: with candidates. imitated: of them.
    kept: states whose candidates were there before.
    mean_advantage: of the best candidates.
  """

  states: int
  imitated: int
  kept: int
  mean_advantage: float


def extract(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  transitions: str,
  critic: str,
  backbone: str,
  policy: str,
  config: ExtractionConfig,
  concurrency: int = 16,
  extensions: Extensions | None = None,
  report: Report = unreported,
) -> Extracted:
  """Draws candidates for the states of transitions, and writes those to be imitated.

  Args:
    experiment: validated and frozen here; its world, ``rl.sampling``,
      ``rollout.max_tokens_per_turn``, engine and seed say how candidates are drawn.
    output: new, empty, or of an earlier call with the same policy and states.
    transitions: folder of ``recording``.
    critic: folder of ``learning``. backbone: of this critic.
    policy: that draws: a run, a checkpoint or a Hugging Face folder. It has the markup of the one
      that played.
    config: see ExtractionConfig.
    concurrency: states at once.
    extensions: may bring tasks and tools.
    report: told of the states.

  Raises:
    CheckpointError: no policy or backbone to load.
    ConfigError: settings, policy or backbone that do not fit each other, or nothing to imitate.
    DataError: no state whose history can be written.
  """
  experiment = at_end(resolve(experiment))
  config.validate("extraction")
  found, origin = read_transitions(transitions)
  learnt, reader = read_critic(critic), load_policy_with_chat(backbone, experiment)
  _check_same(reader.identity == learnt.identity, f"--backbone={backbone!r}", "that of the critic")
  states = _states(found, config, experiment.seed)
  scoring = build_scoring(experiment, extensions or Extensions())
  pool, runner = ModelPool(experiment), LoopThread()
  try:
    engine, chat, identity = pool.serve(policy)
    markup = "the markup of the one that played"
    _check_same(chat.fingerprint() == origin["chat"], f"--policy={policy!r}", markup)
    settings = {
      "stored": config.stored,
      "states": config.states,
      "policy": identity,
      "transitions": origin["sha256"],
      "sampling": experiment.rl.sampling.to_dict(),
      "max_tokens": experiment.rollout.max_tokens_per_turn,
      "seed": experiment.seed,
    }
    directory = claim(output, settings, (CANDIDATES, TRAIN))
    drawer = _Drawer(experiment, engine, chat, scoring, config.stored)
    file = RowFile(directory / CANDIDATES, {"candidates": list})
    kept = len(file.rows)

    async def work(one: Transition) -> None:
      file.append({"id": one.id, "candidates": await drawer.candidates(one)})

    runner.run(fill((file,), states, work, what="states", report=report, concurrency=concurrency))
  finally:
    runner.run(scoring.close())
    runner.close()
    pool.close()
  selection = _select(states, file.rows, learnt, reader, config)
  drawn = selection.advantages[np.isfinite(selection.advantages)]
  if not selection.imitated.any():
    raise ConfigError(
      f"no action has an advantage above --extraction.threshold={config.threshold:g}; the largest "
      f"is {drawn.max(initial=-np.inf):.3g}. Allowed: a lower threshold, or another critic."
    )
  rows = _rows(states, file.rows, selection, drawer.tasks)
  write_atomically(directory / TRAIN, "".join(json.dumps(row) + "\n" for row in rows))
  result = Extracted(len(drawn), len(rows), kept, float(np.mean(drawn)))
  _write_report(directory / REPORT, result, config, learnt)
  return result


def _write_report(
  path: pathlib.Path, result: Extracted, config: ExtractionConfig, learnt: Learnt
) -> None:
  said = {
    **dataclasses.asdict(result),
    "extraction": config.to_dict(),
    "critic": learnt.config.to_dict(),
  }
  write_atomically(path, json.dumps(said, indent=2) + "\n")


class _Drawer:
  """Draws candidate actions by a policy.

  Args:
    experiment: see ``extract``.
    engine, chat: of the policy.
    scoring: has the tasks and tools.
    count: candidates of a state.
  """

  def __init__(
    self, experiment: Experiment, engine: Engine, chat: Chat, scoring: Scoring, count: int
  ):
    self._experiment, self._engine, self._chat = experiment, engine, chat
    self._tools, self._count = scoring.world.tools, count
    self.tasks = {task.id: task for task in (*scoring.tasks.train, *scoring.tasks.test)}
    self._conversations = ConversationReader(chat)
    self._words = TransitionReader(chat, RecordConfig())

  async def candidates(self, one: Transition) -> list[Row]:
    """Each with its text, and as a message; None for one that cannot be imitated.

    A turn that was cut off is not imitated. A state that leaves no room has no candidates.
    """
    if one.task not in self.tasks:
      raise DataError(
        f"transition {one.id} is of task {one.task}, which the world of --config does not have",
        "transitions",
      )
    if len(one.ids) >= self._engine.max_tokens:
      return []
    prefix = await self._engine.prefill(one.ids)
    try:
      return await asyncio.gather(*(self._draw(one, prefix, i) for i in range(self._count)))
    finally:
      prefix.release()

  async def _draw(self, one: Transition, prefix: Any, number: int) -> Row:
    context = await self._engine.open(prefix)
    try:
      sample = await context.generate(
        SampleRequest(
          key_data=keys.derive(self._experiment.seed, keys.Stream.WRITER, one.task, one.id, number),
          max_tokens=self._experiment.rollout.max_tokens_per_turn,
          sampling=self._experiment.rl.sampling,
          stop_ids=self._chat.stop_ids,
        )
      )
    finally:
      context.close()
    ids = [int(i) for i in sample.token_ids]
    tools = declared_tools(self.tasks[one.task].metadata) or self._tools
    whole = sample.finish is Finish.STOP
    message = self._conversations.turn(ids, tools) if whole else None
    return {
      "text": self._words.action_text(ids),
      "message": None if message is None else message_to_json(message),
    }


def _states(found: Sequence[Transition], config: ExtractionConfig, seed: int) -> list[Transition]:
  """The states that candidates are drawn for, by id."""
  written = [one for one in found if one.messages is not None]
  if not written:
    raise DataError(f"none of {len(found)} histories can be written as messages", "transitions")
  if config.states is None or config.states >= len(written):
    return written
  chosen = np.random.default_rng(seed).permutation(len(written))[: config.states]
  return [written[i] for i in sorted(chosen)]


def _select(
  states: Sequence[Transition],
  rows: dict[int, Row],
  learnt: Learnt,
  backbone: Policy,
  config: ExtractionConfig,
) -> Selection:
  """The best of the used candidates of each state; -inf where there is none."""
  shape = (len(states), config.used)
  eligible, drawn = np.zeros(shape, bool), np.zeros(shape, bool)
  pairs = []
  for row, one in enumerate(states):
    for column, candidate in enumerate(rows[one.id]["candidates"][: config.used]):
      eligible[row, column] = candidate["message"] is not None
      drawn[row, column] = True
      pairs.append(question(one.state, candidate["text"]))
  prompts = [*pairs, *(state_prompt(one.state) for one in states)]
  features = read_features(backbone, prompts, layer=learnt.layer, rows=learnt.config.forward_rows)
  q, v = both_values(
    learnt.config,
    learnt.heads,
    jnp.asarray(learnt.actions(features[: len(pairs)])),
    jnp.asarray(learnt.states(features[len(pairs) :])),
  )
  actions = np.zeros((2, *shape), np.float32)
  actions[:, drawn] = np.asarray(q)
  return select(config, advantages(config, actions, np.asarray(v)), eligible)


def _rows(
  states: Sequence[Transition],
  rows: dict[int, Row],
  selection: Selection,
  tasks: dict[int, Task],
) -> list[dict[str, Any]]:
  """Conversations for the supervised stage of the policy: only the last turn has a loss."""
  made = []
  for one, best, advantage, imitated in zip(states, *selection, strict=True):
    if not imitated:
      continue
    assert one.messages is not None
    message = rows[one.id]["candidates"][best]["message"]
    row = {"id": one.id, "advantage": float(advantage), "messages": [*one.messages, message]}
    declared = tasks[one.task].metadata.get(DECLARED_TOOLS)
    made.append(row | ({"tools": declared} if declared else {}))
  return made


def _check_same(same: bool, given: str, allowed: str) -> None:
  if not same:
    raise ConfigError(f"{given} is another one; allowed: {allowed}.")
