"""From a Hugging Face folder to a trained policy that calls Python, and back to a folder."""

import asyncio
import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer
from agentjax.config import ConfigError
from agentjax.convert import to_folder
from agentjax.models.huggingface import load_pretrained, save_pretrained
from agentjax.models.lora import LoraConfig
from agentjax.objectives.objective import policy_objective
from agentjax.rollout.program import EpisodeEnd, tool_episode
from agentjax.sharding import fingerprint
from agentjax.text import build_chat
from agentjax.tools.python import PythonTool
from agentjax.training import Extensions, Run, load_experiment
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import load_networks
from agentjax.training.evaluation import evaluate_checkpoint
from agentjax.training.journal import read_journal
from agentjax.training.learner import Learner
from agentjax.training.metrics import read_metrics
from agentjax.training.pretrained import folder_fingerprint
from agentjax.trajectory.record import Message
from tests.text.extends import assert_extends
from tests.text.folders import write_model, write_vocabulary
from tests.training.figures import without_times
from tests.training.smoke import quiet

_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "qwen3_gsm8k_python.py"
_STEPS = 2
_CALL = '{"name": "python", "arguments": {"code": "print(3 + 4)"}}'
_ANSWER = "#### 7"
_SYSTEM_PROMPT = "End with #### N."
_PROMPT_LINES = (
  "system\n" + _SYSTEM_PROMPT + "\n\nYou may call these functions:\n<tools>\n",
  json.dumps(
    {
      "type": "function",
      "function": {
        "name": PythonTool.name,
        "description": PythonTool.description,
        "parameters": PythonTool.parameters,
      },
    }
  ),
  "\n</tools>\nWrite ",
  '\n{"name": NAME, "arguments": OBJECT}\n',
  " birds and 4 more?",
)


def _successors(tokenizer: HuggingFaceTokenizer) -> list[tuple[int, int]]:
  """The turns this policy knows: a call of Python or the answer, evenly."""
  (call,), (answer,), blanks = (tokenizer.encode(t) for t in (_CALL, _ANSWER, "\n\n"))
  control = tokenizer.controls
  return [
    (blanks[-1], control["<tool_call>"]),  # chat.thinking=False asks with "</think>\n\n"
    (blanks[-1], answer),
    (control["<tool_call>"], call),
    (call, control["</tool_call>"]),
    (control["</tool_call>"], control["<|im_end|>"]),
    (answer, control["<|im_end|>"]),
  ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  directory = tmp_path_factory.mktemp("qwen3")
  # A vocabulary with whole lines of the prompt as tokens keeps the episodes short.
  lines = (_CALL, _ANSWER, *_PROMPT_LINES)
  write_vocabulary(directory, corpus=lines, vocab_size=1200, split=False)
  tokenizer = HuggingFaceTokenizer(directory)
  write_model(directory, tokenizer, _successors(tokenizer))
  return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  directory = tmp_path_factory.mktemp("gsm8k")
  rows = [
    {"question": f"{n} birds and 4 more?", "answer": f"<<{n}+4={n + 4}>>{n + 4}\n#### {n + 4}"}
    for n in (3, 1, 3, 2)
  ]
  for name in ("train", "test"):
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return directory


def _experiment(folder, data):
  """configs/qwen3_gsm8k_python.py at the size of the folder, in float32."""
  experiment = load_experiment(_CONFIG)
  experiment.pretrained, experiment.data.path = str(folder), str(data)
  experiment.model.compute_dtype = "float32"
  experiment.model.remat = "none"
  experiment.chat.system_prompt = _SYSTEM_PROMPT
  experiment.engine.slots = 8
  experiment.engine.extend_buckets, experiment.engine.extend_rows = (16, 64), (4, 4)
  experiment.engine.max_length = experiment.rollout.max_total_tokens = 256
  experiment.rollout.max_tokens_per_turn, experiment.rollout.group_size = 16, 4
  experiment.rl.steps, experiment.rl.tasks_per_step, experiment.rl.microbatch_rows = _STEPS, 2, 4
  experiment.rl.row_length = 256
  experiment.rl.objective.policy_loss.kl_coefficient = 0.01  # so that there is a reference
  experiment.rl.optimizer.learning_rate, experiment.rl.optimizer.warmup_steps = 1e-3, 0
  experiment.evaluation.tasks, experiment.evaluation.every = 2, 0
  experiment.checkpoint.every = 1
  return experiment


@pytest.fixture(scope="module")
def finished(folder, data, tmp_path_factory):
  """(directory, report) of an uninterrupted run."""
  directory = tmp_path_factory.mktemp("runs") / "straight"
  return directory, Run(_experiment(folder, data), directory, console=quiet()).train()


def _recorded(directory, kind):
  return [record for k, record in read_journal(directory / "journal.log") if k == kind]


def test_the_policy_calls_python_and_is_paid_for_the_answer(finished, folder):
  directory, report = finished
  assert report.finished and report.steps == _STEPS
  trajectories = _recorded(directory, "trajectory")
  results = [tool for t in trajectories for tool in t.tools]
  assert len(results) >= 4 and {r.output for r in results} == {"7"}
  rewards = {t.reward.value for t in trajectories}
  assert rewards == {0.0, 1.0} and any(t.answer == "7" and t.tools for t in trajectories)
  rows = without_times(read_metrics(directory / "metrics.jsonl"))
  assert [row["stage"] for row in rows] == ["rl"] * _STEPS
  assert all(row["grad_norm"] > 0 for row in rows)


def test_sampler_and_trainer_agree(finished):
  directory, _ = finished
  assert max(r["mismatch/max"] for r in read_metrics(directory / "metrics.jsonl")) < 2e-5


def test_every_turn_extends_the_exact_ids_before_it(finished, folder, data):
  """What a trajectory holds is the prompt, what was sampled, and what the template adds to it."""
  directory, _ = finished
  experiment = _experiment(folder, data)
  parts = build_parts(experiment, None, Extensions())
  tasks = {task.id: task for task in parts.tasks.train}
  try:
    checked = 0
    for trajectory in _recorded(directory, "trajectory"):
      expected, drawn, turns = [], [], 0
      for segment in trajectory.segments:
        if not segment.sampled.any():
          continue
        assert segment.sampled.all() and segment.owner == "assistant"
        if not turns:
          spans = parts.chat.prompt(tasks[trajectory.task_id].prompt, parts.registry.tools)
        else:
          output = trajectory.tools[turns - 1].output
          spans = parts.chat.observation([Message("tool", output)], drawn, parts.registry.tools)
        drawn = segment.token_ids.tolist()
        longer = [*expected, *(i for span in spans for i in span.ids), *drawn]
        assert_extends(expected, longer)
        expected, turns = longer, turns + 1
      whole = np.concatenate([s.token_ids for s in trajectory.segments])
      assert whole.tolist() == expected
      checked += turns > 1
    assert checked
  finally:
    asyncio.run(parts.registry.close())


class _Stop(RuntimeError):
  pass


@pytest.mark.slow
def test_stopped_within_a_step_it_ends_with_the_bits_of_an_uninterrupted_run(
  finished, folder, data, tmp_path
):
  straight, report = finished
  ended = []

  async def dying(episode):
    try:
      await tool_episode(episode)
    except EpisodeEnd:
      if episode.address[0] == _STEPS:
        ended.append(episode.address)
      if len(ended) == 4:
        raise _Stop from None
      raise

  directory = tmp_path / "stopped"
  extensions = Extensions(program=dying)  # dies once
  with pytest.raises(_Stop):
    Run(_experiment(folder, data), directory, extensions=extensions, console=quiet()).train()
  again = Run(_experiment(folder, data), directory, extensions=extensions, console=quiet()).train()
  assert again.after == report.after
  steps = [[r.fingerprint for r in _recorded(d, "step")] for d in (straight, directory)]
  assert steps[0] == steps[1] and len(set(steps[0])) == _STEPS
  rows = [without_times(read_metrics(d / "metrics.jsonl")) for d in (straight, directory)]
  assert rows[0] == rows[1]


def test_a_recorded_step_replays_to_the_same_hash(finished, folder, data):
  directory, _ = finished
  assert Run(_experiment(folder, data), directory, console=quiet()).replay(_STEPS).identical


def test_a_checkpoint_belongs_to_the_contents_of_the_folder(finished, folder, data, tmp_path):
  directory, report = finished
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  measured = evaluate_checkpoint(_experiment(copy, data), directory)
  assert measured.metrics()["greedy"] == report.after["greedy"]
  weights = copy / "model.safetensors"
  content = bytearray(weights.read_bytes())
  content[-1] ^= 1
  weights.write_bytes(content)
  with pytest.raises(ConfigError, match="config.pretrained"):
    evaluate_checkpoint(_experiment(copy, data), directory)


def test_a_folder_is_measured_like_a_checkpoint(finished, folder, data, tmp_path):
  """Before training, and what training made of it, written as a folder; adapters are ignored."""
  directory, report = finished
  experiment = _experiment(folder, data)
  experiment.lora = LoraConfig(rank=2)
  measured = evaluate_checkpoint(experiment, folder)
  assert measured.metrics()["greedy"] == report.before["greedy"]
  to_folder(directory, tmp_path / "trained", tokenizer_from=folder)
  trained = evaluate_checkpoint(_experiment(folder, data), tmp_path / "trained")
  assert trained.metrics()["greedy"] == report.after["greedy"]


def test_a_trained_policy_goes_back_to_a_folder_and_on_from_there(finished, folder, data, tmp_path):
  directory, _ = finished
  experiment = _experiment(folder, data)
  parts = build_parts(experiment, None, Extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  asyncio.run(parts.registry.close())
  target = learner.abstract_state("rl").weights
  policy = load_networks(directory, target, parts.identity).policy
  exported = tmp_path / "exported"
  save_pretrained(exported, policy, parts.model, tokenizer_from=folder)
  loaded, config = load_pretrained(exported)
  jax.tree.map(np.testing.assert_array_equal, loaded, policy)
  assert config == dataclasses.replace(parts.model)
  start, _ = load_pretrained(folder)
  assert fingerprint(start) != fingerprint(loaded)
  chats = [
    build_chat(experiment.chat, experiment.tokenizer, pretrained=f) for f in (folder, exported)
  ]
  assert chats[0].fingerprint() == chats[1].fingerprint()
  assert folder_fingerprint(exported) != folder_fingerprint(folder)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda e: setattr(e.model, "d_model", 32),
      "config.model.d_model=32; allowed: 64, as config.pretrained's config.json decides",
    ),
    (
      lambda e: setattr(e.tokenizer, "kind", "byte"),
      "config.tokenizer.kind='byte'; allowed: 'hugg",
    ),
    (
      lambda e: setattr(e, "pretrained", "/nowhere"),
      "config.pretrained='/nowhere'; allowed: a Hug",
    ),
    (lambda e: setattr(e, "pretrained", None), "set --config.pretrained=DIR"),
    (lambda e: setattr(e.chat, "tool_call_format", "compact"), "allowed: auto, hermes, xml"),
  ],
)
def test_bad_settings_stop_before_anything_is_read(folder, data, change, message):
  experiment = _experiment(folder, data)
  change(experiment)
  if experiment.tokenizer.kind == "byte":
    experiment.chat.thinking = None
  with pytest.raises(ConfigError) as caught:
    experiment.validate()
  assert message in str(caught.value)
