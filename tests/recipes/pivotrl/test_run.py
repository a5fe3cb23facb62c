"""Turns of trajectories from the command that mines them to a run that trains on them."""

import json
import pathlib
import subprocess
import sys
import types

import pytest

from agentjax.adapters.agent_trajectories import AgentTrajectory
from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.pivotrl.profiles import profile_checkpoint
from agentjax.recipes.pivotrl.staleness import mixed_shares
from agentjax.recipes.pivotrl.turns import candidates
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text.chat import MarkedChat
from agentjax.text.tokenizer import ByteTokenizer
from agentjax.tools import ToolsConfig
from agentjax.tools.declared import read_tool
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
  SupervisedStage,
)
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.experiment import resolve
from agentjax.trajectory.record import Message, ToolCall
from agentjax.worlds.pivot import PivotWorldConfig
from agentjax.worlds.pivot.tasks import read_pivots, write_pivots
from tests.training.smoke import quiet

_ROOT = pathlib.Path(__file__).parents[3]
TOOL = read_tool({"name": "find", "parameters": {"type": "object", "properties": {}}})
TALKS = [
  (Message("user", f"Thing {i}?"), Message("assistant", f"It is {i}."), Message("user", "Thanks."),
   Message("assistant", "Bye."))
  for i in range(3)
]  # fmt: skip


def experiment(folder: pathlib.Path = pathlib.Path("pivots")) -> Experiment:
  """A warm start and two steps on turns where any message is right."""
  return Experiment(
    name="pivots",
    data=DataConfig(path=str(folder), train_size=None, test_size=None),
    world=PivotWorldConfig(),
    model=ModelConfig(
      vocab_size=264, d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16
    ),
    tools=ToolsConfig(names=()),
    reward=RewardConfig(parts=("pivot",)),
    engine=EngineConfig(
      slots=8, max_length=64, chunk_tokens=8, extend_buckets=(32,), extend_rows=(4,)
    ),
    rollout=RolloutConfig(
      group_size=4, max_turns=1, max_tokens_per_turn=8, max_total_tokens=64, concurrency=16
    ),
    supervised=SupervisedStage(
      steps=12,
      tasks_per_step=4,
      row_length=64,
      microbatch_rows=4,
      optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
    rl=RLStage(
      steps=2,
      tasks_per_step=2,
      row_length=64,
      microbatch_rows=4,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig()),
      optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
    evaluation=HeldOutConfig(tasks=0),
    checkpoint=CheckpointConfig(every=20),
  )


def rows():
  return candidates((AgentTrajectory(f"{i}", t, (TOOL,)) for i, t in enumerate(TALKS)), "talks")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """(folder, run) of a run on all turns."""
  folder = tmp_path_factory.mktemp("pivots")
  write_pivots(folder / "pivots.jsonl", rows())
  Run(experiment(folder), folder / "run", console=quiet()).train()
  return folder, folder / "run"


@pytest.mark.slow
def test_a_run_trains_on_turns_and_its_policy_profiles_them_again(trained):
  _, run = trained
  shares = mixed_shares(run)
  assert sorted(shares) == [13, 14] and all(0 <= share <= 1 for share in shares.values())
  found = profile_checkpoint(experiment(), run, rows(), samples=4)
  assert [r.id for r in found.rows] == list(range(6)) and not found.refused
  assert {(r.profile.samples, r.profile.version) for r in found.rows} == {(4, 14)}
  again = profile_checkpoint(experiment(), run, rows(), samples=4)
  assert again.rows == found.rows


def test_supervised_learning_writes_calls_as_the_turn_will_be_read():
  schema = {"type": "object", "properties": {"item": {"type": "string"}}}  # not a required one
  tool = read_tool({"name": "find", "parameters": schema})
  talk = (Message("user", "x"), Message("assistant", "", (ToolCall("find", {"item": "cup"}),)))
  [row] = candidates([AgentTrajectory("a", talk, (tool,))], "talks")
  chat = MarkedChat(ByteTokenizer())
  parts = types.SimpleNamespace(chat=chat, tools=(), experiment=experiment())
  turn = demonstration_trajectory(row.task(), parts).segments[-1].token_ids.tolist()
  assert chat.parse(turn, (tool,)) == ("", talk[1].tool_calls)


def test_without_a_policy_there_is_nothing_to_profile():
  with pytest.raises(ConfigError, match="give --checkpoint=RUN or --config.pretrained=DIR"):
    profile_checkpoint(experiment(), None, rows(), samples=4)


def test_a_folder_without_a_journal_is_no_run(tmp_path):
  with pytest.raises(ConfigError, match="there is no journal.log"):
    mixed_shares(tmp_path)


def test_a_row_that_cannot_be_judged_stops_a_run_before_it_begins(tmp_path):
  bare = candidates([AgentTrajectory("a", TALKS[0], ())], "talks")
  write_pivots(tmp_path / "pivots.jsonl", bare)
  settings = resolve(experiment(tmp_path))
  assert len(build_parts(settings, None, Extensions()).tasks.train) == 2
  other = experiment(tmp_path)
  other.world.verifier.kind = "terminal"
  with pytest.raises(ConfigError, match="task 0 .*the expected action fits none of the harn"):
    build_parts(resolve(other), None, Extensions())


@pytest.mark.slow
def test_the_command_mines_and_looks_at_staleness_first(trained, tmp_path):
  folder, run = trained
  messages = [[{"role": m.role, "content": m.content} for m in talk] for talk in TALKS]
  trajectories = tmp_path / "talks.jsonl"
  trajectories.write_text("".join(json.dumps({"messages": m, "id": "t"}) + "\n" for m in messages))

  def mine(*arguments):
    command = [sys.executable, "-m", "agentjax.recipes.pivotrl.mine", f"--config={run}/config.json"]
    done = subprocess.run(
      [*command, f"--checkpoint={run}", f"--output={tmp_path}/out", *arguments],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    return done.returncode, done.stdout + done.stderr

  code, text = mine(f"--trajectories={trajectories}", "--samples=4")
  report = json.loads((tmp_path / "out" / "report.json").read_text())
  assert code == 0, text
  assert (report["turns"], report["profiled"], report["refused"]) == (6, 6, 0)
  profiles = [row.profile for row in read_pivots(tmp_path / "out" / "candidates.jsonl")]
  mixed = sum(profile.variance > 0 for profile in profiles)
  kept = (tmp_path / "out" / "pivots.jsonl").read_text().splitlines()
  assert len(kept) == mixed == report["pivots"] == report["mixed"]
  code, text = mine(f"--rows={folder}/pivots.jsonl", f"--if_stale={run}", "--window=9")
  assert code == 0 and "the profiles are not stale" in text
  code, text = mine()
  assert code == 2 and "give either --trajectories=FILE or --rows=FILE" in text
  trajectories.write_text('{"messages": 3}\n')
  code, text = mine(f"--trajectories={trajectories}")
  assert code == 2 and f"{trajectories}:1: messages is no list" in text
