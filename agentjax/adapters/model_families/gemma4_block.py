"""Gemma 4 text layers: local and global attention, lent keys and values, inputs of every layer."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from agentjax.models.attend import attend, attend_cache, max_scores
from agentjax.models.attention import (
  KVCache,
  append_rows,
  join_heads,
  rope_frequencies,
  rotate,
  step_of,
)
from agentjax.models.blocks import BlockKind, BlockReport, StreamKind
from agentjax.models.config import Gemma4Config, ModelConfig
from agentjax.models.linear import linear
from agentjax.models.matrices import matrix_spec
from agentjax.models.mlp import Mlp, mlp, mlp_spec
from agentjax.models.moe import Moe, Routing, moe, moe_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import ParamSpec, Weight
from pallas_kernels.kv_packet import Rotary

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Layer:
  """What a character of the pattern says of a layer.

  Attributes:
    is_global: attends to all of the past, else to a window.
    lends: later layers of its kind read its keys and values.
    reads: has no keys and values of its own.
    mixes: has a mixture of experts beside its MLP.
  """

  is_global: bool = False
  lends: bool = False
  reads: bool = False
  mixes: bool = False


LAYERS: Mapping[str, Layer] = {
  "l": Layer(),
  "g": Layer(is_global=True),
  "L": Layer(lends=True),
  "G": Layer(lends=True, is_global=True),
  "r": Layer(reads=True),
  "R": Layer(reads=True, is_global=True),
  "x": Layer(mixes=True),
  "X": Layer(mixes=True, is_global=True),
}


@flax.struct.dataclass
class GemmaAttention:
  """Projections; a reading layer has the queries only, ``value`` may be None (see the config)."""

  query: Weight  # [embed, heads, width]
  query_norm: Weight  # [width]
  key: Weight | None  # [embed, kv_heads, width]
  key_norm: Weight | None  # [width]
  value: Weight | None  # [embed, kv_heads, width]
  out: Weight  # [heads, width, embed]


@flax.struct.dataclass
class Mixture:
  """Mixture of experts beside the MLP, and the norms both need to be added up."""

  router_scale: Weight  # [embed]
  moe: Moe
  norm: Weight  # [embed], of what experts read
  out_norm: Weight  # [embed]
  mlp_out_norm: Weight  # [embed]


@flax.struct.dataclass
class PerLayerGate:
  """How the input of one layer enters the stream."""

  gate: Weight  # [embed, per_layer]
  up: Weight  # [per_layer, embed]
  out_norm: Weight  # [embed]


@flax.struct.dataclass
class GemmaLayer:
  """Weights of one layer."""

  attention_norm: Weight  # [embed]
  attention: GemmaAttention
  attention_out_norm: Weight  # [embed]
  mlp_norm: Weight  # [embed]
  mlp: Mlp
  mlp_out_norm: Weight  # [embed]
  mixture: Mixture | None
  per_layer: PerLayerGate | None
  scale: Weight  # [1]


@flax.struct.dataclass
class PerLayerTable:
  """What the inputs of all layers come from."""

  table: Weight  # [vocab, blocks, per_layer]
  projection: Weight  # [embed, blocks, per_layer]
  norm: Weight  # [per_layer]


@flax.struct.dataclass
class Stream:
  """What flows from layer to layer.

  Attributes:
    x: [..., embed].
    lent_local, lent_global: what the lending layers leave: keys and values [B, T, kv_heads, width]
      in training, their KVCache in decoding; None before them.
  """

  x: Array
  lent_local: Any = None
  lent_global: Any = None

  def lent(self, layer: Layer) -> Any:
    """What a layer reads of another; None where it has keys and values of its own."""
    if not layer.reads:
      return None
    return self.lent_global if layer.is_global else self.lent_local

  def after(self, layer: Layer, x: Array, kept: Any) -> Stream:
    """The stream behind a layer that kept these keys and values."""
    lent_local, lent_global = self.lent_local, self.lent_global
    if layer.lends and layer.is_global:
      lent_global = kept
    elif layer.lends:
      lent_local = kept
    return Stream(x, lent_local, lent_global)


class Given(NamedTuple):
  """What one layer is given beside the stream."""

  per_layer: Array | None  # [..., per_layer]
  experts: Array | None  # int32 [..., choices], to be used in the place of the router's choice


class _Heads(NamedTuple):
  """Attention of local or of global layers."""

  kv_heads: int
  width: int
  frequencies: np.ndarray
  window: int | None


def gemma_spec(config: ModelConfig, layer: Layer) -> GemmaLayer:
  """Abstract parameters of one layer."""
  gemma = _settings(config)
  norm = norm_spec(config.d_model, config)
  wide = layer.reads and gemma.readers_double_mlp
  mixture = per_layer = None
  if layer.mixes:
    mixture = Mixture(
      router_scale=norm,
      moe=moe_spec(config),
      norm=norm,
      out_norm=norm,
      mlp_out_norm=norm,
    )
  if gemma.per_layer_width:
    gate = matrix_spec(config, (config.d_model, gemma.per_layer_width), ("embed", "mlp"))
    per_layer = PerLayerGate(
      gate=gate,
      up=dataclasses.replace(
        gate,
        shape=gate.shape[::-1],
        axes=gate.axes[::-1],
        scale=config.init_scale * gemma.per_layer_width**-0.5,
      ),
      out_norm=norm,
    )
  return GemmaLayer(
    attention_norm=norm,
    attention=_attention_spec(config, layer),
    attention_out_norm=norm,
    mlp_norm=norm,
    mlp=mlp_spec(config, config.d_mlp * (2 if wide else 1)),
    mlp_out_norm=norm,
    mixture=mixture,
    per_layer=per_layer,
    scale=norm_spec(1, config),
  )


def per_layer_spec(config: ModelConfig) -> PerLayerTable | None:
  """Abstract parameters of the inputs of all layers; None where the model has none."""
  if config.gemma is None or not config.gemma.per_layer_width:
    return None
  width, blocks = config.gemma.per_layer_width, len(config.pattern)
  return PerLayerTable(
    table=ParamSpec(
      (config.vocab_size, blocks, width),
      ("vocab", None, "latent"),
      config.param_dtype,
      scale=config.init_scale * width**-0.5,
    ),
    projection=matrix_spec(config, (config.d_model, blocks, width), ("embed", None, None)),
    norm=norm_spec(width, config),
  )


def scaled_stream(
  embedded: Float[Array, "*lead embed"],
  per_layer: PerLayerTable | None,
  config: ModelConfig,
  token_ids: Int[Array, "*lead"],
) -> tuple[Stream, Float[Array, "*lead blocks per_layer"] | None]:
  """The stream ``sqrt(embed) e`` of embeddings e, and the inputs of all layers.

  An input is ``(norm(W x / sqrt(embed)) + sqrt(per_layer) table[token]) / sqrt(2)`` with x the
  stream. Roots are rounded to the dtype of the stream, as the published weights were trained.
  """

  def root(size: int) -> Array:
    return jnp.asarray(size**0.5, embedded.dtype)

  x = embedded * root(config.d_model)
  if per_layer is None:
    return Stream(x), None
  shape = (*token_ids.shape, *per_layer.projection.shape[1:])
  inputs = linear(x, per_layer.projection) * config.d_model**-0.5
  inputs = rms_norm(inputs.reshape(shape), per_layer.norm, config.norm_eps)
  looked_up = per_layer.table[token_ids].astype(x.dtype) * root(shape[-1])
  return Stream(x), (inputs + looked_up) * 2.0**-0.5


def init_gemma_cache(config: ModelConfig, slots: int, length: int, layer: Layer) -> KVCache | None:
  """Zeros, in the compute dtype; None for a layer that reads another's."""
  if layer.reads:
    return None
  heads = _heads(config, layer)
  shape = (slots, heads.kv_heads, length, heads.width)
  return KVCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype), heads.window)


def gemma_layer(
  params: GemmaLayer,
  x: Float[Array, "*lead embed"],
  config: ModelConfig,
  per_layer: Float[Array, "*lead per_layer"] | None,
  *,
  attend: Callable[[GemmaAttention, Array], tuple[Array, Any]],
  mix: Callable[[Moe, Array, Array], tuple[Array, Routing]],
) -> tuple[Array, Any, Routing | None]:
  """One layer, the same in training and decoding.

  ``h = x + norm(attention(norm x)); h = h + norm(m)``, with ``m = mlp(norm h)``, or in layers that
  mix ``m = norm(mlp(norm h)) + norm(moe(norm h))``, whose router reads
  ``h / rms(h) * router_scale / sqrt(embed)``; ``h = h + norm(W_up (gelu(W_gate h) * per_layer))``
  where layers have inputs; ``y = scale * h``.

  Args:
    per_layer: input of this layer.
    attend: ``(weights, inputs) -> (result, anything)``.
    mix: ``(weights, inputs, inputs of the router) -> (result, routing)``.

  Returns:
    [..., embed]; what ``attend`` returned beside its result; the routing.
  """
  eps = config.norm_eps
  out, kept = attend(params.attention, rms_norm(x, params.attention_norm, eps))
  x = x + rms_norm(out, params.attention_out_norm, eps)
  out = mlp(params.mlp, rms_norm(x, params.mlp_norm, eps), config.mlp_activation)
  routing = None
  if params.mixture is not None:
    mixture = params.mixture
    router_scale = mixture.router_scale.astype(jnp.float32) * config.d_model**-0.5
    mixed, routing = mix(
      mixture.moe,
      rms_norm(x, mixture.norm, eps),
      rms_norm(x, router_scale, eps),
    )
    out = rms_norm(out, mixture.mlp_out_norm, eps) + rms_norm(mixed, mixture.out_norm, eps)
  x = x + rms_norm(out, params.mlp_out_norm, eps)
  if params.per_layer is not None:
    assert per_layer is not None
    gate = jax.nn.gelu(linear(x, params.per_layer.gate), approximate=True)
    out = linear(gate * per_layer, params.per_layer.up)
    x = x + rms_norm(out, params.per_layer.out_norm, eps)
  return x * params.scale.astype(x.dtype), kept, routing


def gemma_attention(
  params: GemmaAttention,
  x: Float[Array, "batch time embed"],
  config: ModelConfig,
  layer: Layer,
  lent: tuple[Array, Array] | None,
  *,
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
) -> tuple[Float[Array, "batch time embed"], tuple[Array, Array], Array | None]:
  """``softmax(q kᵀ) v`` with q and k of unit mean square times a learned scale, v without one.

  Args:
    lent: keys and values of another layer; None where this one has its own.

  Returns:
    The result; keys and values [batch, time, kv_heads, width]; with ``record_max_scores`` the
    largest score of each head.
  """
  heads = _heads(config, layer)
  query = _query(params, x, config, heads, positions)
  key, value = _key_value(params, x, config, heads, positions) if lent is None else lent
  how: dict[str, Any] = {
    "segment_ids": segment_ids,
    "scale": 1.0,
    "block": config.attention_block,
    "window": heads.window,
  }
  top = max_scores(query, key, **how) if config.record_max_scores else None
  return _output(params, attend(query, key, value, **how)), (key, value), top


def gemma_extend(
  params: GemmaAttention,
  x: Float[Array, "rows time embed"],
  cache: KVCache,
  config: ModelConfig,
  layer: Layer,
  *,
  rows: Int[Array, " rows"] | None,
  positions: Int[Array, "rows time"],
  counts: Int[Array, " rows"] | Bool[Array, " rows"],
  sees: None = None,
) -> tuple[Float[Array, "rows time embed"], KVCache]:
  """The same over slots (see ``attention_extend``); a reading layer gets the lender's cache.

  Whoever asks for ``sees`` is refused by ``ModelConfig.check_sight``.
  """
  heads = _heads(config, layer)
  query = _query(params, x, config, heads, positions)
  if not layer.reads:
    key, value = _key_value(params, x, config, heads, positions)
    cache = append_rows(cache, key, value, rows=rows, positions=positions, counts=counts)
  out = attend_cache(
    query,
    cache.keys,
    cache.values,
    positions=positions,
    scale=1.0,
    window=heads.window,
    rows=rows,
    counts=counts,
    rotary=Rotary(heads.frequencies),
    kernels=config.kernels,
  )
  return _output(params, out), cache


gemma_step = step_of(gemma_extend)


def _settings(config: ModelConfig) -> Gemma4Config:
  assert config.gemma is not None, "validate() sees to it"
  return config.gemma


def _heads(config: ModelConfig, layer: Layer) -> _Heads:
  gemma = _settings(config)
  if not layer.is_global:
    assert config.rope_theta is not None, "validate() sees to it"
    frequencies = rope_frequencies(config.head_dim, config.rope_theta)
    return _Heads(config.num_kv_heads, config.head_dim, frequencies, gemma.window)
  width = gemma.global_head_dim
  turned = int(gemma.global_rope_fraction * width / 2)
  frequencies = rope_frequencies(width, gemma.global_rope_theta, turned=turned)
  return _Heads(gemma.global_kv_heads, width, frequencies, None)


def _attention_spec(config: ModelConfig, layer: Layer) -> GemmaAttention:
  heads = _heads(config, layer)

  def projection(count: int, name: str) -> ParamSpec:
    shape = (config.d_model, count, heads.width)
    return matrix_spec(config, shape, ("embed", name, "head_dim"))

  norm = norm_spec(heads.width, config)
  key = None if layer.reads else projection(heads.kv_heads, "kv_heads")
  reuses_key = layer.is_global and _settings(config).global_key_is_value
  back = (config.num_heads, heads.width, config.d_model)
  return GemmaAttention(
    query=projection(config.num_heads, "heads"),
    query_norm=norm,
    key=key,
    key_norm=None if layer.reads else norm,
    value=None if reuses_key else key,
    out=matrix_spec(config, back, ("heads", "head_dim", "embed")),
  )


def _query(
  params: GemmaAttention, x: Array, config: ModelConfig, heads: _Heads, positions: Array
) -> Array:
  """[B, T, heads, width]."""
  query = rms_norm(_split(x, params.query), params.query_norm, config.norm_eps)
  return rotate(query, positions, heads.frequencies)


def _key_value(
  params: GemmaAttention, x: Array, config: ModelConfig, heads: _Heads, positions: Array
) -> tuple[Array, Array]:
  """[B, T, kv_heads, width] each."""
  assert params.key is not None
  key = _split(x, params.key)
  value = key if params.value is None else _split(x, params.value)
  key = rotate(rms_norm(key, params.key_norm, config.norm_eps), positions, heads.frequencies)
  return key, rms_norm(value, None, config.norm_eps)


def _split(x: Array, weight: Array) -> Array:
  """[B, T, embed] to [B, T, heads, width]."""
  return linear(x, weight).reshape(*x.shape[:2], *weight.shape[1:])


def _output(params: GemmaAttention, heads: Array) -> Array:
  """[B, T, heads, width] to [B, T, embed]."""
  merged = heads.reshape(*heads.shape[:2], -1)
  return linear(merged, params.out)


def _give(inputs: Array | None, number: int, experts: Array | None) -> Given:
  return Given(None if inputs is None else inputs[..., number, :], experts)


STREAM = StreamKind(
  spec=per_layer_spec,
  open=scaled_stream,
  give=_give,
  close=lambda stream: stream.x,
  replace=lambda stream, x: dataclasses.replace(stream, x=x),
)


def _block(layer: Layer) -> BlockKind:
  def mix_with(config, segment_ids, given):
    def mix(weights, inputs, router_input):
      return moe(
        weights,
        inputs,
        config,
        segment_ids=segment_ids,
        experts=given.experts,
        router_input=router_input,
      )

    return mix

  def forward(params, stream, config, rows, given):
    def attend(weights, inputs):
      out, kept, top = gemma_attention(
        weights,
        inputs,
        config,
        layer,
        stream.lent(layer),
        segment_ids=rows.segment_ids,
        positions=rows.positions,
      )
      return out, (kept, top)

    mix = mix_with(config, rows.segment_ids, given)
    x, (kept, top), routing = gemma_layer(
      params, stream.x, config, given.per_layer, attend=attend, mix=mix
    )
    report = BlockReport(routing=routing, max_scores=None if top is None else top[None])
    return stream.after(layer, x, kept), report

  def decode(attend_slots):
    def run(params, stream, entry, config, where, given):
      cache = entry if stream.lent(layer) is None else stream.lent(layer)

      def attend(weights, inputs):
        return attend_slots(weights, inputs, cache, config, layer, **where._asdict())

      mix = mix_with(config, where.real.astype(jnp.int32), given)
      x, kept, routing = gemma_layer(
        params, stream.x, config, given.per_layer, attend=attend, mix=mix
      )
      experts = None if routing is None else routing.experts
      return stream.after(layer, x, kept), None if layer.reads else kept, experts

    return run

  def join(params, entries, starts, config):
    del params
    return join_heads(entries, starts, Rotary(_heads(config, layer).frequencies))

  return BlockKind(
    spec=functools.partial(gemma_spec, layer=layer),
    forward=forward,
    init_cache=functools.partial(init_gemma_cache, layer=layer),
    extend=decode(gemma_extend),
    step=decode(gemma_step),
    join=join,
    routes=layer.mixes,
    stream=STREAM,
  )


BLOCKS = types.SimpleNamespace(**{kind: _block(layer) for kind, layer in LAYERS.items()})
