"""Multi-head self-attention within the segments of packed rows, with any kind of position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from ddrp_jax.config import ModelConfig
from ddrp_jax.models import ops
from ddrp_jax.models.initializers import parameter
from ddrp_jax.models.relative_position import (
    RelativeTable,
    relative_scores,
    relative_values,
    rotate,
)

AttentionStatistic = Callable[[Float[Array, "b n t t"]], Any]


class RelativeTables(nnx.Module):
    """The offset tables of one layer, or of the whole model: for keys, and perhaps for values."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        arguments = (config.position, config.num_heads, config.head_size)
        self.keys = RelativeTable(*arguments, rngs=rngs)
        on_values = config.position.acts_on == "keys_and_values"
        self.values = nnx.data(RelativeTable(*arguments, rngs=rngs) if on_values else None)


class Attention(nnx.Module):
    """Self-attention with a fused projection to queries, keys and values."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, n, h = config.hidden_size, config.num_heads, config.head_size
        self.qkv_kernel = parameter(
            config, rngs, (d, 3, n, h), ("embed", None, "heads", None), fan_in=d
        )
        self.qkv_bias = parameter(config, rngs, (3, n, h), (None, "heads", None))
        self.out_kernel = parameter(config, rngs, (n, h, d), ("heads", None, "embed"), fan_in=d)
        self.out_bias = parameter(config, rngs, (d,), ("embed",))
        position = config.position
        own = position.kind in ("shaw", "ddrp") and position.sharing != "model"
        self.relative = nnx.data(RelativeTables(config, rngs=rngs) if own else None)

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
        """Returns the layer's output and `statistic(weights)`.

        Args:
            x_btd: input.
            mask: True where a query may attend to a key.
            positions: place of each token in its segment (rotary positions use it).
            bias: added to the scaled scores of every layer (T5).
            relative: the tables that all layers share, where they share them.
            dropout_keys: one for each row; None for evaluation.
            statistic: a function of the attention weights after the softmax and before dropout.
        """
        config, dtype = self.config, x_btd.dtype
        d = config.hidden_size
        kernel, kernel_bias = self.qkv_kernel[...], self.qkv_bias[...]
        # Three products: the parts of one would be cut out of it, and put together again.
        q_btnh, k_btnh, v_btnh = (
            ops.linear(
                x_btd, kernel[:, part].reshape(d, -1), kernel_bias[part].reshape(-1)
            ).reshape(*x_btd.shape[:2], config.num_heads, config.head_size)
            for part in range(3)
        )
        if config.position.kind == "rope":
            q_btnh = rotate(q_btnh, positions, config.position.rope_theta)
            k_btnh = rotate(k_btnh, positions, config.position.rope_theta)
        q_btnh = q_btnh * jnp.asarray(config.head_size**-0.5, dtype)

        scores_bnts = jnp.einsum("btnh,bsnh->bnts", q_btnh, k_btnh)
        tables = self.relative if self.relative is not None else relative
        if tables is not None:
            table = tables.keys().astype(dtype)
            scores_bnts += relative_scores(q_btnh, table, config.position.scores)
        if bias is not None:
            scores_bnts += bias.astype(dtype)
        values: tuple[jax.Array, jax.Array | None] = (v_btnh, None)
        if tables is not None and tables.values is not None:
            values = (v_btnh, tables.values().astype(dtype))
        attention_keys = None if dropout_keys is None else ops.fold(dropout_keys, 0)
        z_btd, probs_bnts = ops.attend(
            _mix,
            scores_bnts,
            mask,
            values,
            attention_keys,
            config.attention_dropout,
            statistic is not None,
        )
        measured = None
        if statistic is not None and probs_bnts is not None:
            measured = statistic(probs_bnts)
        return ops.linear(z_btd, self.out_kernel[...].reshape(-1, d), self.out_bias[...]), measured


def _mix(probs_bnts: Float[Array, "b n t s"], values: Any) -> Float[Array, "b t d"]:
    """Returns the weighted sum of values, and of relative vectors where they act on values."""
    v_btnh, table = values
    z_btnh = jnp.einsum("bnts,bsnh->btnh", probs_bnts, v_btnh)
    if table is not None:
        z_btnh += relative_values(probs_bnts, table)
    return z_btnh.reshape(*z_btnh.shape[:2], -1)


def segment_mask(segment_ids: Int[Array, "b t"]) -> Bool[Array, "b 1 t t"]:
    """Returns True where query and key are real tokens (id > 0) of the same segment."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & (segment_ids > 0)[:, None, :])[:, None]
