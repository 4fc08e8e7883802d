"""Config of an encoder with decoupled directional relative positions (DDRP), or another kind."""

from transformers import PretrainedConfig


class DdrpConfig(PretrainedConfig):
    """Describes an encoder; the names that BERT's config has mean the same here.

    Args:
        position_kind: "absolute", "shaw", "ddrp", "t5", "rope" or "none".
        max_distance: shaw, ddrp: the largest distance kept, K.
        directions: ddrp: 3 (left, same, right) or 2 (left, not left).
        relative_acts_on: shaw, ddrp: "keys" or "keys_and_values".
        relative_sharing: shaw, ddrp: tables for each "layer", for each "head" of each layer, or
            for the whole "model".
        add_absolute_positions: adds learned absolute positions to the input as well.
        num_buckets, bucket_max_distance: t5: how offsets are grouped.
        rotary_base: rope: base of the wavelengths.
        max_position_embeddings: rows of the table of absolute positions.
        position_offset: its row for the first token.
        norm_order: "post" or "pre".
        embedding_norm: a LayerNorm on the summed input embeddings.
        type_vocab_size: token types; 0 has no table of them.
        head_activation: of the masked-LM head: "same" as `hidden_act`, or "gelu".
    """

    model_type = "ddrp"

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        hidden_act="gelu",
        head_activation="same",
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        classifier_dropout=None,
        norm_order="post",
        layer_norm_eps=1e-12,
        embedding_norm=True,
        type_vocab_size=0,
        initializer_range=0.02,
        position_kind="ddrp",
        max_distance=63,
        directions=3,
        relative_acts_on="keys",
        relative_sharing="layer",
        add_absolute_positions=False,
        num_buckets=32,
        bucket_max_distance=128,
        rotary_base=10000.0,
        max_position_embeddings=512,
        position_offset=0,
        pad_token_id=0,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.head_activation = head_activation
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.classifier_dropout = classifier_dropout
        self.norm_order = norm_order
        self.layer_norm_eps = layer_norm_eps
        self.embedding_norm = embedding_norm
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.position_kind = position_kind
        self.max_distance = max_distance
        self.directions = directions
        self.relative_acts_on = relative_acts_on
        self.relative_sharing = relative_sharing
        self.add_absolute_positions = add_absolute_positions
        self.num_buckets = num_buckets
        self.bucket_max_distance = bucket_max_distance
        self.rotary_base = rotary_base
        self.max_position_embeddings = max_position_embeddings
        self.position_offset = position_offset
        super().__init__(**kwargs)
        # After it: some versions of the library set these two themselves.
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
