"""Features of a frozen backbone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models import ModelConfig
from agentjax.recipes.digi_q import CriticConfig
from agentjax.recipes.digi_q.critic import Data, begin, td_loss
from agentjax.recipes.digi_q.features import read_features, tap, tapped_layer
from agentjax.recipes.digi_q.transitions import question, state_prompt
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.training.model_pool import Policy
from agentjax.trajectory.record import Message

_MODEL = ModelConfig(
  vocab_size=264, d_model=16, pattern="*-*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=32
).freeze()


@pytest.fixture(scope="module")
def backbone():
  params = models.init(_MODEL, jax.random.key(0))
  return Policy(params, _MODEL, MarkedChat(ByteTokenizer()), "x")


def test_the_backbone_gets_no_gradient_and_the_heads_do(backbone):
  tokens = jax.random.randint(jax.random.key(1), (6, 32), 8, 264)
  segments, ends = jnp.ones((6, 32), jnp.int32), jnp.full(6, 31)
  config = CriticConfig(width=8, hidden=1).freeze()
  critic = begin(config, _MODEL.d_model)

  def loss(params, heads):
    read = tap(params, _MODEL, tokens, segments, ends, layer=1)
    first, second, third = jnp.split(read, 3)
    data = Data(first, second, third, jnp.ones(2), jnp.zeros(2))
    return td_loss(config, heads, critic.targets, data)

  own, of_heads = jax.grad(loss, argnums=(0, 1))(backbone.params, critic.heads)
  assert all(not np.any(np.asarray(v)) for v in jax.tree.leaves(own))
  assert any(np.any(np.asarray(v)) for v in jax.tree.leaves(of_heads))


def test_features_are_the_stream_after_the_chosen_block_at_the_last_token(backbone):
  prompt = state_prompt("a lake")
  ids = jnp.asarray([[i for s in backbone.chat.prompt(prompt) for i in s.ids]])
  count = ids.shape[1]
  every = models.forward(
    backbone.params,
    _MODEL,
    ids,
    jnp.ones_like(ids),
    jnp.arange(count)[None],
    captured=jnp.asarray([[count - 1]]),
  ).captured
  for layer in range(4):
    read = read_features(backbone, [prompt], layer=layer, rows=2)
    np.testing.assert_allclose(read[0], every[layer, 0, 0], rtol=1e-4, atol=1e-5)
  assert not np.allclose(every[1], every[2])


def test_features_do_not_depend_on_what_is_read_beside_them(backbone):
  prompts = [question("a lake", "Left"), state_prompt("a lake" * 20), question("a lake", "Left")]
  prompts += [question("a lake", "Up")]
  together = read_features(backbone, prompts, layer=1, rows=4)
  alone = np.concatenate([read_features(backbone, [p], layer=1, rows=1) for p in prompts])
  np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(together[0], together[2])
  assert not np.allclose(together[0], together[3], atol=1e-3)


def test_a_layer_is_a_block_of_the_backbone():
  assert tapped_layer(None, _MODEL) == 1 and tapped_layer(3, _MODEL) == 3
  with pytest.raises(ConfigError, match=r"critic\.layer=4; allowed: 0 to 3"):
    tapped_layer(4, _MODEL)


def test_a_question_shows_state_and_action():
  (message,) = question("a lake", "Left")
  assert message == Message("user", message.content)
  assert message.content.startswith("a lake\n\nAction: Left\n")
