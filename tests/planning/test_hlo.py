"""Costs read off compiled programs, against counts by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from agentjax.planning import program_cost


def compiled(function, *shapes):
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.jit(function).lower(*arguments).compile().as_text()


def test_a_product_costs_two_operations_an_entry_and_inner_index():
  text = compiled(lambda a, b: a @ b, (32, 48), (48, 64))
  assert program_cost(text).flops == 2 * 32 * 48 * 64


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
  def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

  text = compiled(layers, (16, 32), (7, 32, 32))
  assert program_cost(text).flops == 7 * 2 * 16 * 32 * 32


def test_loops_in_loops_multiply():
  def both(x, weights):
    def outer(x, _):
      return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0], None

    return jax.lax.scan(outer, x, length=3)[0]

  text = compiled(both, (16, 32), (5, 32, 32))
  assert program_cost(text).flops == 3 * 5 * 2 * 16 * 32 * 32


def test_a_loop_of_unknown_length_runs_as_often_as_told():
  def repeated(x, w, count):
    return jax.lax.fori_loop(0, count.astype(jnp.int32), lambda _, x: jnp.tanh(x @ w), x)

  text = compiled(repeated, (16, 32), (32, 32), ())
  assert program_cost(text).flops == 2 * 16 * 32 * 32
  assert program_cost(text, dynamic_trips=4).flops == 4 * 2 * 16 * 32 * 32


def test_memory_traffic_grows_with_the_loop_and_not_with_what_is_sliced():
  def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

  few = program_cost(compiled(layers, (8, 64), (10, 64, 64))).hbm_bytes
  many = program_cost(compiled(layers, (8, 64), (40, 64, 64))).hbm_bytes
  # A layer reads its own 16 KiB of weights, not the whole stack of them.
  assert many / few == pytest.approx(4, rel=0.2)


# What XLA:TPU writes: an unrolled loop that counts by twos, products as convolutions, a collective
# in two parts of one chain, arrays in fast memory.
TPU = """
%fused_computation.1 (param_0.1: bf16[8,16]) -> bf16[8,64] {
  %param_0.1 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%param_0.1), channel_id=3, dimensions={1}, frontend_attributes={chain_id="0"}
}

%fused_computation.2 (param_0.2: bf16[8,16], param_1.2: bf16[64,32]) -> bf16[8,32] {
  %param_0.2 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.2 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.2 = bf16[8,64]{1,0:T(8,128)(2,1)} all-gather(%param_0.2), channel_id=3, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %convolution.1 = bf16[8,32]{1,0:T(8,128)(2,1)} convolution(%all-gather.2, %param_1.2), dim_labels=bf_io->bf
}

%body (arg: (s32[], bf16[8,16], bf16[64,32], bf16[8,32])) -> (s32[], bf16[8,16], bf16[64,32], bf16[8,32]) {
  %arg = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[64,32]{1,0:S(1)}, bf16[8,32]{1,0}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%arg), index=1
  %w = bf16[64,32]{1,0:S(1)} get-tuple-element(%arg), index=2
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%count, %two), backend_config={"window_config":{"estimated_cycles":"10"}}
  %start = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.1
  %y = bf16[8,32]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused_computation.2, backend_config={"window_config":{"estimated_cycles":"90"}}
  ROOT %out = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[64,32]{1,0:S(1)}, bf16[8,32]{1,0}) tuple(%next, %x, %w, %y)
}

%condition (arg.1: (s32[], bf16[8,16], bf16[64,32], bf16[8,32])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[64,32]{1,0:S(1)}, bf16[8,32]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(8)
  %count.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%count.1, %limit), direction=LT
}

ENTRY %main (p0: bf16[8,16], p1: bf16[64,32]) -> bf16[8,32] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = bf16[64,32]{1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %fast = bf16[64,32]{1,0:S(1)} copy(%p1)
  %empty = bf16[8,32]{1,0} broadcast(%zero), dimensions={}
  %initial = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[64,32]{1,0:S(1)}, bf16[8,32]{1,0}) tuple(%zero, %p0, %fast, %empty)
  %loop = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[64,32]{1,0:S(1)}, bf16[8,32]{1,0}) while(%initial), condition=%condition, body=%body
  ROOT %result = bf16[8,32]{1,0} get-tuple-element(%loop), index=3
}
"""  # noqa: E501


def test_what_the_tpu_compiler_writes_is_understood():
  cost = program_cost(TPU)
  trips = 4
  assert cost.flops == trips * 2 * 8 * 64 * 32
  assert cost.collective_bytes == {"all-gather": trips * 8 * 64 * 2}
  assert cost.cycles == trips * 100
  inside = (8 * 16 + 8 * 64) * 2 + (8 * 16 + 8 * 32) * 2 + 4 + 4 + 4
  assert cost.hbm_bytes == pytest.approx(trips * inside + 64 * 32 * 2 + 8 * 32 * 2, abs=64)


def test_batched_products_written_as_convolutions_count_once_a_batch():
  text = """
ENTRY %main (p0: bf16[6,8,16], p1: bf16[6,16,32]) -> bf16[6,8,32] {
  %p0 = bf16[6,8,16]{2,1,0} parameter(0)
  %p1 = bf16[6,16,32]{2,1,0} parameter(1)
  ROOT %c = bf16[6,8,32]{2,1,0} convolution(%p0, %p1), window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf
}
"""  # noqa: E501
  assert program_cost(text).flops == 6 * 2 * 8 * 16 * 32


# What tpu7x runs on its sparse cores: a call in two parts.
SPARSE_CORES = """\
HloModule jit_move

%called (param_0.2: bf16[1,64]) -> bf16[16,64] {
  %param_0.2 = bf16[1,64]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,64]{1,0} all-gather(%param_0.2), channel_id=2, dimensions={0}, \
backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
}

ENTRY %main.1 (param.1: bf16[1,64]) -> bf16[16,64] {
  %param.1 = bf16[1,64]{1,0} parameter(0)
  %gather-start = ((bf16[1,64]{1,0}), bf16[16,64]{1,0}, u32[]{:S(8)}) call-start(%param.1), \
async_execution_thread="sparsecore", to_apply=%called
  ROOT %gather-done = bf16[16,64]{1,0} call-done(%gather-start)
}
"""


def test_what_runs_on_sparse_cores_counts_once():
  cost = program_cost(SPARSE_CORES)
  assert cost.collective_bytes == {"all-gather": 16 * 64 * 2}
  assert cost.hbm_bytes == (1 + 16) * 64 * 2
  assert cost.cycles == 0


def test_text_without_a_program_is_refused():
  with pytest.raises(ValueError, match="ENTRY"):
    program_cost("HloModule nothing")


# A slice of a weight on its way to fast memory, a weight whole, and tokens scattered into a cache
# in place.
STREAMED = """
%fused_computation.3 (param_0.3: bf16[64,2048,128], param_1.3: s32[64,1], param_2.3: bf16[64,128]) -> bf16[64,2048,128] {
  %param_0.3 = bf16[64,2048,128]{2,1,0} parameter(0)
  %param_1.3 = s32[64,1]{1,0:S(1)} parameter(1)
  %param_2.3 = bf16[64,128]{1,0:S(1)} parameter(2)
  ROOT %scatter.1 = bf16[64,2048,128]{2,1,0} scatter(%param_0.3, %param_1.3, %param_2.3), to_apply=%add
}

ENTRY %main (p0: bf16[4096,3072], p1: bf16[64,2048,128], p2: s32[64,1], p3: bf16[64,128]) -> bf16[64,2048,128] {
  %p0 = bf16[4096,3072]{1,0} parameter(0)
  %p1 = bf16[64,2048,128]{2,1,0} parameter(1)
  %p2 = s32[64,1]{1,0:S(1)} parameter(2)
  %p3 = bf16[64,128]{1,0:S(1)} parameter(3)
  %slice-start = ((bf16[4096,3072]{1,0}), bf16[1024,3072]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%p0), slice={[0:1024], [0:3072]}
  %slice-done = bf16[1024,3072]{1,0:S(1)} slice-done(%slice-start)
  %copy-start = (bf16[4096,3072]{1,0:S(1)}, bf16[4096,3072]{1,0}, u32[]{:S(2)}) copy-start(%p0)
  %copy-done = bf16[4096,3072]{1,0:S(1)} copy-done(%copy-start)
  ROOT %cache = bf16[64,2048,128]{2,1,0} fusion(%p1, %p2, %p3), kind=kCustom, calls=%fused_computation.3
}
"""  # noqa: E501


def test_traffic_is_of_what_is_moved_and_not_of_what_it_is_taken_from_or_put_into():
  cost = program_cost(STREAMED)
  assert cost.hbm_bytes == 2 * (1024 * 3072 + 4096 * 3072 + 64 * 128)


# A cache that a product reads a block of, two fusions deep, and a table that rows are taken from.
READ = """
%fused_computation.4 (param_0.4: bf16[64,2,2048,128], param_1.4: s32[]) -> bf16[64,2,256,128] {
  %param_0.4 = bf16[64,2,2048,128]{3,2,1,0} parameter(0)
  %param_1.4 = s32[]{:T(128)S(6)} parameter(1)
  %zero.4 = s32[]{:T(128)} constant(0)
  ROOT %slice = bf16[64,2,256,128]{3,2,1,0} dynamic-slice(%param_0.4, %zero.4, %zero.4, %param_1.4, %zero.4), dynamic_slice_sizes={64,2,256,128}
}

%fused_computation.5 (param_0.5: bf16[64,2,2048,128], param_1.5: s32[], param_2.5: bf16[64,2,4,128]) -> bf16[64,2,4,256] {
  %param_0.5 = bf16[64,2,2048,128]{3,2,1,0} parameter(0)
  %param_1.5 = s32[]{:T(128)S(6)} parameter(1)
  %param_2.5 = bf16[64,2,4,128]{3,2,1,0:S(1)} parameter(2)
  %inner = bf16[64,2,256,128]{3,2,1,0} fusion(%param_0.5, %param_1.5), kind=kLoop, calls=%fused_computation.4
  ROOT %dot = bf16[64,2,4,256]{3,2,1,0:S(1)} dot(%param_2.5, %inner), lhs_batch_dims={0,1}, rhs_batch_dims={0,1}, lhs_contracting_dims={3}, rhs_contracting_dims={3}
}

ENTRY %main (p0: bf16[64,2,2048,128], p1: s32[], p2: bf16[64,2,4,128], p3: f32[50000,4096], p4: s32[64,1]) -> bf16[64,2,4,256] {
  %p0 = bf16[64,2,2048,128]{3,2,1,0} parameter(0)
  %p1 = s32[]{:T(128)S(6)} parameter(1)
  %p2 = bf16[64,2,4,128]{3,2,1,0:S(1)} parameter(2)
  %p3 = f32[50000,4096]{1,0} parameter(3)
  %p4 = s32[64,1]{1,0:S(1)} parameter(4)
  %rows = f32[64,4096]{1,0} gather(%p3, %p4), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4096}
  ROOT %scores = bf16[64,2,4,256]{3,2,1,0:S(1)} fusion(%p0, %p1, %p2), kind=kOutput, calls=%fused_computation.5
}
"""  # noqa: E501


def test_a_block_of_a_cache_and_rows_of_a_table_are_all_that_is_read_of_them():
  cost = program_cost(READ)
  assert cost.hbm_bytes == 2 * 64 * 2 * 256 * 128 + 2 * 4 * 64 * 4096


def test_costs_add_up():
  text = compiled(lambda a, b: a @ b, (32, 48), (48, 64))
  once = program_cost(text)
  assert once.plus(once, 2).flops == 3 * once.flops
  assert once.plus(program_cost(TPU), -1).collective_bytes == {"all-gather": -4 * 8 * 64 * 2}
