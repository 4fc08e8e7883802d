"""Packed rows of definition examples, corrupted as the source says."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from ddrp_jax.config import ReconstructionConfig
from ddrp_jax.data.frequency import reserved_ids
from ddrp_jax.data.hashing import random_bits, uniform
from ddrp_jax.data.packing import pack
from ddrp_jax.data.pipeline import Batch
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.definitions.examples import Examples
from ddrp_jax.errors import UsageError

# Which random number of a position is meant.
_ACTION, _REPLACEMENT = 0, 1


@dataclasses.dataclass(frozen=True)
class ExampleRows:
    """Rows of T tokens that hold whole examples, each a segment (`data.pipeline.Reader`).

    Attributes:
        examples: where they come from.
        chosen: which of them, indices [n].
        length: T.
        seed: of the packing, of the rows' order and of the corruption.
        tokenizer: the examples' own.
        corruption: how definitions are corrupted and reconstructed; None leaves them alone, and
            only the wanted pieces are targets (always so with a decoder).
        is_target: bool [vocab]: which tokens may be targets.
        decoder_start: ids that a decoder's input begins with; None for a model without a decoder.
    """

    examples: Examples
    chosen: np.ndarray
    length: int
    seed: int
    tokenizer: Tokenizer
    corruption: ReconstructionConfig | None
    is_target: np.ndarray
    decoder_start: tuple[int, ...] | None = None

    @functools.cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = self.examples.lengths[self.chosen]
        if len(sizes) and sizes.max() > self.length:
            raise UsageError(
                f"length={self.length}: the examples of {str(self.examples.path)!r} have up to "
                f"{sizes.max()} tokens; raise the stage's length, or build with a smaller "
                "--max-length"
            )
        offsets, order = pack(sizes, self.length, self.seed)
        return offsets, self.chosen[order]

    @functools.cached_property
    def decoder_length(self) -> int:
        """Tokens of a row's decoder input: what the fullest row of the plan needs."""
        assert self.decoder_start is not None
        offsets, packed = self._plan
        sizes = self._decoder_sizes(packed)
        longest = np.add.reduceat(sizes, offsets[:-1]).max() if len(sizes) else 1
        return -(-int(longest) // 8) * 8

    def _decoder_sizes(self, indices: np.ndarray) -> np.ndarray:
        assert self.decoder_start is not None
        shown = self.examples.slot_position[indices] - self.examples.slot_begin[indices]
        return shown.astype(np.int64) + len(self.decoder_start)

    @functools.cached_property
    def _ordinary(self) -> np.ndarray:
        reserved = sorted(reserved_ids(self.tokenizer))
        return np.setdiff1d(np.arange(self.tokenizer.vocab_size), reserved).astype(np.int32)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._plan[0]) - 1

    def read(self, rows: np.ndarray, epochs: np.ndarray) -> Batch:
        """Returns the batch of some rows.

        Args:
            rows: [B] numbers of rows in the plan; -1 makes a row of padding.
            epochs: [B] which pass each belongs to.

        Returns:
            `input_ids`, `segment_ids`, `positions`, int32 [B, T]; `row` [B]; `target_ids` int32
            and `target_weights`, `slot_weights` float32 [B, S]: the token whose row is wanted at a
            place, 1 where one is, and 1 where it is an example's wanted piece; `example` int32
            [B, S]: the number of that example, -1 elsewhere. S = T, or with a decoder the length
            of its input, which `decoder_ids`, `decoder_segment_ids`, `decoder_positions` [B, S]
            hold.
        """
        offsets, packed = self._plan
        real = np.flatnonzero(rows >= 0)
        firsts = offsets[rows[real]]
        counts = offsets[rows[real] + 1] - firsts
        total = int(counts.sum())
        number = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = packed[np.repeat(firsts, counts) + number]
        row_of = np.repeat(np.arange(len(real)), counts)
        sizes = self.examples.lengths[indices]
        layout = _Layout(real[row_of], number, sizes, (len(rows), self.length))

        source = np.repeat(self.examples.offsets[indices], sizes) + layout.within
        input_ids = layout.fill(self.examples.input_ids[source], np.int32, self.tokenizer.pad_id)
        batch = {
            "segment_ids": layout.fill(np.repeat(number + 1, sizes), np.int32),
            "positions": layout.fill(layout.within, np.int32),
        }
        shape = input_ids.shape
        slots = layout.begins + self.examples.slot_position[indices]
        if self.decoder_start is not None:
            decoder, slots = self._decoder(indices, real[row_of], number, len(rows))
            batch |= decoder
            shape = decoder["decoder_ids"].shape
        target_ids = np.zeros(shape, np.int32)
        target_weights = np.zeros(shape, np.float32)
        if self.corruption is not None:
            in_definition = layout.fill(self.examples.definition_flags[source], bool)
            is_wanted = in_definition & self.is_target[input_ids]
            target_ids[is_wanted] = input_ids[is_wanted]
            target_weights[is_wanted] = 1
            input_ids = self._corrupt(input_ids, in_definition, rows, epochs)
        slot_weights = np.zeros(shape, np.float32)
        example = np.full(shape, -1, np.int32)
        wanted = self.examples.target_id[indices]
        target_ids.reshape(-1)[slots] = wanted
        slot_weights.reshape(-1)[slots] = target_weights.reshape(-1)[slots] = self.is_target[wanted]
        example.reshape(-1)[slots] = indices
        return batch | {
            "input_ids": input_ids,
            "target_ids": target_ids,
            "target_weights": target_weights,
            "slot_weights": slot_weights,
            "example": example,
            "row": np.asarray(rows, np.int32),
        }

    def _corrupt(
        self, ids: np.ndarray, chosen: np.ndarray, rows: np.ndarray, epochs: np.ndarray
    ) -> np.ndarray:
        """Returns `ids` [B, T] where some of the chosen tokens are masks and some are random."""
        assert self.corruption is not None
        row, position = np.nonzero(chosen)
        bits = random_bits(self.seed, np.asarray(epochs)[row], np.asarray(rows)[row], position)
        action = uniform(random_bits(bits, _ACTION))
        draw = uniform(random_bits(bits, _REPLACEMENT))
        random_ids = self._ordinary[(draw * len(self._ordinary)).astype(np.int64)]
        mask_below = self.corruption.mask_fraction
        random_below = mask_below + self.corruption.random_fraction
        originals = ids[row, position]
        replaced = np.where(action < random_below, random_ids, originals)
        out = ids.copy()
        out[row, position] = np.where(
            action < mask_below, np.int32(self.tokenizer.mask_id), replaced
        )
        return out

    def _decoder(
        self, indices: np.ndarray, rows: np.ndarray, number: np.ndarray, num_rows: int
    ) -> tuple[Batch, np.ndarray]:
        """Returns the decoder's input: the start, then the shown pieces; and the last places."""
        assert self.decoder_start is not None
        sizes = self._decoder_sizes(indices)
        layout = _Layout(rows, number, sizes, (num_rows, self.decoder_length))
        skip = len(self.decoder_start)
        source = np.repeat(
            self.examples.offsets[indices] + self.examples.slot_begin[indices] - skip, sizes
        )
        source += layout.within
        start = np.asarray(self.decoder_start, np.int32)
        is_start = layout.within < skip
        ids = np.where(
            is_start,
            start[np.minimum(layout.within, skip - 1)],
            self.examples.input_ids[np.maximum(source, 0)],
        )
        batch = {
            "decoder_ids": layout.fill(ids, np.int32, self.tokenizer.pad_id),
            "decoder_segment_ids": layout.fill(np.repeat(number + 1, sizes), np.int32),
            "decoder_positions": layout.fill(layout.within, np.int32),
        }
        return batch, layout.begins + sizes - 1


class _Layout:
    """Where the tokens of packed segments go in rows.

    Args:
        rows: [n] the row of each segment, those of one row together and in order.
        number: [n] its number within the row, from 0.
        sizes: [n] its tokens.
        shape: rows and T.

    Attributes:
        begins: [n] flat place of each segment's first token.
        within: [tokens] place of each token in its segment.
    """

    def __init__(
        self, rows: np.ndarray, number: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]
    ):
        self._shape = shape
        ends = np.cumsum(sizes)
        before = ends - sizes
        first = np.arange(len(sizes)) - number  # of the same row
        self.begins = rows * shape[1] + before - before[first]
        self.within = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
        self._place = np.repeat(self.begins, sizes) + self.within

    def fill(self, values: np.ndarray, dtype: type, padding: int = 0) -> np.ndarray:
        """Returns the rows that hold one value for each token."""
        out: np.ndarray = np.full(self._shape, padding, dtype)
        out.reshape(-1)[self._place] = values
        return out
