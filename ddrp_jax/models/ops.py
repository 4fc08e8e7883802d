"""Element-wise pieces of the encoder, each with a backward pass that keeps one array.

Left to itself, automatic differentiation saves every intermediate of a LayerNorm, a GELU, a
softmax or a dropout, once for each layer. Each function here saves its input or its output and
works the rest out again, which is cheaper than the memory traffic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

MASKED_SCORE = -1e30  # finite, so that a row with nothing to attend to gives no NaN


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "*rows d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float
) -> Float[Array, "*rows d"]:
    """Normalises the last axis to mean 0 and variance 1 (in float32), then scales and shifts it."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(x32 - mean).mean(-1, keepdims=True) + epsilon)
    out = (x32 - mean) * inverse * scale + bias
    return out.astype(x.dtype), (x, mean, inverse, scale)


def _layer_norm_backward(epsilon, saved, g):
    x, mean, inverse, scale = saved
    g32 = g.astype(jnp.float32)
    normed = (x.astype(jnp.float32) - mean) * inverse
    g_scale, g_bias = column_sum(g32 * normed), column_sum(g32)
    g_normed = g32 * scale
    g_x = inverse * (
        g_normed
        - g_normed.mean(-1, keepdims=True)
        - normed * (g_normed * normed).mean(-1, keepdims=True)
    )
    return g_x.astype(x.dtype), g_scale, g_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def linear(
    x: Float[Array, "*rows d"], kernel: Float[Array, "d f"], bias: Float[Array, " f"]
) -> Float[Array, "*rows f"]:
    """Returns `x @ kernel + bias`, computed in the type of `x`."""
    return _linear(x, kernel, bias)


def _linear(x, kernel, bias):
    return x @ kernel.astype(x.dtype) + bias.astype(x.dtype)


def _linear_forward(x, kernel, bias):
    return _linear(x, kernel, bias), (x, kernel)


def _linear_backward(saved, g):
    x, kernel = saved
    return g @ kernel.astype(g.dtype).T, kernel_gradient(x, g), column_sum(g)


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def logits(
    x: Float[Array, "*rows d"], table: Float[Array, "v d"], bias: Float[Array, " v"]
) -> Float[Array, "*rows v"]:
    """Returns `x @ table^T + bias` in float32, for products computed in the type of `x`."""
    table = table.astype(x.dtype)
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32) + bias


def _logits_forward(x, table, bias):
    return logits(x, table, bias), (x, table)


def _logits_backward(saved, g):
    x, table = saved
    g_x = g.astype(x.dtype) @ table.astype(x.dtype)
    return g_x, kernel_gradient(x, g.astype(x.dtype)).T, column_sum(g)


logits.defvjp(_logits_forward, _logits_backward)


def kernel_gradient(x: Float[Array, "*rows d"], g: Float[Array, "*rows f"]) -> Float[Array, "d f"]:
    """Returns `x^T g` in float32, by the product that turns the smaller of the two.

    The backward rule of a plain product always turns `g`, and then the result.
    """
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if x.shape[1] <= g.shape[1]:
        return jnp.einsum("rd,rf->df", x, g, preferred_element_type=jnp.float32)
    return jnp.einsum("rf,rd->fd", g, x, preferred_element_type=jnp.float32).T


def column_sum(x: Float[Array, "*rows d"]) -> Float[Array, " d"]:
    """Sums over all axes but the last, in float32.

    As a product with ones: XLA's reduction over the rows of a matrix runs 40 times slower on CPU.
    """
    x = x.reshape(-1, x.shape[-1])
    ones = jnp.ones((1, x.shape[0]), x.dtype)
    return jnp.matmul(ones, x, preferred_element_type=jnp.float32)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def feed_forward(
    x: Float[Array, "*rows d"],
    up_kernel: Float[Array, "d f"],
    up_bias: Float[Array, " f"],
    down_kernel: Float[Array, "f d"],
    down_bias: Float[Array, " d"],
    approximate: bool,
) -> Float[Array, "*rows d"]:
    """Returns `gelu(x @ up + b) @ down + c`; only the input of the GELU is kept."""
    return linear(gelu(linear(x, up_kernel, up_bias), approximate), down_kernel, down_bias)


def _feed_forward_forward(x, up_kernel, up_bias, down_kernel, down_bias, approximate):
    before = _linear(x, up_kernel, up_bias)
    out = _linear(gelu(before, approximate), down_kernel, down_bias)
    return out, (x, before, up_kernel, down_kernel)


def _feed_forward_backward(approximate, saved, g):
    x, before, up_kernel, down_kernel = saved
    after, pull = jax.vjp(lambda before: gelu(before, approximate), before)
    g_after = g @ down_kernel.astype(g.dtype).T
    (g_before,) = pull(g_after)
    return (
        g_before @ up_kernel.astype(g.dtype).T,
        kernel_gradient(x, g_before),
        column_sum(g_before),
        kernel_gradient(after, g),
        column_sum(g),
    )


feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x: Float[Array, "..."], approximate: bool) -> Float[Array, "..."]:
    """Gaussian error linear unit: `x * Phi(x)`, or its tanh approximation (BERT's `gelu_new`)."""
    x32 = x.astype(jnp.float32)
    return (x32 * _gelu_gate(x32, approximate)).astype(x.dtype)


def _gelu_gate(x, approximate):
    if approximate:
        return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_forward(x, approximate):
    return gelu(x, approximate), x


def _gelu_backward(approximate, x, g):
    x32 = x.astype(jnp.float32)
    gate = _gelu_gate(x32, approximate)
    if approximate:
        inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x32**2)
        slope = gate + x32 * 2 * gate * (1 - gate) * inner_slope
    else:
        slope = gate + x32 * jnp.exp(-0.5 * x32**2) / math.sqrt(2 * math.pi)
    return ((g.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def attend(
    mix: Callable[..., Float[Array, "b t d"]],
    scores: Float[Array, "b n t s"],
    mask: Bool[Array, "b 1 t s"],
    values: Any,
    dropout_keys: UInt32[Array, " b"] | None,
    rate: float,
    with_weights: bool = False,
) -> tuple[Float[Array, "b t d"], Float[Array, "b n t s"] | None]:
    """Softmax over the keys where `mask` is True, dropout, and the weighted sum of values.

    A query with no key gives equal weights rather than NaN; nothing may read them. The weights
    before dropout are kept for the backward pass, and where they are not wanted the result, which
    is kept anyway as the input of the next product.

    Args:
        mix: `(weights, values) -> z`, linear in each; D is that of N heads, one after the other.
        scores: scaled scores.
        mask: where a query may attend to a key.
        values: what `mix` takes.
        dropout_keys: one for each row, or None.
        rate: dropout of the weights.
        with_weights: whether the weights are wanted as well.

    Returns:
        `mix(dropout(weights), values)`; and the weights before dropout in the scores' type, or
        None.
    """
    return _attend_forward(mix, scores, mask, values, dropout_keys, rate, with_weights)[0]


def _attend_forward(mix, scores, mask, values, dropout_keys, rate, with_weights):
    scores32 = jnp.where(mask, scores.astype(jnp.float32), MASKED_SCORE)
    probs = jax.nn.softmax(scores32, axis=-1)
    z = mix(dropout(probs, dropout_keys, rate).astype(scores.dtype), values)
    kept = probs.astype(scores.dtype)
    if with_weights:
        return (z, kept), (kept, values, dropout_keys, None)
    return (z, None), (kept, values, dropout_keys, z)


def _attend_backward(mix, rate, with_weights, saved, g):
    kept, values, dropout_keys, z = saved
    g_z, g_weights = g
    probs = kept.astype(jnp.float32)
    dropped = dropout(probs, dropout_keys, rate).astype(kept.dtype)
    g_dropped, g_values = jax.vjp(mix, dropped, values)[1](g_z)
    g_probs = dropout(g_dropped.astype(jnp.float32), dropout_keys, rate)
    if with_weights:
        g_probs += g_weights.astype(jnp.float32)
        mean = (g_probs * probs).sum(-1, keepdims=True)
    else:
        # The mean of the gradient under the weights, from what they were mixed to: one pass less
        # over all pairs of places. Heads are summed by a product: to part them, TPUs would copy.
        heads = kept.shape[1]
        one_hot_dn = np.repeat(np.eye(heads, dtype=np.float32), z.shape[-1] // heads, axis=0)
        products_btd = z.astype(jnp.float32) * g_z.astype(jnp.float32)
        mean = jnp.einsum("btd,dn->bnt", products_btd, one_hot_dn)[..., None]
    # Weights are exactly 0 where the mask is False, and so is the gradient there.
    g_scores = probs * (g_probs - mean)
    return g_scores.astype(kept.dtype), None, g_values, None


attend.defvjp(_attend_forward, _attend_backward)


def row_keys(seed: UInt32[Array, ""], step: UInt32[Array, ""], rows: UInt32[Array, " b"]):
    """Returns one dropout key `[b]` for each row of the global batch.

    A mask is then a function of (seed, step, row, layer, place in the row): the same for any
    number of devices and any split into microbatches.
    """
    return _mix(_mix(_mix(seed) ^ step) + rows * jnp.uint32(0x9E3779B9))


def fold(keys: UInt32[Array, " b"], data: int | UInt32[Array, ""]) -> UInt32[Array, " b"]:
    """Returns keys independent of `keys` for each value of `data` (a layer, a place in it)."""
    return _mix(keys ^ (jnp.uint32(data) * jnp.uint32(0x85EBCA77) + jnp.uint32(1)))


def dropout(
    x: Float[Array, "b ..."], keys: UInt32[Array, " b"] | None, rate: float
) -> Float[Array, "b ..."]:
    """Zeroes each element with probability `rate` and scales the rest by `1/(1 - rate)`.

    Bits come from a counter-based hash of the element's place in its row, worked out again in
    the backward pass: no mask is stored, and none depends on how the array is sharded.
    `keys=None` is evaluation: `x` itself.
    """
    if keys is None or rate == 0.0:
        return x
    return _dropout(x, keys, rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dropout(x, keys, rate):
    return _scaled(x, keys, rate)


def _dropout_forward(x, keys, rate):
    return _dropout(x, keys, rate), keys


def _dropout_backward(rate, keys, g):
    return _scaled(g, keys, rate), None


_dropout.defvjp(_dropout_forward, _dropout_backward)


def _scaled(x, keys, rate):
    # In float32: 1/(1 - rate) rounded to bfloat16 would move every mean the same way.
    return (x.astype(jnp.float32) * _keep(keys, x.shape, rate)).astype(x.dtype)


def _keep(keys, shape, rate):
    """Returns `[b, ...]` of 0 and `1/(1 - rate)`."""
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in range(len(shape) - 1, 0, -1):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    keys = keys.reshape((-1,) + (1,) * (len(shape) - 1))
    bits = _mix(place * jnp.uint32(0x9E3779B9) + keys)
    threshold = jnp.uint32(round(rate * 2**32))
    return jnp.where(bits >= threshold, jnp.float32(1 / (1 - rate)), jnp.float32(0))


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns a bijection of 32 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
