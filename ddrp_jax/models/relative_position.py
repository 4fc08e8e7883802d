"""Relative positions: the tables, and the scores that they add to attention.

`offset(i, j) = j - i` for query i and key j, kept to [-K, K]; row `offset + K` of a table
`[R, H]`, `R = 2K + 1`, stands for it. Shaw's table is free; DDRP's is the product of a distance
and a direction (arXiv 2210.04246, abstract), and one scoring function serves both.

In a packed row, two tokens of one segment are as far apart as their columns are, and no others
attend to each other: columns alone give the offsets.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ddrp_jax.config import PositionConfig


class RelativeTable(nnx.Module):
    """The parameters of one table `[R, H]`, or of one for each head, `[N, R, H]`.

    Shaw: `table`. DDRP: `distance` [K+1, H] and `direction` [3 or 2, H], multiplied together.
    Init (ours): distance ~ N(0, 0.02), direction ~ N(0, 1): with directions near one the model
    would start nearly blind to direction, and two small factors would multiply to nearly nothing.
    """

    def __init__(self, config: PositionConfig, num_heads: int, head_size: int, *, rngs: nnx.Rngs):
        self.max_distance = config.max_distance
        self.directions = config.directions
        heads = (num_heads,) if config.sharing == "head" else ()
        axes = ("heads",) if config.sharing == "head" else ()

        def table(rows: int, deviation: float) -> nnx.Param:
            value = nnx.initializers.normal(deviation)(rngs.params(), (*heads, rows, head_size))
            return nnx.Param(value, out_sharding=(*axes, None, None), eager_sharding=False)

        self.table: Any = nnx.data(None)
        self.distance: Any = nnx.data(None)
        self.direction: Any = nnx.data(None)
        if config.kind == "shaw":
            self.table = table(2 * config.max_distance + 1, 0.02)
        else:
            self.distance = table(config.max_distance + 1, 0.02)
            self.direction = table(config.directions, 1.0)

    def __call__(self) -> Float[Array, "*heads r h"]:
        """Returns the offset table; row `offset + K`."""
        if self.table is not None:
            return self.table[...]
        return ddrp_table(self.distance[...], self.direction[...])


def ddrp_table(
    distance: Float[Array, "*heads k1 h"], direction: Float[Array, "*heads s h"]
) -> Float[Array, "*heads r h"]:
    """Returns `D[|offset|] * S[direction of offset]` for the offsets -K..K.

    Directions are (left, same, right), or with two rows (left, not left).
    """
    left, right = direction[..., :1, :], direction[..., -1:, :]
    same = direction[..., 1:2, :]  # with two rows this is the right one
    return jnp.concatenate(
        [
            distance[..., :0:-1, :] * left,
            distance[..., :1, :] * same,
            distance[..., 1:, :] * right,
        ],
        axis=-2,
    )


def offset_rows(length: int, max_distance: int) -> np.ndarray:
    """Returns `[length, length]`: the table row of the offset between query i and key j."""
    offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
    return np.clip(offsets, -max_distance, max_distance) + max_distance


def relative_scores(
    q_btnh: Float[Array, "b t n h"], table: Float[Array, "*heads r h"], implementation: str
) -> Float[Array, "b n t t"]:
    """Returns `q_i . r(offset(i, j))` for every query i and key j.

    Args:
        q_btnh: queries.
        table: `[R, H]`, or `[N, R, H]` with one table for each head.
        implementation: "dense" contracts with a `[T, T, H]` table, "one_hot" and "gather" spread
            the `[T, R]` products over the offsets, "skew" multiplies blocks of queries by the
            rows that any of them needs and moves each query's products into place. "auto" is
            "skew" where the program is compiled for CPUs, else "dense".
    """
    if implementation == "auto":
        return _scores_by_platform(q_btnh, table)
    if implementation == "skew":
        return _skewed_scores(q_btnh, table)
    rows_ts = offset_rows(q_btnh.shape[1], (table.shape[-2] - 1) // 2)
    heads = "n" if table.ndim == 3 else ""
    if implementation == "dense":
        return _dense_scores(q_btnh, table)
    products_bntr = jnp.einsum(f"btnh,{heads}rh->bntr", q_btnh, table)
    if implementation == "one_hot":
        one_hot_tsr = jax.nn.one_hot(rows_ts, table.shape[-2], dtype=q_btnh.dtype)
        return jnp.einsum("bntr,tsr->bnts", products_bntr, one_hot_tsr)
    return jnp.take_along_axis(products_bntr, jnp.asarray(rows_ts)[None, None], axis=-1)


# The gradient of a choice between platforms would keep what any of them needs: each direction
# chooses by itself.
@jax.custom_vjp
def _scores_by_platform(q_btnh, table):
    return jax.lax.platform_dependent(
        q_btnh,
        table,
        cpu=_skewed_scores,
        default=functools.partial(relative_scores, implementation="dense"),
    )


def _scores_by_platform_forward(q_btnh, table):
    return _scores_by_platform(q_btnh, table), (q_btnh, table)


def _scores_by_platform_backward(saved, g_bnts):
    def pull(implementation):
        def scores(q_btnh, table):
            return relative_scores(q_btnh, table, implementation)

        return lambda saved, g_bnts: jax.vjp(scores, *saved)[1](g_bnts)

    return jax.lax.platform_dependent(saved, g_bnts, cpu=pull("skew"), default=pull("dense"))


_scores_by_platform.defvjp(_scores_by_platform_forward, _scores_by_platform_backward)

# Queries that share one product of "skew": few enough to waste little on offsets that only some
# of them have, enough for a product of a size that CPUs are fast at.
_BLOCK = 16


def _skewed_scores(q_btnh, table):
    batch, length, heads, size = q_btnh.shape
    block = math.gcd(length, _BLOCK)
    width = length + block - 1
    # Place w of a block that begins with query i: offset w - (block - 1) - i. Query i + r finds
    # key j at w = j + (block - 1) - r.
    offsets_cw = np.arange(width) - (block - 1) - np.arange(0, length, block)[:, None]
    largest = (table.shape[-2] - 1) // 2
    windows = _take_rows(table, np.clip(offsets_cw, -largest, largest) + largest)
    q_crbnh = q_btnh.swapaxes(0, 1).reshape(length // block, block, batch, heads, size)
    by_head = "n" if table.ndim == 3 else ""
    products_crbnw = jnp.einsum(f"crbnh,{by_head}cwh->crbnw", q_crbnh, windows)
    products_tbnw = products_crbnw.reshape(length, batch, heads, width)
    return jnp.moveaxis(_slide(products_tbnw, block), 0, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _slide(products_tbnw, block):
    """Returns `out[t, ..., j] = products[t, ..., j + (block - 1) - t % block]` for T places j."""
    length = len(products_tbnw)
    return _slices(products_tbnw, block - 1 - np.arange(length) % block, length)


def _slide_forward(products_tbnw, block):
    return _slide(products_tbnw, block), None


def _slide_backward(block, _, g_tbns):
    # The inverse move, as slices of a padded array: the gradient of a slice is a scatter.
    length = len(g_tbns)
    padded = jnp.pad(g_tbns, [(0, 0)] * (g_tbns.ndim - 1) + [(block - 1, block - 1)])
    return (_slices(padded, np.arange(length) % block, length + block - 1),)


_slide.defvjp(_slide_forward, _slide_backward)


def _slices(x_tbnw, starts_t, size):
    def take(x_bnw, start):
        return jax.lax.dynamic_slice_in_dim(x_bnw, start, size, axis=-1)

    return jax.vmap(take)(x_tbnw, starts_t.astype(np.int32))


@jax.custom_vjp
def _dense_scores(
    q_btnh: Float[Array, "b t n h"], table: Float[Array, "*heads r h"]
) -> Float[Array, "b n t t"]:
    """Returns `q_i . r(offset(i, j))`, contracted with the table spread to `[T, T, H]`.

    The backward pass gathers the scores' gradient by offset first, so that it neither keeps the
    spread table nor sums a gradient of that size over the devices.
    """
    rows_ts = offset_rows(q_btnh.shape[1], (table.shape[-2] - 1) // 2)
    heads = "n" if table.ndim == 3 else ""
    spread = jnp.take(table, rows_ts, axis=-2)
    return jnp.einsum(f"btnh,{heads}tsh->bnts", q_btnh, spread)


def _dense_scores_forward(q_btnh, table):
    return _dense_scores(q_btnh, table), (q_btnh, table)


def _dense_scores_backward(saved, g_bnts):
    q_btnh, table = saved
    rows_ts = offset_rows(q_btnh.shape[1], (table.shape[-2] - 1) // 2)
    heads = "n" if table.ndim == 3 else ""
    one_hot_tsr = jax.nn.one_hot(rows_ts, table.shape[-2], dtype=g_bnts.dtype)
    g_bntr = jnp.einsum("bnts,tsr->bntr", g_bnts, one_hot_tsr)
    return (
        jnp.einsum(f"bntr,{heads}rh->btnh", g_bntr, table),
        jnp.einsum(f"bntr,btnh->{heads}rh", g_bntr, q_btnh),
    )


_dense_scores.defvjp(_dense_scores_forward, _dense_scores_backward)


def relative_values(
    probs_bnts: Float[Array, "b n t t"], table: Float[Array, "*heads r h"]
) -> Float[Array, "b t n h"]:
    """Returns `sum_j a_ij r(offset(i, j))`, what relative positions add to the values."""
    length = probs_bnts.shape[-1]
    rows_ts = offset_rows(length, (table.shape[-2] - 1) // 2)
    heads = "n" if table.ndim == 3 else ""
    return jnp.einsum(f"bnts,{heads}tsh->btnh", probs_bnts, _take_rows(table, rows_ts))


def _take_rows(table, rows_ts):
    """Returns `table[..., rows, :]` whose gradient is a product with a one-hot matrix.

    A gather's own gradient is a scatter, which every backend does one row at a time.
    """
    return _take_rows_vjp(table, rows_ts.tobytes(), rows_ts.shape, rows_ts.dtype.str)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _take_rows_vjp(table, rows, shape, dtype):
    return jnp.take(table, np.frombuffer(rows, dtype).reshape(shape), axis=-2)


def _take_rows_forward(table, rows, shape, dtype):
    return _take_rows_vjp(table, rows, shape, dtype), jnp.zeros((table.shape[-2], 0))


def _take_rows_backward(rows, shape, dtype, like, g):
    one_hot = jax.nn.one_hot(
        np.frombuffer(rows, dtype).reshape(shape), like.shape[0], dtype=g.dtype
    )
    return (jnp.einsum("tsr,...tsh->...rh", one_hot, g),)


_take_rows_vjp.defvjp(_take_rows_forward, _take_rows_backward)


def bucket_rows(length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns `[length, length]`: T5's bucket of the offset between query i and key j.

    Half of the buckets serve each direction; half of those one distance each, the rest
    logarithmically up to `max_distance` (Raffel et al. 2020, section 2.1).
    """
    offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
    half, exact = num_buckets // 2, num_buckets // 4
    distance = np.abs(offsets)
    # float32, as the published models computed it: float64 puts some distances elsewhere.
    scaled = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    far = exact + (scaled * (half - exact)).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, half - 1)) + half * (offsets > 0)


class BucketBias(nnx.Module):
    """T5's bias: one number for each bucket of offsets and head, shared by all layers."""

    def __init__(self, config: PositionConfig, num_heads: int, *, rngs: nnx.Rngs):
        self.num_buckets = config.num_buckets
        self.max_distance = config.bucket_max_distance
        value = nnx.initializers.normal(0.02)(rngs.params(), (config.num_buckets, num_heads))
        self.bias = nnx.Param(value, out_sharding=(None, "heads"), eager_sharding=False)

    def __call__(self, length: int) -> Float[Array, "1 n t t"]:
        rows_ts = bucket_rows(length, self.num_buckets, self.max_distance)
        return jnp.moveaxis(_take_rows(self.bias[...], rows_ts), -1, 0)[None]


def rotate(
    x_btnh: Float[Array, "b t n h"], positions_bt: Int[Array, "b t"], theta: float
) -> Float[Array, "b t n h"]:
    """Rotates pairs (h, h + H/2) by an angle proportional to the position (rotary embedding)."""
    half = x_btnh.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_bt1f = (positions_bt.astype(jnp.float32)[..., None] * frequencies)[:, :, None]
    cos, sin = jnp.cos(angles_bt1f), jnp.sin(angles_bt1f)
    first, second = x_btnh[..., :half].astype(jnp.float32), x_btnh[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)
