import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrp_jax.data.packing import packing_plan
from ddrp_jax.errors import UsageError


@dataclasses.dataclass
class Stream:
    """A stream of which only the document lengths matter."""

    document_lengths: list

    @property
    def offsets(self):
        return np.cumsum([0, *self.document_lengths], dtype=np.int64)


def rows_of(plan):
    """Returns each row as its list of (start, length)."""
    pieces = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    bounds = plan.row_offsets.tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(bounds)]


def test_a_300_token_document_at_length_128_is_split():
    plan = packing_plan(Stream([300]), 128, seed=0)
    assert sorted(rows_of(plan)) == [[(0, 126)], [(126, 126)], [(252, 48)]]


def test_a_94_token_corpus_gives_one_padded_row():
    plan = packing_plan(Stream([94]), 128, seed=0)
    assert rows_of(plan) == [[(0, 94)]]
    assert plan.fill_rate == 96 / 128


def test_a_document_that_fills_a_row_leaves_no_empty_piece():
    assert rows_of(packing_plan(Stream([126]), 128, seed=0)) == [[(0, 126)]]
    assert len(rows_of(packing_plan(Stream([252]), 128, seed=0))) == 2


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(3, 24),
    st.integers(0, 3),
)
def test_every_token_stands_in_one_piece_of_its_document_and_rows_have_room(lengths, length, seed):
    stream = Stream(lengths)
    plan = packing_plan(stream, length, seed)
    rows = rows_of(plan)
    assert all(row and sum(n + 2 for _, n in row) <= length for row in rows)
    assert all(0 < n <= length - 2 for row in rows for _, n in row)
    covered = sorted(t for row in rows for start, n in row for t in range(start, start + n))
    assert covered == list(range(sum(lengths)))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    assert all(len(set(owner[start : start + n])) == 1 for row in rows for start, n in row)
    # No more pieces than the cuts ask for.
    assert len(plan.starts) == sum(-(-n // (length - 2)) for n in lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(3, 32))
def test_best_fit_leaves_no_two_rows_that_would_fit_in_one(lengths, length):
    rows = rows_of(packing_plan(Stream(lengths), length, seed=0))
    used = sorted(sum(n + 2 for _, n in row) for row in rows)
    assert len(used) == 1 or used[0] + used[1] > length


def test_the_plan_is_a_function_of_lengths_length_and_seed():
    lengths = np.random.default_rng(0).geometric(1 / 40, 500).tolist()
    first, again = (packing_plan(Stream(lengths), 64, seed=1) for _ in range(2))
    other = packing_plan(Stream(lengths), 64, seed=2)
    assert rows_of(first) == rows_of(again)
    assert rows_of(first) != rows_of(other)
    assert first.num_rows == other.num_rows


@pytest.mark.parametrize("length", [64, 128, 512])
@pytest.mark.parametrize("mean", [20, 300])
def test_rows_are_nearly_full(length, mean):
    lengths = np.random.default_rng(0).geometric(1 / mean, 20_000).tolist()
    assert packing_plan(Stream(lengths), length, seed=0).fill_rate > 0.99


@pytest.mark.parametrize("length", [64, 128])
def test_the_demo_corpus_fills_its_rows(demo_records, length):
    assert packing_plan(demo_records.split("train"), length, seed=0).fill_rate > 0.97


def test_the_first_rows_are_a_fair_sample():
    # Half the tokens stand in full pieces, which packing places first.
    lengths = [62] * 1000 + [20] * 3000
    rows = rows_of(packing_plan(Stream(lengths), 64, seed=0))
    full = sum(len(row) == 1 for row in rows[: len(rows) // 4])
    assert 0.3 < full / (len(rows) // 4) < 0.7


def test_a_length_without_room_is_refused():
    with pytest.raises(UsageError, match="length=2: expected at least 3"):
        packing_plan(Stream([5]), 2, seed=0)
