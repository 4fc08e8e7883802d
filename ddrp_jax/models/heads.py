"""Heads on the encoder. The masked-language-modelling head reads predicted positions only, the
classification head the first token.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from ddrp_jax.config import ModelConfig
from ddrp_jax.models import ops
from ddrp_jax.models.blocks import LayerNorm
from ddrp_jax.models.encoder import Encoder, padded_vocabulary
from ddrp_jax.models.initializers import parameter


class MaskedLMHead(nnx.Module):
    """BERT's head: dense, GELU, LayerNorm, then the word table (tied) or a matrix of its own."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, rows = config.hidden_size, padded_vocabulary(config.vocab_size)
        self.dense_kernel = parameter(config, rngs, (d, d), ("embed", None), fan_in=d)
        self.dense_bias = parameter(config, rngs, (d,), ("embed",))
        self.norm = LayerNorm(config, rngs=rngs)
        self.decoder_bias = parameter(config, rngs, (rows,), ("vocab",))
        self.decoder_kernel = nnx.data(None)
        if not config.tied_head:
            self.decoder_kernel = parameter(config, rngs, (rows, d), ("vocab", "embed"), fan_in=d)

    def __call__(
        self, hidden: Float[Array, "*rows d"], word_table: Float[Array, "v d"]
    ) -> Float[Array, "*rows v"]:
        """Returns float32 logits over the padded vocabulary; padded entries are never likely."""
        config = self.config
        x = ops.linear(hidden, self.dense_kernel[...], self.dense_bias[...])
        approximate = config.activation == "gelu_tanh" and config.head_activation == "same"
        x = self.norm(ops.gelu(x, approximate))
        table = word_table if self.decoder_kernel is None else self.decoder_kernel[...]
        is_real = jnp.arange(table.shape[0]) < config.vocab_size
        return ops.logits(x, table, jnp.where(is_real, self.decoder_bias[...], ops.MASKED_SCORE))


class MaskedLM(nnx.Module):
    """An encoder with the masked-language-modelling head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs=rngs)
        self.head = MaskedLMHead(config, rngs=rngs)

    def logits(
        self, hidden: Float[Array, "b t d"], predict_positions: Int[Array, "b p"] | None = None
    ) -> Float[Array, "b p v"]:
        """Returns logits at the predicted positions of each row, or everywhere without them."""
        if predict_positions is not None:
            hidden = jnp.take_along_axis(hidden, predict_positions[..., None], axis=1)
        return self.head(hidden, self.encoder.embeddings.word[...])


class Pooler(nnx.Module):
    """BERT's pooler: a dense layer with tanh on the first token's hidden state."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.kernel = parameter(config, rngs, (d, d), ("embed", None), fan_in=d)
        self.bias = parameter(config, rngs, (d,), ("embed",))

    def __call__(self, first: Float[Array, "b d"]) -> Float[Array, "b d"]:
        return jnp.tanh(ops.linear(first, self.kernel[...], self.bias[...]))


class ClassificationHead(nnx.Module):
    """A pooler and a linear layer on the first token: the head of BERT, RoBERTa and MPNet.

    The families differ in dropout alone: RoBERTa and MPNet drop the pooler's input as well.

    Args:
        config: the encoder's.
        num_labels: outputs; 1 is a regression.
        drop_input: whether the pooler's input is dropped too.
        dropout: rate; None takes the encoder's.
        rngs: stream `params`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_labels: int,
        *,
        drop_input: bool = False,
        dropout: float | None = None,
        rngs: nnx.Rngs,
    ):
        d = config.hidden_size
        self.drop_input = drop_input
        self.dropout = config.dropout if dropout is None else dropout
        self.pooler = Pooler(config, rngs=rngs)
        self.kernel = parameter(config, rngs, (d, num_labels), ("embed", None), fan_in=d)
        self.bias = parameter(config, rngs, (num_labels,), (None,))

    def __call__(
        self, hidden: Float[Array, "b t d"], dropout_keys: UInt32[Array, " b"] | None = None
    ) -> Float[Array, "b c"]:
        """Returns float32 logits of texts whose first token stands in column 0."""

        def dropped(x: jnp.ndarray, place: int) -> jnp.ndarray:
            keys = None if dropout_keys is None else ops.fold(dropout_keys, place)
            return ops.dropout(x, keys, self.dropout)

        first = hidden[:, 0]
        pooled = self.pooler(dropped(first, 0) if self.drop_input else first)
        logits = ops.linear(dropped(pooled, 1), self.kernel[...], self.bias[...])
        return logits.astype(jnp.float32)
