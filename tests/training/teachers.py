"""Tiny policies on disk and episodes to put to them, for tests of learning from teachers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.text import ByteTokenizer
from agentjax.training.checkpoint import CheckpointStore
from agentjax.training.state import Network, TrainState, Weights
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward
from tests.training.stages import staged_experiment

MODEL = models.ModelConfig(
  vocab_size=264, d_model=16, pattern="*", num_heads=2, num_kv_heads=2, head_dim=8, logits_chunk=24
)
WIDER = dataclasses.replace(MODEL, d_model=24)


def base(**stage):
  """An experiment with a policy of their kind and size."""
  experiment = staged_experiment(ScheduleConfig())
  experiment.model = dataclasses.replace(MODEL)
  experiment.rl = dataclasses.replace(
    experiment.rl, tasks_per_step=4, microbatch_rows=2, row_length=128, **stage
  )
  return experiment


def save_policy(directory, model, seed, tokenizer=None):
  """A checkpoint of random parameters, and the parameters."""
  params = models.init(dataclasses.replace(model, init_scale=3.0), jax.random.key(seed))
  described = model.to_dict()
  del described["exact_chunk"]
  identity = {"model": described, "tokenizer": tokenizer or ByteTokenizer().fingerprint()}
  state = TrainState(jnp.zeros((), jnp.int32), {"policy": Network(Weights(params))})
  CheckpointStore(directory / "checkpoints", 1, identity).save(0, state, {})
  return params


def episodes(step=1, sources=("digits",), prompt_seed=0, group=2):
  """Episodes of four tasks in two turns; the last of a group is rewarded."""
  prompts, words = np.random.default_rng(prompt_seed), np.random.default_rng(1)
  result = []
  for task in range(4):
    length = 3 + task
    prompt = np.r_[1, prompts.integers(8, 264, length)]
    for sample in range(group):
      builder = TrajectoryBuilder(
        step=step, task_id=task, sample=sample, source=sources[task % len(sources)]
      )
      builder.append("user", prompt)
      for turn in range(2):
        drawn = words.integers(8, 264, 5)
        builder.append_sampled(drawn, np.full(5, -5.0), np.full(5, 5.0), step)
        if not turn:
          builder.append("user", words.integers(8, 264, 3))
      result.append(builder.build(reward=Reward(float(sample == group - 1))))
  return result
