"""The public checker: passes what is right and names what is wrong."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.supervised import supervised_objective
from agentjax.testing import check_objective


def good(inputs):
  ratio = jnp.exp(inputs.log_probs - inputs.old_log_probs)
  per_token = -jnp.minimum(ratio, 2.0) * inputs.advantages
  return jnp.sum(inputs.coefficients * per_token), {"ratio": jnp.sum(inputs.shares * ratio)}


def test_a_loss_of_ones_own_passes():
  check_objective(good, seed=0)


def test_our_own_objectives_pass():
  config = ObjectiveConfig()
  check_objective(policy_objective(config), config, seed=1)
  check_objective(supervised_objective, seed=2)


def ignores_coefficients(inputs):
  return jnp.mean(good(inputs)[0] * jnp.ones_like(inputs.weights)), {}


def mean_over_the_array(inputs):
  return jnp.mean(-inputs.log_probs * inputs.advantages), {}


def own_denominator(inputs):
  loss = -inputs.log_probs * inputs.advantages * inputs.weights
  return jnp.sum(loss) / jnp.sum(inputs.weights), {}


def trains_on_padding(inputs):
  return jnp.sum(inputs.coefficients * -inputs.log_probs) + 1e-3 * jnp.sum(inputs.log_probs), {}


def trains_on_prompts(inputs):
  inside = inputs.segment_ids > 0
  return jnp.sum(jnp.where(inside, -inputs.log_probs * 0.1, 0)), {}


def reads_prompts(inputs):
  inside = (inputs.segment_ids > 0).astype(jnp.float32)
  level = jax.lax.stop_gradient(jnp.sum(inside * inputs.log_probs) / 40)
  return jnp.sum(inputs.coefficients * -inputs.log_probs) * level, {}


def numbered(inputs):
  return jnp.sum(inputs.coefficients * -inputs.log_probs * inputs.segment_ids), {}


def squares_the_coefficients(inputs):
  return jnp.sum(jnp.square(inputs.coefficients) * -inputs.log_probs), {}


def centres_on_the_rows(inputs):
  baseline = jnp.sum(inputs.shares * inputs.log_probs)
  return jnp.sum(inputs.coefficients * inputs.advantages * (baseline - inputs.log_probs)), {}


def averages_a_metric(inputs):
  loss, _ = good(inputs)
  inside = jnp.sum(inputs.weights)
  ratio = jnp.sum(inputs.weights * inputs.log_probs) / jnp.maximum(inside, 1)
  return loss, {"mean_log_prob": ratio}


def explodes(inputs):
  loss, _ = good(inputs)
  return loss + jnp.sum(inputs.coefficients * jnp.log(inputs.weights - 2)), {}


@pytest.mark.parametrize(
  "loss, named",
  [
    (mean_over_the_array, "padding:"),
    (trains_on_padding, "padding:"),
    (trains_on_prompts, "sibling exclusion:"),
    (reads_prompts, "sibling exclusion:"),
    (numbered, "permutation:"),
    (own_denominator, "mask linearity:"),
    (squares_the_coefficients, "mask linearity:"),
    (centres_on_the_rows, "mask linearity:|micro-batch equality:"),
    (averages_a_metric, "micro-batch equality: metric 'mean_log_prob'"),
    (explodes, "finite:"),
  ],
)
def test_a_broken_loss_is_told_which_promise_it_breaks(loss, named):
  with pytest.raises(AssertionError, match=f"^({named})"):
    check_objective(loss, seed=0)


def test_the_loss_in_the_docs_passes_as_it_stands():
  text = (pathlib.Path(__file__).parents[1] / "docs" / "objectives.md").read_text()
  (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  exec(compile(snippet, "docs/objectives.md", "exec"), {})
