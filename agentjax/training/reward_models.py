r"""Training reward models: preferences as stored episodes, and C2's two runs as experiments.

Nothing here is a loop: a run of ``agentjax.training.run.Run`` trains what these functions set up.
``python -m agentjax.synthesise --method=c2`` writes what configs/c2_generator.py and
configs/c2_verifier.py read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Sequence

from agentjax.config import check
from agentjax.data.synthesis_folder import plain_messages
from agentjax.files import write_atomically
from agentjax.objectives import preset
from agentjax.rewards import RewardConfig
from agentjax.rewards.c2 import (
  REWARD_PARTS,
  REWARD_WEIGHTS,
  PreferenceRow,
  Synthesis,
  generator_rows,
  verifier_tasks,
)
from agentjax.training.experiment import Experiment
from agentjax.training.parts import Parts
from agentjax.training.stored import Manifest, write_episodes
from agentjax.training.teacher import template_fingerprint
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Reward, Task, Trajectory

SOURCE = "preferences"


def preference_tasks(rows: Sequence[PreferenceRow], *, source: str = SOURCE) -> list[Task]:
  """The prompts of the rows as tasks; the demonstration is the chosen reply."""
  return [
    Task(row.id, row.prompt, "chosen", source, (Message("assistant", row.chosen),)) for row in rows
  ]


class TooLongError(ValueError):
  """A preference has more tokens than a row of the run that is to learn from it."""


def preference_trajectories(
  row: PreferenceRow, parts: Parts, *, source: str = SOURCE
) -> tuple[Trajectory, Trajectory]:
  """Chosen with reward 1 and rejected with reward 0, as two episodes of one task.

  Raises:
    TooLongError: one is longer than ``rl.row_length``.
  """
  made = []
  for sample, (reply, reward) in enumerate(((row.chosen, 1.0), (row.rejected, 0.0))):
    turns = (Message("assistant", reply),)
    builder = TrajectoryBuilder(step=0, task_id=row.id, sample=sample, source=source)
    length = 0
    for span in parts.chat.conversation(row.prompt, turns, ()):
      builder.append(span.owner, span.ids, weight=float(span.target))
      length += len(span.ids)
    limit = parts.experiment.rl.row_length
    if length > limit:
      raise TooLongError(
        f"reply {sample} of preference {row.id} has {length} tokens with its prompt; "
        f"config.rl.row_length={limit} allows {limit}."
      )
    made.append(builder.build(reward=Reward(reward)))
  return made[0], made[1]


def write_preferences(
  folder: str | os.PathLike[str],
  rows: Sequence[PreferenceRow],
  parts: Parts,
  *,
  source: str = SOURCE,
) -> Manifest:
  """Writes a folder for ``config.rl.rollouts``: the pairs that DPO learns from.

  Args:
    folder: new or empty.
    rows: with ids of their own.
    parts: vocabulary and chat of the run that will read it.
    source: name of the data set, as in ``preference_tasks``.

  Raises:
    ValueError: no row, an id twice, or a reply that is too long.
    CheckpointError: the folder is in use.
  """
  if len({row.id for row in rows}) != len(rows) or not rows:
    raise ValueError(f"{len(rows)} preferences; allowed: at least one, each with an id of its own.")
  return _store(
    folder, [t for row in rows for t in preference_trajectories(row, parts, source=source)], parts
  )


def _store(
  folder: str | os.PathLike[str], episodes: Sequence[Trajectory], parts: Parts
) -> Manifest:
  manifest = Manifest(
    tokenizer=parts.tokenizer.fingerprint(),
    template=template_fingerprint(parts.chat, parts.experiment.chat),
    policy="",
    teachers={},
    demonstrations_by="",
    temperature=parts.experiment.rl.sampling.temperature or 1.0,
    episodes=len(episodes),
    tokens=sum(int((s.weights > 0).sum()) for t in episodes for s in t.segments),
  )
  write_episodes(folder, episodes, manifest)
  return manifest


@dataclasses.dataclass(frozen=True)
class C2Data:
  """What C2's two runs have to learn from.

  Attributes:
    preferences: pairs of rubrics for the generator.
    tasks: of the verifier.
    too_long: pairs that were kept, but do not fit a row of the generator's run.
    too_long_to_verify: pairs that were kept, but do not fit a prompt of the verifier.
  """

  preferences: int
  tasks: int
  too_long: int
  too_long_to_verify: int


def write_c2(
  folder: str | os.PathLike[str],
  syntheses: Sequence[Synthesis],
  parts: Parts,
  *,
  seed: int,
  verifier_tokens: int = 8192,
) -> C2Data:
  """Writes what C2's two runs read: FOLDER/generator, FOLDER/verifier and FOLDER/episodes.

  ``generator`` and ``verifier`` hold a ``train.jsonl`` each for ``config.data.source=jsonl`` with
  ``messages_field="messages"``; ``episodes`` is the generator's ``config.rl.rollouts``. It comes
  last: where it is, all three are whole. Those of an earlier call are replaced.

  Args:
    folder: of a synthesis.
    syntheses: of ``c2.synthesise``.
    parts: vocabulary and chat of the generator's run.
    seed: that of the C2Config.
    verifier_tokens: of a prompt of the verifier, at most; the source's number.

  Raises:
    TooLongError: no pair was kept that fits a row of the generator, or a prompt of the verifier.
  """
  kept: list[PreferenceRow] = []
  episodes: list[Trajectory] = []
  rows = generator_rows(syntheses, seed=seed)
  for row in rows:
    row = dataclasses.replace(row, id=len(kept))  # tasks of a file are numbered by its lines
    try:
      episodes += preference_trajectories(row, parts)
    except TooLongError:
      continue
    kept.append(row)

  def fits(synthesis: Synthesis) -> bool:
    prompts = [task.prompt for task in verifier_tasks([synthesis], seed=seed)]
    lengths = [sum(len(span.ids) for span in parts.chat.prompt(prompt)) for prompt in prompts]
    return bool(lengths) and max(lengths) <= verifier_tokens

  shown = [synthesis for synthesis in syntheses if fits(synthesis)]
  if not kept or not shown:
    raise TooLongError(
      f"{len(rows)} pairs were kept: config.rl.row_length={parts.experiment.rl.row_length} allows "
      f"{len(kept)} of them for the generator, verifier_tokens={verifier_tokens} {len(shown)} for "
      "the verifier."
    )
  root = pathlib.Path(folder)
  shutil.rmtree(root / "episodes", ignore_errors=True)
  tasks = verifier_tasks(shown, seed=seed)
  for name, made in (("generator", preference_tasks(kept)), ("verifier", tasks)):
    lines = [
      json.dumps(
        {
          "messages": plain_messages((*task.prompt, *task.demonstration)),
          "answer": task.answer,
        }
      )
      for task in made
    ]
    write_atomically(root / name / "train.jsonl", "".join(line + "\n" for line in lines))
  _store(root / "episodes", episodes, parts)
  return C2Data(len(kept), len(tasks), len(rows) - len(kept), len(rows) - len(shown))


def c2_generator(base: Experiment, rollouts: str, *, warmup: float = 0.1) -> Experiment:
  """C2's rubric generator (2604.13618): DPO at beta .1 on stored pairs, lr 5e-7, warm-up .1.

  Args:
    base: model, vocabulary, sizes and steps; the source takes three passes in batches of 8.
    rollouts: of ``write_preferences``.
    warmup: share of ``base.rl.steps`` in which the learning rate rises.
  """
  check(0 <= warmup < 1, "warmup", warmup, "0 <= warmup < 1")
  optimizer = dataclasses.replace(
    base.rl.optimizer, learning_rate=5e-7, warmup_steps=math.ceil(warmup * base.rl.steps)
  )
  rl = dataclasses.replace(
    base.rl,
    rollouts=rollouts,
    objective=preset("dpo"),
    old_log_probs="recomputed",
    minibatches=1,
    epochs=1,
    optimizer=optimizer,
  )
  return dataclasses.replace(base, rl=rl)


def c2_verifier(base: Experiment) -> Experiment:
  """C2's verifier (2604.13618): GRPO with groups of 8 and KL .01, lr 5e-7, linear, one pass.

  The reward is ``.6 preference + .3 rubric label + .1 format``, each +1 or -1.

  Args:
    base: model, vocabulary, sizes and steps; run it on the tasks of ``c2.verifier_tasks``. The
      source's prompts have up to 8192 tokens and its replies 2048.
  """
  objective = preset("grpo")
  objective.policy_loss.kl_coefficient = 0.01
  return dataclasses.replace(
    base,
    reward=RewardConfig(parts=REWARD_PARTS, weights=REWARD_WEIGHTS),
    tools=dataclasses.replace(base.tools, names=()),
    rollout=dataclasses.replace(base.rollout, group_size=8, max_turns=1, answer="text"),
    evaluation=dataclasses.replace(base.evaluation, success_part=REWARD_PARTS[0]),
    rl=dataclasses.replace(
      base.rl,
      objective=objective,
      optimizer=dataclasses.replace(base.rl.optimizer, learning_rate=5e-7, schedule="linear"),
    ),
  )
