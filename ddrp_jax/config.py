"""The configuration of a run: frozen dataclasses that own their defaults, docs and checks.

A file in `configs/` returns an `ml_collections.ConfigDict` (`to_config_dict` makes one from these
classes, so every field can be overridden on the command line). At the border `from_config_dict`
turns it into these classes: an unknown key is an error that names the nearest known one, a value
of the wrong type or out of range an error that names the field. `as_dict` gives plain JSON data.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from ddrp_jax.errors import UsageError, nearest


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """How the encoder knows where a token stands."""

    kind: Literal["absolute", "shaw", "ddrp", "t5", "rope", "none"] = "ddrp"
    # shaw, ddrp: the largest distance kept, K >= 1. R = 2K+1 = 127 offsets fit one 128-lane tile.
    max_distance: int = 63
    # ddrp: 3 rows (left, same, right) or 2 (left, not left).
    directions: int = 3
    # shaw, ddrp: relative vectors join the keys, or the keys and the values.
    acts_on: Literal["keys", "keys_and_values"] = "keys"
    # shaw, ddrp: one pair of tables for each layer, for the whole model, or for each head of each
    # layer.
    sharing: Literal["layer", "model", "head"] = "layer"
    # Adds learned absolute positions to the input as well ("absolute" always has them).
    add_absolute: bool = False
    # shaw, ddrp: how relative scores are computed; all agree. "auto" is the fastest known for the
    # platform that a program is compiled for.
    scores: Literal["auto", "dense", "one_hot", "skew", "gather"] = "auto"
    # t5: number of buckets, and the distance beyond which all share the last one.
    num_buckets: int = 32
    bucket_max_distance: int = 128
    # rope: base of the geometric progression of wavelengths.
    rope_theta: float = 10_000.0

    def check(self, path: str) -> None:
        _require(self.max_distance >= 1, path, "max_distance", self.max_distance, "at least 1")
        _require(self.directions in (2, 3), path, "directions", self.directions, "2 or 3")
        _require(
            self.num_buckets >= 4 and self.num_buckets % 2 == 0,
            path,
            "num_buckets",
            self.num_buckets,
            "an even number of at least 4",
        )
        _require(
            self.bucket_max_distance > self.num_buckets // 4,
            path,
            "bucket_max_distance",
            self.bucket_max_distance,
            f"more than a quarter of num_buckets, {self.num_buckets // 4}",
        )
        _require(self.rope_theta > 0, path, "rope_theta", self.rope_theta, "a positive number")

    @property
    def has_absolute(self) -> bool:
        """Whether the input carries a learned absolute position."""
        return self.kind == "absolute" or self.add_absolute


# A model with a decoder is BART, and PyTorch's BART has no other values of these.
_WITH_DECODER: dict[str, Any] = {
    "norm_order": "post",
    "embedding_norm": True,
    "token_types": 0,
    "position_offset": 2,
    "tied_head": True,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder on the encoder (BART); its width, heads and hidden units are the encoder's."""

    # 0 is an encoder alone.
    num_layers: int = 0
    # Word vectors, the encoder's and the decoder's, times sqrt(hidden_size).
    scale_embedding: bool = False
    # What the decoder reads first, and what ends a text.
    start_id: int = 2
    eos_id: int = 2
    # Tokens that a generated text begins with, and ends with where it reaches its largest length.
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None

    def check(self, path: str) -> None:
        for name in ("num_layers", "start_id", "eos_id", "forced_bos_id", "forced_eos_id"):
            value = getattr(self, name)
            _require(value is None or value >= 0, path, name, value, "at least 0")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One encoder, and perhaps a decoder: BERT, RoBERTa, DDRP and BART are values of this."""

    # 0 takes the tokenizer's.
    vocab_size: int = 0
    num_layers: int = 12
    hidden_size: int = 768
    num_heads: int = 12
    intermediate_size: int = 3072
    # "gelu" is the exact one (BERT, RoBERTa), "gelu_tanh" its approximation ("gelu_new").
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    # The masked-LM head's: the encoder's (BERT), or always the exact one (RoBERTa, MPNet).
    head_activation: Literal["same", "gelu"] = "same"
    norm_order: Literal["post", "pre"] = "post"
    norm_epsilon: float = 1e-12
    # A LayerNorm on the summed input embeddings (BERT's).
    embedding_norm: bool = True
    # Number of token types; 0 has no such table (RoBERTa's single type is 1).
    token_types: int = 0
    position: PositionConfig = PositionConfig()
    # Rows of the absolute table that a segment may use: its longest legal length.
    max_length: int = 512
    # Index of the first position: 0 for BERT, pad id + 1 for RoBERTa.
    position_offset: int = 0
    pad_id: int = 0
    tied_head: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    decoder: DecoderConfig = DecoderConfig()
    # "normal" is N(0, initializer_range) everywhere (BERT's); "fan_in" is N(0, 1/fan_in) for
    # every kernel.
    initializer: Literal["normal", "fan_in"] = "normal"
    initializer_range: float = 0.02
    # Computation type; parameters, norms, softmax and losses stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # What the backward pass recomputes: nothing, all but the matrix products, or whole layers.
    remat: Literal["none", "dots", "full"] = "none"
    # Layers as one scanned body (compile time flat in depth), or unrolled.
    scan_layers: bool = True

    def check(self, path: str) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "intermediate_size", "max_length"):
            _require(getattr(self, name) >= 1, path, name, getattr(self, name), "at least 1")
        for name in ("vocab_size", "token_types", "position_offset", "pad_id"):
            _require(getattr(self, name) >= 0, path, name, getattr(self, name), "at least 0")
        for name in ("dropout", "attention_dropout"):
            _require(0 <= getattr(self, name) < 1, path, name, getattr(self, name), "in [0, 1)")
        for name in ("norm_epsilon", "initializer_range"):
            value = getattr(self, name)
            _require(value > 0, path, name, value, "a positive number")
        _require(
            self.hidden_size % self.num_heads == 0,
            path,
            "num_heads",
            self.num_heads,
            f"a divisor of hidden_size, {self.hidden_size}",
        )
        _require(
            self.position.kind != "rope" or self.head_size % 2 == 0,
            path,
            "num_heads",
            self.num_heads,
            f"an even head size for rope, not {self.hidden_size}/{self.num_heads}",
        )
        if self.decoder.num_layers:
            _require(
                self.position.kind == "absolute",
                path,
                "position.kind",
                self.position.kind,
                "'absolute' in a model with a decoder",
            )
            for name, only in _WITH_DECODER.items():
                value = getattr(self, name)
                _require(value == only, path, name, value, f"{only!r} in a model with a decoder")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """MTH = MLM + token_weight * TCD + head_weight * HCD; a weight of 0 removes its term."""

    # Our choice by measurement (README, "Two commands"); the source's weights are not known.
    token_weight: float = 0.0
    head_weight: float = 0.0
    # Steps over which both weights rise linearly from 0 to their value.
    weight_warmup_steps: int = 0
    head_layers: Literal["all", "last"] = "all"
    # One cosine for each query's weights, or for each head's whole map taken as one vector.
    head_unit: Literal["query", "map"] = "query"

    def check(self, path: str) -> None:
        for name in ("token_weight", "head_weight", "weight_warmup_steps"):
            _require(getattr(self, name) >= 0, path, name, getattr(self, name), "at least 0")


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """Dynamic masking: which tokens are predicted, and what stands in their place."""

    rate: float = 0.15
    mask_fraction: float = 0.8
    random_fraction: float = 0.1
    whole_word: bool = False
    # Static number of predicted positions in a row; 0 takes round(rate * length).
    max_predictions: int = 0

    def check(self, path: str) -> None:
        _require(0 < self.rate < 1, path, "rate", self.rate, "in (0, 1)")
        for name in ("mask_fraction", "random_fraction"):
            _require(0 <= getattr(self, name) <= 1, path, name, getattr(self, name), "in [0, 1]")
        total = self.mask_fraction + self.random_fraction
        _require(
            total <= 1 + 1e-9, path, "mask_fraction + random_fraction", total, "at most 1 together"
        )
        _require(
            self.max_predictions >= 0, path, "max_predictions", self.max_predictions, "at least 0"
        )


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate: linear warm-up from `start` to `peak`, then a decay to `end`."""

    kind: Literal["linear", "cosine", "inverse_sqrt", "constant"] = "linear"
    peak: float = 1e-4
    warmup_steps: int = 0
    start: float = 0.0
    end: float = 0.0

    def check(self, path: str) -> None:
        _require(0 < self.peak < math.inf, path, "peak", self.peak, "a positive number")
        _require(self.warmup_steps >= 0, path, "warmup_steps", self.warmup_steps, "at least 0")
        for name in ("start", "end"):
            value = getattr(self, name)
            _require(0 <= value <= self.peak, path, name, value, f"in [0, peak={self.peak}]")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """A stretch of training with one length, batch, corpus and schedule (BERT's 128, then 512)."""

    name: str = "main"
    # A folder that `ddrp prepare` wrote; for a reconstructor, `ddrp definitions build`.
    records: str = ""
    length: int = 128
    # Rows of one step over all devices.
    batch_size: int = 256
    steps: int = 100_000
    # Microbatches that one step sums its gradients over.
    accumulation: int = 1
    schedule: ScheduleConfig = ScheduleConfig()

    def check(self, path: str) -> None:
        for name in ("batch_size", "steps", "accumulation"):
            _require(getattr(self, name) >= 1, path, name, getattr(self, name), "at least 1")
        _require(self.length >= 3, path, "length", self.length, "at least 3: CLS, a piece, SEP")
        _require(
            self.batch_size % self.accumulation == 0,
            path,
            "accumulation",
            self.accumulation,
            f"a divisor of batch_size, {self.batch_size}",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or LAMB; biases and norms are never decayed."""

    kind: Literal["adamw", "lamb"] = "adamw"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    # Whether word, position and token-type tables are decayed.
    decay_embeddings: bool = True
    # Whether relative tables (distance, direction, Shaw's, T5's) are decayed.
    decay_relative: bool = False
    # Largest global norm of the gradient; 0 does not clip.
    clip_norm: float = 1.0

    def check(self, path: str) -> None:
        for name in ("b1", "b2"):
            _require(0 <= getattr(self, name) < 1, path, name, getattr(self, name), "in [0, 1)")
        _require(self.eps > 0, path, "eps", self.eps, "a positive number")
        for name in ("weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, path, name, getattr(self, name), "at least 0")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one of them may be -1 and takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    # Slices that the data axis spans, where several are joined by an ordinary network.
    dcn_data: int = 1

    def check(self, path: str) -> None:
        _require(self.dcn_data >= 1, path, "dcn_data", self.dcn_data, "at least 1")
        sizes = (self.data, self.fsdp, self.tensor)
        _require(
            all(size >= 1 or size == -1 for size in sizes) and sizes.count(-1) <= 1,
            path,
            "data, fsdp, tensor",
            sizes,
            "positive numbers, at most one of them -1",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop around the step: seeds, and how often to log, evaluate, measure and save."""

    seed: int = 0
    log_every: int = 50
    # 0 evaluates only at the end.
    eval_every: int = 1000
    # Rows of the held-out split; 0 takes all.
    eval_rows: int = 1024
    eval_batch_size: int = 0  # 0: the stage's batch_size
    # Token and head similarities on the training batch; 0 takes them at evaluations only.
    representations_every: int = 0
    # 0 saves only at the end, and at a signal.
    save_every: int = 1000
    keep_last: int = 3
    # Keeps the checkpoints with the lowest held-out loss as well (mlm_loss in pre-training).
    keep_best: int = 1
    # Batches made ahead of the step, and processes that make them (0: a thread).
    prefetch: int = 16
    workers: int = 0
    tensorboard: bool = True
    wandb: str = ""  # a project name turns it on

    def check(self, path: str) -> None:
        for name in (
            "log_every",
            "keep_last",
        ):
            _require(getattr(self, name) >= 1, path, name, getattr(self, name), "at least 1")
        _require(self.seed < 2**31, path, "seed", self.seed, "below 2**31")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                _require(value >= 0, path, field.name, value, "at least 0")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every run has, whatever it trains."""

    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[StageConfig, ...] = (StageConfig(),)
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()

    def check(self, path: str) -> None:
        _require(len(self.stages) >= 1, path, "stages", self.stages, "at least one stage")
        names = [stage.name for stage in self.stages]
        _require(len(set(names)) == len(names), path, "stages", names, "a different name each")
        for i, stage in enumerate(self.stages):
            if self.model.position.has_absolute:
                _require(
                    stage.length <= self.model.max_length,
                    f"{path}.stages[{i}]",
                    "length",
                    stage.length,
                    f"at most model.max_length={self.model.max_length}",
                )

    @property
    def total_steps(self) -> int:
        """Steps of all stages together."""
        return sum(stage.steps for stage in self.stages)


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """A pre-training run."""

    objective: ObjectiveConfig = ObjectiveConfig()
    masking: MaskingConfig = MaskingConfig()


@dataclasses.dataclass(frozen=True)
class ReconstructionConfig:
    """How a model learns to produce a token's embedding from its definition (DefinitionEMB)."""

    # The model whose embeddings are rebuilt: a run's folder or one checkpoint's.
    checkpoint: str = ""
    # Of its word table; the run fills it in.
    fingerprint: str = ""
    # Whether the student's own word table learns (the source: RoBERTa's does, BART's does not).
    train_embeddings: bool = True
    # Whether the definition's tokens are corrupted and reconstructed too (the source: RoBERTa's
    # are): these shares become the mask token and a random one.
    reconstruct_definitions: bool = True
    mask_fraction: float = 0.5
    random_fraction: float = 0.25
    # This share of the vocabulary, its rarest tokens, is never a target: we distrust its rows.
    filter_ratio: float = 0.0
    # The linear map starts as N(0, 1/D), or as the ridge regression of the target rows on the
    # pre-trained hidden states of this many training examples (ours).
    map_init: Literal["normal", "ridge"] = "normal"
    ridge_examples: int = 10_000

    def check(self, path: str) -> None:
        for name in ("mask_fraction", "random_fraction"):
            _require(0 <= getattr(self, name) <= 1, path, name, getattr(self, name), "in [0, 1]")
        total = self.mask_fraction + self.random_fraction
        _require(
            total <= 1 + 1e-9, path, "mask_fraction + random_fraction", total, "at most 1 together"
        )
        value = self.filter_ratio
        _require(0 <= value < 1, path, "filter_ratio", value, "in [0, 1)")
        _require(
            self.ridge_examples >= 1, path, "ridge_examples", self.ridge_examples, "at least 1"
        )


@dataclasses.dataclass(frozen=True)
class DefinitionConfig(RunConfig):
    """A run that trains a reconstructor; `model` is that of its checkpoint."""

    reconstruction: ReconstructionConfig = ReconstructionConfig()


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a config dataclass as plain JSON data (tuples become lists)."""
    return _plain(dataclasses.asdict(config))


def to_config_dict(config: Any) -> ConfigDict:
    """Returns a config dataclass as a ConfigDict, for `configs/` files to change and return."""
    return ConfigDict(_with_config_dicts(as_dict(config)), convert_dict=True)


def from_config_dict(cls: type, values: Mapping[str, Any], path: str = "config") -> Any:
    """Converts a ConfigDict or plain mapping into the dataclass `cls`, strictly.

    Args:
        cls: one of the config dataclasses.
        values: field name to value; fields left out keep their defaults.
        path: how error messages call this mapping.

    Raises:
        UsageError: an unknown field, a value of the wrong type, or one out of range.
    """
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    converted = {}
    for name in values:
        if name not in hints:
            hint = nearest(name, known) or f"; known fields: {', '.join(known)}"
            raise UsageError(f"{path}.{name}: there is no such field{hint}")
        converted[name] = _convert(hints[name], values[name], f"{path}.{name}")
    config = cls(**converted)
    config.check(path)
    return config


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping | ConfigDict):
            raise UsageError(f"{path}={value!r}: expected a mapping of fields")
        return from_config_dict(typing.cast(type, hint), value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{path}={value!r}: expected a list")
        return tuple(_convert(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            options = [str(argument) for argument in arguments]
            hint_text = nearest(str(value), options)
            raise UsageError(f"{path}={value!r}: expected one of {', '.join(options)}{hint_text}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UsageError(f"{path}={value!r}: expected {hint.__name__}, got {type(value).__name__}")
    return value


def _require(condition: bool, path: str, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise UsageError(f"{path}.{name}={value!r}: expected {expected}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _with_config_dicts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_config_dicts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [
            ConfigDict(_with_config_dicts(item)) if isinstance(item, dict) else item
            for item in value
        ]
    return value
