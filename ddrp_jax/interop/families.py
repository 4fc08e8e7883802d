"""The families of published models that our models can express, and how their configs read.

A family turns a `config.json` into a `ModelConfig` and back, and owns its table of names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ddrp_jax.config import ModelConfig, from_config_dict
from ddrp_jax.errors import UsageError
from ddrp_jax.interop import name_tables
from ddrp_jax.interop.name_tables import Table

Published = Mapping[str, Any]  # a config.json

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
_ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}

# Fields of a config.json and of ours with the same meaning.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_epsilon",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_id",
    "tie_word_embeddings": "tied_head",
}
# What transformers takes where a config.json leaves a field out.
_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
# Fields of published models that would change what they compute, and their harmless values.
_REFUSED = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "position_embedding_type": ("absolute", None),
}
KINDS = {
    "base": "Model",
    "masked_lm": "ForMaskedLM",
    "classification": "ForSequenceClassification",
    "generation": "ForConditionalGeneration",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: its name in `config.json`.
        class_prefix: of its PyTorch classes.
        table: names of its tensors.
        defaults: fields of `config.json` with a default of their own.
        offset: index of the first position, given the padding id.
        counts: what a position counts: "columns" whatever the padding (BERT), "ids" other than
            the padding's (RoBERTa, MPNet), or the "tokens" that the mask shows (ours).
        drops_input: whether the classification head drops the pooler's input too.
        specific: the rest of our config, from theirs.
        expresses: whether a model of ours is one of this family.
        write: the rest of their config, from ours.
        fields: those of a config.json and of ours with the same meaning.
        activation: name of the field that holds the activation.
    """

    model_type: str
    class_prefix: str
    table: Table
    defaults: Mapping[str, Any]
    offset: Callable[[int], int]
    counts: Literal["columns", "ids", "tokens"]
    drops_input: bool
    specific: Callable[[Published], dict[str, Any]]
    expresses: Callable[[ModelConfig], bool]
    write: Callable[[ModelConfig], dict[str, Any]]
    fields: Mapping[str, str] = dataclasses.field(default_factory=lambda: _FIELDS)
    activation: str = "hidden_act"

    def architecture(self, kind: str) -> str:
        """Returns the name of the PyTorch class of one kind of model."""
        return f"{self.class_prefix}{KINDS[kind]}"

    def positions(self, ids: np.ndarray, mask: np.ndarray, pad_id: int) -> np.ndarray:
        """Returns the place of each token `[B, T]` as the family's PyTorch class takes it.

        Args:
            ids: token ids `[B, T]`, padded on either side.
            mask: True for real tokens `[B, T]`.
            pad_id: the padding's id.
        """
        if self.counts == "columns":
            return np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        counted = mask if self.counts == "tokens" else ids != pad_id
        # A padding id among the tokens takes the row before the first one's, as in RoBERTa.
        return np.where(counted, np.cumsum(counted, axis=1) - 1, -1 if self.counts == "ids" else 0)

    def read_config(self, published: Published, source: str) -> ModelConfig:
        """Returns our config of a model.

        Args:
            published: its `config.json`.
            source: how errors call it.

        Raises:
            UsageError: our model cannot express it.
        """
        given = {name: value for name, value in published.items() if value is not None}
        values = {**_DEFAULTS, **self.defaults, **given}
        for name, harmless in _REFUSED.items():
            if values.get(name) not in harmless:
                raise UsageError(
                    f"{source}: {name}={values[name]!r} is not supported, only {harmless[0]!r}"
                )
        activation = values[self.activation]
        if activation not in _ACTIVATIONS:
            raise UsageError(
                f"{source}: {self.activation}={activation!r} is not supported; expected one of "
                f"{', '.join(_ACTIVATIONS)}"
            )
        offset = self.offset(values["pad_token_id"])
        ours = {ours: values[theirs] for theirs, ours in self.fields.items() if theirs in values}
        ours |= {
            "activation": _ACTIVATIONS[activation],
            "token_types": values.get("type_vocab_size", 0),
            "position_offset": offset,
            "max_length": values["max_position_embeddings"] - offset,
        }
        return from_config_dict(ModelConfig, ours | self.specific(values), source)

    def write_config(self, config: ModelConfig, base: Published) -> dict[str, Any]:
        """Returns the `config.json` of a model of ours.

        Args:
            config: the model's.
            base: fields to keep where ours say nothing of them; those of the model that it was
                imported from, if it was.
        """
        activation = base.get(self.activation)
        if _ACTIVATIONS.get(str(activation)) != config.activation:
            activation = _ACTIVATION_NAMES[config.activation]
        return {
            **base,
            **{theirs: getattr(config, ours) for theirs, ours in self.fields.items()},
            "model_type": self.model_type,
            self.activation: activation,
            "max_position_embeddings": config.max_length + config.position_offset,
            **self.write(config),
        }


def family_of(published: Published, source: str) -> Family:
    """Returns the family of a `config.json`.

    Raises:
        UsageError: it is none of ours.
    """
    model_type = published.get("model_type")
    if model_type not in FAMILIES:
        raise UsageError(
            f"{source}: model_type={model_type!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def family_for(config: ModelConfig) -> Family:
    """Returns the family to export a model as: a stock one if that expresses it, else our own."""
    return next(family for family in FAMILIES.values() if family.expresses(config))


def _is_stock(config: ModelConfig, kind: str) -> bool:
    return config.position.kind == kind and config.norm_order == "post" and config.embedding_norm


def _has_exact_head(config: ModelConfig) -> bool:
    return "gelu" in (config.activation, config.head_activation)


def _exact_head(values: Published) -> dict[str, Any]:
    # RoBERTa's and MPNet's masked-LM heads use the exact function whatever hidden_act says.
    exact = _ACTIVATIONS[values["hidden_act"]] == "gelu"
    return {"head_activation": "same" if exact else "gelu"}


_ABSOLUTE = {"position": {"kind": "absolute"}}


def _mpnet(values: Published) -> dict[str, Any]:
    for name, only in (("relative_attention_num_buckets", 32), ("pad_token_id", 1)):
        if values[name] != only:
            # Its PyTorch class computes with these two whatever the config says.
            raise UsageError(f"config.json: {name}={values[name]!r}: MPNet has {only}")
    return _exact_head(values) | {
        "position": {
            "kind": "t5",
            "add_absolute": True,
            "num_buckets": 32,
            "bucket_max_distance": 128,
        }
    }


def _is_mpnet(config: ModelConfig) -> bool:
    position = config.position
    return (
        _is_stock(config, "t5")
        and position.add_absolute
        and (position.num_buckets, position.bucket_max_distance) == (32, 128)
        and (config.pad_id, config.position_offset, config.token_types) == (1, 2, 0)
        and _has_exact_head(config)
    )


# Fields of our own config.json and of PositionConfig.
_POSITION_FIELDS = {
    "position_kind": "kind",
    "max_distance": "max_distance",
    "directions": "directions",
    "relative_acts_on": "acts_on",
    "relative_sharing": "sharing",
    "add_absolute_positions": "add_absolute",
    "num_buckets": "num_buckets",
    "bucket_max_distance": "bucket_max_distance",
    "rotary_base": "rope_theta",
}
_OWN_FIELDS = ("norm_order", "embedding_norm", "head_activation", "position_offset")


def _ddrp(values: Published) -> dict[str, Any]:
    position = {ours: values[t] for t, ours in _POSITION_FIELDS.items() if t in values}
    own = {name: values[name] for name in _OWN_FIELDS if name in values}
    rows = values["max_position_embeddings"]
    return own | {"position": position, "max_length": rows - own.get("position_offset", 0)}


def _write_ddrp(config: ModelConfig) -> dict[str, Any]:
    return (
        {theirs: getattr(config.position, ours) for theirs, ours in _POSITION_FIELDS.items()}
        | {name: getattr(config, name) for name in _OWN_FIELDS}
        | {
            "type_vocab_size": config.token_types,
            "auto_map": {
                "AutoConfig": "configuration_ddrp.DdrpConfig",
                "AutoModel": "modeling_ddrp.DdrpModel",
                "AutoModelForMaskedLM": "modeling_ddrp.DdrpForMaskedLM",
                "AutoModelForSequenceClassification": "modeling_ddrp.DdrpForSequenceClassification",
            },
        }
    )


_BART_OFFSET = 2  # rows of the position table before the first position
_BART_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "encoder_layers": "num_layers",
    "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "intermediate_size",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
    "pad_token_id": "pad_id",
    "tie_word_embeddings": "tied_head",
}
_FORCED = {"forced_bos_token_id": "forced_bos_id", "forced_eos_token_id": "forced_eos_id"}


def _bart(values: Published) -> dict[str, Any]:
    for name in ("attention_heads", "ffn_dim"):
        ours, theirs = values[f"encoder_{name}"], values[f"decoder_{name}"]
        if ours != theirs:
            raise UsageError(
                f"config.json: decoder_{name}={theirs!r} is not supported; expected the encoder's, "
                f"{ours!r}"
            )
    if not values["tie_word_embeddings"]:
        raise UsageError("config.json: tie_word_embeddings=False is not supported for BART")
    for name in ("eos_token_id", *_FORCED):
        if isinstance(values.get(name), list):
            raise UsageError(f"config.json: {name}={values[name]!r}: expected one id")
    return _ABSOLUTE | {
        "norm_epsilon": 1e-5,
        "position_offset": _BART_OFFSET,
        # Theirs leaves the first two rows out of the number.
        "max_length": values["max_position_embeddings"],
        "decoder": {
            "num_layers": values["decoder_layers"],
            "scale_embedding": values["scale_embedding"],
            "start_id": values["decoder_start_token_id"],
            "eos_id": values["eos_token_id"],
            **{ours: values.get(theirs) for theirs, ours in _FORCED.items()},
        },
    }


def _write_bart(config: ModelConfig) -> dict[str, Any]:
    decoder = config.decoder
    return {
        "max_position_embeddings": config.max_length,
        "decoder_layers": decoder.num_layers,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.intermediate_size,
        "scale_embedding": decoder.scale_embedding,
        "decoder_start_token_id": decoder.start_id,
        "eos_token_id": decoder.eos_id,
        "is_encoder_decoder": True,
    }


def generation_config(config: ModelConfig, base: Published) -> dict[str, Any]:
    """Returns the `generation_config.json` of a model with a decoder.

    Args:
        config: the model's.
        base: that of the model that it was imported from, or empty.
    """
    decoder = config.decoder
    forced = {theirs: getattr(decoder, ours) for theirs, ours in _FORCED.items()}
    return {
        **base,
        "decoder_start_token_id": decoder.start_id,
        "eos_token_id": decoder.eos_id,
        "pad_token_id": config.pad_id,
        **{name: token for name, token in forced.items() if token is not None},
    }


# In the order in which an export tries them.
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="bart",
            class_prefix="Bart",
            table=name_tables.BART,
            defaults={
                "vocab_size": 50265,
                "pad_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 2,
                "d_model": 1024,
                "dropout": 0.1,
                "attention_dropout": 0.0,
                "activation_function": "gelu",
                "init_std": 0.02,
                "max_position_embeddings": 1024,
                "scale_embedding": False,
                **{f"{side}_layers": 12 for side in ("encoder", "decoder")},
                **{f"{side}_attention_heads": 16 for side in ("encoder", "decoder")},
                **{f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")},
            },
            offset=lambda pad_id: _BART_OFFSET,
            counts="columns",
            drops_input=True,
            specific=_bart,
            expresses=lambda config: config.decoder.num_layers > 0,
            write=_write_bart,
            fields=_BART_FIELDS,
            activation="activation_function",
        ),
        Family(
            model_type="bert",
            class_prefix="Bert",
            table=name_tables.BERT,
            defaults={"vocab_size": 30522, "type_vocab_size": 2, "pad_token_id": 0},
            offset=lambda pad_id: 0,
            counts="columns",
            drops_input=False,
            specific=lambda values: _ABSOLUTE,
            expresses=lambda config: (
                _is_stock(config, "absolute")
                and config.position_offset == 0
                and (config.head_activation == "same" or config.activation == "gelu")
            ),
            # A model without token types is one whose two types add nothing.
            write=lambda config: {"type_vocab_size": config.token_types or 2},
        ),
        Family(
            model_type="roberta",
            class_prefix="Roberta",
            table=name_tables.ROBERTA,
            defaults={"vocab_size": 50265, "type_vocab_size": 2, "pad_token_id": 1},
            offset=lambda pad_id: pad_id + 1,
            counts="ids",
            drops_input=True,
            specific=lambda values: _ABSOLUTE | _exact_head(values),
            expresses=lambda config: (
                _is_stock(config, "absolute")
                and config.position_offset == config.pad_id + 1
                and _has_exact_head(config)
            ),
            write=lambda config: {"type_vocab_size": config.token_types or 1},
        ),
        Family(
            model_type="mpnet",
            class_prefix="MPNet",
            table=name_tables.MPNET,
            defaults={
                "vocab_size": 30527,
                "pad_token_id": 1,
                "relative_attention_num_buckets": 32,
            },
            offset=lambda pad_id: pad_id + 1,
            counts="ids",
            drops_input=True,
            specific=_mpnet,
            expresses=_is_mpnet,
            write=lambda config: {"relative_attention_num_buckets": 32},
        ),
        Family(
            model_type="ddrp",
            class_prefix="Ddrp",
            table=name_tables.DDRP,
            defaults={"vocab_size": 32000, "pad_token_id": 0},
            offset=lambda pad_id: 0,
            counts="tokens",
            drops_input=True,
            specific=_ddrp,
            expresses=lambda config: True,
            write=_write_ddrp,
        ),
    )
}
