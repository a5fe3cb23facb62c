"""Learning from teachers: who is asked about what, and what the update makes of the answers."""

import contextlib
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.huggingface_text.chat import TemplateChat
from agentjax.adapters.huggingface_text.tokenizer import HuggingFaceTokenizer
from agentjax.config import ConfigError
from agentjax.models.huggingface import save_pretrained
from agentjax.objectives import preset
from agentjax.objectives.distillation import DistillationConfig, candidate_divergence, divergence
from agentjax.objectives.objective import policy_objective
from agentjax.recipes.lightning_opd.precompute import with_answers
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.signals.signal import SignalTools
from agentjax.signals.teacher import (
  TeacherConfig,
  TeacherHead,
  Teachers,
  TeacherTargets,
  kept_places,
  load_teacher,
  route,
  teacher_divergences,
)
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.training import OptimizerConfig
from agentjax.training.build import build_parts
from agentjax.training.experiment import PhaseConfig, resolve
from agentjax.training.learner import Learner
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.packing import pack, to_sequences, without_prompt
from agentjax.trajectory.store import StoreWriter, read_store
from tests.signals.tracing import trace
from tests.text.folders import XML_TEMPLATE, write_vocabulary
from tests.training.stages import extensions, staged_experiment
from tests.training.teachers import MODEL, WIDER, episodes, save_policy


def build(directory, teachers=(), distillation=None, model=MODEL, **stage):
  """A learner with its first state."""
  experiment = staged_experiment(ScheduleConfig())
  experiment.model = dataclasses.replace(model)
  experiment.rollout.group_size = 2
  experiment.rl = dataclasses.replace(
    experiment.rl,
    teachers=tuple(teachers),
    microbatch_rows=2,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    **stage,
  )
  if distillation is not None:
    experiment.rl.objective = preset("opd")
    experiment.rl.objective.distillation = distillation
  learner = Learner(
    build_parts(resolve(experiment), directory, extensions()),
    policy_objective(experiment.rl.objective),
  )
  return learner, learner.begin_rl(learner.initial_state("rl"))


def prefixes_and_responses(trajectories):
  ids = [token_paths(t)[0].token_ids for t in trajectories]
  return [x[:1] for x in ids], [x[1:] for x in ids]


def test_each_teacher_is_asked_about_its_own_data_sets(tmp_path):
  """One of another width; the episodes' order in the batch is not that of their teachers."""
  wide = save_policy(tmp_path / "wide", WIDER, seed=1)
  plain = save_policy(tmp_path / "plain", MODEL, seed=2)
  learner, _ = build(
    tmp_path,
    [TeacherConfig(str(tmp_path / "wide"), ("sums",)), TeacherConfig(str(tmp_path / "plain"))],
    DistillationConfig(),
  )
  trajectories = episodes(sources=("digits", "sums"))
  found = learner.signals["teacher"].teachers.score(trajectories, DistillationConfig())
  pairs = prefixes_and_responses(trajectories)
  by_wide = models.score_responses(wide, WIDER, *pairs, row_length=128)
  by_plain = models.score_responses(plain, MODEL, *pairs, row_length=128)
  for trajectory, ours, first, second in zip(trajectories, found, by_wide, by_plain, strict=True):
    theirs = first if trajectory.source == "sums" else second
    np.testing.assert_allclose(ours["log_probs"][1:], theirs.log_probs, atol=2e-5)
  assert len({learner.signals["teacher"].teachers[i].identity for i in range(2)}) == 2


def test_scores_of_several_teachers_are_joined_on_the_mesh(tmp_path, monkeypatch):
  configs = []
  for name, model, seed in (("wide", WIDER, 1), ("plain", MODEL, 2)):
    save_policy(tmp_path / name, model, seed=seed)
    configs.append(TeacherConfig(str(tmp_path / name)))
  routed = dataclasses.replace(configs[0], sources=("sums",)), configs[1]
  mesh, chat = make_mesh(MeshConfig(), jax.devices()[:1]), MarkedChat(ByteTokenizer())
  rows = functools.partial(pack, row_length=64, pad_id=0, rows=4)
  tools = SignalTools(MODEL, (), mesh, rows, 4, chat=chat)
  wide, plain, together = (Teachers(own, tools) for own in ([configs[0]], [configs[1]], routed))
  settings = DistillationConfig(form="top_k", candidates="teacher", top_k=3)
  sequences = to_sequences(episodes(sources=("digits", "sums")))
  batch = rows(sequences)

  def scores(teachers, placed=None):
    return teachers.ask(settings, None, batch, sequences, placed)

  found, by_wide, by_plain = map(scores, (together, wide, plain))
  of_sums = np.array([False, *(s.source == "sums" for s in sequences)])[batch.segment_ids]
  inside = (batch.segment_ids > 0) & (batch.positions > 0)
  for name in ("ids", "candidates"):
    expected = np.where(of_sums[..., None], by_wide[name], by_plain[name])
    np.testing.assert_allclose(found[name][inside], expected[inside], atol=2e-5)
    assert not found[name][batch.segment_ids == 0].any()
  with jax.set_mesh(mesh):
    monkeypatch.setattr(jax, "set_mesh", lambda _: contextlib.nullcontext())  # it is set
    for teachers in (together, wide):
      traced = trace(functools.partial(scores, teachers), batch)
      assert traced["ids"].shape == (*batch.token_ids.shape, 3)


def test_a_source_without_a_teacher_is_named():
  named = [TeacherConfig("a", ("x", "y")), TeacherConfig("b", ("z",))]
  assert route([*named, TeacherConfig("c")], ["z", "other", "x"]) == [1, 2, 0]
  with pytest.raises(ConfigError, match="no teacher takes episodes of 'other'.*x, y, z"):
    route(named, ["x", "other"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"teachers": ()}, "rl.teachers=.*at least one"),
    ({"teachers": (TeacherConfig("a"), TeacherConfig("b"))}, "sources=.*empty for one teacher"),
    (
      {"teachers": (TeacherConfig("a", ("x",)), TeacherConfig("b", ("x",)))},
      "without x, taken above",
    ),
    ({"teachers": (TeacherConfig(""),)}, r"teachers\[0\].path=''"),
    (
      {"rollouts": "stored", "teachers": (), "objective": preset("tip")},
      "form 'sampled' or 'top_k', keep=1 and overlap_top_k=0 on stored",
    ),
    ({"rollouts": "stored"}, "old_log_probs='behaviour'; allowed: 'recomputed'"),
    (
      {"teachers": (TeacherConfig("a", ("x",)), TeacherConfig("b")), "form": "full"},
      "form='full'; allowed: 'sampled' or 'top_k' with several",
    ),
    ({"objective": preset("grpo"), "teachers": (TeacherConfig("a"),)}, "presets have them"),
    ({"phases": (PhaseConfig(steps=9),)}, "rl.steps=6; allowed: above 9"),
    (
      {"phases": (PhaseConfig(objective=preset("opd"), context="response"),)},
      r"phases\[0\].objective.distillation=.*whole episodes",
    ),
  ],
)
def test_settings_that_cannot_be_are_named(changes, message):
  experiment = staged_experiment(ScheduleConfig())
  experiment.rl.objective = preset("opd")
  experiment.rl.teachers = (TeacherConfig("a"),)
  if "form" in changes:
    experiment.rl.objective.distillation.form = changes.pop("form")
  for name, value in changes.items():
    setattr(experiment.rl, name, value)
  with pytest.raises(ConfigError, match=message):
    experiment.validate()


def test_a_teacher_of_another_vocabulary_is_refused_before_it_is_loaded(tmp_path):
  save_policy(tmp_path / "teacher", MODEL, seed=1, tokenizer="f" * 64)
  learner, _ = build(tmp_path, [TeacherConfig(str(tmp_path / "teacher"))], DistillationConfig())
  with pytest.raises(ConfigError, match="another tokenizer than the student.*ffffffffffff"):
    learner.signals["teacher"].teachers.score(episodes(), DistillationConfig())


def test_a_folder_is_refused_for_its_tokenizer_and_warned_of_for_its_template(tmp_path, caplog):
  def teacher(name, **vocabulary):
    write_vocabulary(tmp_path / f"{name}-words", **vocabulary)
    words = HuggingFaceTokenizer(tmp_path / f"{name}-words")
    model = dataclasses.replace(
      MODEL,
      pattern="*-*-",
      rope_theta=10000.0,
      d_mlp=16,
      mlp_activation="swiglu",
      vocab_size=words.vocab_size,
    )
    policy = models.init(model, jax.random.key(0))
    save_pretrained(tmp_path / name, policy, model, tokenizer_from=tmp_path / f"{name}-words")
    return TeacherConfig(str(tmp_path / name))

  same, other_template = teacher("same"), teacher("template", template=XML_TEMPLATE)
  other_words = teacher("words", corpus=("the quick brown fox",))
  chat, mesh = TemplateChat.from_folder(same.path), make_mesh(MeshConfig())
  with caplog.at_level("WARNING"):
    load_teacher(same, chat, MODEL, mesh)
    assert not caplog.text
    load_teacher(other_template, chat, MODEL, mesh)
  assert "another chat template than the student" in caplog.text
  with pytest.raises(ConfigError, match="another tokenizer than the student"):
    load_teacher(other_words, chat, MODEL, mesh)


def test_places_of_the_kept_tokens_come_in_few_shapes():
  weights = np.zeros((3, 32), np.float32)
  weights[0, [4, 9]] = weights[1, 31] = 1
  places = kept_places(weights, 1)
  np.testing.assert_array_equal(places, [[4, 9, 0, 0], [31, 0, 0, 0], [0, 0, 0, 0]])
  weights[2, 1:6] = 1
  assert kept_places(weights, 1).shape == (3, 8)
  assert kept_places(np.ones((2, 30), np.float32), 1).shape == (2, 30)


@pytest.mark.parametrize(
  ("form", "kind", "rest"),
  [("full", "jsd", "bucket"), ("top_k", "jsd", "bucket"), ("top_k", "mixed", "floor")],
)
def test_divergences_of_kept_tokens_are_those_of_whole_logits(form, kind, rest):
  """Value and gradient, through the gather and in chunks of the tokens."""
  student = models.init(MODEL, jax.random.key(0))
  teacher = models.init(WIDER, jax.random.key(1))
  random = np.random.default_rng(0)
  hidden = jnp.asarray(random.normal(size=(2, 40, 16)), jnp.float32)
  theirs = jnp.asarray(random.normal(size=(2, 40, 24)), jnp.float32)
  ids = jnp.asarray(random.integers(0, 88, (2, 40, 3)) + np.array([0, 88, 176]))
  mask = random.uniform(size=(2, 40)) < 0.7
  mask[:, 0] = False
  kept = kept_places(mask.astype(np.float32), 1)
  settings = DistillationConfig(form=form, divergence=kind, rest=rest, forward_weight=0.3)
  log_q = jax.nn.log_softmax(models.compute_logits(teacher, WIDER, theirs) / 0.7)
  at_ids = jnp.take_along_axis(log_q, ids, -1)
  mix = jnp.asarray(random.normal(size=(2, 40)))

  def plain(student, hidden):
    log_p = jax.nn.log_softmax(models.compute_logits(student, MODEL, hidden) / 0.7)
    if form == "full":
      values = divergence(log_p, log_q, kind)
    elif rest == "floor":
      floored = jnp.full_like(log_q, -100.0)
      places = jnp.arange(2)[:, None, None], jnp.arange(40)[:, None], ids
      floored = floored.at[places].set(jax.nn.log_softmax(at_ids))
      reverse = jnp.sum(jnp.exp(log_p) * (log_p - floored), axis=-1)
      forward = jnp.sum(jnp.exp(floored) * (floored - log_p), axis=-1)
      values = 0.3 * forward + 0.7 * reverse
    else:
      values = candidate_divergence(jnp.take_along_axis(log_p, ids, -1), at_ids, kind, rest)
    # A state tells of the token after it.
    values = jnp.where(mask, jnp.roll(values, 1, axis=1), 0)
    return jnp.sum(mix * values), values

  def ours(student, hidden):
    index = np.maximum(kept - 1, 0)[:, :, None]
    if form == "full":
      targets = TeacherTargets(hidden=jnp.take_along_axis(theirs, index, 1))
    else:
      targets = TeacherTargets(
        ids=jnp.take_along_axis(ids, index, 1), log_probs=jnp.take_along_axis(at_ids, index, 1)
      )
    values, _ = teacher_divergences(
      student,
      MODEL,
      hidden,
      kept,
      targets,
      TeacherHead(teacher.lm_head, None),
      settings,
      0.7,
    )
    return jnp.sum(mix * values), values

  def run(function):
    return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(student, hidden)

  (_, values), grads = run(ours)
  (_, wanted), wanted_grads = run(plain)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  near(values, wanted)
  jax.tree.map(near, grads, wanted_grads)


@pytest.mark.parametrize(
  "distillation",
  [
    DistillationConfig(form="full", keep=0.5, overlap_top_k=4),
    pytest.param(DistillationConfig(form="top_k", top_k=8), marks=pytest.mark.slow),
    pytest.param(DistillationConfig(form="full"), marks=pytest.mark.slow),
  ],
)
def test_updates_bring_the_student_nearer_to_its_teacher(tmp_path, distillation):
  teacher = save_policy(tmp_path / "teacher", WIDER, seed=1)
  learner, state = build(
    tmp_path,
    [TeacherConfig(str(tmp_path / "teacher"))],
    distillation,
    old_log_probs="recomputed",
  )
  pairs = prefixes_and_responses(episodes())
  masks = [token_paths(t)[0].sampled for t in episodes()]

  def distance(policy):
    """Mean KL(student || teacher) of the sampled tokens, nats."""
    both = [
      models.score_responses(p, m, *pairs, full=True, row_length=128)
      for p, m in ((policy, MODEL), (teacher, WIDER))
    ]
    each = [
      np.mean(divergence(a.distributions, b.distributions, "reverse_kl")[sampled[1:]])
      for a, b, sampled in zip(*both, masks, strict=True)
    ]
    return float(np.mean(each))

  before = distance(learner.policy(state))
  seen = []
  for step in range(1, 7):
    state, metrics = learner.rl_step(state, episodes(step), step)
    seen.append(metrics)
  assert distance(learner.policy(state)) < before - 0.05
  assert seen[-1]["policy/divergence"] < seen[0]["policy/divergence"]
  if distillation.keep < 1:
    assert seen[0]["distillation/kept"] == pytest.approx(0.5, abs=0.01)
    assert seen[0]["tokens/weighted"] == 40  # of 8 episodes with 10 sampled tokens
  if distillation.overlap_top_k:
    assert 0 <= seen[0]["distillation/overlap"] <= 1
    assert seen[0]["distillation/entropy_gap"] > 0


@pytest.mark.parametrize(
  ("candidates", "rest", "steps"),
  [
    ("student", "bucket", 1),
    pytest.param("teacher", "renormalise", 2, marks=pytest.mark.slow),
  ],
)
def test_stored_candidates_train_as_the_live_teacher_does(tmp_path, candidates, rest, steps):
  """The same divergences and updates, from a file; the student's candidates are of its start."""
  save_policy(tmp_path / "teacher", WIDER, seed=1)
  settings = DistillationConfig(form="top_k", top_k=4, candidates=candidates, rest=rest)
  live, state = build(tmp_path, [TeacherConfig(str(tmp_path / "teacher"))], settings)
  # More are stored than are asked for: the likeliest come first.
  asked = dataclasses.replace(settings, top_k=6).stored
  with StoreWriter(tmp_path / "stored") as writer:
    answers = live.signals["teacher"].teachers.score(episodes(), asked, live.policy(state))
    for trajectory, said in zip(episodes(), answers, strict=True):
      scored = with_answers(trajectory, said)
      assert ["teacher_top_ids" in s.columns for s in scored.segments] == [False, True, False, True]
      writer.append_trajectory(scored)
  shutil.rmtree(tmp_path / "teacher")
  without, other = build(tmp_path, (), settings, rollouts="stored")
  before = jax.tree.map(np.asarray, state.weights.policy)
  for step in range(1, steps + 1):
    again = [dataclasses.replace(t, step=step) for t in read_store(tmp_path / "stored")]
    other, found = without.rl_step(other, again, step)
    state, wanted = live.rl_step(state, episodes(step), step)
    for name in ("policy/divergence", "loss", "grad_norm"):
      assert found[name] == pytest.approx(wanted[name], rel=1e-5)
  ours, theirs = other.weights.policy, state.weights.policy
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, theirs)
  assert max(jax.tree.leaves(moved)) > 1e-3
  more = dataclasses.replace(settings, top_k=7)
  with pytest.raises(ConfigError, match="top_k=7 and 6 candidates a token were stored"):
    batch = pack(to_sequences(again), row_length=64, pad_id=0)
    without.signals["teacher"].teachers.ask(more, None, batch, to_sequences(again))


def test_without_the_prompt_only_its_first_token_and_what_was_said_after_it_stay():
  sequence = to_sequences(episodes())[3]  # a prompt of 5 tokens
  cut = without_prompt(sequence)
  np.testing.assert_array_equal(cut.token_ids, np.r_[1, sequence.token_ids[5:]])
  np.testing.assert_array_equal(cut.weights, np.r_[0, sequence.weights[5:]])
  assert not cut.behaviour_log_probs.any() and cut.reward == sequence.reward
  assert without_prompt(dataclasses.replace(sequence, weights=sequence.weights * 0)) is None


@pytest.mark.slow
def test_dsrl_pushes_wrong_answers_away_whatever_was_asked_then_turns_to_grpo(tmp_path):
  """The first phase is blind to prompts and to right answers; the reference follows its end."""
  phase = PhaseConfig(steps=1, objective=preset("nsr_prerl"), context="response")
  learner, state = build(
    tmp_path, objective=preset("grpo"), phases=(phase,), old_log_probs="recomputed"
  )
  states, every = [], []
  for trajectories in (episodes(), episodes(prompt_seed=5)):
    fresh = learner.begin_rl(learner.initial_state("rl"))
    after, metrics = learner.rl_step(fresh, trajectories, 1)
    states.append(jax.device_get(after.weights.policy))
    every.append(metrics)
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert every[0]["tokens/weighted"] == 40 and not any("mismatch" in k for k in every[0])

  wrong = [t for t in episodes() if t.reward.value == 0]
  ids = [s.token_ids for s in map(without_prompt, to_sequences(wrong))]

  def marginal(policy):
    """log P(y), nats a token."""
    scores = models.score_responses(policy, MODEL, [x[:1] for x in ids], [x[1:] for x in ids])
    return np.mean(np.concatenate([s.log_probs for s in scores]))

  assert marginal(states[0]) < marginal(learner.policy(state)) - 0.01
  # The second phase: other prompts matter, and the reference is what the first phase left.
  before = jax.device_get(after.weights.policy)
  started = jax.device_get(after.reference)
  last, metrics = learner.rl_step(after, episodes(2), 2)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(last.reference), before)
  assert any(
    not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (started, before)), strict=True)
  )
  assert metrics["tokens/weighted"] == 80 and "mismatch/max" in metrics
