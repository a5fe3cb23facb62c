r"""Finds the turns of experts' trajectories from which a policy can learn (PivotRL, 2603.21383).

  python -m agentjax.recipes.pivotrl.mine --config=configs/pivotrl_tool_calls.py \
      --checkpoint=runs/a --trajectories=airline.jsonl.gz --form=openai --tools=tools.json \
      --output=pivots

Every assistant turn is sampled ``--samples`` times by the policy and judged by ``config.reward``.
``--output`` then holds ``candidates.jsonl``, all turns that could be profiled; ``pivots.jsonl``,
those whose rewards differ, with a mean below ``--max_mean``; and ``report.json``, with what was
refused and why.

  python -m agentjax.recipes.pivotrl.mine --config=runs/b/config.json --checkpoint=runs/b \
      --rows=pivots/candidates.jsonl --if_stale=runs/b --output=pivots_2

profiles known turns again with a later policy, if most groups of run b no longer have two rewards
that differ.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from typing import Literal, cast, get_args

import numpy as np
from absl import flags
from rich.console import Console

from agentjax.adapters.agent_trajectories import TrajectoryForm, read_trajectories
from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.files import write_atomically
from agentjax.recipes.pivotrl.turns import candidates, observed_tools, select_pivots
from agentjax.tools.declared import DeclaredTool, read_tools
from agentjax.training.flags import define_config_flag
from agentjax.training.progress import print_line
from agentjax.worlds.pivot.tasks import PivotRow, read_pivots, write_pivots

_CONFIG = define_config_flag()
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  None,
  "Directory of a checkpoint (RUN/checkpoints/STEP), or of a run for its newest. Without it the "
  "policy is that of --config.pretrained.",
)
_TRAJECTORIES = flags.DEFINE_multi_string(
  "trajectories", [], "File of trajectories; may be given several times."
)
_FORM = flags.DEFINE_enum("form", "openai", get_args(TrajectoryForm), "How their rows are made.")
_TOOLS = flags.DEFINE_string(
  "tools", None, "JSON file with a list of tools, for trajectories that declare none."
)
_OBSERVED = flags.DEFINE_bool(
  "observed_tools",
  False,
  "Declare the tools that the files call, with the arguments that were seen, for trajectories that "
  "declare none. In the place of --tools.",
)
_THINKING = flags.DEFINE_enum(
  "thinking", "drop", ["keep", "drop"], "What becomes of the reasoning of earlier turns."
)
_SUCCESSES = flags.DEFINE_bool(
  "successes_only", False, "Leave out trajectories that record a reward below 1."
)
_ROWS = flags.DEFINE_string(
  "rows", None, "File of rows (candidates.jsonl) to profile again, in the place of trajectories."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for what is found.", required=True)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  8,
  "K, samples a turn. The paper does not say; its authors' tools advise 8 or more.",
  lower_bound=2,
)
_MAX_MEAN = flags.DEFINE_float(
  "max_mean",
  1.0,
  "Lambda: pivots have a lower mean reward. The paper does not say; 1 keeps all that are mixed.",
  lower_bound=0.0,
)
_LIMIT = flags.DEFINE_integer("limit", None, "At most this many pivots; the easiest go first.")
_TURNS = flags.DEFINE_integer(
  "turns", None, "Profile this many turns, chosen at random (seed: config.seed); all by default."
)
_IF_STALE = flags.DEFINE_string(
  "if_stale", None, "Run to look at first: do nothing unless its profiles are stale."
)
_LEAST_MIXED = flags.DEFINE_float(
  "least_mixed", 0.5, "Profiles are stale where fewer groups than this share are mixed. Ours."
)
_WINDOW = flags.DEFINE_integer("window", 10, "Latest steps of the run that are looked at. Ours.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.recipes.pivotrl.profiles import profile_checkpoint
  from agentjax.recipes.pivotrl.staleness import StalenessConfig, mixed_shares, staleness

  console = Console()
  if _IF_STALE.value is not None:
    verdict = staleness(
      mixed_shares(_IF_STALE.value), StalenessConfig(_LEAST_MIXED.value, _WINDOW.value)
    )
    print_line(
      console,
      f"{_IF_STALE.value}: {100 * verdict.mixed:.0f}% of the groups of the last {verdict.steps} "
      f"steps are mixed; the profiles are {'stale' if verdict.stale else 'not stale'}",
    )
    if not verdict.stale:
      return
  rows = _rows()
  if _TURNS.value is not None and _TURNS.value < len(rows):
    chosen = np.random.default_rng(_CONFIG.value.seed).permutation(len(rows))[: _TURNS.value]
    rows = [rows[i] for i in sorted(chosen)]
  profiles = profile_checkpoint(_CONFIG.value, _CHECKPOINT.value, rows, samples=_SAMPLES.value)
  pivots = select_pivots(profiles.rows, max_mean=_MAX_MEAN.value, limit=_LIMIT.value)
  means = [row.profile.mean for row in profiles.rows if row.profile is not None]
  mixed = sum(row.profile is not None and row.profile.variance > 0 for row in profiles.rows)
  reasons = collections.Counter(profiles.refused.values()).most_common()
  report = {
    "turns": len(rows),
    "profiled": len(profiles.rows),
    "samples": _SAMPLES.value,
    "mixed": mixed,
    "always_right": sum(m == 1.0 for m in means),
    "never_right": sum(m == 0.0 for m in means),
    "max_mean": _MAX_MEAN.value,
    "pivots": len(pivots),
    "prompt_tokens": profiles.prompt_tokens,
    "sampled_tokens": profiles.sampled_tokens,
    "refused": len(profiles.refused),
    "reasons": reasons,
  }
  folder = _OUTPUT.value
  write_pivots(os.path.join(folder, "candidates.jsonl"), profiles.rows)
  write_pivots(os.path.join(folder, "pivots.jsonl"), pivots)
  write_atomically(os.path.join(folder, "report.json"), json.dumps(report, indent=2) + "\n")
  print_line(
    console,
    f"{report['turns']} turns: {report['refused']} refused, {report['always_right']} always right, "
    f"{report['never_right']} never right, {mixed} mixed; {len(pivots)} pivots in {folder}",
  )
  for reason, count in reasons[:5]:
    print_line(console, f"  refused {count}: {reason}")


def _rows() -> list[PivotRow]:
  """The turns that the flags name."""
  if bool(_TRAJECTORIES.value) == (_ROWS.value is not None):
    raise ConfigError("give either --trajectories=FILE or --rows=FILE.")
  if _ROWS.value is not None:
    return read_pivots(_ROWS.value)
  if _OBSERVED.value and _TOOLS.value is not None:
    raise ConfigError("give either --tools=FILE or --observed_tools.")
  tools, form = _declared(), cast(TrajectoryForm, _FORM.value)
  thinking = cast(Literal["keep", "drop"], _THINKING.value)
  trajectories = [
    trajectory
    for path in _TRAJECTORIES.value
    for trajectory in read_trajectories(path, form, tools=tools, thinking=thinking)
    if not _SUCCESSES.value or trajectory.metadata.get("reward", 1.0) >= 1.0
  ]
  if _OBSERVED.value:
    tools = observed_tools(trajectories)
    trajectories = [t if t.tools else dataclasses.replace(t, tools=tools) for t in trajectories]
  return candidates(trajectories, os.path.basename(_TRAJECTORIES.value[0]).partition(".")[0])


def _declared() -> tuple[DeclaredTool, ...]:
  if _TOOLS.value is None:
    return ()
  try:
    with open(_TOOLS.value, encoding="utf-8") as file:
      return read_tools(json.load(file))
  except (OSError, ValueError) as error:
    raise ConfigError(f"--tools={_TOOLS.value!r} cannot be used: {error}") from error


if __name__ == "__main__":
  main(run)
