import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrp_jax.config import MaskingConfig
from ddrp_jax.data.masking import Masker
from ddrp_jax.errors import UsageError

LENGTH = 32
PINNED_POSITIONS = [[3, 4, 10, 24], [8, 15, 23, 28]]
PINNED_SUM = 1551
property_settings = settings(max_examples=100, deadline=None)


@dataclasses.dataclass
class Vocabulary:
    """What a masker asks of a tokenizer: ids 0 to 4 are special, odd ids begin words."""

    vocab_size: int = 50
    mask_id: int = 4
    special_ids: frozenset = frozenset(range(5))

    @property
    def word_starts(self):
        return np.arange(self.vocab_size) % 2 == 1


@st.composite
def batches(draw, length=LENGTH):
    """Rows of segments `CLS tokens SEP` and padding, unknown tokens among them."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        ids, segments = [], []
        for segment in range(1, draw(st.integers(0, 3)) + 1):
            room = length - len(ids) - 2
            if room < 1:
                break
            piece = draw(st.lists(st.sampled_from([1, *range(5, 50)]), min_size=1, max_size=room))
            ids += [2, *piece, 3]
            segments += [segment] * (len(piece) + 2)
        padding = [0] * (length - len(ids))
        rows.append((ids + padding, segments + padding))
    ids, segments = zip(*rows, strict=True)
    return np.array(ids, np.int32), np.array(segments, np.int32)


def mask(ids, segments, *, seed=0, rows=None, epochs=None, vocabulary=None, **config):
    masker = Masker(MaskingConfig(**config), vocabulary or Vocabulary(), ids.shape[1])
    rows = np.arange(len(ids)) if rows is None else np.asarray(rows)
    epochs = np.zeros(len(ids), int) if epochs is None else np.asarray(epochs)
    return masker(ids, segments, seed=seed, rows=rows, epochs=epochs)


def predictions(batch, row):
    used = batch["predict_weights"][row] > 0
    return batch["predict_positions"][row][used].tolist()


def maskable(ids, segments, row):
    return [t for t in range(ids.shape[1]) if segments[row, t] > 0 and ids[row, t] >= 5]


def words(ids, segments, row):
    """The words of a row, by a plain loop: lists of positions."""
    found = []
    for t in maskable(ids, segments, row):
        if ids[row, t] % 2 == 1 or t - 1 not in maskable(ids, segments, row):
            found.append([])
        found[-1].append(t)
    return found


@property_settings
@given(batches(), st.sampled_from([0.01, 0.1, 0.15, 0.25, 0.5, 0.9]), st.integers(0, 5))
def test_exactly_the_rounded_rate_is_predicted(batch, rate, seed):
    ids, segments = batch
    masked = mask(ids, segments, rate=rate, seed=seed)
    for row in range(len(ids)):
        candidates = maskable(ids, segments, row)
        chosen = predictions(masked, row)
        assert len(chosen) == round(rate * len(candidates))
        assert set(chosen) <= set(candidates)
        assert chosen == sorted(set(chosen))
        assert masked["predict_weights"][row, : len(chosen)].tolist() == [1] * len(chosen)


@property_settings
@given(batches(), st.booleans())
def test_only_predicted_positions_change_and_their_ids_are_kept(batch, whole_word):
    ids, segments = batch
    before = ids.copy()
    masked = mask(ids, segments, rate=0.5, whole_word=whole_word)
    np.testing.assert_array_equal(ids, before)
    for row in range(len(ids)):
        chosen = predictions(masked, row)
        count = len(chosen)
        np.testing.assert_array_equal(masked["predict_ids"][row, :count], ids[row, chosen])
        assert not masked["predict_ids"][row, count:].any()
        assert not masked["predict_positions"][row, count:].any()
        others = np.setdiff1d(np.arange(LENGTH), chosen)
        np.testing.assert_array_equal(masked["input_ids"][row, others], ids[row, others])
        seen = set(masked["input_ids"][row, chosen].tolist())
        assert seen <= {4, *range(5, 50)}


@property_settings
@given(batches(), st.sampled_from([0.1, 0.15, 0.3, 0.6]))
def test_whole_words_are_taken_up_to_the_budget_and_no_further(batch, rate):
    ids, segments = batch
    masked = mask(ids, segments, rate=rate, whole_word=True)
    for row in range(len(ids)):
        chosen = set(predictions(masked, row))
        budget = round(rate * len(maskable(ids, segments, row)))
        taken, left = 0, []
        for word in words(ids, segments, row):
            assert chosen.issuperset(word) or chosen.isdisjoint(word)
            if chosen.issuperset(word):
                taken += len(word)
            else:
                left.append(len(word))
        assert taken == len(chosen) <= budget
        assert all(size > budget - taken for size in left)


def full_rows(count, length=LENGTH):
    ids = np.random.default_rng(0).integers(5, 50, (count, length)).astype(np.int32)
    ids[:, 0], ids[:, -1] = 2, 3
    return ids, np.ones((count, length), np.int32)


@pytest.mark.parametrize("whole_word", [False, True])
def test_a_rows_masks_do_not_depend_on_its_batch(whole_word):
    ids, segments = full_rows(8)
    epochs = np.arange(8) % 3
    together = mask(ids, segments, epochs=epochs, whole_word=whole_word)
    for row in (6, 2):
        alone = mask(
            ids[[row]], segments[[row]], rows=[row], epochs=epochs[[row]], whole_word=whole_word
        )
        for name, value in alone.items():
            np.testing.assert_array_equal(value[0], together[name][row])


@pytest.mark.parametrize("change", [{"seed": 1}, {"rows": [1]}, {"epochs": [1]}])
def test_seed_row_and_epoch_each_change_the_masks(change):
    ids, segments = full_rows(1)
    first, again = (mask(ids, segments, rows=[0], epochs=[0]) for _ in range(2))
    other = mask(ids, segments, **({"rows": [0], "epochs": [0]} | change))
    assert predictions(first, 0) == predictions(again, 0) != predictions(other, 0)


def test_masks_never_change_between_versions():
    # A resumed run and a new evaluation rely on these. Change them only with the records' version.
    ids, segments = full_rows(2)
    masked = mask(ids, segments, seed=7, rows=[3, 10**9], epochs=[0, 5])
    assert [predictions(masked, row) for row in (0, 1)] == PINNED_POSITIONS
    assert masked["input_ids"].sum() == PINNED_SUM


def test_every_position_is_chosen_equally_often():
    ids, segments = full_rows(4000)
    masked = mask(ids, segments, rate=0.2)
    counts = np.bincount(masked["predict_positions"].ravel(), minlength=LENGTH)[1:-1]
    expected = 4000 * 6 / 30
    assert len(counts) == 30
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize("fractions", [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.3, 0.6)])
def test_predicted_tokens_are_masked_replaced_or_kept_as_configured(fractions):
    mask_fraction, random_fraction = fractions
    ids, segments = full_rows(2000)
    # One id everywhere tells a kept token from a random one.
    ids[:, 1:-1] = 7
    masked = mask(
        ids, segments, rate=0.5, mask_fraction=mask_fraction, random_fraction=random_fraction
    )
    seen = np.take_along_axis(masked["input_ids"], masked["predict_positions"], axis=1)
    seen = seen[masked["predict_weights"] > 0]
    total = len(seen)
    random_share = random_fraction * 44 / 45  # one random token in 45 is the same as before
    for share, expected in (
        ((seen == 4).mean(), mask_fraction),
        (((seen != 4) & (seen != 7)).mean(), random_share),
        ((seen == 7).mean(), 1 - mask_fraction - random_share),
    ):
        spread = math.sqrt(max(expected * (1 - expected), 0) / total)
        assert abs(share - expected) <= 5 * spread + 1e-12


def test_random_tokens_are_uniform_over_the_vocabulary_without_special_ones():
    ids, segments = full_rows(4000)
    masked = mask(ids, segments, rate=0.5, mask_fraction=0.0, random_fraction=1.0)
    seen = np.take_along_axis(masked["input_ids"], masked["predict_positions"], axis=1)
    counts = np.bincount(seen[masked["predict_weights"] > 0], minlength=50)
    assert not counts[:5].any()
    expected = counts.sum() / 45
    # Chi-squared with 44 degrees of freedom: mean 44, standard deviation 9.4.
    assert ((counts[5:] - expected) ** 2 / expected).sum() < 100


def test_whole_words_in_every_kind_of_tokenizer(tokenizer):
    text = "the quick brown fox says hello to the unaffable world"
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    row = np.array([ids * 1], np.int32)
    segments = np.ones_like(row)
    starts = tokenizer.word_starts[row[0]]
    several = 0
    for epoch in range(30):
        masked = mask(
            row, segments, epochs=[epoch], rate=0.4, whole_word=True, vocabulary=tokenizer
        )
        chosen = set(predictions(masked, 0))
        assert chosen
        several += any(t + 1 in chosen and not starts[t + 1] for t in chosen)
        for t in range(2, len(ids) - 1):
            if not starts[t]:
                assert (t in chosen) == (t - 1 in chosen), tokenizer.id_to_token(ids[t])
    assert several


def test_rows_of_padding_have_no_predictions():
    ids, segments = np.zeros((2, LENGTH), np.int32), np.zeros((2, LENGTH), np.int32)
    for whole_word in (False, True):
        masked = mask(ids, segments, whole_word=whole_word)
        assert not masked["predict_weights"].any()
        assert not masked["input_ids"].any()


def test_the_static_number_of_predictions():
    assert Masker(MaskingConfig(), Vocabulary(), 128).max_predictions == 19
    assert Masker(MaskingConfig(max_predictions=40), Vocabulary(), 128).max_predictions == 40
    ids, segments = full_rows(3)
    batch = mask(ids, segments, max_predictions=9)
    assert batch["predict_positions"].shape == (3, 9)
    assert batch["predict_weights"].sum(axis=1).tolist() == [4, 4, 4]  # round(0.15 * 30) is even
    dtypes = {name: value.dtype for name, value in batch.items()}
    assert dtypes.pop("predict_weights") == np.float32
    assert set(dtypes.values()) == {np.dtype(np.int32)}


def test_a_rate_that_exceeds_the_static_number_is_refused():
    Masker(MaskingConfig(rate=0.15, max_predictions=19), Vocabulary(), 128)
    with pytest.raises(UsageError, match=r"max_predictions=18.*up to 19 predictions.*raise"):
        Masker(MaskingConfig(rate=0.15, max_predictions=18), Vocabulary(), 128)
