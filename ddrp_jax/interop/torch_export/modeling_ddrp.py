"""PyTorch classes of an encoder with decoupled directional relative positions (DDRP).

A query at place i and a key at place j are `j - i` apart; distances beyond K count as K. DDRP
keeps one vector for each distance and one for each direction, and their product joins the key:

    score(i, j) = q_i . (k_j + distance[|j - i|] * direction[sign(j - i)]) / sqrt(head size)

(arXiv 2210.04246). The other kinds of position that its trainer knows are here as well. Shapes:
B batch, T length, N heads, H head size, R = 2K + 1 offsets, D hidden size.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
)

from .configuration_ddrp import DdrpConfig


def offsets(length: int, device: torch.device) -> torch.Tensor:
    """Returns `j - i` for query i and key j, [T, T]."""
    places = torch.arange(length, device=device)
    return places[None, :] - places[:, None]


class RelativeTable(nn.Module):
    """One vector for each offset from -K to K: [R, H], or [N, R, H] with tables for each head."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        heads = (config.num_attention_heads,) if config.relative_sharing == "head" else ()
        size = config.hidden_size // config.num_attention_heads
        distances = config.max_distance + 1
        if config.position_kind == "shaw":
            self.table = nn.Parameter(torch.empty(*heads, 2 * distances - 1, size))
        else:
            self.table = None
            self.distance = nn.Parameter(torch.empty(*heads, distances, size))
            self.direction = nn.Parameter(torch.empty(*heads, config.directions, size))

    def forward(self) -> torch.Tensor:
        if self.table is not None:
            return self.table
        distance, direction = self.distance, self.direction
        left, right = direction[..., :1, :], direction[..., -1:, :]
        same = direction[..., 1:2, :]  # with two directions this is the right one
        return torch.cat(
            [
                distance[..., 1:, :].flip(-2) * left,
                distance[..., :1, :] * same,
                distance[..., 1:, :] * right,
            ],
            dim=-2,
        )


def relative_rows(length: int, max_distance: int, device: torch.device) -> torch.Tensor:
    """Returns the row of a `RelativeTable` for every query and key, [T, T]."""
    return offsets(length, device).clamp(-max_distance, max_distance) + max_distance


def relative_scores(query: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the product of queries [B, N, T, H] with the vector of each offset, [B, N, T, T]."""
    products = query @ table.transpose(-1, -2)
    return products.gather(-1, rows.expand(*query.shape[:2], -1, -1))


def relative_values(probs: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the vectors of the offsets, weighted with [B, N, T, T] and summed: [B, N, T, H]."""
    weights = probs.new_zeros(*probs.shape[:-1], table.shape[-2])
    return weights.scatter_add(-1, rows.expand_as(probs), probs) @ table


class BucketBias(nn.Module):
    """T5's bias: one number for each bucket of offsets and head."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        self.max_distance = config.bucket_max_distance
        self.bias = nn.Parameter(torch.empty(config.num_buckets, config.num_attention_heads))

    def forward(self, length: int) -> torch.Tensor:
        """Returns [1, N, T, T]."""
        offset = offsets(length, self.bias.device)
        # Half of the buckets for each direction; half of those for one distance each, the others
        # wider and wider up to the largest distance.
        half = self.bias.shape[0] // 2
        exact = half // 2
        distance = offset.abs()
        far = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(distance < exact, distance, far) + half * (offset > 0)
        return self.bias[bucket].permute(2, 0, 1)[None]


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Turns pairs (h, h + H/2) of [B, N, T, H] by angles that grow with the position [B, T]."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions.float()[..., None] * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class DdrpAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        own_tables = config.position_kind in ("shaw", "ddrp") and config.relative_sharing != "model"
        on_values = config.relative_acts_on == "keys_and_values"
        self.relative_keys = RelativeTable(config) if own_tables else None
        self.relative_values = RelativeTable(config) if own_tables and on_values else None

    def forward(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        shared_keys: RelativeTable | None,
        shared_values: RelativeTable | None,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output [B, T, D], and the attention weights [B, N, T, T] where asked for.

        Args:
            hidden: input [B, T, D].
            bias: what is added to the scaled scores: the mask, and T5's bias.
            positions: place of each token in its text [B, T].
            rows: `relative_rows`.
            shared_keys, shared_values: tables that all layers share.
            need_weights: whether to return the weights; without, a fused kernel may be used.
        """
        batch, length, _ = hidden.shape

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(batch, length, self.num_heads, self.head_size).transpose(1, 2)

        query, key, value = (
            heads(project(hidden)) for project in (self.query, self.key, self.value)
        )
        if self.config.position_kind == "rope":
            query = rotate(query, positions, self.config.rotary_base)
            key = rotate(key, positions, self.config.rotary_base)
        query = query * self.head_size**-0.5
        key_table = self.relative_keys or shared_keys
        value_table = self.relative_values or shared_values
        if key_table is not None:
            bias = bias + relative_scores(query, key_table(), rows)

        rate = self.config.attention_probs_dropout_prob if self.training else 0.0
        weights = None
        if need_weights or value_table is not None:
            scores = query @ key.transpose(-1, -2) + bias
            weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
            dropped = functional.dropout(weights, rate)
            mixed = dropped @ value
            if value_table is not None:
                mixed = mixed + relative_values(dropped, value_table(), rows)
        else:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, dropout_p=rate, scale=1.0
            )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return self.output(mixed), weights if need_weights else None


class DdrpLayer(nn.Module):
    """Attention and feed-forward, each with a residual path and a norm before or after it."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        self.pre_norm = config.norm_order == "pre"
        self.attention = DdrpAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(hidden)))

    def forward(
        self, hidden: torch.Tensor, **attention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.pre_norm:
            mixed, weights = self.attention(self.attention_norm(hidden), **attention)
            hidden = hidden + self.dropout(mixed)
            normed = self.feed_forward_norm(hidden)
            return hidden + self.dropout(self.feed_forward(normed)), weights
        mixed, weights = self.attention(hidden, **attention)
        hidden = self.attention_norm(hidden + self.dropout(mixed))
        hidden = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return hidden, weights


class DdrpEmbeddings(nn.Module):
    """Sum of word, position and token-type vectors, then LayerNorm and dropout."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, d, padding_idx=config.pad_token_id)
        has_absolute = config.position_kind == "absolute" or config.add_absolute_positions
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, d) if has_absolute else None
        )
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, d) if config.type_vocab_size else None
        )
        self.norm = nn.LayerNorm(d, eps=config.layer_norm_eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, words: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = words
        if self.position_embeddings is not None:
            longest = self.config.max_position_embeddings - self.config.position_offset
            if words.shape[1] > longest:
                raise ValueError(f"{words.shape[1]} tokens; this model has positions for {longest}")
            hidden = hidden + self.position_embeddings(positions + self.config.position_offset)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(positions)
            hidden = hidden + self.token_type_embeddings(token_type_ids)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(hidden)


class DdrpPreTrainedModel(PreTrainedModel):
    """What the three models share: config, initialisation."""

    config_class = DdrpConfig
    base_model_prefix = "ddrp"
    _supports_sdpa = True
    _no_split_modules = ["DdrpLayer"]  # noqa: RUF012 (the library wants a list here)

    def _init_weights(self, module: nn.Module) -> None:
        deviation = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=deviation)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, BucketBias):
            nn.init.normal_(module.bias, std=deviation)
        elif isinstance(module, RelativeTable):
            if module.table is not None:
                nn.init.normal_(module.table, std=deviation)
            else:
                nn.init.normal_(module.distance, std=deviation)
                nn.init.normal_(module.direction, std=1.0)


class DdrpModel(DdrpPreTrainedModel):
    """The encoder."""

    def __init__(self, config: DdrpConfig):
        super().__init__(config)
        self.embeddings = DdrpEmbeddings(config)
        self.layers = nn.ModuleList(DdrpLayer(config) for _ in range(config.num_hidden_layers))
        is_relative = config.position_kind in ("shaw", "ddrp")
        shares_tables = is_relative and config.relative_sharing == "model"
        on_values = config.relative_acts_on == "keys_and_values"
        self.relative_keys = RelativeTable(config) if shares_tables else None
        self.relative_values = RelativeTable(config) if shares_tables and on_values else None
        self.bucket_bias = BucketBias(config) if config.position_kind == "t5" else None
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if config.norm_order == "pre"
            else None
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> BaseModelOutput | tuple:
        """Encodes a batch of texts.

        Args:
            input_ids: token ids [B, T].
            attention_mask: 1 for real tokens, 0 for padding on either side [B, T].
            token_type_ids: [B, T]; all 0 where left out.
            position_ids: place of each token in its text, from 0 [B, T]; counted over real tokens
                where left out.
            inputs_embeds: word vectors [B, T, D] in place of `input_ids`.
            output_attentions: whether to return every layer's weights.
            output_hidden_states: whether to return the embeddings' output and every layer's.
            return_dict: False gives a plain tuple.
        """
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        words = (
            self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        )
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if return_dict is None:
            return_dict = config.return_dict
        batch, length = words.shape[:2]
        if attention_mask is None:
            attention_mask = torch.ones(batch, length, dtype=torch.long, device=words.device)
        is_real = attention_mask != 0
        if position_ids is None:
            position_ids = (is_real.long().cumsum(1) - 1).clamp(min=0)

        hidden = self.embeddings(words, position_ids, token_type_ids)
        # Finite, also with scores added, so that a row of nothing but padding gives no NaN.
        bias = torch.zeros(batch, 1, 1, length, dtype=hidden.dtype, device=hidden.device)
        bias = bias.masked_fill(~is_real[:, None, None], torch.finfo(hidden.dtype).min / 2)
        bias = bias.expand(-1, -1, length, -1)
        if self.bucket_bias is not None:
            bias = bias + self.bucket_bias(length).to(hidden.dtype)
        rows = relative_rows(length, config.max_distance, hidden.device)
        need_weights = output_attentions or config._attn_implementation == "eager"

        hidden_states, attentions = [hidden], []
        for layer in self.layers:
            hidden, weights = layer(
                hidden,
                bias=bias,
                positions=position_ids,
                rows=rows,
                shared_keys=self.relative_keys,
                shared_values=self.relative_values,
                need_weights=need_weights,
            )
            hidden_states.append(hidden)
            attentions.append(weights)
        if self.final_norm is not None:
            hidden = hidden_states[-1] = self.final_norm(hidden)
        output = BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


class DdrpLMHead(nn.Module):
    """Dense layer, activation, LayerNorm, and the matrix to the vocabulary."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        same = config.head_activation == "same"
        self.activation = ACT2FN[config.hidden_act if same else config.head_activation]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.activation(self.dense(hidden))))


class DdrpForMaskedLM(DdrpPreTrainedModel):
    """The encoder with the masked-language-modelling head."""

    _tied_weights_keys = {  # noqa: RUF012 (the library wants a dict here)
        "lm_head.decoder.weight": "ddrp.embeddings.word_embeddings.weight"
    }

    def __init__(self, config: DdrpConfig):
        super().__init__(config)
        self.ddrp = DdrpModel(config)
        self.lm_head = DdrpLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head.decoder = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **inputs,
    ) -> MaskedLMOutput | tuple:
        """Returns logits [B, T, V]; with `labels` (-100 where nothing is predicted) the loss."""
        output = self.ddrp(input_ids, attention_mask, return_dict=True, **inputs)
        logits = self.lm_head(output.last_hidden_state)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        result = MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()


class DdrpClassificationHead(nn.Module):
    """Dense layer with tanh on the first real token, then a linear layer."""

    def __init__(self, config: DdrpConfig):
        super().__init__()
        rate = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        pooled = torch.tanh(self.dense(self.dropout(first)))
        return self.out_proj(self.dropout(pooled))


class DdrpForSequenceClassification(DdrpPreTrainedModel):
    """The encoder with a head that classifies texts, or gives each a number (one label)."""

    def __init__(self, config: DdrpConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.ddrp = DdrpModel(config)
        self.classifier = DdrpClassificationHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **inputs,
    ) -> SequenceClassifierOutput | tuple:
        """Returns logits [B, C]; with `labels` the loss that `problem_type` or their type says."""
        output = self.ddrp(input_ids, attention_mask, return_dict=True, **inputs)
        hidden = output.last_hidden_state
        first = hidden[:, 0]
        if attention_mask is not None:  # with padding on the left a text begins further on
            begin = (attention_mask != 0).long().argmax(1)
            first = hidden[torch.arange(len(hidden), device=hidden.device), begin]
        logits = self.classifier(first)
        result = SequenceClassifierOutput(
            loss=None if labels is None else self.loss(logits, labels),
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kind = self.config.problem_type
        if kind is None:
            kind = "multi_label_classification"
            if self.num_labels == 1:
                kind = "regression"
            elif not labels.is_floating_point():
                kind = "single_label_classification"
        if kind == "regression":
            return functional.mse_loss(logits, labels.to(logits.dtype).view_as(logits))
        if kind == "single_label_classification":
            return functional.cross_entropy(logits, labels.view(-1))
        return functional.binary_cross_entropy_with_logits(logits, labels)
