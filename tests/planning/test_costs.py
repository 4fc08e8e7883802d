"""Costs read from compiled text, against programs whose counts are known."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ddrp_jax.planning import costs, hlo

ONE = {"data": 1}


def compiled_cost(function, *arguments, mesh_shape=ONE):
    compiled = jax.jit(function).lower(*arguments).compile()
    return costs.cost(hlo.parse(compiled.as_text()), mesh_shape)


def matrix(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_product_inside_a_scan_counts_once_for_each_trip():
    def function(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]

    cost = compiled_cost(function, matrix(32, 64), matrix(12, 64, 64))
    assert cost.flops == 12 * 2 * 32 * 64 * 64
    assert cost.unknown_loops == 0
    # XLA's own count has the body once.
    compiled = jax.jit(function).lower(matrix(32, 64), matrix(12, 64, 64)).compile()
    assert compiled.cost_analysis()["flops"] < cost.flops / 6


def test_loops_inside_loops_multiply():
    def inner(x, kernel):
        return jax.lax.fori_loop(0, 5, lambda i, x: x @ kernel, x)

    def function(x, kernels):
        return jax.lax.scan(lambda x, kernel: (inner(x, kernel), None), x, kernels)[0]

    cost = compiled_cost(function, matrix(8, 16), matrix(3, 16, 16))
    assert cost.flops == 3 * 5 * 2 * 8 * 16 * 16


def test_a_loop_of_unknown_length_is_reported():
    def function(x, kernel):
        return jax.lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x @ kernel + 1, x)

    cost = compiled_cost(function, matrix(8, 16), matrix(16, 16))
    assert cost.flops == 2 * 8 * 16 * 16
    assert cost.unknown_loops > 0


def test_batched_products_and_both_passes_count():
    def loss(q, k):
        return jnp.square(jnp.einsum("btnh,bsnh->bnts", q, k)).sum()

    cost = compiled_cost(jax.grad(loss, (0, 1)), matrix(2, 16, 4, 8), matrix(2, 16, 4, 8))
    assert cost.flops == 3 * 2 * (2 * 4 * 16 * 16 * 8)


def test_convolutions_count_real_places_alone():
    window = "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf"
    text = f"""
ENTRY %main (a: f32[4,8,16], b: f32[4,16,32]) -> f32[4,8,32] {{
  %a = f32[4,8,16]{{2,1,0}} parameter(0)
  %b = f32[4,16,32]{{2,1,0}} parameter(1)
  ROOT %conv = f32[4,8,32]{{2,1,0}} convolution(%a, %b), {window}
}}
"""
    # A batch of four products [8, 16] x [16, 32], as the TPU compiler writes it: of 16 pairs of
    # an output and a kernel place, four meet an input.
    cost = costs.cost(hlo.parse(text), ONE)
    assert cost.flops == 4 * 2 * 8 * 16 * 32


# A loop as the TPU compiler writes it, cut down to what is read.
TPU_LOOP = (Path(__file__).parent / "tpu_loop.hlo").read_text()


def test_tpu_text_trip_counts_come_from_the_condition():
    module = hlo.parse(TPU_LOOP)
    cost = costs.cost(module, ONE)
    assert cost.unknown_loops == 0
    assert cost.cycles == 5 + 10 * 700  # from 2 to 12
    # Each trip reads one slice of the stack, and writes to memory on the chip.
    in_loop = 10 * (8 * 128 * 2)
    assert in_loop <= cost.traffic <= in_loop + 400  # and the counter


@functools.cache
def mesh():
    kinds = (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=kinds)


@pytest.mark.parametrize(
    "axes",
    [("data",), ("fsdp",), ("tensor",), ("data", "fsdp"), ("fsdp", "tensor"), ("data", "tensor")],
)
def test_a_sum_over_axes_is_found_with_its_size(axes):
    rows = NamedSharding(mesh(), PartitionSpec(axes))
    x = jax.ShapeDtypeStruct((8, 1000), jnp.float32, sharding=rows)
    compiled = (
        jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh(), PartitionSpec()))
        .lower(x)
        .compile()
    )
    (found,) = costs.cost(hlo.parse(compiled.as_text()), mesh().shape).collectives
    assert found == costs.Collective("all-reduce", "+".join(axes), 2 ** len(axes), 4000, 1)


def test_collectives_of_a_loop_count_for_each_trip():
    def shift(x):
        around = [(0, 1), (1, 0)]
        return jax.lax.fori_loop(
            0, 7, lambda i, x: jax.lax.ppermute(x, "fsdp", around) * 0.5 + i, x
        )

    rows = PartitionSpec("fsdp")
    function = jax.shard_map(shift, mesh=mesh(), in_specs=rows, out_specs=rows)
    x = jax.ShapeDtypeStruct((2, 300), jnp.float32, sharding=NamedSharding(mesh(), rows))
    compiled = jax.jit(function).lower(x).compile()
    found = costs.cost(hlo.parse(compiled.as_text()), mesh().shape).collectives
    assert sum(exchange.count for exchange in found) == 7
    assert {(exchange.kind, exchange.axes) for exchange in found} == {
        ("collective-permute", "fsdp")
    }
    assert {exchange.bytes for exchange in found} == {1200}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp", 4)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data", 2)),
        ("[2,4]<=[8]", ("fsdp", 4)),
        ("[4,2]<=[2,4]T(1,0)", ("data", 2)),
        ("[1,8]<=[8]", ("data+fsdp", 8)),
        ("{}", ("data+fsdp", 8)),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("?", 2)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("fsdp", 4)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data", 2)),
    ],
)
def test_every_spelling_of_groups_is_read(groups, axes):
    line = (
        "  %r = f32[8]{0} all-reduce(%x), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    )
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{line}\n}}\n"
    instruction = hlo.parse(text).computations["main"].by_name["r"]
    assert costs.mesh_axes(instruction, {"data": 2, "fsdp": 4, "tensor": 1}) == axes


def test_updates_in_place_write_the_slice_alone():
    def function(x, stack):
        return jax.lax.fori_loop(0, 4, lambda i, s: s.at[i].set(x * i), stack)

    compiled = jax.jit(function, donate_argnums=1).lower(matrix(1000), matrix(4, 1000)).compile()
    cost = costs.cost(hlo.parse(compiled.as_text()), ONE)
    assert cost.traffic < 4 * 4 * (2 * 1000 + 100) + 4 * 4 * 1000


def test_sizes_are_of_the_types():
    text = """
ENTRY %main (x: bf16[3,5]) -> (bf16[3,5], s4[7], pred[2]) {
  %x = bf16[3,5]{1,0} parameter(0)
  %a = s4[7]{0} constant({...})
  %b = pred[2]{0} constant({...})
  ROOT %t = (bf16[3,5]{1,0}, s4[7]{0}, pred[2]{0}) tuple(%x, %a, %b)
}
"""
    root = hlo.parse(text).computations["main"].root
    assert [shape.bytes for shape in root.shapes] == [30, 4, 2]
    assert np.all([shape.in_hbm for shape in root.shapes])
