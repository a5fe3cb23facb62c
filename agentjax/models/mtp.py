"""Multi-token prediction: predicts tokens after the next one, from the same hidden state.

At depth k the state of token t is joined with the embedding of token t + k and passes a small
layer, which predicts token t + k + 1 and passes its state to the next depth:

    s_t^0 = hidden state of the model, after its last norm
    s_t^k = final_norm(blocks([token_norm(E[x_{t+k}]), hidden_norm(s_t^{k-1})] join))
    p(x_{t+k+1} | x_{<= t+k}) = softmax(lm_head s_t^k)

Embedding and output projection are the model's. References: DeepSeek-V3, 2412.19437, section 2.2;
Nemotron 3 Super, 2604.12374 (one layer for all depths, detached heads in reinforcement learning).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.blocks import Rows
from agentjax.models.config import ModelConfig
from agentjax.models.heads import score_targets
from agentjax.models.linear import linear
from agentjax.models.moe import Routing
from agentjax.models.norm import rms_norm
from agentjax.models.stack import DecodeParams, MtpLayer, Params, open_stream, run_unit

Array = jax.Array


@flax.struct.dataclass
class MtpScores:
  """Result of ``mtp_scores``.

  Attributes:
    log_probs: float32 [depths, B, T], aligned with the token itself: at depth k (index k - 1) token
      t is predicted from the state k + 1 tokens before it; nats, 0 where its sequence has none
      there.
    routing: of the layer's routers at every depth, [depths, routers, ...]; only states with a
      target count. None without routers.
  """

  log_probs: Array
  routing: Routing | None


class MtpLoss(NamedTuple):
  """Result of ``mtp_loss``; everything adds up over micro-batches.

  Attributes:
    loss: float32 scalar.
    metrics: ``mtp/nll_k``, the weighted sum of depth k.
    load: float32 [routers, experts], tokens sent to each expert, in the order that
      ``update_router_bias`` takes after the routers of the pattern; None without routers.
  """

  loss: Array
  metrics: dict[str, Array]
  load: Array | None


def mtp_scores(
  params: Params,
  config: ModelConfig,
  hidden: Float[Array, "batch time embed"],
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
) -> MtpScores:
  """Log-probs of tokens seen from further back, a scan over depths.

  Nothing crosses sequences: a state whose target lies outside its sequence is padding for the
  layer. With ``config.mtp.detach`` gradients reach the layer's own parameters only.

  Args:
    params: with ``mtp``.
    config: of the params.
    hidden: of ``forward`` on the same rows.
    token_ids, segment_ids, positions: see ``forward``.
  """
  if config.mtp is None or params.mtp is None:
    raise ValueError("config.mtp is None: these parameters predict one token only; set config.mtp.")
  layer = params.mtp
  if config.mtp.detach:
    hidden, params = jax.lax.stop_gradient((hidden, params))
  depths, pattern = config.mtp.depths, config.mtp.pattern

  def body(state: Array, depth: Any) -> tuple[Array, tuple[Array, Any]]:
    own, (inputs, targets, segments) = depth
    weights = jax.tree.map(lambda w: w[0], layer) if own is None else own
    x, reports = run_unit(
      join(params, config, weights, inputs, state),
      (weights.blocks, (None,) * len(pattern)),
      unit=pattern,
      config=config,
      rows=Rows(segments, positions),
    )
    state = rms_norm(x, weights.final_norm, config.norm_eps)
    log_probs = score_targets(params, config, state, targets)[0]
    routings = [report.routing for report in reports if report.routing is not None]
    routing = jax.tree.map(lambda *v: jnp.stack(v), *routings) if routings else None
    return state, (jnp.where(segments != 0, log_probs, 0.0), routing)

  ahead = range(1, depths + 1)
  rows = [
    (
      _ahead(token_ids, k),
      _ahead(token_ids, k + 1),
      jnp.where(_ahead(segment_ids, k + 1) == segment_ids, segment_ids, 0),
    )
    for k in ahead
  ]
  own = None if config.mtp.shared else layer
  _, (log_probs, routing) = jax.lax.scan(
    body, hidden, (own, jax.tree.map(lambda *v: jnp.stack(v), *rows))
  )
  aligned = [_behind(v, k + 1) for k, v in zip(ahead, log_probs, strict=True)]
  return MtpScores(log_probs=jnp.stack(aligned), routing=routing)


def mtp_loss(
  params: Params,
  config: ModelConfig,
  hidden: Float[Array, "batch time embed"],
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  weights: Float[Array, "batch time"],
) -> MtpLoss:
  """``mean_k sum_t weights_t * -log p_k(x_t)``, to be multiplied by 0.3 in Nemotron 3 pretraining.

  Args:
    params, config, hidden, token_ids, segment_ids, positions: see ``mtp_scores``.
    weights: of each token as a target; with 1 / N on the N tokens of a batch that count it is the
      mean over tokens, and micro-batches add up. The first k + 1 tokens of a sequence, which depth
      k cannot predict, add nothing.
  """
  scores = mtp_scores(params, config, hidden, token_ids, segment_ids, positions)
  assert config.mtp is not None
  by_depth = -jnp.sum(weights * scores.log_probs, axis=(1, 2))
  load = None
  if scores.routing is not None:
    load = scores.routing.load
    load = jnp.sum(load, axis=0) if config.mtp.shared else load.reshape(-1, load.shape[-1])
  return MtpLoss(
    loss=jnp.mean(by_depth),
    metrics={f"mtp/nll_{k}": jax.lax.stop_gradient(v) for k, v in enumerate(by_depth, start=1)},
    load=load,
  )


def join(
  params: Params | DecodeParams,
  config: ModelConfig,
  layer: MtpLayer,
  token_ids: Int[Array, "*lead"],
  state: Float[Array, "*lead embed"],
) -> Float[Array, "*lead embed"]:
  """The input of the blocks of one depth; ``layer`` is its layer, without the leading axis."""
  parts = (
    rms_norm(open_stream(params, config, token_ids)[0], layer.token_norm, config.norm_eps),
    rms_norm(state, layer.hidden_norm, config.norm_eps),
  )
  return linear(jnp.concatenate(parts, axis=-1), layer.join)


def _ahead(x: Array, places: int) -> Array:
  """The entry ``places`` further on in the row; 0 past its end."""
  return jnp.pad(x, ((0, 0), (0, places)))[:, places:]


def _behind(x: Array, places: int) -> Array:
  """The entry ``places`` further back in the row; 0 before its start."""
  return jnp.pad(x, ((0, 0), (places, 0)))[:, : x.shape[1]]
