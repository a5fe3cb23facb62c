r"""GRPO's update by TRL, as benchmarks/objectives.py times it; for a Python with torch and trl.

  python benchmarks/trl_update.py --rows=8 --time=512 --vocab=32768 --d_model=128 --layers=2

The loss is ``GRPOTrainer.compute_loss`` itself (DAPO's settings, with TRL's LM head that makes
logits in tiles) on completions that are given; then its gradient, clipping and AdamW, float32, all
cores; rows in micro-batches whose gradients add up, as ``--microbatch_rows`` says. Prints one
object of JSON: best and median wall seconds of an update, median CPU seconds, peak memory in MiB
above what the process held with its model, and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def resident_mib() -> float:
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def build_trainer(sizes: argparse.Namespace):
  import torch
  from datasets import Dataset
  from tokenizers import Tokenizer, models
  from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
  from trl import GRPOConfig, GRPOTrainer

  torch.manual_seed(0)
  model = LlamaForCausalLM(
    LlamaConfig(
      vocab_size=sizes.vocab,
      hidden_size=sizes.d_model,
      num_hidden_layers=sizes.layers,
      num_attention_heads=sizes.heads,
      num_key_value_heads=sizes.heads,
      intermediate_size=4 * sizes.d_model,
      max_position_embeddings=sizes.time,
      tie_word_embeddings=False,
    )
  )
  words = {"<pad>": 0, "<eos>": 1, "a": 2}  # the trainer wants one; nothing is generated
  tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
    pad_token="<pad>",
    eos_token="<eos>",
  )
  settings = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=sizes.rows,
    num_generations=min(4, sizes.rows),
    max_completion_length=sizes.time - prompt_length(sizes),
    loss_type="dapo",
    epsilon_high=0.28,
    beta=0.0,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
  )
  return GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **unused: [0.0] * len(completions),
    args=settings,
    train_dataset=Dataset.from_dict({"prompt": ["a"] * sizes.rows}),
    processing_class=tokenizer,
  )


def prompt_length(sizes: argparse.Namespace) -> int:
  return max(1, sizes.time // 8)


def batches(sizes: argparse.Namespace):
  """What ``compute_loss`` takes, one for each micro-batch."""
  import torch

  prompt = prompt_length(sizes)
  ids = torch.randint(8, sizes.vocab, (sizes.rows, sizes.time))
  answer = sizes.time - prompt
  whole = {
    "prompt_ids": ids[:, :prompt],
    "prompt_mask": torch.ones(sizes.rows, prompt, dtype=torch.long),
    "completion_ids": ids[:, prompt:],
    "completion_mask": torch.ones(sizes.rows, answer, dtype=torch.long),
    "advantages": torch.tensor([1.0, -1.0] * sizes.rows)[: sizes.rows],
    "old_per_token_logps": -torch.rand(sizes.rows, answer),
  }
  parts = zip(*(value.split(sizes.microbatch_rows) for value in whole.values()), strict=True)
  tokens = torch.tensor(sizes.rows * answer)
  return [{**dict(zip(whole, part, strict=True)), "num_items_in_batch": tokens} for part in parts]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in {
    "rows": 8, "time": 512, "vocab": 32768, "d_model": 128, "layers": 2, "heads": 4, "repeats": 3,
  }.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--microbatch_rows", type=int, help="all rows at once if not given")
  sizes = parser.parse_args()
  sizes.microbatch_rows = sizes.microbatch_rows or sizes.rows

  import torch
  import transformers
  import trl

  torch.set_num_threads(os.cpu_count() or 1)
  trainer, inputs = build_trainer(sizes), batches(sizes)
  model = trainer.model.train()
  # What the training loop would have set.
  trainer.current_gradient_accumulation_steps = 1
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
  before = resident_mib()

  def update(parts) -> None:
    for part in parts:
      trainer.compute_loss(model, part).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  update(inputs[:1])
  wall, cpu = [], []
  for _ in range(sizes.repeats):
    started, used = time.perf_counter(), time.process_time()
    update(inputs)
    wall.append(time.perf_counter() - started)
    cpu.append(time.process_time() - used)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
  versions = {m.__name__: m.__version__ for m in (trl, transformers, torch)}
  print(
    json.dumps(
      {
        "best_s": min(wall),
        "median_s": statistics.median(wall),
        "cpu_s_median": statistics.median(cpu),
        "peak_mib": peak,
        "versions": versions,
      }
    )
  )


if __name__ == "__main__":
  main()
