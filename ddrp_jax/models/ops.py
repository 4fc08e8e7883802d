"""Element-wise pieces of the encoder, each with a backward pass that keeps one array.

Left to itself, automatic differentiation saves every intermediate of a LayerNorm, a GELU, a
softmax or a dropout, once for each layer. Each function here saves its input or its output and
works the rest out again, which is cheaper than the memory traffic on every backend measured.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
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
    g_scale, g_bias = _column_sum(g32 * normed), _column_sum(g32)
    g_normed = g32 * scale
    g_x = inverse * (
        g_normed
        - g_normed.mean(-1, keepdims=True)
        - normed * (g_normed * normed).mean(-1, keepdims=True)
    )
    return g_x.astype(x.dtype), g_scale, g_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def add_bias(x: Float[Array, "*rows d"], bias: Float[Array, " d"]) -> Float[Array, "*rows d"]:
    """Returns `x + bias`."""
    return x + bias.astype(x.dtype)


def _add_bias_forward(x, bias):
    return add_bias(x, bias), None


def _add_bias_backward(_, g):
    return g, _column_sum(g)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _column_sum(x: Float[Array, "*rows d"]) -> Float[Array, " d"]:
    """Sums over all axes but the last, in float32.

    As a product with ones: XLA's reduction over the rows of a matrix runs 40 times slower on CPU.
    """
    x = x.reshape(-1, x.shape[-1])
    ones = jnp.ones((1, x.shape[0]), x.dtype)
    return jnp.matmul(ones, x, preferred_element_type=jnp.float32)[0]


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


@jax.custom_vjp
def masked_softmax(
    scores: Float[Array, "b n t s"], mask: Bool[Array, "b 1 t s"]
) -> Float[Array, "b n t s"]:
    """Softmax over the keys where `mask` is True, in float32.

    A query with no key gives equal weights rather than NaN; nothing reads them.
    """
    return jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), MASKED_SCORE), axis=-1)


def _masked_softmax_forward(scores, mask):
    probs = masked_softmax(scores, mask)
    return probs, (probs, mask, jnp.zeros((0,), scores.dtype))


def _masked_softmax_backward(saved, g):
    probs, mask, like = saved
    g_scores = probs * (g - (g * probs).sum(-1, keepdims=True))
    return jnp.where(mask, g_scores, 0).astype(like.dtype), None


masked_softmax.defvjp(_masked_softmax_forward, _masked_softmax_backward)


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
    return x * _keep(keys, x.shape, rate).astype(x.dtype)


def _dropout_forward(x, keys, rate):
    return _dropout(x, keys, rate), keys


def _dropout_backward(rate, keys, g):
    return g * _keep(keys, g.shape, rate).astype(g.dtype), None


_dropout.defvjp(_dropout_forward, _dropout_backward)


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
