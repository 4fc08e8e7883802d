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
            the `[T, R]` products over the offsets, "skew" does so by moving memory alone.
    """
    length = q_btnh.shape[1]
    rows_ts = offset_rows(length, (table.shape[-2] - 1) // 2)
    heads = "n" if table.ndim == 3 else ""
    if implementation == "dense":
        return _dense_scores(q_btnh, table)
    products_bntr = jnp.einsum(f"btnh,{heads}rh->bntr", q_btnh, table)
    if implementation == "one_hot":
        one_hot_tsr = jax.nn.one_hot(rows_ts, table.shape[-2], dtype=q_btnh.dtype)
        return jnp.einsum("bntr,tsr->bnts", products_bntr, one_hot_tsr)
    if implementation == "gather":
        return jnp.take_along_axis(products_bntr, jnp.asarray(rows_ts)[None, None], axis=-1)
    return _skew(products_bntr)


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


def _skew(products_bntr: Float[Array, "b n t r"]) -> Float[Array, "b n t t"]:
    """Turns row i left by i: `out[i, j] = products[i, clip(j - i) + K]`, by reshaping alone."""
    length, rows = products_bntr.shape[-2:]
    k = (rows - 1) // 2
    if k >= length - 1:  # offsets beyond the length are never asked for
        wide = products_bntr[..., k - length + 1 : k + length]
    else:
        wide = jnp.pad(products_bntr, [(0, 0)] * 3 + [(length - 1 - k,) * 2], mode="edge")
    padded = jnp.pad(wide, [(0, 0)] * 3 + [(0, 1)])
    flat = padded.reshape(*padded.shape[:-2], 2 * length * length)
    turned = flat[..., length - 1 : length - 1 + length * (2 * length - 1)]
    return turned.reshape(*turned.shape[:-1], length, 2 * length - 1)[..., :length]


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
