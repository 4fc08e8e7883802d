"""The encoder-decoder: BART is a config of this class."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from ddrp_jax.config import ModelConfig
from ddrp_jax.models import ops
from ddrp_jax.models.attention import Attention, segment_mask
from ddrp_jax.models.blocks import FeedForward, LayerNorm
from ddrp_jax.models.encoder import Encoder, embed_words, padded_vocabulary, with_remat
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.models.initializers import parameter


def build_model(config: ModelConfig, *, rngs: nnx.Rngs) -> MaskedLM | Seq2Seq:
    """Returns the model of a config: an encoder with its head, or an encoder-decoder."""
    return (Seq2Seq if config.decoder.num_layers else MaskedLM)(config, rngs=rngs)


class CrossAttention(nnx.Module):
    """Attention of the decoder's tokens to the encoder's output."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, n, h = config.hidden_size, config.num_heads, config.head_size
        self.q_kernel = parameter(config, rngs, (d, n, h), ("embed", "heads", None), fan_in=d)
        self.q_bias = parameter(config, rngs, (n, h), ("heads", None))
        self.kv_kernel = parameter(
            config, rngs, (d, 2, n, h), ("embed", None, "heads", None), fan_in=d
        )
        self.kv_bias = parameter(config, rngs, (2, n, h), (None, "heads", None))
        self.out_kernel = parameter(config, rngs, (n, h, d), ("heads", None, "embed"), fan_in=d)
        self.out_bias = parameter(config, rngs, (d,), ("embed",))

    def keys_and_values(
        self, memory_bsd: Float[Array, "b s d"]
    ) -> tuple[Float[Array, "b s n h"], Float[Array, "b s n h"]]:
        """Returns what every query of this layer looks at."""
        kernel, bias = self.kv_kernel[...], self.kv_bias[...]
        kv = ops.linear(memory_bsd, kernel.reshape(kernel.shape[0], -1), bias.reshape(-1))
        kv = kv.reshape(*memory_bsd.shape[:2], *bias.shape)
        return kv[:, :, 0], kv[:, :, 1]

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        memory_bsd: Float[Array, "b s d"],
        mask: Bool[Array, "b 1 t s"],
        dropout_keys: UInt32[Array, " b"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Returns the layer's output; `mask` is True where a query may attend to a key."""
        config, d = self.config, self.config.hidden_size
        q = ops.linear(x_btd, self.q_kernel[...].reshape(d, -1), self.q_bias[...].reshape(-1))
        q_btnh = q.reshape(*x_btd.shape[:2], *self.q_bias.shape)
        q_btnh = q_btnh * jnp.asarray(config.head_size**-0.5, x_btd.dtype)
        k_bsnh, v_bsnh = self.keys_and_values(memory_bsd)
        scores_bnts = jnp.einsum("btnh,bsnh->bnts", q_btnh, k_bsnh)
        z_btd, _ = ops.attend(
            _mix, scores_bnts, mask, v_bsnh, dropout_keys, config.attention_dropout
        )
        return ops.linear(z_btd, self.out_kernel[...].reshape(-1, d), self.out_bias[...])


def _mix(
    probs_bnts: Float[Array, "b n t s"], v_bsnh: Float[Array, "b s n h"]
) -> Float[Array, "b t d"]:
    z_btnh = jnp.einsum("bnts,bsnh->btnh", probs_bnts, v_bsnh)
    return z_btnh.reshape(*z_btnh.shape[:2], -1)


class DecoderLayer(nnx.Module):
    """Self-attention, cross-attention and feed-forward, each with a residual path and a norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.self_attention = Attention(config, rngs=rngs)
        self.self_attention_norm = LayerNorm(config, rngs=rngs)
        self.cross_attention = CrossAttention(config, rngs=rngs)
        self.cross_attention_norm = LayerNorm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.feed_forward_norm = LayerNorm(config, rngs=rngs)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Bool[Array, "b 1 t t"],
        positions: Int[Array, "b t"],
        memory_bsd: Float[Array, "b s d"],
        memory_mask: Bool[Array, "b 1 t s"],
        dropout_keys: UInt32[Array, " b"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Returns the layer's output."""

        def keys_for(place: int) -> jax.Array | None:
            return None if dropout_keys is None else ops.fold(dropout_keys, place)

        # Self-attention itself folds 0 into its keys.
        y, _ = self.self_attention(x_btd, mask, positions, dropout_keys=dropout_keys)
        x_btd = self.self_attention_norm(x_btd + ops.dropout(y, keys_for(1), self.dropout))
        y = self.cross_attention(x_btd, memory_bsd, memory_mask, keys_for(2))
        x_btd = self.cross_attention_norm(x_btd + ops.dropout(y, keys_for(3), self.dropout))
        y = self.feed_forward(x_btd)
        return self.feed_forward_norm(x_btd + ops.dropout(y, keys_for(4), self.dropout))


class Decoder(nnx.Module):
    """Positions and norm of its own on the shared word table, then equal layers, stacked."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        rows = config.max_length + config.position_offset
        self.position = parameter(config, rngs, (rows, d), (None, "embed"), fan_in=d)
        self.norm = LayerNorm(config, rngs=rngs)

        @nnx.split_rngs(splits=config.decoder.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, rngs=rngs)

        self.layers = stack(rngs)

    def embed(
        self,
        input_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        word_table: Float[Array, "v d"],
    ) -> Float[Array, "b t d"]:
        """Returns the first layer's input, before dropout."""
        x_btd = embed_words(self.config, word_table, input_ids)
        rows_bt = positions + self.config.position_offset
        x_btd = self.norm(x_btd + jnp.take(self.position[...], rows_bt, axis=0))
        return x_btd.astype(self.config.dtype)

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        memory_bsd: Float[Array, "b s d"],
        memory_segment_ids: Int[Array, "b s"],
        word_table: Float[Array, "v d"],
        *,
        dropout_keys: UInt32[Array, " b"] | None = None,
        output_hidden_states: bool = False,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "l1 b t d"] | None]:
        """Returns the last hidden states, and on demand those of all layers.

        Args:
            input_ids: what the decoder reads; each position sees itself and what stands before.
            segment_ids: 0 for padding; tokens attend within their segment.
            positions: place of each token in its segment.
            memory_bsd: the encoder's output.
            memory_segment_ids: of its tokens; a segment looks at the one of the same number.
            word_table: the encoder's.
            dropout_keys: one for each row; None for evaluation.
            output_hidden_states: whether to keep every layer's output.
        """
        config = self.config
        causal = jnp.tril(jnp.ones((input_ids.shape[1],) * 2, bool))
        mask = segment_mask(segment_ids) & causal
        same = segment_ids[:, :, None] == memory_segment_ids[:, None, :]
        cross_mask = (same & (memory_segment_ids > 0)[:, None, :])[:, None]

        def keys_for(place: int | jax.Array) -> jax.Array | None:
            return None if dropout_keys is None else ops.fold(dropout_keys, place)

        x_btd = self.embed(input_ids, positions, word_table)
        x_btd = ops.dropout(x_btd, keys_for(0), config.dropout)
        graphdef, stacked = nnx.split(self.layers)

        def body(x_btd: jax.Array, xs: Any) -> Any:
            state, index = xs
            layer = nnx.merge(graphdef, state)
            x_btd = layer(x_btd, mask, positions, memory_bsd, cross_mask, keys_for(index + 1))
            return x_btd, x_btd if output_hidden_states else None

        count = config.decoder.num_layers
        last, hidden_states = jax.lax.scan(
            with_remat(config, body),
            x_btd,
            (stacked, jnp.arange(count, dtype=jnp.uint32)),
            unroll=1 if config.scan_layers else count,
        )
        if output_hidden_states:
            hidden_states = jnp.concatenate([x_btd[None], hidden_states])
        return last, hidden_states


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Seq2SeqOutput:
    """What the encoder-decoder gives back.

    Attributes:
        hidden: last hidden states of the decoder `[B, T, D]`.
        memory: last hidden states of the encoder `[B, S, D]`.
        hidden_states: of the decoder's embeddings and layers `[L+1, B, T, D]`, or None.
        memory_states: of the encoder's `[L+1, B, S, D]`, or None.
    """

    hidden: Float[Array, "b t d"]
    memory: Float[Array, "b s d"]
    hidden_states: Float[Array, "l1 b t d"] | None
    memory_states: Float[Array, "m1 b s d"] | None


class Seq2Seq(nnx.Module):
    """An encoder and a decoder that share the word table, which is the output matrix too."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        rows = padded_vocabulary(config.vocab_size)
        self.final_logits_bias = parameter(config, rngs, (rows,), ("vocab",))

    @property
    def word_table(self) -> Float[Array, "v d"]:
        """The table of input embeddings that encoder, decoder and output share."""
        return self.encoder.embeddings.word[...]

    @property
    def logits_bias(self) -> Float[Array, " v"]:
        """What is added to the logits: it keeps the entries that pad the vocabulary from being
        likely.
        """
        bias = self.final_logits_bias[...]
        is_real = jnp.arange(bias.size) < self.config.vocab_size
        return jnp.where(is_real, bias, ops.MASKED_SCORE)

    def encode(
        self,
        source_ids: Int[Array, "b s"],
        source_segments: Int[Array, "b s"] | Bool[Array, "b s"],
        positions: Int[Array, "b s"] | None = None,
        *,
        dropout_keys: UInt32[Array, " b"] | None = None,
        output_hidden_states: bool = False,
    ) -> tuple[Float[Array, "b s d"], Float[Array, "m1 b s d"] | None]:
        """Returns the encoder's last hidden states, and on demand those of all layers."""
        output = self.encoder(
            source_ids,
            source_segments.astype(jnp.int32),
            _columns(source_ids) if positions is None else positions,
            dropout_keys=dropout_keys,
            output_hidden_states=output_hidden_states,
        )
        return output.hidden, output.hidden_states

    def __call__(
        self,
        source_ids: Int[Array, "b s"],
        source_segments: Int[Array, "b s"] | Bool[Array, "b s"],
        decoder_ids: Int[Array, "b t"],
        decoder_segments: Int[Array, "b t"] | Bool[Array, "b t"],
        *,
        positions: tuple[Int[Array, "b s"], Int[Array, "b t"]] | None = None,
        dropout_keys: UInt32[Array, " b"] | None = None,
        output_hidden_states: bool = False,
    ) -> Seq2SeqOutput:
        """Encodes a source, and decodes with every decoder input given (teacher forcing).

        Args:
            source_ids: the encoder's token ids.
            source_segments: 0 (or False) for padding; tokens attend within their segment.
            decoder_ids: the decoder's token ids; hidden state t has seen those up to t.
            decoder_segments: likewise; a segment sees the source's segment of the same number.
            positions: place of each source and decoder token in its segment; None takes columns,
                as PyTorch's BART does whatever the padding.
            dropout_keys: `ops.row_keys`, one for each row; None for evaluation.
            output_hidden_states: whether to keep every layer's output.
        """

        def keys_for(place: int) -> jax.Array | None:
            return None if dropout_keys is None else ops.fold(dropout_keys, place)

        places = (_columns(source_ids), _columns(decoder_ids)) if positions is None else positions
        memory, memory_states = self.encode(
            source_ids,
            source_segments,
            places[0],
            dropout_keys=keys_for(0),
            output_hidden_states=output_hidden_states,
        )
        hidden, hidden_states = self.decoder(
            decoder_ids,
            decoder_segments.astype(jnp.int32),
            places[1],
            memory,
            source_segments.astype(jnp.int32),
            self.word_table,
            dropout_keys=keys_for(1),
            output_hidden_states=output_hidden_states,
        )
        return Seq2SeqOutput(hidden, memory, hidden_states, memory_states)

    def logits(
        self, hidden: Float[Array, "b t d"], predict_positions: Int[Array, "b p"] | None = None
    ) -> Float[Array, "b p v"]:
        """Returns float32 logits at some positions, or everywhere; padded entries are unlikely."""
        if predict_positions is not None:
            hidden = jnp.take_along_axis(hidden, predict_positions[..., None], axis=1)
        return ops.logits(hidden, self.word_table, self.logits_bias)


def _columns(ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


def shift_right(ids: Int[Array, "b t"], start_id: int) -> Int[Array, "b t"]:
    """Returns the decoder's input for the targets `ids`: the token before each of them."""
    return jnp.concatenate([jnp.full_like(ids[:, :1], start_id), ids[:, :-1]], axis=1)
