"""MTH's regularisers: token and head cosine differentiation (arXiv 2210.04246, abstract).

Masked language modelling alone gives different tokens similar last hidden states, and different
heads similar attention weights; these push both apart. The exact definitions are ours: real
tokens of each segment, segments of one token left out, token-weighted. Every function returns
`(sum, weight)`, and the weight depends on the batch alone, so means can be taken over the global
batch whatever the number of devices or microbatches.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

EPSILON = 1e-12  # inside the square root: at a zero vector the gradient is 0, not NaN

SumAndWeight = tuple[Float[Array, "..."], Float[Array, "..."]]


def others(segment_ids: Int[Array, "b t"]) -> Float[Array, "b t t"]:
    """Returns 1 where two different real tokens share a segment, else 0."""
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids > 0)[:, None, :]
    return (same & ~jnp.eye(segment_ids.shape[1], dtype=bool)).astype(jnp.float32)


def has_others(segment_ids: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """Returns 1 for a real token that is not alone in its segment, else 0."""
    return (others(segment_ids).sum(-1) > 0).astype(jnp.float32)


def token_cosine(hidden: Float[Array, "b t d"], segment_ids: Int[Array, "b t"]) -> SumAndWeight:
    """Token cosine differentiation: mean cosine of the hidden states of a segment's tokens.

    `TCD(segment) = 1/(n(n-1)) sum_{i != j} u_i . u_j`, weighted by the n tokens of the segment.

    Args:
        hidden: last hidden states.
        segment_ids: 0 for padding.

    Returns:
        The sum of `n * TCD(segment)` over segments of two or more tokens, and the number of
        their tokens.
    """
    u_btd = _unit(hidden)
    others_bts = others(segment_ids)
    # The sum over a segment's other tokens, as one product: |sum u|^2 - sum |u|^2 without the
    # cancellation, and without a scatter over segments.
    sum_btd = jnp.einsum("bts,bsd->btd", others_bts, u_btd)
    count_bt = others_bts.sum(-1)
    cosine_bt = (u_btd * sum_btd).sum(-1) / jnp.maximum(count_bt, 1)
    return cosine_bt.sum(), (count_bt > 0).sum(dtype=jnp.float32)


def token_absolute_cosine(
    hidden: Float[Array, "b t d"], segment_ids: Int[Array, "b t"]
) -> SumAndWeight:
    """As `token_cosine`, of absolute values: two opposite clusters do not look far apart.

    It costs `O(T^2 D)`; for reports, not for training.
    """
    u_btd = _unit(hidden)
    others_bts = others(segment_ids)
    count_bt = others_bts.sum(-1)
    cosines_bts = jnp.abs(jnp.einsum("btd,bsd->bts", u_btd, u_btd)) * others_bts
    cosine_bt = cosines_bts.sum(-1) / jnp.maximum(count_bt, 1)
    return cosine_bt.sum(), (count_bt > 0).sum(dtype=jnp.float32)


def head_cosine(
    probs: Float[Array, "b n t t"], segment_ids: Int[Array, "b t"], unit: str = "query"
) -> SumAndWeight:
    """Head cosine differentiation: mean cosine of the attention weights of different heads.

    The sum over pairs of heads is closed: `sum_{g != h} w_g . w_h = |sum_h w_h|^2 - sum_h |w_h|^2`.

    Args:
        probs: one layer's attention weights, after the softmax and before dropout.
        segment_ids: 0 for padding.
        unit: "query" compares the weights of each query, "map" each head's whole map of a row as
            one vector.

    Returns:
        With "query" the sum over queries whose segment has two or more tokens, and their number;
        with "map" the sum over rows that have such queries, weighted by their number.
    """
    heads = probs.shape[1]
    counted_bt = has_others(segment_ids)
    weight = counted_bt.sum()
    if heads == 1:
        return jnp.zeros(()), weight
    if unit == "map":
        probs = probs * counted_bt[:, None, :, None]
        flat = probs.reshape(*probs.shape[:2], 1, -1)
        cosine_b = _pairwise(flat, heads)[:, 0]
        return (cosine_b * counted_bt.sum(-1)).sum(), weight
    return (_pairwise(probs, heads) * counted_bt).sum(), weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pairwise(a_bnts: Float[Array, "b n t s"], heads: int) -> Float[Array, "b t"]:
    """Returns the mean over pairs of different heads of the cosine of their vectors.

    The backward pass keeps the vectors as they came, and their sum over heads: left to itself,
    differentiation keeps two more arrays of the vectors' size in float32.
    """
    return _pairwise_forward(a_bnts, heads)[0]


def _pairwise_forward(a_bnts, heads):
    a32 = a_bnts.astype(jnp.float32)
    squared_bnt = jnp.square(a32).sum(-1)
    inverse_bnt = jax.lax.rsqrt(squared_bnt + EPSILON)
    sum_bts = jnp.einsum("bnts,bnt->bts", a32, inverse_bnt)
    own_bt = (squared_bnt * jnp.square(inverse_bnt)).sum(1)
    cosine_bt = (jnp.square(sum_bts).sum(-1) - own_bt) / (heads * (heads - 1))
    return cosine_bt, (a_bnts, inverse_bnt, sum_bts.astype(a_bnts.dtype))


def _pairwise_backward(heads, saved, g_bt):
    a_bnts, inverse_bnt, sum_bts = saved
    a32, sum32_bts = a_bnts.astype(jnp.float32), sum_bts.astype(jnp.float32)
    along_bnt = (a32 * sum32_bts[:, None]).sum(-1)
    # Of u = a / sqrt(|a|^2 + eps), and of |u|^2, which is not quite one.
    own_bnt = inverse_bnt**3 * along_bnt + EPSILON * inverse_bnt**4
    scale_bnt = 2 * g_bt[:, None] / (heads * (heads - 1))
    g_bnts = (scale_bnt * inverse_bnt)[..., None] * sum32_bts[:, None]
    g_bnts -= (scale_bnt * own_bnt)[..., None] * a32
    return (g_bnts.astype(a_bnts.dtype),)


_pairwise.defvjp(_pairwise_forward, _pairwise_backward)


def _unit(hidden: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    hidden = hidden.astype(jnp.float32)
    return hidden * jax.lax.rsqrt(jnp.square(hidden).sum(-1, keepdims=True) + EPSILON)
