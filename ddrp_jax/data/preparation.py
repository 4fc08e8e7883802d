"""Writing records: read documents, tokenise them in several processes, store the ids."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

import ddrp_jax
from ddrp_jax.data.folders import check_replaceable, whole_folder
from ddrp_jax.data.hashing import random_bits, uniform
from ddrp_jax.data.records import INDEX_FILE, VERSION, Records, open_records
from ddrp_jax.data.sources import Source
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError

# A quarter of a gigabyte at two bytes a token.
SHARD_TOKENS = 2**27
# What one process tokenises at a time: large against the cost of passing it, small against memory.
_CHUNK_CHARACTERS = 500_000

Progress = Callable[[int, int, int], None]


@dataclasses.dataclass
class _Chunk:
    texts: list[str] = dataclasses.field(default_factory=list)
    copies: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Encoded:
    tokens: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    heldout: np.ndarray


def prepare_records(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    output: str | Path,
    *,
    holdout: float = 0.0,
    seed: int = 0,
    processes: int = 1,
    overwrite: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> Records:
    """Turns documents into a record folder that appears whole or not at all.

    The result is a function of the documents, the tokenizer, `holdout` and `seed` alone.

    Args:
        sources: read one after the other.
        tokenizer: is stored beside the ids.
        output: the folder to make.
        holdout: share of the documents that goes to the split "heldout". A document's text
            decides, so copies of one never lie on both sides.
        seed: of the choice of held-out documents and of those that a source's weight takes.
        processes: how many tokenise.
        overwrite: whether a finished folder may be replaced.
        shard_tokens: tokens after which the next file begins, at the end of a document.
        progress: called with the documents, tokens and bytes done so far.

    Raises:
        UsageError: the output exists, or `holdout` leaves a split empty.
        DdrpError: there is no text, or a source is damaged.
    """
    output = Path(output)
    if not 0 <= holdout < 1:
        raise UsageError(f"holdout={holdout!r}: expected a share of at least 0 and below 1")
    check_replaceable(output, marker=INDEX_FILE, overwrite=overwrite)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    with whole_folder(output, marker=INDEX_FILE, overwrite=overwrite) as working:
        tokenizer.save(working / "tokenizer")
        names = ("train", "heldout") if holdout else ("train",)
        writers = [_SplitWriter(working / name, tokenizer, dtype, shard_tokens) for name in names]
        statistics: list[dict[str, Any]] = [
            {"spec": source.spec, "weight": source.weight, "documents": 0, "empty_documents": 0}
            for source in sources
        ]
        chunks = _chunks(sources, statistics, seed)
        encode = _Encoder(str(working / "tokenizer"), holdout, seed, dtype)
        done = np.zeros(3, np.int64)
        for chunk, encoded in _encode_all(chunks, encode, processes):
            for name, writer in zip(names, writers, strict=True):
                done += _write(writer, chunk, encoded, heldout=name == "heldout")
            if progress is not None:
                progress(*done.tolist())
        splits = {name: writer.close() for name, writer in zip(names, writers, strict=True)}
        _check_not_empty(splits, holdout)
        index = {
            "version": VERSION,
            "ddrp_jax": ddrp_jax.__version__,
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "kind": tokenizer.kind,
                "vocab_size": tokenizer.vocab_size,
            },
            "dtype": dtype.str,
            "holdout": holdout,
            "seed": seed,
            "sources": statistics,
            "splits": splits,
        }
        (working / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return open_records(output)


class _SplitWriter:
    """Appends documents to one split."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, dtype: np.dtype, shard_tokens: int):
        folder.mkdir()
        self._folder, self._dtype, self._shard_tokens = folder, dtype, shard_tokens
        self._special = sorted(tokenizer.special_ids)
        self._counts = np.zeros(tokenizer.vocab_size, np.int64)
        self._documents = self._tokens = self._bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._offsets = open(folder / "documents.bin", "wb")  # noqa: SIM115
        self._offsets.write(np.zeros(1, "<i8").tobytes())
        self._file: Any = None

    def add(self, documents: list[np.ndarray], text_bytes: int) -> None:
        """Appends whole documents that hold `text_bytes` of text together."""
        tokens = np.concatenate(documents)
        if self._file is None or self._shards[-1]["tokens"] >= self._shard_tokens:
            self._next_shard()
        self._file.write(tokens.astype(self._dtype).tobytes())
        ends = self._tokens + np.cumsum([len(document) for document in documents])
        self._offsets.write(ends.astype("<i8").tobytes())
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        self._shards[-1]["tokens"] += len(tokens)
        self._documents += len(documents)
        self._tokens += len(tokens)
        self._bytes += text_bytes

    def close(self) -> dict[str, Any]:
        """Closes the files and returns what index.json says of this split."""
        self._offsets.close()
        if self._file is not None:
            self._file.close()
        return {
            "documents": self._documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "largest_id": int(np.flatnonzero(self._counts).max(initial=0)),
            "unigram_entropy": self._unigram_entropy(),
            "shards": self._shards,
        }

    def _next_shard(self) -> None:
        if self._file is not None:
            self._file.close()
        name = f"tokens-{len(self._shards):05d}.bin"
        self._shards.append({"file": name, "tokens": 0})
        self._file = open(self._folder / name, "wb")  # noqa: SIM115

    def _unigram_entropy(self) -> float:
        counts = self._counts.copy()
        counts[self._special] = 0
        shares = counts[counts > 0] / max(counts.sum(), 1)
        return float(-np.sum(shares * np.log(shares)))


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Tokenises chunks; each process loads the tokenizer once."""

    tokenizer_folder: str
    holdout: float
    seed: int
    dtype: np.dtype

    def __call__(self, texts: list[str]) -> _Encoded:
        ids = _loaded(self.tokenizer_folder).encode_batch(texts)
        flat = [token for document in ids for token in document]
        raw = [text.encode("utf-8") for text in texts]
        keys = [hashlib.blake2b(text, digest_size=8).digest() for text in raw]
        draws = uniform(random_bits(self.seed, np.frombuffer(b"".join(keys), "<u8")))
        return _Encoded(
            tokens=np.array(flat, self.dtype),
            lengths=np.array([len(document) for document in ids], np.int64),
            bytes=np.array([len(text) for text in raw], np.int64),
            heldout=draws < self.holdout,
        )


_tokenizers: dict[str, Tokenizer] = {}


def _loaded(folder: str) -> Tokenizer:
    if folder not in _tokenizers:
        _tokenizers.clear()
        _tokenizers[folder] = load_tokenizer(folder)
    return _tokenizers[folder]


def _chunks(
    sources: Sequence[Source], statistics: list[dict[str, Any]], seed: int
) -> Iterator[_Chunk]:
    chunk, characters = _Chunk(), 0
    for number, source in enumerate(sources):
        whole, fraction = divmod(source.weight, 1)
        for document, text in enumerate(source.documents()):
            if not text.strip():
                statistics[number]["empty_documents"] += 1
                continue
            statistics[number]["documents"] += 1
            copies = int(whole)
            if fraction:
                copies += bool(uniform(random_bits(seed, number, document)) < fraction)
            if not copies:
                continue
            chunk.texts.append(text)
            chunk.copies.append(copies)
            characters += len(text)
            if characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = _Chunk(), 0
    if chunk.texts:
        yield chunk


def _encode_all(
    chunks: Iterable[_Chunk], encode: _Encoder, processes: int
) -> Iterator[tuple[_Chunk, _Encoded]]:
    """Yields every chunk with its ids, in order, with a bounded number of chunks in memory."""
    if processes <= 1:
        for chunk in chunks:
            yield chunk, encode(chunk.texts)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    waiting: collections.deque[tuple[_Chunk, concurrent.futures.Future[_Encoded]]]
    waiting = collections.deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(encode, chunk.texts)))
            if len(waiting) > 2 * processes:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise DdrpError(
            "a process that tokenises was killed, perhaps for want of memory; try fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # Every process is one of several already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    exit_with_parent()


def exit_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that one was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _write(writer: _SplitWriter, chunk: _Chunk, encoded: _Encoded, *, heldout: bool) -> np.ndarray:
    """Appends the chunk's documents of one split; returns documents, tokens and bytes written."""
    documents: list[np.ndarray] = []
    text_bytes = 0
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    for i in np.flatnonzero((encoded.heldout == heldout) & (encoded.lengths > 0)).tolist():
        document = encoded.tokens[starts[i] : starts[i] + encoded.lengths[i]]
        copies = 1 if heldout else chunk.copies[i]
        documents += [document] * copies
        text_bytes += copies * int(encoded.bytes[i])
    if documents:
        writer.add(documents, text_bytes)
    return np.array([len(documents), sum(map(len, documents)), text_bytes])


def _check_not_empty(splits: dict[str, dict[str, Any]], holdout: float) -> None:
    total = sum(split["documents"] for split in splits.values())
    if total == 0:
        raise DdrpError("no text in any input: the corpus is empty")
    for name, split in splits.items():
        if split["documents"] == 0:
            raise UsageError(
                f"holdout={holdout}: of {total} documents none fell to the split {name!r}; "
                "choose another --holdout (or --seed), or 0 for no held-out split"
            )
