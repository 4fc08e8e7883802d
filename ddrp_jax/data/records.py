"""Records: a corpus as one stream of token ids with document offsets.

    DIR/index.json              what is there; written last
    DIR/tokenizer/              the tokenizer that made the ids
    DIR/<split>/tokens-00000.bin ...   little-endian ids of whole documents, 2 or 4 bytes each
    DIR/<split>/documents.bin   little-endian int64 [documents + 1]: where each document begins

Documents carry no special tokens: the pipeline adds them for whatever length it packs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import local_copy

INDEX_FILE = "index.json"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """One split, read by memory map.

    Attributes:
        path: the split's folder.
        documents, tokens, bytes: counts; bytes are those of the text in UTF-8.
        largest_id: the largest id in the stream.
        unigram_entropy: nats per token of the distribution of single non-special tokens, which is
            the loss of a model that has learnt nothing but how common each token is.
        dtype: NumPy's name of the type on disk.
        shards: (file name, tokens) in stream order.
    """

    path: Path
    documents: int
    tokens: int
    bytes: int
    largest_id: int
    unigram_entropy: float
    dtype: str
    shards: tuple[tuple[str, int], ...]

    @property
    def num_documents(self) -> int:
        """Documents in this split."""
        return self.documents

    @property
    def num_tokens(self) -> int:
        """Tokens in this split."""
        return self.tokens

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Int64 [documents + 1]: document d is tokens `offsets[d]` up to `offsets[d + 1]`."""
        return np.memmap(self.path / "documents.bin", dtype="<i8", mode="r")

    @property
    def lengths(self) -> np.ndarray:
        """Int64 [documents]: tokens of each document."""
        return np.diff(self.offsets)

    @functools.cached_property
    def _maps(self) -> tuple[list[np.ndarray], np.ndarray]:
        # Plain arrays over the maps: every slice of a memmap object pays for its Python class.
        maps = [
            np.asarray(np.memmap(self.path / name, dtype=self.dtype, mode="r"))
            for name, _ in self.shards
        ]
        return maps, np.cumsum([0, *(tokens for _, tokens in self.shards)])

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the int32 tokens of several stretches, one after the other.

        Args:
            starts: [N] first token of each stretch; a stretch lies within one document.
            lengths: [N] tokens of each.
        """
        maps, bounds = self._maps
        shards = np.searchsorted(bounds, starts, side="right") - 1
        local = starts - bounds[shards]
        parts = [
            maps[shard][start:stop]
            for shard, start, stop in zip(
                shards.tolist(), local.tolist(), (local + lengths).tolist(), strict=True
            )
        ]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    def document(self, number: int) -> np.ndarray:
        """Returns the int32 tokens of one document."""
        return self.gather(self.offsets[number : number + 1], self.lengths[number : number + 1])

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens its own maps; pickling these would copy the corpus.
        fields = {field.name for field in dataclasses.fields(self)}
        return {name: value for name, value in self.__dict__.items() if name in fields}


@dataclasses.dataclass(frozen=True)
class Records:
    """A folder that `ddrp prepare` wrote.

    Attributes:
        path: the folder.
        tokenizer_fingerprint, vocab_size: of the tokenizer that made the ids.
        splits: name to stream: "train", and "heldout" where some documents were held out.
        index: everything in index.json.
    """

    path: Path
    tokenizer_fingerprint: str
    vocab_size: int
    splits: dict[str, TokenStream]
    index: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what the records hold; where they lie and came from is left out."""
        content = [self.index[name] for name in ("tokenizer", "dtype", "splits")]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def split(self, name: str) -> TokenStream:
        """Returns a split by name, or raises UsageError that names those there are."""
        if name not in self.splits:
            raise UsageError(
                f"records {str(self.path)!r} have no split {name!r}, only "
                f"{', '.join(self.splits)}; 'ddrp prepare --holdout 0.5%' makes one"
            )
        return self.splits[name]

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer that made the ids.

        Raises:
            DdrpError: the folder's tokenizer is not the one that index.json names.
        """
        tokenizer = load_tokenizer(self.path / "tokenizer")
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise DdrpError(
                f"{self.path}/tokenizer: fingerprint {tokenizer.fingerprint}, but the records were "
                f"made with {self.tokenizer_fingerprint}; run 'ddrp prepare' again"
            )
        return tokenizer


def open_records(path: str | Path) -> Records:
    """Opens a record folder and checks that its files are as long as its index says.

    Args:
        path: the folder, or that of a bucket (`gs://`), which is copied to the disk.

    Raises:
        UsageError: there are no finished records.
        DdrpError: a file is missing, truncated or of another version.
    """
    path = local_copy(path, INDEX_FILE)
    index_path = path / INDEX_FILE
    if not index_path.exists():
        raise UsageError(
            f"records={str(path)!r}: no {INDEX_FILE} there; "
            f"run 'ddrp prepare --output {path}' first"
        )
    try:
        index = json.loads(index_path.read_bytes())
        version = index["version"]
        if version != VERSION:
            raise DdrpError(
                f"{index_path}: version {version!r}, expected {VERSION}; run 'ddrp prepare' again"
            )
        splits = {
            name: TokenStream(
                path=path / name,
                dtype=index["dtype"],
                shards=tuple((shard["file"], shard["tokens"]) for shard in split["shards"]),
                **{
                    field: split[field]
                    for field in ("documents", "tokens", "bytes", "largest_id", "unigram_entropy")
                },
            )
            for name, split in index["splits"].items()
        }
        fingerprint, vocab_size = (
            index["tokenizer"]["fingerprint"],
            index["tokenizer"]["vocab_size"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DdrpError(f"{index_path}: damaged ({error!r}); run 'ddrp prepare' again") from error
    for split in splits.values():
        _check_files(split)
    return Records(path, fingerprint, vocab_size, splits, index)


def check_records(records: Records, tokenizer_fingerprint: str, vocab_size: int) -> None:
    """Checks that a model can read these records.

    Args:
        records: what will be read.
        tokenizer_fingerprint: of the model's tokenizer.
        vocab_size: rows of the model's word table.

    Raises:
        UsageError: the ids come from another tokenizer, or exceed the model's vocabulary.
    """
    if records.tokenizer_fingerprint != tokenizer_fingerprint:
        raise UsageError(
            f"records {str(records.path)!r} were made with tokenizer "
            f"{records.tokenizer_fingerprint}, not with {tokenizer_fingerprint}; "
            "run 'ddrp prepare' with that tokenizer"
        )
    largest = max(records.vocab_size - 1, *(split.largest_id for split in records.splits.values()))
    if largest >= vocab_size:
        raise UsageError(
            f"records {str(records.path)!r} may hold token ids up to {largest}, beyond the model's "
            f"vocab_size={vocab_size}; set it to at least {largest + 1}"
        )


def _check_files(split: TokenStream) -> None:
    width = np.dtype(split.dtype).itemsize
    expected = {name: tokens * width for name, tokens in split.shards}
    expected["documents.bin"] = 8 * (split.documents + 1)
    for name, size in expected.items():
        path = split.path / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            found = "missing" if actual is None else f"{actual:,} bytes"
            raise DdrpError(f"{path}: {found}, expected {size:,} bytes; run 'ddrp prepare' again")
