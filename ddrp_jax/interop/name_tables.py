"""Which tensor of a published model is which of our parameters: one table for each family.

A table is read in both directions. A parameter of ours is a path, `a/b/c`; `:1` behind it means
the second of the three that a fused projection holds (queries, keys, values). In a name of theirs
`{layer}` counts the layers, which are one stacked parameter of ours. A row counts for a model
where our model has the parameter: no token types, no row.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import math
import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np

Shape = tuple[int, ...]


class Transform(enum.Enum):
    """How a tensor of theirs is laid out, seen from ours."""

    SAME = enum.auto()
    FLAT = enum.auto()  # heads and their width are one axis
    KERNEL = enum.auto()  # [outputs, inputs]; our first axis is the inputs, the rest the outputs
    MERGE_KERNEL = enum.auto()  # [outputs, inputs]; our last axis is the outputs
    VOCABULARY = enum.auto()  # without the rows that pad our vocabulary
    VOCABULARY_ROW = enum.auto()  # the same of a vector, which theirs has as a matrix of one row

    def shape(self, ours: Shape, vocab_size: int) -> Shape:
        """Returns the shape of theirs."""
        match self:
            case Transform.SAME:
                return ours
            case Transform.FLAT:
                return (math.prod(ours),)
            case Transform.KERNEL:
                return (math.prod(ours[1:]), ours[0])
            case Transform.MERGE_KERNEL:
                return (ours[-1], math.prod(ours[:-1]))
            case Transform.VOCABULARY:
                return (vocab_size, *ours[1:])
            case Transform.VOCABULARY_ROW:
                return (1, vocab_size)

    def to_theirs(self, ours: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns theirs, a view where it can be."""
        if self is Transform.VOCABULARY:
            return ours[: shape[0]]
        if self is Transform.VOCABULARY_ROW:
            return ours[None, : shape[1]]
        if self in (Transform.KERNEL, Transform.MERGE_KERNEL):
            return ours.reshape(shape[::-1]).T
        return ours.reshape(shape)

    def to_ours(self, theirs: np.ndarray, ours: np.ndarray) -> None:
        """Writes theirs into the zeroed array `ours`."""
        if self is Transform.VOCABULARY:
            ours[: len(theirs)] = theirs
        elif self is Transform.VOCABULARY_ROW:
            ours[: theirs.shape[1]] = theirs[0]
        elif self in (Transform.KERNEL, Transform.MERGE_KERNEL):
            ours[...] = theirs.T.reshape(ours.shape)
        else:
            ours[...] = theirs.reshape(ours.shape)


SAME, FLAT, KERNEL, MERGE_KERNEL, VOCABULARY, VOCABULARY_ROW = Transform


class Part(enum.Enum):
    """The parts of a model; a file holds each of them whole, or not at all."""

    ENCODER = "encoder"
    DECODER = "decoder"
    MASKED_LM = "masked-LM head"
    GENERATION = "bias of the output matrix"
    POOLER = "pooler"
    CLASSIFIER = "classification head"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        ours: path of our parameter, with `:i` for one of three fused ones.
        theirs: name of the tensor without the base model's prefix.
        transform: how it is laid out.
        part: the part that it belongs to.
        copy: another name that the tensor goes by; where a file has both, this is the one in use.
        rows_without: rows of zeros to write where our model lacks the parameter and theirs always
            has it; 0 leaves it out.
    """

    ours: str
    theirs: str
    transform: Transform = SAME
    part: Part = Part.ENCODER
    copy: str = ""
    rows_without: int = 0


@dataclasses.dataclass(frozen=True)
class Table:
    """The names of one family.

    Attributes:
        prefix: before the names of encoder and pooler where a head stands on them.
        rows: what we read and write.
        copies: other names of the word table in a model that ties its output matrix to it.
        parts: what a model of each kind ("base", "masked_lm", ...) is made of.
        harmless: patterns of names that files hold and nobody needs, and what they are.
        head: the part that our model always has, whatever the kind of theirs.
    """

    prefix: str
    rows: tuple[Row, ...]
    copies: tuple[str, ...]
    parts: Mapping[str, tuple[Part, ...]]
    harmless: Mapping[str, str]
    head: Part = Part.MASKED_LM

    @property
    def word_table(self) -> str:
        """Name of the word table."""
        return next(row.theirs for row in self.rows if row.ours == "encoder/embeddings/word")

    def canonical(self, name: str) -> str:
        """Returns a name as the table has it: no prefix, and LayerNorm's modern names."""
        name = name.removeprefix(self.prefix)
        for old, new in (("gamma", "weight"), ("beta", "bias")):
            name = re.sub(rf"((?:LayerNorm|layer_norm)\.){old}$", rf"\1{new}", name)
        return name

    def full_name(self, row: Row, name: str, *, has_head: bool) -> str:
        """Returns a name as files have it.

        Args:
            row: its row.
            name: as the table has it.
            has_head: whether a head stands on the base model.
        """
        in_base = row.part in (Part.ENCODER, Part.DECODER, Part.POOLER)
        return f"{self.prefix}{name}" if has_head and in_base else name

    def why_harmless(self, name: str) -> str | None:
        """Returns what a left-over tensor is, or None where it is not known to be harmless."""
        for pattern, reason in self.harmless.items():
            if fnmatch.fnmatchcase(name, pattern):
                return reason
        return None


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of theirs and the slice of our parameter that it is.

    Attributes:
        row: the row of the table.
        theirs: its name in the table's form, the layer filled in.
        path: our parameter.
        index: where in our parameter.
        shape: theirs.
    """

    row: Row
    theirs: str
    path: str
    index: tuple[int | slice, ...]
    shape: Shape


def parts_of_kinds(
    base: tuple[Part, ...], classification: tuple[Part, ...]
) -> dict[str, tuple[Part, ...]]:
    """Returns the parts of each kind of model, given those beside the encoder."""
    return {
        "base": (Part.ENCODER, *base),
        "masked_lm": (Part.ENCODER, Part.MASKED_LM),
        "classification": (Part.ENCODER, *classification),
    }


def places(
    table: Table, parts: Collection[Part], shapes: Mapping[str, Shape], vocab_size: int
) -> Iterator[Place]:
    """Yields a place for every tensor that a model with parameters of these shapes has.

    Args:
        table: the family's.
        parts: those wanted.
        shapes: of our parameters, by path.
        vocab_size: without padding.
    """
    for row in table.rows:
        path, _, fused = row.ours.partition(":")
        if row.part not in parts or path not in shapes:
            continue
        ours = shapes[path]
        layers = range(ours[0]) if "{layer}" in row.theirs else [None]
        for layer in layers:
            inner = ours if layer is None else ours[1:]
            index: tuple[int | slice, ...] = () if layer is None else (layer,)
            if fused:
                # The fused axis stands before heads and head size.
                index += (*[slice(None)] * (len(inner) - 3), int(fused))
                inner = (*inner[:-3], *inner[-2:])
            name = row.theirs if layer is None else row.theirs.format(layer=layer)
            yield Place(row, name, path, index, row.transform.shape(inner, vocab_size))


def _dense(ours: str, theirs: str, part: Part = Part.ENCODER) -> tuple[Row, Row]:
    return (
        Row(f"{ours}kernel", f"{theirs}.weight", KERNEL, part),
        Row(f"{ours}bias", f"{theirs}.bias", SAME, part),
    )


def _norm(ours: str, theirs: str, part: Part = Part.ENCODER) -> tuple[Row, Row]:
    return (
        Row(f"{ours}/scale", f"{theirs}.weight", SAME, part),
        Row(f"{ours}/bias", f"{theirs}.bias", SAME, part),
    )


def _embeddings(norm: str, token_types: int) -> tuple[Row, ...]:
    return (
        Row("encoder/embeddings/word", "embeddings.word_embeddings.weight", VOCABULARY),
        Row("encoder/embeddings/position", "embeddings.position_embeddings.weight"),
        Row(
            "encoder/embeddings/token_type",
            "embeddings.token_type_embeddings.weight",
            rows_without=token_types,
        ),
        *_norm("encoder/embeddings/norm", norm),
    )


def _fused(ours: str, *names: str, part: Part = Part.ENCODER) -> tuple[Row, ...]:
    return tuple(
        row
        for number, name in enumerate(names)
        for row in (
            Row(f"{ours}_kernel:{number}", f"{name}.weight", KERNEL, part),
            Row(f"{ours}_bias:{number}", f"{name}.bias", FLAT, part),
        )
    )


def _merging(ours: str, theirs: str, part: Part = Part.ENCODER) -> tuple[Row, Row]:
    return (
        Row(f"{ours}_kernel", f"{theirs}.weight", MERGE_KERNEL, part),
        Row(f"{ours}_bias", f"{theirs}.bias", SAME, part),
    )


def _layer(
    queries: str, keys: str, values: str, output: str, norm: str, up: str, down: str, last_norm: str
) -> tuple[Row, ...]:
    ours = "encoder/layers"
    return (
        *_fused(f"{ours}/attention/qkv", queries, keys, values),
        *_merging(f"{ours}/attention/out", output),
        *_norm(f"{ours}/attention_norm", norm),
        *_dense(f"{ours}/feed_forward/up_", up),
        *_dense(f"{ours}/feed_forward/down_", down),
        *_norm(f"{ours}/feed_forward_norm", last_norm),
    )


def _decoder_layer(theirs: str) -> tuple[Row, ...]:
    ours, part = "decoder/layers", Part.DECODER
    own, cross = f"{theirs}.self_attn", f"{theirs}.encoder_attn"
    queries = f"{ours}/cross_attention/q"
    return (
        *_fused(f"{ours}/self_attention/qkv", *(f"{own}.{x}_proj" for x in "qkv"), part=part),
        *_merging(f"{ours}/self_attention/out", f"{own}.out_proj", part),
        *_norm(f"{ours}/self_attention_norm", f"{theirs}.self_attn_layer_norm", part),
        Row(f"{queries}_kernel", f"{cross}.q_proj.weight", KERNEL, part),
        Row(f"{queries}_bias", f"{cross}.q_proj.bias", FLAT, part),
        *_fused(f"{ours}/cross_attention/kv", *(f"{cross}.{x}_proj" for x in "kv"), part=part),
        *_merging(f"{ours}/cross_attention/out", f"{cross}.out_proj", part),
        *_norm(f"{ours}/cross_attention_norm", f"{theirs}.encoder_attn_layer_norm", part),
        *_dense(f"{ours}/feed_forward/up_", f"{theirs}.fc1", part),
        *_dense(f"{ours}/feed_forward/down_", f"{theirs}.fc2", part),
        *_norm(f"{ours}/feed_forward_norm", f"{theirs}.final_layer_norm", part),
    )


def _masked_lm(dense: str, norm: str, bias: str, decoder: str) -> tuple[Row, ...]:
    part = Part.MASKED_LM
    copy = f"{decoder}.bias" if bias != f"{decoder}.bias" else ""
    return (
        *_dense("head/dense_", dense, part),
        *_norm("head/norm", norm, part),
        Row("head/decoder_bias", bias, VOCABULARY, part, copy=copy),
        Row("head/decoder_kernel", f"{decoder}.weight", VOCABULARY, part),
    )


_BERT_LAYER = _layer(
    queries="encoder.layer.{layer}.attention.self.query",
    keys="encoder.layer.{layer}.attention.self.key",
    values="encoder.layer.{layer}.attention.self.value",
    output="encoder.layer.{layer}.attention.output.dense",
    norm="encoder.layer.{layer}.attention.output.LayerNorm",
    up="encoder.layer.{layer}.intermediate.dense",
    down="encoder.layer.{layer}.output.dense",
    last_norm="encoder.layer.{layer}.output.LayerNorm",
)
_POOLER = _dense("pooler/", "pooler.dense", Part.POOLER)
# RoBERTa's classification head is BERT's pooler and classifier under other names.
_ROBERTA_HEADS = (
    *_masked_lm("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
    *_POOLER,
    *_dense("pooler/", "classifier.dense", Part.CLASSIFIER),
    *_dense("", "classifier.out_proj", Part.CLASSIFIER),
)
_HARMLESS = {
    "embeddings.position_ids": "a buffer",
    "embeddings.token_type_ids": "a buffer",
    "pooler.dense.*": "a pooler that this architecture does not use",
}

BERT = Table(
    prefix="bert.",
    rows=(
        *_embeddings("embeddings.LayerNorm", token_types=2),
        *_BERT_LAYER,
        *_masked_lm(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
            "cls.predictions.decoder",
        ),
        *_POOLER,
        *_dense("", "classifier", Part.CLASSIFIER),
    ),
    copies=("cls.predictions.decoder.weight",),
    parts=parts_of_kinds((Part.POOLER,), (Part.POOLER, Part.CLASSIFIER)),
    harmless=_HARMLESS | {"cls.seq_relationship.*": "the next-sentence head"},
)

ROBERTA = Table(
    prefix="roberta.",
    rows=(
        *_embeddings("embeddings.LayerNorm", token_types=1),
        *_BERT_LAYER,
        *_ROBERTA_HEADS,
    ),
    copies=("lm_head.decoder.weight",),
    parts=parts_of_kinds((Part.POOLER,), (Part.CLASSIFIER,)),
    harmless=_HARMLESS,
)

MPNET = Table(
    prefix="mpnet.",
    rows=(
        *_embeddings("embeddings.LayerNorm", token_types=0),
        *_layer(
            queries="encoder.layer.{layer}.attention.attn.q",
            keys="encoder.layer.{layer}.attention.attn.k",
            values="encoder.layer.{layer}.attention.attn.v",
            output="encoder.layer.{layer}.attention.attn.o",
            norm="encoder.layer.{layer}.attention.LayerNorm",
            up="encoder.layer.{layer}.intermediate.dense",
            down="encoder.layer.{layer}.output.dense",
            last_norm="encoder.layer.{layer}.output.LayerNorm",
        ),
        Row("encoder/bucket_bias/bias", "encoder.relative_attention_bias.weight"),
        *_ROBERTA_HEADS,
    ),
    copies=("lm_head.decoder.weight",),
    parts=parts_of_kinds((Part.POOLER,), (Part.CLASSIFIER,)),
    harmless=_HARMLESS,
)


BART = Table(
    prefix="model.",
    rows=(
        Row("encoder/embeddings/word", "shared.weight", VOCABULARY),
        Row("encoder/embeddings/position", "encoder.embed_positions.weight"),
        *_norm("encoder/embeddings/norm", "encoder.layernorm_embedding"),
        *_layer(
            queries="encoder.layers.{layer}.self_attn.q_proj",
            keys="encoder.layers.{layer}.self_attn.k_proj",
            values="encoder.layers.{layer}.self_attn.v_proj",
            output="encoder.layers.{layer}.self_attn.out_proj",
            norm="encoder.layers.{layer}.self_attn_layer_norm",
            up="encoder.layers.{layer}.fc1",
            down="encoder.layers.{layer}.fc2",
            last_norm="encoder.layers.{layer}.final_layer_norm",
        ),
        Row("decoder/position", "decoder.embed_positions.weight", part=Part.DECODER),
        *_norm("decoder/norm", "decoder.layernorm_embedding", Part.DECODER),
        *_decoder_layer("decoder.layers.{layer}"),
        Row("final_logits_bias", "final_logits_bias", VOCABULARY_ROW, Part.GENERATION),
    ),
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    parts={
        "base": (Part.ENCODER, Part.DECODER),
        "generation": (Part.ENCODER, Part.DECODER, Part.GENERATION),
    },
    harmless={"encoder.version": "a number", "decoder.version": "a number"},
    head=Part.GENERATION,
)


def _relative(ours: str, theirs: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{ours}/relative/{on}/{name}", f"{theirs}relative_{on}.{name}")
        for on in ("keys", "values")
        for name in ("distance", "direction", "table")
    )


# Names of our own, for the classes in torch_export/.
DDRP = Table(
    prefix="ddrp.",
    rows=(
        *_embeddings("embeddings.norm", token_types=0),
        *_layer(
            queries="layers.{layer}.attention.query",
            keys="layers.{layer}.attention.key",
            values="layers.{layer}.attention.value",
            output="layers.{layer}.attention.output",
            norm="layers.{layer}.attention_norm",
            up="layers.{layer}.up",
            down="layers.{layer}.down",
            last_norm="layers.{layer}.feed_forward_norm",
        ),
        *_relative("encoder/layers/attention", "layers.{layer}.attention."),
        *_relative("encoder", ""),
        Row("encoder/bucket_bias/bias", "bucket_bias.bias"),
        *_norm("encoder/final_norm", "final_norm"),
        *_masked_lm("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias", "lm_head.decoder"),
        *_dense("pooler/", "classifier.dense", Part.CLASSIFIER),
        *_dense("", "classifier.out_proj", Part.CLASSIFIER),
    ),
    copies=("lm_head.decoder.weight",),
    parts=parts_of_kinds((), (Part.CLASSIFIER,)),
    harmless=_HARMLESS,
)
