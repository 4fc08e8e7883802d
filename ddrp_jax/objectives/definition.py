"""Reconstruction of token embeddings (DefinitionEMB, arXiv 2408.01308)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def squared_error(
    predictions: Float[Array, "b t d"],
    targets: Float[Array, "b t d"],
    weights: Float[Array, "b t"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum and the weight of `(100 / D) |prediction - target|^2` (the source's scale).

    Args:
        predictions: `L h`, of whatever is at each place.
        targets: rows of the frozen table; no gradient flows to them from here if they are constant.
        weights: 1 where a row is predicted, else 0; a place of weight 0 adds nothing, not even NaN
            to the gradient.
    """
    error_bt = jnp.square(predictions.astype(jnp.float32) - targets).mean(-1)
    return 100.0 * (error_bt * weights).sum(), weights.sum()


def cosine(
    predictions: Float[Array, "b t d"],
    targets: Float[Array, "b t d"],
    weights: Float[Array, "b t"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum and the weight of the cosine between prediction and target."""
    predictions = predictions.astype(jnp.float32)
    # Inside the root, so that a row of zeros has cosine 0.
    scale = jnp.square(predictions).sum(-1) * jnp.square(targets).sum(-1) + 1e-24
    cosine_bt = (predictions * targets).sum(-1) / jnp.sqrt(scale)
    return (cosine_bt * weights).sum(), weights.sum()


def target_moments(
    targets: Float[Array, "b t d"], weights: Float[Array, "b t"]
) -> dict[str, tuple[Float[Array, "..."], Float[Array, "..."]]]:
    """Returns sums of the targets `[D]` and of their squared norms, with their weights.

    The error of the best constant row, the targets' mean, follows from both:
    `mean |y|^2 - |mean y|^2`.
    """
    count = weights.sum()
    total_d = (targets * weights[..., None]).sum((0, 1))
    return {
        "target": (total_d, jnp.broadcast_to(count, total_d.shape)),
        "target_square": ((jnp.square(targets).sum(-1) * weights).sum(), count),
    }
