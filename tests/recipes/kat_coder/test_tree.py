"""The tree of shared histories: its rows, by hand, and the gradient of the separate branches."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.data.jsonl_tasks import load_jsonl
from agentjax.objectives import (
  AdvantageConfig,
  ObjectiveConfig,
  PolicyLossConfig,
  policy_objective,
  prepare,
)
from agentjax.objectives.preparation import prepare_supervised
from agentjax.objectives.supervised import supervised_objective
from agentjax.recipes.kat_coder import TreeConfig, merge
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.experiment import SupervisedStage
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Reward
from agentjax.trajectory.weights import WeightConfig, apply_weight_rules

MODEL = models.ModelConfig(
  vocab_size=264, d_model=16, pattern="M*-", num_heads=2, num_kv_heads=1, head_dim=8, d_mlp=32,
  mamba_heads=2, mamba_head_dim=8, mamba_state=8, chunk_size=16,
)  # fmt: skip
CHAT = MarkedChat(ByteTokenizer())


def act(text, **fields):
  return {"role": "assistant", "content": text, **fields}


def see(text):
  return {"role": "user", "content": text}


ROOT = [see("Fix the bug."), act("look at it"), see("A file.")]
CHAIN = [ROOT[:2], [*ROOT, act("edit")], [*ROOT, act("edit"), see("Done."), act("test it")]]
BRANCHES = [
  [*ROOT, act("edit")],
  [*ROOT, act("ask")],
  [*ROOT, act("give up"), see("No."), act("go")],
]


def rows(*conversations, **fields):
  return [{"messages": list(c), **fields} for c in conversations]


def weights(made):
  return [
    [(m["content"], m.get("weight", 1)) for m in row["messages"] if m["role"] == "assistant"]
    for row in made
  ]


def test_a_conversation_that_another_continues_is_computed_once():
  made = merge(rows(*CHAIN), TreeConfig())
  assert weights(made) == [[("look at it", 3), ("edit", 2), ("test it", 1)]]
  assert weights(merge(rows(*reversed(CHAIN)), TreeConfig())) == weights(made)


def test_a_shared_message_has_its_weight_in_the_first_branch():
  made = merge(rows(*BRANCHES), TreeConfig())
  assert weights(made) == [
    [("look at it", 3), ("edit", 1)],
    [("look at it", 0), ("ask", 1)],
    [("look at it", 0), ("give up", 1), ("go", 1)],
  ]
  once = merge(rows(*BRANCHES), TreeConfig(count="once"))
  assert weights(once)[0] == [("look at it", 1), ("edit", 1)]


def test_weights_of_the_conversations_add_up():
  first, second = rows([see("a"), act("b", weight=0.5)], [see("a"), act("b", weight=0), see("c"),
                                                          act("d")])  # fmt: skip
  assert weights(merge([first, second], TreeConfig())) == [[("b", 0.5), ("d", 1)]]


def test_what_is_not_the_same_is_not_shared():
  one, other = rows(CHAIN[0]), rows(CHAIN[1], tools=[{"type": "function"}])
  assert len(merge([*one, *other], TreeConfig())) == 2
  flagged = rows([ROOT[0], act("look at it", flags=["reflection"]), ROOT[2], act("edit")])
  assert len(merge([*one, *flagged], TreeConfig())) == 2
  (made,) = merge(rows(*CHAIN, source="x"), TreeConfig())
  assert made["source"] == "x"


def test_a_branch_without_anything_to_learn_is_left_out():
  made = merge(rows(CHAIN[0], [*ROOT[:2], see("Bye.")]), TreeConfig())
  assert weights(made) == [[("look at it", 2)]]


@pytest.mark.parametrize("row", [{}, {"messages": [see("a")]}, {"messages": [act("a"), {}]}])
def test_a_row_that_is_no_conversation_is_named(row):
  with pytest.raises(ValueError, match="row 1: "):
    merge([*rows(ROOT), row], TreeConfig())


@functools.cache
def parameters():
  return models.init(MODEL, jax.random.key(0))


def gradient(batch, objective, prepared):
  """Loss and gradient of all parameters."""
  tokens = (batch.token_ids, batch.segment_ids, batch.positions)

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    found = models.score_tokens(params, MODEL, *map(jnp.asarray, tokens))
    return objective(prepared.with_scores(found.log_probs, found.entropies))[0]

  value, found = loss(parameters())
  return float(value), np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])


def learnt(folder, made):
  """Tokens, loss and gradient of a supervised step on all rows of a file."""
  file = folder / "train.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in made))
  tasks = load_jsonl(file, source="s", answer_field="", messages_field="messages")
  stage = SupervisedStage(row_length=192)
  parts = types.SimpleNamespace(
    chat=CHAT, tools=(), experiment=types.SimpleNamespace(supervised=stage)
  )
  sequences = to_sequences([demonstration_trajectory(task, parts) for task in tasks])
  batch = pack(sequences, row_length=192, rows=3, pad_id=0)
  count = sum(map(len, sequences))
  return count, *gradient(batch, supervised_objective, prepare_supervised(batch))


@pytest.mark.parametrize(("conversations", "most"), [(CHAIN, 0.6), (BRANCHES, 1.0)])
def test_loss_and_gradient_are_those_of_separate_conversations(tmp_path, conversations, most):
  separate = learnt(tmp_path, rows(*conversations))
  shared = learnt(tmp_path, merge(rows(*conversations), TreeConfig()))
  assert shared[0] <= most * separate[0]
  assert shared[1] == pytest.approx(separate[1], rel=1e-5)
  # Float32, in another order of sums.
  np.testing.assert_allclose(shared[2], separate[2], atol=2e-6 + 1e-5 * abs(separate[2]).max())
  once = learnt(tmp_path, merge(rows(*conversations), TreeConfig(count="once")))
  assert abs(once[2] - separate[2]).max() > 0.01 * abs(separate[2]).max()


def grown(turns, reward, *, leaf=None):
  """An episode whose last turns, from ``leaf`` on if it is given, branch off its first one."""
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s", group=str(reward))
  builder.append("user", [65, 66, 67])
  first = builder.append_sampled([70, 71, 72], [-1.0] * 3, [0.0] * 3, 0)
  for ids in turns if leaf is None else [turns[leaf]]:
    builder.append_sampled(ids, [-1.0] * len(ids), [0.0] * len(ids), 0, parent=first)
  return builder.build(reward=Reward(reward))


def updated(trajectories, *rules):
  weighted = [apply_weight_rules(t, WeightConfig(rules=("role", *rules))) for t in trajectories]
  batch = pack(to_sequences(weighted), row_length=32, rows=3, pad_id=0)
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none"),
    PolicyLossConfig(gradient_form="score", clip="unit"),
  )
  return gradient(batch, policy_objective(config), prepare(batch, config)[0])[1]


def test_an_episode_of_several_branches_updates_as_its_branches_do():
  turns = [[80, 81], [82, 83, 84], [85]]
  tree = [grown(turns, 1.0), grown(turns[:2], -0.5)]
  separate = [grown(turns, 1.0, leaf=i) for i in range(3)]
  separate += [grown(turns, -0.5, leaf=i) for i in range(2)]
  expected = updated(separate)
  atol = 2e-6 + 1e-5 * abs(expected).max()
  np.testing.assert_allclose(updated(tree, "leaves"), expected, atol=atol)
  assert abs(updated(tree) - expected).max() > 0.01 * abs(expected).max()
