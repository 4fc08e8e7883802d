"""Cycles of Pallas kernels, from the TPU compiler's static schedules."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.compilation_cache import compilation_cache

from ddrp_jax.planning import aot, costs, hlo, kernels

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install 'ddrp-jax[tpu-plan]'",
)
CHIP = "v5e:1x1"
BLOCK = pl.BlockSpec((128, 128), lambda i, j: (i, j))


def exponential(x_ref, y_ref):
    y_ref[...] = jnp.exp(x_ref[...])


def exponential_and_product(x_ref, y_ref):
    x = x_ref[...]
    y_ref[...] = jnp.exp(x) + jnp.dot(x, x.T, precision="highest")


def looping(trips):
    def body(x_ref, y_ref):
        def inner(i, y):
            return jax.lax.fori_loop(0, 7, lambda j, z: jnp.exp(z) + y * j, y)

        y_ref[...] = jax.lax.fori_loop(0, trips, inner, x_ref[...])

    return body


def looping_as_data_say(x_ref, y_ref):
    y_ref[...] = jax.lax.while_loop(lambda y: jnp.max(y) < 9.0, lambda y: y + 1.0, x_ref[...])


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with pytest.MonkeyPatch.context() as patch:
        # What it sets stays with this module, but for those that libtpu has read by then.
        for name in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "TPU_SKIP_MDS_QUERY"):
            patch.setenv(name, "")
        aot.prepare_environment()
        # A cache of programs for chips that are not there could be written and not read.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@functools.cache
def cost(body, rows, columns, trips=1):
    """Of a scan that runs a kernel over blocks of 128 x 128 in each of its trips."""
    place = jax.sharding.SingleDeviceSharding(aot.devices_of(CHIP)[0])
    x = jax.ShapeDtypeStruct((rows, columns), jnp.float32, sharding=place)
    kernel = pl.pallas_call(
        body, out_shape=x, grid=(rows // 128, columns // 128), in_specs=[BLOCK], out_specs=BLOCK
    )

    def function(x):
        return jax.lax.scan(lambda x, _: (kernel(x), None), x, length=trips)[0]

    return costs.cost(hlo.parse(jax.jit(function).lower(x).compile().as_text()), {"data": 1})


@functools.cache
def schedule(body, rows, columns):
    (kernel,) = cost(body, rows, columns).kernels
    return kernels.schedule(kernel, CHIP)


def test_programs_are_those_of_the_grid_and_share_one_schedule():
    few, many = schedule(exponential, 256, 128), schedule(exponential, 256, 512)
    assert (few.programs, many.programs) == (2, 8)
    assert few.unknown_loops == many.unknown_loops == 0
    # 16 registers of 8 x 128 to load, raise and store, at most a few a cycle; a grid with another
    # axis costs some more scalars.
    assert 16 <= few.bundles <= many.bundles < few.bundles + 60
    assert many.cycles == 8 * many.bundles


def test_a_kernel_that_does_more_has_more_cycles():
    assert (
        schedule(exponential_and_product, 256, 128).cycles > schedule(exponential, 256, 128).cycles
    )


def test_each_run_counts():
    once, thrice = (cost(exponential, 256, 512, trips) for trips in (1, 3))
    assert [kernel.count for kernel in thrice.kernels] == [3]
    cycles, notes = aot.kernel_cycles(once, "v5e")
    assert cycles == schedule(exponential, 256, 512).cycles
    assert aot.kernel_cycles(thrice, "v5e")[0] == 3 * cycles
    assert notes == ()


def test_loops_count_as_often_as_they_run():
    few, more, many = (schedule(looping(trips), 128, 128) for trips in (20, 30, 50))
    assert few.unknown_loops == many.unknown_loops == 0
    assert many.bundles - more.bundles == 2 * (more.bundles - few.bundles)
    # Each of the 7 trips inside raises 16 registers.
    assert more.bundles - few.bundles >= 10 * 7 * 16


def test_loops_around_which_is_a_grid_count_for_each_program():
    one, four = (schedule(looping(20), rows, 128) for rows in (128, 512))
    assert (one.programs, four.programs) == (1, 4)
    # A grid adds the exchange of blocks, once a program.
    assert one.bundles < four.bundles < one.bundles + 100


def test_a_loop_of_unknown_length_is_told():
    assert schedule(looping_as_data_say, 128, 128).unknown_loops == 1
    _, (note,) = aot.kernel_cycles(cost(looping_as_data_say, 128, 128), "v5e")
    assert "1 of its loops count once" in note


def test_a_kernel_that_does_not_compile_alone_is_told():
    (kernel,) = cost(exponential, 256, 128).kernels
    damaged = costs.Cost(0, 0, 0, (), (costs.Kernel("k", 2, kernel.operands, (), "{}"),), 0)
    assert aot.kernel_cycles(damaged, "v5e") == (
        0,
        ("Pallas kernel k, run 2 times: the compiler gives neither an estimate nor a schedule",),
    )
