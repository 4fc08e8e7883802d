"""Definition examples on disk: prompts that ask for one piece of a word each.

    DIR/index.json          what is there; written last
    DIR/tokenizer/          the tokenizer that made the ids
    DIR/<array>.npy         one row for each example, in order of target, carrier and sense;
                            ragged ones flat, with `offsets`

A row's `input_ids` are CLS, the prompt and SEP. Its slot shows the pieces before the wanted one;
that one and those behind it are masks, and so is the headword inside its own definition.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import local_copy

INDEX_FILE = "index.json"
VERSION = 1
ARRAYS = {
    "offsets": "int64",
    "input_ids": "int32",
    "definition_flags": "bool",
    "slot_begin": "int32",
    "slot_position": "int32",
    "target_id": "int32",
    "headword": "int32",
    "sense": "int32",
    "held_out": "bool",
    "held_out_ids": "int32",
}
_FLAT = ("input_ids", "definition_flags")


@dataclasses.dataclass(frozen=True)
class Examples:
    """A folder that `ddrp definitions build` wrote, read by memory map. N examples.

    Attributes:
        path: the folder.
        index: everything in index.json.
        offsets: int64 [N + 1]: example n is `offsets[n]` up to `offsets[n + 1]` of the flat arrays.
        input_ids: int32, flat.
        definition_flags: bool, flat: the token belongs to the definition's text and is no mask.
        slot_begin: int32 [N]: column of the slot's first piece.
        slot_position: int32 [N]: column of the wanted piece, which is a mask.
        target_id: int32 [N]: the wanted piece; ascending.
        headword: int32 [N]: whose definition it is, an index into `headwords`.
        sense: int32 [N]: 0 is the dictionary's first definition of the headword.
        held_out: bool [N]: the target is a token of a held-out headword.
        held_out_ids: int32, sorted: every token of the held-out headwords.
    """

    path: Path
    index: dict[str, Any]
    offsets: np.ndarray
    input_ids: np.ndarray
    definition_flags: np.ndarray
    slot_begin: np.ndarray
    slot_position: np.ndarray
    target_id: np.ndarray
    headword: np.ndarray
    sense: np.ndarray
    held_out: np.ndarray
    held_out_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.target_id)

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.index["tokenizer"]["vocab_size"]

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of the tokenizer that made the ids."""
        return self.index["tokenizer"]["fingerprint"]

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what the arrays hold."""
        return self.index["fingerprint"]

    @property
    def headwords(self) -> list[str]:
        """The headwords, casefolded."""
        return self.index["headwords"]

    @property
    def lengths(self) -> np.ndarray:
        """Int64 [N]: tokens of each example."""
        return np.diff(self.offsets)

    @functools.cached_property
    def defined_ids(self) -> np.ndarray:
        """Sorted ids of the tokens with at least one definition."""
        return np.unique(self.target_id)

    def split(self, name: str) -> np.ndarray:
        """Returns the indices of the examples of "train" or "heldout"."""
        if name not in ("train", "heldout"):
            raise ValueError(f"split {name!r}: expected 'train' or 'heldout'")
        return np.flatnonzero(self.held_out == (name == "heldout"))

    def for_tokens(self, token_ids: Any, senses: str = "first") -> np.ndarray:
        """Returns the indices of the examples that produce tokens' rows, token after token.

        Args:
            token_ids: [n] ids, each of them with a definition.
            senses: "first": one example for each token, its headword's first definition; "mean":
                all definitions of the same headword, over which a row is averaged.

        Raises:
            UsageError: a token has no definition, or `senses` is neither.
        """
        if senses not in ("first", "mean"):
            raise UsageError(f"senses={senses!r}: expected 'first' or 'mean'")
        token_ids = np.asarray(token_ids, np.int64)
        first = np.searchsorted(self.target_id, token_ids)
        known = first < len(self)
        known[known] = self.target_id[first[known]] == token_ids[known]
        if not known.all():
            missing = token_ids[~known]
            raise UsageError(
                f"{len(missing):,} of these tokens have no definition in {str(self.path)!r}, "
                f"such as id {missing[0]}"
            )
        if senses == "first":
            return first
        last = np.searchsorted(self.target_id, token_ids, side="right")
        counts = last - first
        starts = np.cumsum(counts) - counts
        every = np.repeat(first - starts, counts) + np.arange(counts.sum())
        carrier = np.repeat(self.headword[first], counts)
        return every[self.headword[every] == carrier]

    def padded(
        self, indices: np.ndarray, length: int, pad_id: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns examples as rows of one length.

        Args:
            indices: [B] examples, none longer than `length`.
            length: T.
            pad_id: what follows an example's end.

        Returns:
            input_ids int32 [B, T], definition_flags bool [B, T], and whether a column is within
            the example, bool [B, T].
        """
        starts, sizes = self.offsets[indices], self.lengths[indices]
        if sizes.max(initial=0) > length:
            raise ValueError(f"an example of {sizes.max()} tokens in rows of {length}")
        inside = np.arange(length) < sizes[:, None]
        source = (starts[:, None] + np.arange(length))[inside]
        input_ids = np.full(inside.shape, pad_id, np.int32)
        flags = np.zeros(inside.shape, bool)
        input_ids[inside] = self.input_ids[source]
        flags[inside] = self.definition_flags[source]
        return input_ids, flags, inside

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer that made the ids.

        Raises:
            DdrpError: the folder's tokenizer is not the one that index.json names.
        """
        tokenizer = load_tokenizer(self.path / "tokenizer")
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise DdrpError(
                f"{self.path}/tokenizer: fingerprint {tokenizer.fingerprint}, but the examples "
                f"were made with {self.tokenizer_fingerprint}; run 'ddrp definitions build' again"
            )
        return tokenizer


def write_examples(
    folder: Path, arrays: Mapping[str, np.ndarray], index: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Writes a folder that `open_examples` reads; the index comes last."""
    tokenizer.save(folder / "tokenizer")
    for name, dtype in ARRAYS.items():
        np.save(folder / f"{name}.npy", arrays[name].astype(dtype))
    (folder / INDEX_FILE).write_text(json.dumps(index, ensure_ascii=False) + "\n", "utf-8")


def open_examples(path: str | Path) -> Examples:
    """Opens a folder of examples and checks that its arrays fit each other.

    Args:
        path: the folder, or that of a bucket (`gs://`), which is copied to the disk.

    Raises:
        UsageError: there are no finished examples.
        DdrpError: a file is missing, damaged or of another version.
    """
    path = local_copy(path, INDEX_FILE)
    index_path = path / INDEX_FILE
    again = "run 'ddrp definitions build' again"
    if not index_path.exists():
        raise UsageError(
            f"definitions={str(path)!r}: no {INDEX_FILE} there; "
            f"run 'ddrp definitions build --output {path}' first"
        )
    try:
        index = json.loads(index_path.read_bytes())
        version, examples, tokens = index["version"], index["examples"], index["tokens"]
        held_out_ids = index["held_out_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise DdrpError(f"{index_path}: damaged ({error!r}); {again}") from error
    if version != VERSION:
        raise DdrpError(f"{index_path}: version {version!r}, expected {VERSION}; {again}")
    arrays = {}
    for name, dtype in ARRAYS.items():
        file = path / f"{name}.npy"
        try:
            array = np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DdrpError(f"{file}: cannot be read ({error}); {again}") from error
        size = {"offsets": examples + 1, "held_out_ids": held_out_ids}.get(name, examples)
        size = tokens if name in _FLAT else size
        if array.dtype != dtype or array.shape != (size,):
            raise DdrpError(
                f"{file}: {array.dtype} {array.shape}, expected {dtype} ({size},); {again}"
            )
        # Plain arrays over the maps: every slice of a memmap object pays for its Python class.
        arrays[name] = np.asarray(array)
    return Examples(path, index, **arrays)
