"""Masked language modelling as sums over the predicted tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def masked_lm(
    logits: Float[Array, "b p v"], ids: Int[Array, "b p"], weights: Float[Array, "b p"]
) -> dict[str, tuple[Float[Array, ""], Float[Array, ""]]]:
    """Returns `{name: (sum, weight)}` of the cross-entropy (nats) and the accuracy.

    A mean is taken over the global batch, never here: sums over devices and microbatches add up,
    means of means do not. Unused places have weight 0.

    Args:
        logits: float32, at the predicted positions.
        ids: the tokens that stood there.
        weights: 1 for a prediction, 0 for an unused place.
    """
    loss, is_right = _cross_entropy(logits, ids)
    count = weights.sum()
    return {
        "mlm_loss": ((loss * weights).sum(), count),
        "mlm_accuracy": ((is_right * weights).sum(), count),
    }


@jax.custom_vjp
def _cross_entropy(
    logits: Float[Array, "b p v"], ids: Int[Array, "b p"]
) -> tuple[Float[Array, "b p"], Float[Array, "b p"]]:
    """Returns the cross-entropy, and 1 where no logit is above the right one's.

    The backward pass is one element-wise function of the logits: the gradient of a lookup would
    be a scatter into a second array of their size.
    """
    return _cross_entropy_forward(logits, ids)[0]


def _cross_entropy_forward(logits, ids):
    largest = logits.max(-1)
    log_sum = largest + jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
    target = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    is_right = (target >= largest).astype(jnp.float32)
    return (log_sum - target, is_right), (logits, log_sum, ids)


def _cross_entropy_backward(saved, g):
    logits, log_sum, ids = saved
    is_target = jnp.arange(logits.shape[-1]) == ids[..., None]
    probs = jnp.exp(logits - log_sum[..., None])
    return (probs - is_target) * g[0][..., None], None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
