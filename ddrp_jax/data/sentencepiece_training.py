"""Training a SentencePiece model so that the same text always gives the same file."""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Iterable, Iterator

from ddrp_jax.data.tokenizers import ROLES, SentencePieceTokenizer
from ddrp_jax.errors import DdrpError, UsageError

# SentencePiece drops longer lines from training without a word.
MAX_SENTENCE_BYTES = 4192
# Sentences kept in memory for training; more text than this hardly moves a vocabulary.
MAX_SENTENCES = 2_000_000
# The trainer uses this character for its own ends and skips sentences that hold it.
_RESERVED = "\u2585"
# Part of the result depends on the number of threads, so it never follows the machine's.
_THREADS = 8


@dataclasses.dataclass
class TrainingReport:
    """What became of the text.

    Attributes:
        lines: lines that hold text.
        split_lines: lines longer than 4,192 bytes, which were split, none dropped.
        sentences: what the lines gave after splitting.
        dropped_sentences: those that hold U+2585, which the trainer keeps for itself.
        unsampled_sentences: those left out at random because there were more than 2 million.
    """

    lines: int = 0
    split_lines: int = 0
    sentences: int = 0
    dropped_sentences: int = 0
    unsampled_sentences: int = 0


def train_sentencepiece(
    documents: Iterable[str],
    *,
    vocab_size: int,
    model: str = "unigram",
    character_coverage: float = 0.9995,
    max_sentences: int = MAX_SENTENCES,
) -> tuple[SentencePieceTokenizer, TrainingReport]:
    """Trains a tokenizer with `[PAD] [UNK] [CLS] [SEP] [MASK]` as ids 0 to 4.

    Args:
        documents: the text; lines end at `\\n` only.
        vocab_size: pieces, the five special ones included.
        model: "unigram" or "bpe".
        character_coverage: share of all characters that get pieces; the rest is unknown.
        max_sentences: a seeded sample of this many is trained on.

    Raises:
        UsageError: the text is too little for `vocab_size`, or `vocab_size` for the text.
        DdrpError: there is no text.
    """
    from sentencepiece import SentencePieceTrainer

    report = TrainingReport()
    sample = _sample(_sentences(documents, report), max_sentences, report)
    if not sample:
        raise DdrpError("no text to train a tokenizer on: every input is empty")
    names = {role: spellings[0] for role, spellings in ROLES.items()}
    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=written,
            vocab_size=vocab_size,
            model_type=model,
            character_coverage=character_coverage,
            max_sentence_length=MAX_SENTENCE_BYTES,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=names["pad"],
            unk_piece=names["unk"],
            bos_piece=names["cls"],
            eos_piece=names["sep"],
            control_symbols=[names["mask"]],
            # With these as pieces, the spelling of a special token is never unknown text.
            required_chars="".join(sorted(set("".join(names.values())))),
            # A seed vocabulary of a million, the trainer's default, costs a small model three times
            # the time and changed its number of tokens by 0.1 %.
            seed_sentencepiece_size=min(20 * vocab_size, 1_000_000),
            num_threads=_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[-1].split("] ")[-1]
        raise UsageError(f"vocab_size={vocab_size}: SentencePiece refuses: {reason}") from error
    return SentencePieceTokenizer(_with_exact_scores(written.getvalue())), report


def _with_exact_scores(model: bytes) -> bytes:
    """Rounds scores to multiples of 1/512, so that float32 sums over a page of text are exact.

    SentencePiece adds the scores of a whole text in float32: two segmentations of a word that
    score about the same would win by turns, depending on what stands before the word.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    for piece in proto.pieces:
        piece.score = round(piece.score * 512) / 512
    return proto.SerializeToString()


def _sentences(documents: Iterable[str], report: TrainingReport) -> Iterator[str]:
    for document in documents:
        for line in document.split("\n"):
            if not line.strip():
                continue
            report.lines += 1
            parts = split_bytes(line, MAX_SENTENCE_BYTES)
            report.split_lines += len(parts) > 1
            for part in parts:
                report.sentences += 1
                if _RESERVED in part:
                    report.dropped_sentences += 1
                else:
                    yield part


def split_bytes(line: str, limit: int) -> list[str]:
    """Splits `line` at spaces, or within a word that is too long, into at most `limit` bytes each.

    Every part has at least one character that is no space, and no such character is lost.
    """
    rest = line.encode("utf-8")
    parts = []
    while len(rest) > limit:
        cut = rest.rfind(b" ", 0, limit + 1)
        if cut <= 0:
            cut = limit
            while rest[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        parts.append(rest[:cut].decode("utf-8"))
        rest = rest[cut:].lstrip(b" ")
    parts.append(rest.decode("utf-8"))
    return [part for part in parts if part.strip()]


def _sample(sentences: Iterable[str], size: int, report: TrainingReport) -> list[str]:
    """Keeps a uniform sample of `size` sentences, in reading order (reservoir sampling)."""
    kept: list[tuple[int, str]] = []
    generator = random.Random(0)
    for number, sentence in enumerate(sentences):
        if number < size:
            kept.append((number, sentence))
            continue
        report.unsampled_sentences += 1
        slot = generator.randrange(number + 1)
        if slot < size:
            kept[slot] = (number, sentence)
    return [sentence for _, sentence in sorted(kept)]
