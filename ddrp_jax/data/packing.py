"""The packing plan: which pieces of which documents share a row."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddrp_jax.data.hashing import random_bits
from ddrp_jax.data.records import TokenStream
from ddrp_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Rows of segments, each segment `CLS piece SEP`.

    Row r holds the pieces `row_offsets[r]` up to `row_offsets[r + 1]`.

    Attributes:
        length: T, tokens of a row.
        row_offsets: int64 [rows + 1].
        starts: int64 [pieces]: first token of each piece in the stream.
        lengths: int32 [pieces]: its tokens, without CLS and SEP.
    """

    length: int
    row_offsets: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.row_offsets) - 1

    @property
    def fill_rate(self) -> float:
        """Share of all positions that are not padding."""
        used = int(self.lengths.sum()) + 2 * len(self.lengths)
        return used / (self.num_rows * self.length)


def packing_plan(stream: TokenStream, length: int, seed: int) -> PackingPlan:
    """Packs every token of a split into rows of `length`, each exactly once.

    Documents are cut into pieces of `length - 2`, and what is left of each is packed best fit
    decreasing: longest first, into the fullest row that has room. Lengths are few, so whole groups
    of equal pieces go into whole groups of equal rows at once. Rows come in random order.

    The result depends on the split's document lengths, `length` and `seed` alone.

    Args:
        stream: the split.
        length: T, at least 3.
        seed: of which equal pieces meet in a row, and of the order of rows.

    Raises:
        UsageError: `length` has no room for a token.
    """
    if length < 3:
        raise UsageError(f"length={length}: expected at least 3: CLS, a token, SEP")
    starts, lengths = _pieces(np.asarray(stream.offsets), length - 2)
    row_offsets, order = pack(lengths + 2, length, seed)
    return PackingPlan(length, row_offsets, starts[order], lengths[order].astype(np.int32))


def pack(sizes: np.ndarray, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items into rows, best fit decreasing, and puts the rows in random order.

    Args:
        sizes: [items] tokens of each, none more than `length`.
        length: T, tokens of a row.
        seed: of which equal items meet in a row, and of the order of rows.

    Returns:
        `row_offsets` int64 [rows + 1] and `order` [items]: row r holds the items
        `order[row_offsets[r] : row_offsets[r + 1]]`.
    """
    full = sizes == length
    rows = np.empty(len(sizes), np.int64)
    num_full = np.count_nonzero(full)
    rows[full] = np.arange(num_full)  # most pieces of long documents: nothing to fit
    rows[~full] = num_full + _best_fit(sizes[~full], length, seed)
    num_rows = int(rows.max(initial=-1)) + 1
    # Row numbers tell how rows were filled, full ones first: shuffle them, so that the first rows
    # are a fair sample (evaluation takes the first ones).
    place = np.empty(num_rows, np.int64)
    place[np.argsort(random_bits(seed, 1, np.arange(num_rows)), kind="stable")] = np.arange(
        num_rows
    )
    rows = place[rows]
    order = np.argsort(rows, kind="stable")
    row_offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=row_offsets[1:])
    return row_offsets, order


def _pieces(offsets: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most `longest` tokens; returns their starts and lengths."""
    documents = np.diff(offsets)
    counts = -(-documents // longest)
    firsts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)
    starts = np.repeat(offsets[:-1], counts) + within * longest
    lengths = np.minimum(np.repeat(documents, counts) - within * longest, longest)
    return starts, lengths


def _best_fit(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """Returns the row of each item, by best fit decreasing over groups of equal sizes."""
    rows = np.empty(len(sizes), np.int64)
    # Ties within a size are broken at random, so that neighbours in the corpus do not meet.
    order = np.lexsort((random_bits(seed, 0, np.arange(len(sizes))), sizes))
    bounds = np.searchsorted(sizes, np.arange(capacity + 2), sorter=order)
    free: list[np.ndarray] = [np.zeros(0, np.int64) for _ in range(capacity + 1)]
    num_rows = 0
    for size in range(capacity, 0, -1):
        items = order[bounds[size] : bounds[size + 1]]
        room = size
        while room <= capacity and len(items):
            open_rows = free[room]
            if not len(open_rows):
                room += 1
                continue
            taken = min(len(open_rows), len(items))
            rows[items[:taken]] = open_rows[:taken]
            items, free[room] = items[taken:], open_rows[taken:]
            free[room - size] = np.concatenate([free[room - size], open_rows[:taken]])
            room = max(room - size, size)  # the fullest row with room may be one of these
        each = capacity // size
        opened = -(-len(items) // each)
        rows[items] = num_rows + np.arange(len(items)) // each
        new_rows = np.arange(num_rows, num_rows + opened)
        left = np.full(opened, capacity - each * size)
        if len(items) % each:
            left[-1] = capacity - len(items) % each * size
        for room in np.unique(left).tolist():
            free[room] = np.concatenate([free[room], new_rows[left == room]])
        num_rows += opened
    return rows
