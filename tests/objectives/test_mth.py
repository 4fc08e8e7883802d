"""Token and head cosine differentiation against double loops over pairs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrp_jax.objectives import mth

ROWS, LENGTH, WIDTH, HEADS = 3, 7, 4, 3


@st.composite
def layouts(draw):
    """Rows of segments, each of one token or more, followed by padding or not."""
    rows = []
    for _ in range(ROWS):
        sizes, left = [], LENGTH
        while left and draw(st.booleans()):
            sizes.append(draw(st.integers(1, left)))
            left -= sizes[-1]
        rows.append(sizes)
    return rows


def segments(segment_ids):
    """Places of each segment of each row."""
    for row, ids in enumerate(segment_ids):
        for number in np.unique(ids[ids > 0]):
            yield row, np.flatnonzero(ids == number)


def cosine(a, b):
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b) / size if size else 0.0


def loop_token_cosine(hidden, segment_ids, of=lambda value: value):
    total = weight = 0.0
    for row, places in segments(segment_ids):
        n = len(places)
        if n >= 2:
            pairs = itertools.permutations(places, 2)
            mean = sum(of(cosine(hidden[row, i], hidden[row, j])) for i, j in pairs) / (n * (n - 1))
            total, weight = total + n * mean, weight + n
    return total, weight


def loop_head_cosine(probs, segment_ids, unit="query"):
    heads = probs.shape[1]
    total = weight = 0.0
    pairs = list(itertools.permutations(range(heads), 2))
    maps = {}
    for row, places in segments(segment_ids):
        if len(places) < 2:
            continue
        weight += len(places)
        for query in places:
            over = probs[row, :, query][:, places]
            if unit == "query" and heads > 1:
                total += sum(cosine(over[g], over[h]) for g, h in pairs) / len(pairs)
            maps.setdefault(row, []).append(probs[row, :, query])
    if unit == "map" and heads > 1:
        for rows in maps.values():
            whole = np.stack(rows, axis=1).reshape(heads, -1)
            mean = sum(cosine(whole[g], whole[h]) for g, h in pairs) / len(pairs)
            total += len(rows) * mean
    return total, weight


def attention(segment_ids, heads=HEADS, seed=0):
    """Weights as a layer gives them: within segments, and equal where there is nothing."""
    draw = np.random.default_rng(seed)
    same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids > 0)[:, None]
    scores = (
        draw.normal(size=(len(same), heads, *same.shape[1:])) + np.where(same, 0, -1e9)[:, None]
    )
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    return (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


def both(pair):
    return [float(value) for value in pair]


token_cosine = jax.jit(mth.token_cosine)
token_absolute_cosine = jax.jit(mth.token_absolute_cosine)
head_cosine = jax.jit(mth.head_cosine, static_argnames="unit")
any_seed = st.integers(0, 2**31)
few = settings(max_examples=40, deadline=None)


@few
@given(layouts(), any_seed, st.sampled_from([0.0, 1.0, 20.0]))
def test_token_cosine_is_the_mean_over_pairs(layout, seed, common):
    """`common` moves all vectors the same way: up to cosines near one, where sums cancel."""
    segment_ids, _ = small.rows(layout, LENGTH)
    draw = np.random.default_rng(seed)
    hidden = (draw.normal(size=(ROWS, LENGTH, WIDTH)) + common).astype(np.float32)
    for function, of in ((token_cosine, float), (token_absolute_cosine, abs)):
        wanted = loop_token_cosine(hidden.astype(np.float64), segment_ids, of)
        np.testing.assert_allclose(both(function(hidden, segment_ids)), wanted, atol=2e-5)


@few
@given(layouts(), any_seed)
def test_mean_token_cosine_stays_in_its_range(layout, seed):
    segment_ids, _ = small.rows(layout, LENGTH)
    draw = np.random.default_rng(seed)
    hidden = draw.choice([-1.0, 1.0], (ROWS, LENGTH, 1)) * draw.normal(size=WIDTH)  # two clusters
    total, weight = both(token_cosine(hidden.astype(np.float32), segment_ids))
    lowest = -sum(len(p) / (len(p) - 1) for _, p in segments(segment_ids) if len(p) > 1)
    assert lowest - 1e-5 <= total <= weight + 1e-5
    opposite, _ = both(token_absolute_cosine(hidden.astype(np.float32), segment_ids))
    assert opposite == pytest.approx(weight, abs=1e-5)  # which the absolute value sees through


@few
@given(layouts(), any_seed)
def test_head_cosine_is_the_mean_over_pairs_of_heads(layout, seed):
    segment_ids, _ = small.rows(layout, LENGTH)
    probs = attention(segment_ids, seed=seed)
    for unit in ("query", "map"):
        wanted = loop_head_cosine(probs.astype(np.float64), segment_ids, unit)
        total, weight = both(head_cosine(probs, segment_ids, unit=unit))
        np.testing.assert_allclose((total, weight), wanted, atol=2e-5, err_msg=unit)
        assert -1e-5 <= total <= weight + 1e-5


@few
@given(layouts(), any_seed)
def test_gradients_are_those_of_the_sum_over_pairs(layout, seed):
    segment_ids, _ = small.rows(layout, LENGTH)
    hidden = np.random.default_rng(seed).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    probs = attention(segment_ids, seed=seed)
    got, wanted = (f(jnp.asarray(hidden), jnp.asarray(probs), segment_ids) for f in (closed, pairs))
    for one, other in zip(got, wanted, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=1e-4)
    alone = segment_ids == 0
    for row, places in segments(segment_ids):
        if len(places) == 1:
            alone[row, places] = True
    assert not np.any(got[0][alone])
    assert not np.any(np.moveaxis(got[1], 1, 2)[alone])


@jax.jit
def closed(hidden, probs, segment_ids):
    return jax.grad(
        lambda h, p: mth.token_cosine(h, segment_ids)[0] + mth.head_cosine(p, segment_ids)[0],
        (0, 1),
    )(hidden, probs)


@jax.jit
def pairs(hidden, probs, segment_ids):
    def total(hidden, probs):
        u = hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True)
        same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids > 0)[:, None]
        same = same & ~jnp.eye(LENGTH, dtype=bool)
        count = same.sum(-1)
        cosines = jnp.where(same, jnp.einsum("btd,bsd->bts", u, u), 0).sum(-1)
        tokens = (cosines / jnp.maximum(count, 1)).sum()
        w = probs / jnp.linalg.norm(probs, axis=-1, keepdims=True)
        by_pair = jnp.einsum("bgts,bhts->btgh", w, w) * (1 - jnp.eye(HEADS))
        heads = by_pair.sum((-2, -1)) / (HEADS * (HEADS - 1))
        return tokens + jnp.where(count > 0, heads, 0).sum()

    return jax.grad(total, (0, 1))(hidden, probs)


def test_a_zero_vector_among_three_orthogonal_ones_gives_zero():
    """Taking n from |sum u|^2 instead of the squared norms would give -1/6."""
    hidden = jnp.asarray([[[1, 0], [0, 1], [0, 0]]], jnp.float32)
    total, weight = both(token_cosine(hidden, jnp.ones((1, 3), jnp.int32)))
    assert total == pytest.approx(0, abs=1e-6)
    assert weight == 3


def test_token_cosines_by_hand():
    same, opposite, square = [[1, 0], [3, 0]], [[1, 0], [-2, 0]], [[1, 0], [0, 5]]
    for vectors, wanted in ((same, 1), (opposite, -1), (square, 0)):
        pair = token_cosine(jnp.asarray([vectors], jnp.float32), jnp.ones((1, 2), jnp.int32))
        np.testing.assert_allclose(both(pair), (2 * wanted, 2), atol=1e-6)
    # Two tokens with cosine 1, ten with 0, one alone: (2 * 1 + 10 * 0) / 12, not (1 + 0) / 2.
    hidden = np.zeros((1, 13, 10), np.float32)
    hidden[0, :2, 0] = hidden[0, 12, 0] = 1
    hidden[0, 2:12] = np.eye(10)
    segment_ids, _ = small.rows([[2, 10, 1]], 13)
    pair = token_cosine(jnp.asarray(hidden), jnp.asarray(segment_ids))
    np.testing.assert_allclose(both(pair), (2, 12), atol=1e-5)


def test_head_cosines_by_hand():
    ones = jnp.ones((1, 2), jnp.int32)
    equal, apart = [[1, 0], [1, 0]], [[1, 0], [0, 1]]
    for weights, wanted in ((equal, 1), (apart, 0), ([[0.5, 0.5], [1, 0]], 2**-0.5)):
        # Two heads, both queries the same.
        probs = jnp.asarray(weights, jnp.float32)[None, :, None].repeat(2, axis=2)
        for unit in ("query", "map"):
            pair = head_cosine(probs, ones, unit=unit)
            np.testing.assert_allclose(both(pair), (2 * wanted, 2), atol=1e-6)
    # Heads that agree for one query and not for the other: the units differ where norms do.
    probs = jnp.asarray([[[[1, 0], [0.5, 0.5]], [[1, 0], [0, 1]]]], jnp.float32)
    assert both(head_cosine(probs, ones, unit="query"))[0] == pytest.approx(1 + 2**-0.5)
    assert both(head_cosine(probs, ones, unit="map"))[0] == pytest.approx(
        2 * 1.5 / (1.5 * 2) ** 0.5
    )


def test_a_head_without_weights_among_orthogonal_ones_gives_zero():
    """Taking the number of heads from |sum w|^2 instead of the squared norms would give -1/6."""
    probs = jnp.asarray([[[1, 0]] * 2, [[0, 1]] * 2, [[0, 0]] * 2], jnp.float32)[None]
    for unit in ("query", "map"):
        total, _ = both(head_cosine(probs, jnp.ones((1, 2), jnp.int32), unit=unit))
        assert total == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("unit", ["query", "map"])
def test_one_head_has_nothing_to_differ_from(unit):
    segment_ids, _ = small.rows([[4, 3]], LENGTH)
    probs = jnp.asarray(attention(segment_ids, heads=1))
    assert both(head_cosine(probs, jnp.asarray(segment_ids), unit=unit)) == [0, 7]


@pytest.mark.parametrize(("length", "wanted"), [(2, 0.8), (512, 0.4)])
def test_independent_heads_differ_less_the_shorter_the_segment(length, wanted):
    """Softmaxes of independent N(0, 1) scores; by lengths e^-1 = 0.37 at infinity."""
    segment_ids = np.ones((1 if length > 100 else 400, length), np.int32)
    probs = attention(segment_ids, heads=4)
    total, weight = both(head_cosine(jnp.asarray(probs), jnp.asarray(segment_ids)))
    assert total / weight == pytest.approx(wanted, abs=0.05)


def zero_and_alone():
    """Rows of nothing but padding, of one token, of a zero vector, and a whole one."""
    segment_ids, _ = small.rows([[], [1], [3], [1, 2, 1]], 4)
    hidden = np.random.default_rng(0).normal(size=(4, 4, 3)).astype(np.float32)
    hidden[2, 1] = 0
    return hidden, segment_ids


def test_gradients_are_finite_everywhere_and_zero_where_nothing_is_compared():
    """At a zero vector the gradient of dot/(norm + eps) is NaN, and no mask mends that after."""
    hidden, segment_ids = map(jnp.asarray, zero_and_alone())

    @jax.jit
    def all_gradients(hidden, probs):
        def of(function, x, **options):
            return jax.grad(lambda x: function(x, segment_ids, **options)[0])(x)

        tokens = [of(f, hidden) for f in (mth.token_cosine, mth.token_absolute_cosine)]
        return tokens, [of(mth.head_cosine, probs, unit=unit) for unit in ("query", "map")]

    tokens, heads = all_gradients(hidden, jnp.zeros((4, 2, 4, 4)))
    alone = np.asarray([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 1]], bool)
    for grads in tokens:
        assert np.isfinite(grads).all()
        assert not np.any(grads[alone])
        assert np.any(grads[3, 1:3])
    assert np.isfinite(heads).all()


def test_a_batch_of_padding_has_no_weight_and_no_nan():
    nothing = jnp.zeros((2, LENGTH), jnp.int32)
    hidden = jnp.ones((2, LENGTH, WIDTH))
    probs = jnp.full((2, HEADS, LENGTH, LENGTH), 1 / LENGTH)
    for pair in (
        token_cosine(hidden, nothing),
        token_absolute_cosine(hidden, nothing),
        head_cosine(probs, nothing),
        head_cosine(probs, nothing, unit="map"),
    ):
        assert both(pair) == [0, 0]
