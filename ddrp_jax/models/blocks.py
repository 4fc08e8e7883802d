"""The pieces of an encoder layer: LayerNorm, feed-forward, and the layer itself."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from ddrp_jax.config import ModelConfig
from ddrp_jax.models import ops
from ddrp_jax.models.attention import Attention, AttentionStatistic, RelativeTables
from ddrp_jax.models.initializers import parameter


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis with scale and bias, computed in float32."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.epsilon = config.norm_epsilon
        self.scale = parameter(config, rngs, (config.hidden_size,), ("embed",), ones=True)
        self.bias = parameter(config, rngs, (config.hidden_size,), ("embed",))

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        return ops.layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


class FeedForward(nnx.Module):
    """Two products with a GELU between them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        self.approximate = config.activation == "gelu_tanh"
        self.up_kernel = parameter(config, rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.up_bias = parameter(config, rngs, (f,), ("mlp",))
        self.down_kernel = parameter(config, rngs, (f, d), ("mlp", "embed"), fan_in=f)
        self.down_bias = parameter(config, rngs, (d,), ("embed",))

    def __call__(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return ops.feed_forward(
            x_btd,
            self.up_kernel[...],
            self.up_bias[...],
            self.down_kernel[...],
            self.down_bias[...],
            self.approximate,
        )


class EncoderLayer(nnx.Module):
    """Attention and feed-forward, each with a residual path and a norm before or after it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.pre_norm = config.norm_order == "pre"
        self.dropout = config.dropout
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = LayerNorm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_norm = LayerNorm(config, rngs=rngs)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b 1 t t"],
        positions: Int[Array, "b t"],
        *,
        bias: Float[Array, "1 n t t"] | None = None,
        relative: RelativeTables | None = None,
        dropout_keys: UInt32[Array, " b"] | None = None,
        statistic: AttentionStatistic | None = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Returns the layer's output and the statistic of its attention weights."""

        def dropped(y: jnp.ndarray, place: int) -> jnp.ndarray:
            keys = None if dropout_keys is None else ops.fold(dropout_keys, place)
            return ops.dropout(y, keys, self.dropout)

        y, measured = self.attention(
            self.attention_norm(x_btd) if self.pre_norm else x_btd,
            mask,
            positions,
            bias=bias,
            relative=relative,
            dropout_keys=dropout_keys,
            statistic=statistic,
        )
        x_btd = x_btd + dropped(y, 1)
        if not self.pre_norm:
            x_btd = self.attention_norm(x_btd)
        y = self.feed_forward(self.feed_forward_norm(x_btd) if self.pre_norm else x_btd)
        x_btd = x_btd + dropped(y, 2)
        if not self.pre_norm:
            x_btd = self.feed_forward_norm(x_btd)
        return x_btd, measured
