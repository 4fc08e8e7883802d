"""A `tokenizer.json` that gives the same ids as one of our SentencePiece models.

PyTorch users load that file; the `tokenizers` library cannot read a SentencePiece model itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddrp_jax.data.tokenizers import SentencePieceTokenizer


def tokenizer_json(tokenizer: SentencePieceTokenizer) -> str:
    """Returns the text of a `tokenizer.json` for a Unigram or BPE SentencePiece model.

    The exported tokenizer adds CLS and SEP, and recognises the spellings of special tokens unless
    its `encode_special_tokens` is set, as is the custom of that library.
    """
    from sentencepiece import sentencepiece_model_pb2 as pb2
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        normalizers,
        pre_tokenizers,
        processors,
    )

    proto = pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
    is_bpe = proto.trainer_spec.model_type == pb2.TrainerSpec.BPE  # type: ignore[attr-defined]
    backend = Tokenizer(_bpe(tokenizer, proto) if is_bpe else _unigram(tokenizer, proto))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(charsmap)] if charsmap else []),
            normalizers.Replace(Regex(" +"), " "),
            # SentencePiece drops outer spaces. A leading one may stay: Metaspace turns it into the
            # mark that the first word has anyway, and after a mask token it must survive.
            normalizers.Replace(Regex(" $"), ""),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    cls, sep = tokenizer.id_to_token(tokenizer.cls_id), tokenizer.id_to_token(tokenizer.sep_id)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
    backend.add_special_tokens(
        [
            AddedToken(
                tokenizer.id_to_token(i),
                special=True,
                normalized=False,
                lstrip=i == tokenizer.mask_id,
            )
            for i in sorted(tokenizer.special_ids)
        ]
    )
    return backend.to_str()


def _unigram(tokenizer: SentencePieceTokenizer, proto):  # type: ignore[no-untyped-def]
    from tokenizers import models

    # SentencePiece never matches a control symbol in text, `tokenizers` would. A score below the
    # sum of any other segmentation of its letters keeps it out: at most 8 letters, all of them
    # pieces (the training asks for that), of which none scores below `lowest`.
    lowest = min(piece.score for piece in proto.pieces)
    forbidden = 10.0 * (lowest - 10.0)
    vocabulary = [
        (piece.piece, forbidden if i in tokenizer.special_ids else piece.score)
        for i, piece in enumerate(proto.pieces)
    ]
    return models.Unigram(vocabulary, unk_id=tokenizer.unk_id, byte_fallback=False)


def _bpe(tokenizer: SentencePieceTokenizer, proto):  # type: ignore[no-untyped-def]
    from tokenizers import models

    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    # SentencePiece merges the pair whose result scores highest, whatever the pair.
    merges = []
    for i, piece in enumerate(proto.pieces):
        if i in tokenizer.special_ids:
            continue
        splits = ((piece.piece[:cut], piece.piece[cut:]) for cut in range(1, len(piece.piece)))
        merges += [(-piece.score, pair) for pair in splits if pair[0] in ids and pair[1] in ids]
    merges.sort(key=lambda merge: merge[0])
    return models.BPE(
        ids,
        [pair for _, pair in merges],
        unk_token=tokenizer.id_to_token(tokenizer.unk_id),
        fuse_unk=True,
    )
