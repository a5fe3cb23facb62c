"""A policy of bytes on disk that writes by a table."""

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from agentjax.files import write_atomically
from agentjax.text import ByteTokenizer
from agentjax.training.checkpoint import CheckpointStore
from agentjax.training.experiment import write_experiment
from agentjax.training.state import Network, TrainState, Weights

TABLE_MODEL = models.ModelConfig(
  vocab_size=264, d_model=64, pattern="*", num_heads=2, num_kv_heads=2, head_dim=8
)
_CERTAIN = 20.0  # logit of a successor; the others' are near 0
_TOKENIZER = ByteTokenizer()


def save_table_policy(directory, successors, seed, experiment):
  """A run whose policy writes by a table of successors; "" is the start of a turn, None its end.

  ``experiment`` is the run's.
  """
  special = _TOKENIZER.special
  params = models.init(TABLE_MODEL, jax.random.key(seed))
  rng = np.random.default_rng(seed)
  embedding = rng.normal(size=(264, 64)).astype(np.float32)
  head = 0.02 * rng.normal(size=(64, 264)).astype(np.float32)
  for byte, following in successors.items():
    at = embedding[_TOKENIZER.encode(byte)[0] if byte else special.assistant]
    for after in following or [None]:
      target = special.end if after is None else _TOKENIZER.encode(after)[0]
      head[:, target] += _CERTAIN * at / 64
  quiet_blocks = jax.tree.map(lambda x: 0.01 * x, params.groups)
  params = params.replace(
    embedding=jnp.asarray(embedding), lm_head=jnp.asarray(head), groups=quiet_blocks
  )
  described = TABLE_MODEL.to_dict()
  del described["exact_chunk"]
  identity = {"model": described, "tokenizer": _TOKENIZER.fingerprint()}
  state = TrainState(jnp.zeros((), jnp.int32), {"policy": Network(Weights(params))})
  CheckpointStore(directory / "checkpoints", 1, identity).save(0, state, {})
  write_atomically(directory / "config.json", write_experiment(experiment))
