"""Which rows are replaced."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrp_jax.definitions.replace import choose_by_corpus, choose_by_ratio
from ddrp_jax.errors import UsageError


@given(
    data=st.data(),
    vocab_size=st.integers(1, 60),
    ratio=st.floats(0, 1, exclude_min=True, allow_subnormal=False),
)
def test_the_rarest_share_of_the_vocabulary_is_chosen(data, vocab_size, ratio):
    order = data.draw(st.permutations(range(vocab_size)))
    special = set(data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=10)))
    ranking = [token for token in order if token not in special]
    defined = sorted(set(ranking) & set(data.draw(st.lists(st.integers(0, vocab_size - 1)))))
    # Special tokens stand before all others, as the most frequent.
    whole = [*special, *ranking]
    rarest = whole[::-1][: round(ratio * vocab_size)]
    expected = sorted(token for token in rarest if token in defined)
    chosen = (np.array(ranking, np.int64), ratio, vocab_size, np.array(defined, np.int64))
    if expected:
        assert choose_by_ratio(*chosen).tolist() == expected
    else:
        with pytest.raises(UsageError, match="choose a greater one"):
            choose_by_ratio(*chosen)
    if defined:
        everything = choose_by_ratio(chosen[0], 1.0, vocab_size, chosen[3])
        assert everything.tolist() == defined


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.0001, float("nan"), float("inf")])
def test_a_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(UsageError, match="expected a share of the vocabulary"):
        choose_by_ratio(np.arange(5), ratio, 5, np.arange(5))


def test_the_defined_tokens_of_a_corpus_are_chosen():
    counts = np.array([9, 0, 1, 2, 0, 3])
    assert choose_by_corpus(counts, np.array([1, 2, 3, 4]), "text:x").tolist() == [2, 3]
    with pytest.raises(UsageError, match="tokens-from='text:x': none of the 4 tokens"):
        choose_by_corpus(counts, np.array([1, 4]), "text:x")
