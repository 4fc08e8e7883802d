"""Dynamic masking (BERT, Devlin et al. 2019, section 3.1) as a pure function of row and epoch."""

from __future__ import annotations

import numpy as np

from ddrp_jax.config import MaskingConfig
from ddrp_jax.data.hashing import random_bits, uniform
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.errors import UsageError

# Which random number of a position is meant.
_CHOICE, _ACTION, _REPLACEMENT = 0, 1, 2


def predictions_of(config: MaskingConfig, length: int) -> int:
    """Returns the static number of predicted positions of a row of `length` tokens."""
    return config.max_predictions or round(config.rate * length)


class Masker:
    """Chooses the predicted tokens of rows, and what the model sees in their place."""

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer, length: int):
        """Fixes the static number of predictions in a row, `max_predictions`.

        Args:
            config: rate, fractions, whole words.
            tokenizer: tells special tokens and the beginnings of words.
            length: T, tokens of a row.

        Raises:
            UsageError: the rate can predict more tokens of a row than `config.max_predictions`.
        """
        self.config = config
        self.length = length
        most = int(prediction_counts(config.rate, length - 2))
        self.max_predictions = predictions_of(config, length)
        if most > self.max_predictions:
            raise UsageError(
                f"masking.max_predictions={self.max_predictions}: a row of {length} tokens has up "
                f"to {most} predictions at masking.rate={config.rate}; raise max_predictions to "
                f"{most} or lower the rate"
            )
        self._mask_id = tokenizer.mask_id
        self._is_special = np.zeros(tokenizer.vocab_size, bool)
        self._is_special[sorted(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special).astype(np.int32)
        self._word_starts = tokenizer.word_starts

    def __call__(
        self,
        input_ids: np.ndarray,
        segment_ids: np.ndarray,
        *,
        seed: int,
        rows: np.ndarray,
        epochs: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Masks a batch; each row depends on itself, `seed`, its number and its epoch alone.

        Of a row with n maskable tokens (not padding, not special), exactly `round(rate * n)` are
        predicted, rounding half to even as Python's `round` does. Of those, `mask_fraction` become
        the mask token, `random_fraction` a uniformly drawn non-special token (perhaps the same
        one), and the rest stay, each drawn on its own.

        With `whole_word`, words of a row are drawn in random order, and a word is taken if all of
        its tokens still fit within the `round(rate * n)`. So no word is predicted in part, the
        count never exceeds `round(rate * n)`, and it falls short only when no word left is short
        enough for the rest. A word begins where the tokenizer says so, at the start of a segment
        and after a special token.

        Args:
            input_ids: int32 [B, T].
            segment_ids: int32 [B, T], 0 on padding.
            seed: of the run.
            rows: [B] numbers of the rows in the packing plan.
            epochs: [B] which pass over the corpus each row belongs to.

        Returns:
            `input_ids` [B, T] after masking, and `predict_positions`, `predict_ids` (int32) and
            `predict_weights` (float32), each [B, P], positions ascending, zeros where unused.
        """
        maskable = (segment_ids > 0) & ~self._is_special[input_ids]
        budgets = prediction_counts(self.config.rate, maskable.sum(axis=1))
        positions = np.arange(self.length)
        coordinates = (seed, np.asarray(epochs)[:, None], np.asarray(rows)[:, None], positions)
        bits = random_bits(*coordinates)
        scores = random_bits(bits, _CHOICE)
        if self.config.whole_word:
            chosen = self._choose_words(scores, input_ids, maskable, budgets)
        else:
            chosen = _choose_tokens(scores, maskable, budgets)

        # `nonzero` goes row by row, so positions ascend within each.
        row, position = np.nonzero(chosen)
        counts = chosen.sum(axis=1)
        slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (len(input_ids), self.max_predictions)
        originals = input_ids[row, position]
        batch = {
            "input_ids": input_ids.copy(),
            "predict_positions": np.zeros(shape, np.int32),
            "predict_ids": np.zeros(shape, np.int32),
            "predict_weights": np.zeros(shape, np.float32),
        }
        batch["predict_positions"][row, slot] = position
        batch["predict_ids"][row, slot] = originals
        batch["predict_weights"][row, slot] = 1
        batch["input_ids"][row, position] = self._replacements(originals, bits[row, position])
        return batch

    def _replacements(self, originals: np.ndarray, bits: np.ndarray) -> np.ndarray:
        action = uniform(random_bits(bits, _ACTION))
        draw = uniform(random_bits(bits, _REPLACEMENT))
        random_ids = self._ordinary[(draw * len(self._ordinary)).astype(np.int64)]
        mask_below = self.config.mask_fraction
        random_below = mask_below + self.config.random_fraction
        replaced = np.where(action < random_below, random_ids, originals)
        return np.where(action < mask_below, np.int32(self._mask_id), replaced)

    def _choose_words(
        self,
        scores: np.ndarray,
        input_ids: np.ndarray,
        maskable: np.ndarray,
        budgets: np.ndarray,
    ) -> np.ndarray:
        begins = self._word_starts[input_ids]
        # A segment's CLS stands before its first word, so no word runs on from the last segment.
        begins[:, 1:] |= ~maskable[:, :-1]
        begins &= maskable
        words = np.cumsum(begins, axis=1) - 1  # [B, T] number of each token's word in its row
        num_words = int(begins.sum(axis=1).max(initial=0))
        rows = np.broadcast_to(np.arange(len(input_ids))[:, None], words.shape)
        sizes = np.zeros((len(input_ids), num_words), np.int64)
        np.add.at(sizes, (rows[maskable], words[maskable]), 1)
        priorities = np.full(sizes.shape, np.iinfo(np.uint64).max)
        priorities[rows[begins], words[begins]] = scores[begins]
        order = np.argsort(priorities, axis=1, kind="stable")
        left = budgets.copy()
        taken = np.zeros(sizes.shape, bool)
        every_row = np.arange(len(input_ids))
        for word in order.T:
            size = sizes[every_row, word]
            fits = (size > 0) & (size <= left)
            taken[every_row, word] = fits
            left -= np.where(fits, size, 0)
        chosen = np.zeros_like(maskable)
        chosen[maskable] = taken[rows[maskable], words[maskable]]
        return chosen


def prediction_counts(rate: float, maskable: np.ndarray | int) -> np.ndarray:
    """Returns `round(rate * maskable)`, half to even, as int64."""
    return np.rint(rate * np.asarray(maskable)).astype(np.int64)


def _choose_tokens(scores: np.ndarray, maskable: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Chooses the `budgets[b]` maskable positions of lowest score in each row."""
    # Stable, and maskable positions first: exact whatever the scores.
    order = np.lexsort((scores, ~maskable), axis=1)
    ranks = np.argsort(order, axis=1, kind="stable")
    return maskable & (ranks < budgets[:, None])
