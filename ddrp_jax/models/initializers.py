"""How parameters are born: value, and the names of their axes for the mesh."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from ddrp_jax.config import ModelConfig


def parameter(
    config: ModelConfig,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    fan_in: int | None = None,
    ones: bool = False,
) -> nnx.Param:
    """Returns a parameter of float32 with logical axis names.

    Args:
        config: decides between N(0, initializer_range) and fan-in scaling (`initializer`).
        rngs: stream `params`.
        shape: its shape.
        axes: a logical name, or None, for each axis (training/sharding.py maps them to the mesh).
        fan_in: inputs that one output sums over; None makes a bias (zeros) or a scale (ones).
        ones: start from ones instead of zeros where `fan_in` is None.
    """
    if fan_in is None:
        value = jnp.ones(shape) if ones else jnp.zeros(shape)
    else:
        deviation = config.initializer_range
        if config.initializer == "fan_in":
            deviation = fan_in**-0.5
        value = nnx.initializers.normal(deviation)(rngs.params(), shape)
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)
