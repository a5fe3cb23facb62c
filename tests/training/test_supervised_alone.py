"""A folder learns from conversations in a file, with no other stage, and becomes a folder again."""

import json
import pathlib

from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer
from agentjax.convert import to_folder
from agentjax.models import load_pretrained
from agentjax.training import Run, load_experiment
from agentjax.training.metrics import read_metrics
from tests.text.folders import write_model, write_vocabulary
from tests.training.smoke import quiet

_CONFIG = pathlib.Path(__file__).parents[2] / "configs/supervised.py"


def test_a_folder_learns_from_conversations_alone(tmp_path):
  folder = tmp_path / "folder"
  write_vocabulary(folder)
  write_model(folder, HuggingFaceTokenizer(folder), [])
  turns = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}]
  row = json.dumps({"messages": turns})
  (tmp_path / "train.jsonl").write_text(f"{row}\n" * 8)
  experiment = load_experiment(_CONFIG)
  experiment.pretrained, experiment.data.path = str(folder), str(tmp_path)
  experiment.model.compute_dtype, experiment.model.remat = "float32", "none"
  experiment.rollout.max_total_tokens = 4  # shorter than the prompts, none of which is played
  stage = experiment.supervised
  stage.steps, stage.tasks_per_step, stage.row_length, stage.microbatch_rows = 8, 4, 128, 2
  stage.optimizer.learning_rate, stage.optimizer.warmup_steps = 3e-3, 0
  assert Run(experiment, tmp_path / "run", console=quiet()).train().finished
  losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
  assert losses[-1] < losses[0] - 1  # nats a token; it knows nothing at first
  to_folder(tmp_path / "run", tmp_path / "trained")
  before, _ = load_pretrained(folder)
  after, _ = load_pretrained(tmp_path / "trained")
  assert (after.embedding != before.embedding).any()
