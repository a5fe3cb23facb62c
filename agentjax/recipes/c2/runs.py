r"""C2's two runs as experiments, and the files that they read.

Nothing here is a loop: a run of ``agentjax.training.run.Run`` trains what these functions set up.
``python -m agentjax.recipes.c2.synthesise`` writes what configs/c2_generator.py and
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
from agentjax.recipes.c2.rubrics import (
  REWARD_PARTS,
  REWARD_WEIGHTS,
  Synthesis,
  rubric_messages,
  verifier_tasks,
)
from agentjax.rewards import RewardConfig
from agentjax.rewards.judges import question_key
from agentjax.training.build import Parts
from agentjax.training.experiment import Experiment
from agentjax.training.preferences import (
  PreferenceRow,
  TooLongError,
  preference_tasks,
  preference_trajectories,
  store_pairs,
)
from agentjax.trajectory.record import Trajectory


def generator_rows(syntheses: Sequence[Synthesis], *, seed: int) -> list[PreferenceRow]:
  """Step 2: one row a pair that was kept; ``seed`` is that of the C2Config."""
  return [
    PreferenceRow(
      s.pair.id,
      rubric_messages(s.pair, key=question_key(seed, s.pair.id)),
      s.chosen,
      s.rejected,
    )
    for s in syntheses
    if s.selection is not None
  ]


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
  store_pairs(root / "episodes", episodes, parts)
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
