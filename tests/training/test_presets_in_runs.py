"""Every preset in a run: the loss of its definition, or a refusal that names what is missing.

A learner prepares the same episodes with each preset. What it hands to the loss must give the
gradient of the preset's own definition, computed here from the episodes, and not that of GRPO.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.engine import EngineConfig
from agentjax.objectives import policy_objective, prepare, preset
from agentjax.recipes.credit.agreement import Agreement
from agentjax.recipes.presets import PRESETS
from agentjax.recipes.prime import ProcessConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.keys import BASELINE
from agentjax.signals.teacher import TeacherConfig, Teachers
from agentjax.training import Experiment, Extensions, HeldOutConfig, RLStage
from agentjax.training.build import build_parts
from agentjax.training.learner import Learner
from agentjax.training.state import Network, TrainState, Weights
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Reward, Status, Task
from tests.training.stages import PaidDigits
from tests.training.teachers import MODEL, save_policy

# What a run that has nothing of its own is refused for.
MISSING = {
  "gdpo": "config.reward.parts",
  "kl_cov": "config.rl.minibatches",
  "prime": "config.rl.process",
} | dict.fromkeys(
  (
    "decoupled_ppo",
    "geometric_rejection",
    "icepop",
    "ipa",
    "k3_rejection",
    "longcat",
    "sequence_tis",
  ),
  "config.rl.old_log_probs",
)
MISSING |= dict.fromkeys(("dpo", "implicit_prm"), "config.rl.old_log_probs")
MISSING |= {n: "config.rl.teachers" for n, c in PRESETS.items() if c.distillation is not None}


def bare(name):
  """A run that knows nothing of the method."""
  return Experiment(
    name="presets",
    model=MODEL,
    engine=EngineConfig(slots=4, max_length=96, extend_buckets=(32,), extend_rows=(4,)),
    rollout=RolloutConfig(group_size=4, max_turns=2, max_tokens_per_turn=12, max_total_tokens=96),
    reward=RewardConfig(parts=("exact_match",), weights=(1.0,)),
    rl=RLStage(steps=2, tasks_per_step=2, row_length=96, microbatch_rows=4, objective=preset(name)),
    evaluation=HeldOutConfig(tasks=0),
  )


def given(name, folder):
  """The same run with what the method needs."""
  experiment, missing = bare(name), MISSING.get(name)
  stage = experiment.rl
  experiment.reward = RewardConfig(parts=("environment", "turns"), weights=(1.0, 0.25))
  if name == "kl_cov":
    stage.minibatches = 2
  if name == "prime":
    stage.process = ProcessConfig()
  if missing == "config.rl.old_log_probs" or name == "mopd":
    stage.old_log_probs = "recomputed"
  if missing == "config.rl.teachers":
    stage.teachers = (TeacherConfig(path=str(folder / "teacher")),)
  return experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("presets")
  save_policy(path / "teacher", MODEL, 7)
  return path


def episodes():
  """Two groups of four episodes in two turns; rewards and answers differ within a group."""
  random = np.random.default_rng(0)
  result = []
  for task in range(2):
    prompt = np.r_[1, random.integers(8, 264, 3 + task)]
    for sample in range(4):
      builder = TrajectoryBuilder(step=1, task_id=task, sample=sample, source="digits")
      builder.append("user", prompt)
      paid = [round(float(x), 2) for x in random.uniform(0, 0.5, 2)]
      for turn in range(2):
        drawn = random.integers(8, 264, 3 + sample)
        log_probs = random.normal(-5.5, 0.6, len(drawn))
        builder.append_sampled(drawn, log_probs, np.full(len(drawn), 5.0), 1)
        if not turn:
          builder.append("user", random.integers(8, 264, 2))
      built = builder.build(reward=Reward(sum(paid)))
      turns = iter(paid)
      earned = [next(turns) if s.sampled.any() else None for s in built.segments]
      result.append(
        dataclasses.replace(
          built,
          reward_parts={"environment": Reward(sum(paid)), "turns": Reward(2.0)},
          turn_rewards={"environment": earned},
          answer=str(min(sample, 1 + task)),
        )
      )
  return result


def greedy():
  """Episode of sample -1 of each group, for presets with a baseline."""
  return [dataclasses.replace(t, sample=BASELINE, reward=Reward(0.3)) for t in episodes()[::4]]


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_that_lacks_what_a_preset_needs_is_refused_by_name(name):
  experiment = bare(name)
  if name not in MISSING:
    experiment.validate()
    return
  with pytest.raises(ConfigError, match="allowed|Use|takes") as error:
    experiment.validate()
  assert str(error.value).startswith(MISSING[name]) or MISSING[name] in str(error.value)


def drift(batch, seed):
  """What a policy says of the tokens beyond what the sampler said; nothing in the first group."""
  random = np.random.default_rng(seed).normal(scale=0.4, size=batch.token_ids.shape)
  first = (np.asarray(batch.segment_ids) <= 4) & (seed == 1)
  return np.where(first | (np.asarray(batch.segment_ids) == 0), 0, random).astype(np.float32)


def in_a_run(name, folder, monkeypatch):
  """(batch, what the run prepared of the episodes, the same by the preset's definition)."""
  experiment = given(name, folder)
  experiment.validate()
  experiment.freeze()
  tasks = [Task(i, (Message("user", f"Task {i}."),), "", "digits") for i in range(2)]
  extensions = Extensions(tasks=TaskSplits(tasks, []), make_environment=lambda task: PaidDigits())
  parts = build_parts(experiment, folder, extensions)
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  seen = []

  def scores(networks, batch):
    seed = 2 if networks.policy == "reference" else 1
    return batch.behaviour_log_probs + drift(batch, seed), drift(batch, 3)

  def ask(settings, policy, batch, sequences, placed):
    del policy, sequences, placed
    shape = (*batch.token_ids.shape, settings.places)
    answers = {"log_probs": batch.behaviour_log_probs + drift(batch, 4)}
    answers |= {"ids": np.zeros(shape, np.int32), "candidates": np.zeros(shape, np.float32)}
    if settings.candidate_loss is not None:
      answers["old_log_probs"] = np.zeros(shape, np.float32)
    answers |= {"hidden": np.zeros((*batch.token_ids.shape, 2), np.float32)}
    return answers | {"entropies": 1 + drift(batch, 5), "divergences": np.abs(drift(batch, 6))}

  def keep(update, state, one, number):
    del update
    seen.append((one.packed, one.ready[number]))
    figures = dict.fromkeys(("bad_steps", "grad_norm", "update_norm"), 0.0)
    return state, figures, np.asarray(one.packed.behaviour_log_probs)[None]

  monkeypatch.setattr(learner, "score", scores)
  monkeypatch.setattr(Teachers, "ask", staticmethod(ask))
  monkeypatch.setattr(learner, "_apply", keep)
  state = TrainState(
    jnp.zeros((), jnp.int32),
    {name: Network(Weights(name)) for name in ("policy", "reference")},
  )
  learner.rl_step(state, [*episodes(), *greedy()], 1)
  batch, ready = seen[0]
  if name in ("kl_cov", "prime"):  # minibatches, rewards of steps
    return batch, ready.prepared, None
  return (
    batch,
    ready.prepared,
    prepare(
      batch.for_loss(),
      preset(name),
      old_log_probs=batch.behaviour_log_probs + drift(batch, 1)
      if experiment.rl.old_log_probs == "recomputed"
      else None,
      reference_log_probs=batch.behaviour_log_probs + drift(batch, 2),
      teacher_log_probs=batch.behaviour_log_probs + drift(batch, 4),
      values=drift(batch, 3),
      baselines=np.full(8, 0.3, np.float32),
      part_advantage=standardised_parts({"environment": 1.0, "turns": 0.25}),
      agreement=np.repeat(np.float32([0.75, 0.5]), 4),
      selected=ready.prepared.weights > 0 if name == "tip" else None,
    )[0],
  )


def standardised_parts(weights):
  """The sum of the parts, each less its group's mean and over its deviation; two groups of four."""
  total = np.zeros(8, np.float32)
  for name, weight in weights.items():
    values = np.array([t.reward_parts[name].value for t in episodes()]).reshape(2, 4)
    deviation = values.std(1, ddof=1, keepdims=True)
    total += (weight * (values - values.mean(1, keepdims=True)) / (deviation + 1e-6)).reshape(8)
  return total


def unit_gradient(name, batch, prepared):
  config = preset(name)
  loss = policy_objective(config)
  now = jnp.asarray(batch.behaviour_log_probs + drift(batch, 7))
  blank = jnp.asarray(drift(batch, 3)) if config.needs_values else None

  def total(log_probs, divergences):
    inputs = prepared.with_scores(log_probs, jnp.ones_like(log_probs), blank, divergences)
    return loss(inputs)[0]

  found = jax.jit(jax.grad(total, (0, 1)))(now, jnp.ones_like(now))
  flat = np.concatenate([np.ravel(x) for x in found])
  return flat / np.linalg.norm(flat)


@pytest.fixture(scope="module")
def plain(folder):
  with pytest.MonkeyPatch.context() as patch:
    batch, prepared, _ = in_a_run("grpo", folder, patch)
  return unit_gradient("grpo", batch, prepared)


FAST = ("adpo", "gdpo", "remax", "prime")


@pytest.mark.parametrize(
  "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PRESETS]
)
def test_a_run_gives_a_preset_the_loss_of_its_definition(name, folder, plain, monkeypatch):
  batch, prepared, wanted = in_a_run(name, folder, monkeypatch)
  ours = unit_gradient(name, batch, prepared)
  assert np.isfinite(ours).all()
  if wanted is not None:
    np.testing.assert_allclose(ours, unit_gradient(name, batch, wanted), atol=1e-5)
  # A run with minibatches has other rows.
  if name != "grpo" and ours.shape == plain.shape:
    assert np.dot(ours, plain) < 0.999


def test_adpo_trusts_the_groups_that_agree(folder, monkeypatch):
  batch, adpo, _ = in_a_run("adpo", folder, monkeypatch)
  _, grpo, _ = in_a_run("grpo", folder, monkeypatch)
  agreement = np.repeat([0.75, 0.5], 4)  # of the answers of each group
  scale = 0.6 + 0.4 * (agreement - 0.3) / 0.5
  bonus = 0.1 * (0.8 - agreement) / 0.5
  owner = np.maximum(np.asarray(batch.segment_ids) - 1, 0)
  inside = np.asarray(batch.weights) > 0
  np.testing.assert_allclose(adpo.advantages, grpo.advantages * scale[owner], rtol=1e-5)
  np.testing.assert_allclose(adpo.clip_high_bonus[inside], bonus[owner][inside], rtol=1e-6)


def test_agreement_is_the_share_of_the_most_frequent_answer():
  made = [dataclasses.replace(t) for t in episodes()]
  answers = ("7", "7.0", None, "eight", "a", "b", None, " a ")
  for trajectory, answer in zip(made, answers, strict=True):
    trajectory.answer = answer
  made[4].status = Status.ENV_ERROR
  marked, metrics = Agreement().observe(None, made)
  shares = [t.columns["agreement"] for t in marked]
  assert shares == pytest.approx([0.5] * 4 + [1 / 3] * 4)
  assert metrics["agreement/mean"] == pytest.approx(5 / 12)
