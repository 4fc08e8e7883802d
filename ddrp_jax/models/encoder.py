"""The encoder: BERT, RoBERTa and DDRP models are configs of this one class."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from ddrp_jax.config import ModelConfig
from ddrp_jax.models import ops
from ddrp_jax.models.attention import AttentionStatistic, RelativeTables, segment_mask
from ddrp_jax.models.blocks import EncoderLayer, LayerNorm
from ddrp_jax.models.initializers import parameter
from ddrp_jax.models.relative_position import BucketBias

VOCABULARY_MULTIPLE = 128  # rows of the word table are padded to fill whole TPU lanes

_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def padded_vocabulary(vocab_size: int) -> int:
    """Returns the number of rows of the word table: `vocab_size` rounded up to whole lanes."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def single_segments(
    input_ids: Int[Array, "b t"], pad_id: int
) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
    """Returns segment ids and positions of rows that hold one text each, padded anywhere."""
    is_real = input_ids != pad_id
    return is_real.astype(jnp.int32), jnp.where(is_real, jnp.cumsum(is_real, axis=1) - 1, 0)


def position_rows(
    config: ModelConfig, positions: Int[Array, "b t"], segment_ids: Int[Array, "b t"]
) -> Int[Array, "b t"]:
    """Returns rows of the absolute table: counted from `position_offset`, padding at `pad_id`.

    BERT counts from 0, RoBERTa from pad_id + 1 with the padding itself at pad_id.
    """
    padding_row = config.pad_id if config.position_offset else 0
    return jnp.where(segment_ids > 0, positions + config.position_offset, padding_row)


def embed_words(
    config: ModelConfig, table: Float[Array, "v d"], input_ids: Int[Array, "b t"]
) -> Float[Array, "b t d"]:
    """Returns the word vectors of token ids, scaled where the config says so."""
    words = jnp.take(table, input_ids, axis=0)
    return words * config.hidden_size**0.5 if config.decoder.scale_embedding else words


def with_remat(config: ModelConfig, body: Any) -> Any:
    """Returns the body of a scan over layers, recomputing in the backward pass as configured."""
    if config.remat == "none":
        return body
    return jax.checkpoint(body, policy=_REMAT_POLICIES[config.remat], prevent_cse=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class EncoderOutput:
    """What the encoder gives back.

    Attributes:
        hidden: last hidden states `[B, T, D]`.
        statistics: `statistic(weights)` of each layer, stacked on a first axis `[L, ...]` (only
            the last layer's, `[1, ...]`, with `statistic_layers="last"`), or None.
        hidden_states: the embeddings' output and every layer's, `[L+1, B, T, D]`, or None.
    """

    hidden: Float[Array, "b t d"]
    statistics: Any
    hidden_states: Float[Array, "l1 b t d"] | None


class Embeddings(nnx.Module):
    """Sum of word, position and token-type vectors, then LayerNorm and dropout as configured."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        # The word table is the head's matrix too: fan-in scaling gives logits of order one.
        self.word = parameter(
            config, rngs, (padded_vocabulary(config.vocab_size), d), ("vocab", "embed"), fan_in=d
        )
        self.position = self.token_type = self.norm = nnx.data(None)
        if config.position.has_absolute:
            rows = config.max_length + config.position_offset
            self.position = parameter(config, rngs, (rows, d), (None, "embed"), fan_in=d)
        if config.token_types:
            shape = (config.token_types, d)
            self.token_type = parameter(config, rngs, shape, (None, "embed"), fan_in=d)
        if config.embedding_norm:
            self.norm = LayerNorm(config, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        token_types: Int[Array, "b t"] | None = None,
        dropout_keys: UInt32[Array, " b"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Returns the encoder's input."""
        dtype = jnp.dtype(self.config.dtype)
        x_btd = embed_words(self.config, self.word[...], input_ids)
        if self.position is not None:
            rows_bt = position_rows(self.config, positions, segment_ids)
            x_btd += jnp.take(self.position[...], rows_bt, axis=0)
        if self.token_type is not None:
            if token_types is None:
                x_btd += self.token_type[0]
            else:
                x_btd += jnp.take(self.token_type[...], token_types, axis=0)
        if self.norm is not None:
            x_btd = self.norm(x_btd)
        return ops.dropout(x_btd.astype(dtype), dropout_keys, self.config.dropout)


class Encoder(nnx.Module):
    """Embeddings, `num_layers` equal layers (stacked on a first axis), and pre-norm's last norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        position = config.position
        shares_tables = position.kind in ("shaw", "ddrp") and position.sharing == "model"
        self.relative = nnx.data(RelativeTables(config, rngs=rngs) if shares_tables else None)
        has_buckets = position.kind == "t5"
        self.bucket_bias = nnx.data(
            BucketBias(position, config.num_heads, rngs=rngs) if has_buckets else None
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(config, rngs=rngs)

        self.layers = stack(rngs)
        is_pre_norm = config.norm_order == "pre"
        self.final_norm = nnx.data(LayerNorm(config, rngs=rngs) if is_pre_norm else None)

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        *,
        token_types: Int[Array, "b t"] | None = None,
        dropout_keys: UInt32[Array, " b"] | None = None,
        statistic: AttentionStatistic | None = None,
        statistic_layers: str = "all",
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Encodes packed rows.

        Args:
            input_ids: token ids.
            segment_ids: 0 for padding; tokens attend within their segment.
            positions: place of each token in its segment, from 0.
            token_types: rows of the token-type table; None is type 0.
            dropout_keys: `ops.row_keys`, one for each row; None for evaluation.
            statistic: a function of one layer's attention weights `[B, N, T, T]` (after the
                softmax, before dropout). Maps themselves are never stacked unless it returns them.
            statistic_layers: "all", or "last" to measure the last layer alone.
            output_hidden_states: whether to keep every layer's output.
        """
        config = self.config
        mask = segment_mask(segment_ids)
        bias = self.bucket_bias(input_ids.shape[1]) if self.bucket_bias is not None else None

        def keys_for(place: int | jax.Array) -> jax.Array | None:
            return None if dropout_keys is None else ops.fold(dropout_keys, place)

        def apply(layer: EncoderLayer, x_btd: jax.Array, index: jax.Array, measure: Any) -> Any:
            return layer(
                x_btd,
                mask,
                positions,
                bias=bias,
                relative=self.relative,
                dropout_keys=keys_for(index + 1),
                statistic=measure,
            )

        x_btd = self.embeddings(input_ids, segment_ids, positions, token_types, keys_for(0))
        first = x_btd
        # The last layer is peeled off where only its weights are measured: a condition inside the
        # scan would keep the statistic's cost in every layer.
        peeled = 1 if statistic is not None and statistic_layers == "last" else 0
        graphdef, stacked = nnx.split(self.layers)

        def body(x_btd: jax.Array, xs: Any) -> Any:
            state, index = xs
            measure = None if peeled else statistic
            x_btd, measured = apply(nnx.merge(graphdef, state), x_btd, index, measure)
            return x_btd, (measured, x_btd if output_hidden_states else None)

        count = config.num_layers - peeled
        unroll = 1 if config.scan_layers else max(count, 1)
        xs = (
            jax.tree.map(lambda leaf: leaf[:count], stacked) if peeled else stacked,
            jnp.arange(count, dtype=jnp.uint32),
        )
        x_btd, (measured, hidden_states) = jax.lax.scan(
            with_remat(config, body), x_btd, xs, unroll=unroll
        )
        if peeled:
            last = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[-1], stacked))
            x_btd, measured = apply(last, x_btd, jnp.uint32(count), statistic)
            measured = jax.tree.map(lambda leaf: leaf[None], measured)
            if output_hidden_states:
                hidden_states = jnp.concatenate([hidden_states, x_btd[None]])
        if output_hidden_states:
            hidden_states = jnp.concatenate([first[None], hidden_states])
        if self.final_norm is not None:
            x_btd = self.final_norm(x_btd)
            if output_hidden_states:
                hidden_states = hidden_states.at[-1].set(x_btd)
        return EncoderOutput(x_btd, measured, hidden_states)
