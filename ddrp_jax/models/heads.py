"""Heads on the encoder. The masked-language-modelling head reads predicted positions only."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

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
        x = self.norm(ops.gelu(x, config.activation == "gelu_tanh"))
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
