r"""Questions behind passages of Wikipedia, an adapter for the policy, and answers behind packets.

  export AGENTJAX_DATA=DIR
  python -m agentjax.train --config=configs/kv_packet_reading.py --workdir=runs/reading
  python -m agentjax.recipes.kv_packets.train --config=configs/kv_packet_reading.py \
      --checkpoint=runs/reading --output=runs/reading/adapter
  python -m agentjax.evaluate --config=configs/kv_packet_reading.py --checkpoint=runs/reading \
      --config.likelihood.adapter=runs/reading/adapter

DIR/qa_search holds nq_open_2655.jsonl.gz and nq_corpus.jsonl.gz (docs/kv_packets.md says how rows
look), DIR/text books as *.txt.gz. In the first command a small hybrid policy is trained on answers.
In the second a header and a trailer learn to keep what it writes, on other passages behind
questions and on pieces of books (KV Packet, 2604.13226: KL over the whole vocabulary to the
policy's own answers with everything in its context). The third measures the policy behind packets;
--config.likelihood.recompute=True measures it behind the text.

The policy is far too small to answer questions of this kind: it shows how the parts work together.
Give a model that reads: --config.pretrained=FOLDER --config.tokenizer.kind=huggingface, for the
second and the third command, without --checkpoint.
"""

import os
import pathlib

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.recipes.kv_packets import AdapterTraining, LessonsConfig, PacketsConfig, ReadingConfig
from agentjax.recipes.scorers.answers import TextMatchConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, SupervisedStage

_DATA = pathlib.Path(os.environ.get("AGENTJAX_DATA", "data"))
_QUESTIONS = _DATA / "qa_search"
_BOOKS = ("botchan", "gutenberg_3261_news_from_nowhere", "tinyshakespeare")


def get_config() -> Experiment:
  return Experiment(
    name="kv_packet_reading",
    data=DataConfig(source=ReadingConfig(), path=str(_QUESTIONS), train_size=2000, test_size=128),
    model=ModelConfig(
      d_model=128,
      pattern="M-*-M-*-",
      num_heads=4,
      num_kv_heads=2,
      head_dim=32,
      d_mlp=256,
      mamba_heads=4,
      mamba_head_dim=32,
      mamba_state=32,
      chunk_size=64,
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=2048),
    likelihood=PacketsConfig(
      corpus=(str(_QUESTIONS / "nq_corpus.jsonl.gz"),),
      lessons=LessonsConfig(
        text=tuple(str(_DATA / "text" / f"{name}.txt.gz") for name in _BOOKS),
        questions=(str(_QUESTIONS / "nq_open_2655.jsonl.gz"),),
        documents=4,
        tokens=128,
        training=AdapterTraining(batch=32, epochs=10, learning_rate=1e-3),
      ),
    ),
    reward=RewardConfig(parts=("f1",), settings={"f1": TextMatchConfig()}),
    engine=EngineConfig(slots=16, max_length=1536, extend_rows=(8, 4, 2)),
    rollout=RolloutConfig(
      group_size=4, max_turns=1, max_tokens_per_turn=24, max_total_tokens=1536, answer="text"
    ),
    supervised=SupervisedStage(
      steps=200,
      tasks_per_step=16,
      row_length=1536,
      microbatch_rows=4,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=20),
    ),
    evaluation=HeldOutConfig(tasks=64, samples=0, pass_at=(), success_part="f1"),
  )
