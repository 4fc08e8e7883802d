"""How common each token of a vocabulary is: in a corpus, or as the vocabulary's order tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ddrp_jax.data.records import INDEX_FILE, Records, open_records
from ddrp_jax.data.sources import Source
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.errors import DdrpError, UsageError

# Rows that published vocabularies keep free, by spelling: BERT's [unused12], Gemma's <unused12>,
# fairseq's madeupword0001, T5's <extra_id_5>, GPT-2's <|endoftext|>.
_RESERVED = re.compile(
    r"[\[<]unused_?\d+[\]>]|<?madeupword\d+>?|<extra_id_\d+>|<\|[^|]+\|>", re.IGNORECASE
)
# What is tokenised at a time: large against the cost of a call, small against memory.
_CHUNK_CHARACTERS = 500_000
_BLOCK_TOKENS = 2**24


def reserved_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids that stand for no text: special tokens, reserved rows, ids without a piece.

    A row such as `[unused12]` was never trained, whatever a vocabulary's order says of it.
    """
    spellings = map(tokenizer.id_to_token, range(tokenizer.vocab_size))
    unused = {
        token
        for token, spelling in enumerate(spellings)
        if not spelling or _RESERVED.fullmatch(spelling)
    }
    return tokenizer.special_ids | unused


def rank_tokens(tokenizer: Tokenizer, corpus: str | Path | Source | None = None) -> np.ndarray:
    """Ranks a vocabulary, most frequent token first.

    Args:
        tokenizer: whose vocabulary.
        corpus: what `count_tokens` takes. Tokens of equal counts, as those that do not occur,
            stay in the vocabulary's order, and so do all where there is no corpus: published
            vocabularies are roughly ordered by frequency.

    Returns:
        Int64 ids, each of the vocabulary once but for `reserved_ids`.

    Raises:
        UsageError, DdrpError: as `count_tokens` does.
    """
    ids = np.setdiff1d(np.arange(tokenizer.vocab_size), list(reserved_ids(tokenizer)))
    if corpus is None:
        return ids
    counts = count_tokens(tokenizer, corpus)
    return ids[np.argsort(-counts[ids], kind="stable")]


def count_tokens(tokenizer: Tokenizer, corpus: str | Path | Source) -> np.ndarray:
    """Counts the tokens of a corpus, which is read as a stream.

    Args:
        tokenizer: turns the text into ids.
        corpus: a source, the text of one as `ddrp prepare --input` takes it, or a folder that
            `ddrp prepare` wrote with this tokenizer (all its splits; the fastest).

    Returns:
        Int64 [vocab_size]. A source's weight is not regarded.

    Raises:
        UsageError: there is no such corpus, or its records come from another tokenizer.
        DdrpError: it holds no text, or a file is damaged.
    """
    if not isinstance(corpus, Source) and (Path(corpus) / INDEX_FILE).is_file():
        blocks = _blocks(open_records(corpus), tokenizer)
    else:
        source = corpus if isinstance(corpus, Source) else Source(str(corpus))
        blocks = _encoded(source, tokenizer)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for block in blocks:
        counts += np.bincount(block, minlength=len(counts))
    if not counts.any():
        name = corpus.spec if isinstance(corpus, Source) else corpus
        raise DdrpError(f"corpus '{name}': no text in it, so no token can be counted")
    return counts


def _blocks(records: Records, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    if records.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"records '{records.path}' were made with tokenizer {records.tokenizer_fingerprint}, "
            f"not with {tokenizer.fingerprint}; run 'ddrp prepare' with that tokenizer, or name "
            "the text itself"
        )
    for split in records.splits.values():
        for name, tokens in split.shards:
            shard = np.memmap(split.path / name, dtype=split.dtype, mode="r")
            for begin in range(0, tokens, _BLOCK_TOKENS):
                yield np.asarray(shard[begin : begin + _BLOCK_TOKENS], np.int64)


def _encoded(source: Source, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for texts in _chunks(source.documents()):
        ids = tokenizer.encode_batch(texts)
        yield np.fromiter((token for document in ids for token in document), np.int64)


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in documents:
        chunk.append(text)
        characters += len(text)
        if characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
