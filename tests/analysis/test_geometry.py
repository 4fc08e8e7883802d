import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ddrp_jax.analysis import geometry
from ddrp_jax.analysis.geometry import (
    all_but_the_top,
    frequency_groups,
    isotropy,
    mean_cosine,
    measure,
    principal_axes,
    principal_plane,
    project,
)
from ddrp_jax.errors import DdrpError, UsageError

property_settings = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def slow_isotropy(table):
    """The definition, one direction and one row at a time, in logarithms of exact sums."""
    table = np.asarray(table, np.float64)
    directions = np.linalg.eigh(table.T @ table)[1].T
    logs = []
    for direction in [*directions, *-directions]:
        scores = [math.fsum(row * direction) for row in table]
        greatest = max(scores)
        logs.append(greatest + math.log(math.fsum(math.exp(score - greatest) for score in scores)))
    return math.exp(min(logs) - max(logs))


def rotation(draw, size):
    return stats.ortho_group.rvs(size, random_state=draw)


def random_table(seed, rows=60, size=6):
    """Rows whose principal directions are told apart, with a mean that is not zero."""
    draw = np.random.default_rng(seed)
    stretch = np.geomspace(1, 0.1, size)
    return (draw.standard_normal((rows, size)) + 0.4) * stretch @ rotation(draw, size)


@property_settings
@given(
    seed=seeds,
    rows=st.integers(1, 40),
    size=st.integers(2, 8),
    scale=st.sampled_from([1e-3, 0.3, 1.0, 30.0]),
)
def test_isotropy_is_that_of_the_definition(seed, rows, size, scale):
    table = scale * random_table(seed, rows, size)
    np.testing.assert_allclose(isotropy(table), slow_isotropy(table), rtol=1e-6, atol=1e-300)


@pytest.mark.parametrize("block_rows", [1, 7, 60, 4096])
def test_blocks_do_not_change_what_is_measured(block_rows, monkeypatch):
    table, ranking = random_table(0).astype(np.float32), np.arange(60)
    whole = measure(table, ranking)
    baseline = all_but_the_top(table, 2)
    points = project(table, principal_plane(table))
    monkeypatch.setattr(geometry, "_BLOCK_ROWS", block_rows)
    blocked = measure(table, ranking)
    for name in ("isotropy", "mean_cosine", "mean_norm", "singular_values"):
        np.testing.assert_allclose(blocked[name], whole[name], **EXACT)
    np.testing.assert_allclose(all_but_the_top(table, 2), baseline, **EXACT)
    np.testing.assert_allclose(project(table, principal_plane(table)), points, **EXACT)


@property_settings
@given(seed=seeds)
def test_isotropy_lies_in_0_1_and_grows_when_rows_shrink(seed):
    table = random_table(seed)
    values = [isotropy(table, scale) for scale in (4.0, 1.0, 0.25, 1e-6)]
    assert 0 <= values[0] < values[1] < values[2] < values[3] <= 1
    np.testing.assert_allclose(isotropy(0.25 * table), values[2], rtol=1e-9)


@property_settings
@given(seed=seeds)
def test_isotropy_knows_no_sign_order_or_direction(seed):
    table, draw = random_table(seed), np.random.default_rng(seed)
    expected = isotropy(table)
    for other in (-table, draw.permutation(table), table @ rotation(draw, 6)):
        np.testing.assert_allclose(isotropy(other), expected, rtol=1e-6)


def test_isotropy_of_tables_with_a_known_value():
    size = 5
    cross = np.concatenate([np.eye(size), -np.eye(size)])
    np.testing.assert_allclose(isotropy(cross * np.arange(1, size + 1) / 1e3), 1, atol=1e-4)
    assert isotropy(np.zeros((3, 4))) == 1
    # One row e of length 2: along it Z is exp(2), against it exp(-2), across it 1.
    np.testing.assert_allclose(isotropy(np.array([[0.0, 2.0, 0.0]])), math.exp(-4), rtol=1e-12)


def test_long_rows_neither_overflow_nor_lose_the_value():
    draw = np.random.default_rng(5)
    table = 1e5 * draw.standard_normal((50, 4))
    with np.errstate(all="raise", under="ignore"):
        assert isotropy(table) == pytest.approx(slow_isotropy(table), abs=1e-300)
    with np.errstate(all="raise", under="ignore"):
        assert 0 < isotropy(np.array([[300.0, 0.0]])) == pytest.approx(math.exp(-600), rel=1e-9)


def test_float16_and_float32_tables_are_measured_in_double_precision():
    table = random_table(1)
    for dtype in (np.float16, np.float32):
        rounded = table.astype(dtype)
        expected = slow_isotropy(rounded.astype(np.float64))
        np.testing.assert_allclose(isotropy(rounded), expected, rtol=1e-9)


@property_settings
@given(seed=seeds, rows=st.integers(2, 30))
def test_mean_cosine_is_the_mean_over_all_pairs(seed, rows):
    table = random_table(seed, rows)
    table[0] = 0
    cosines = []
    for i in range(1, rows):
        for j in range(i + 1, rows):
            norms = np.linalg.norm(table[i]) * np.linalg.norm(table[j])
            cosines.append(table[i] @ table[j] / norms)
    if not cosines:
        assert mean_cosine(table) is None
    else:
        np.testing.assert_allclose(mean_cosine(table), np.mean(cosines), **EXACT)


def test_spectrum_is_that_of_a_singular_value_decomposition():
    for table in (random_table(2), random_table(3, rows=4)):
        values, axes = principal_axes(table)
        expected = np.zeros(6)
        expected[: min(table.shape)] = np.linalg.svd(table, compute_uv=False)
        np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-7)
        np.testing.assert_allclose(axes.T @ axes, np.eye(6), atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(table @ axes, axis=0), expected, atol=1e-7)


def test_all_but_the_top_takes_the_mean_and_the_greatest_directions():
    table = random_table(4)
    left = all_but_the_top(table, components=2)
    np.testing.assert_allclose(left.mean(axis=0), 0, atol=1e-12)
    centred = table - table.mean(axis=0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(left, (u[:, 2:] * s[2:]) @ vt[2:], atol=1e-9)
    np.testing.assert_allclose(all_but_the_top(table, components=0), centred, atol=1e-12)
    for components in (-1, 6):
        with pytest.raises(UsageError, match="expected fewer than the 6 dimensions"):
            all_but_the_top(table, components)


def test_the_projection_keeps_the_originals_axes():
    table = random_table(6)
    plane = principal_plane(table)
    before = project(table, plane)
    _, s, vt = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(np.linalg.norm(before, axis=0), s[:2], rtol=1e-9)
    after = project(table + 3 * vt[0], plane)
    moved = after - before
    np.testing.assert_allclose(np.abs(moved), np.broadcast_to([3, 0], moved.shape), atol=1e-9)
    # The same axes whatever signs the decomposition gives.
    np.testing.assert_allclose(np.abs(principal_plane(-table)[1] - plane[1]), 0, atol=1e-9)


@given(size=st.integers(0, 500))
def test_groups_cut_the_ranking(size):
    ranking = np.random.default_rng(size).permutation(size)
    groups = frequency_groups(ranking)
    assert list(groups) == ["frequent", "medium", "rare"]
    np.testing.assert_array_equal(np.concatenate(list(groups.values())), ranking)
    for group, share in zip(groups.values(), (0.3, 0.5, 0.2), strict=True):
        assert abs(len(group) - share * size) <= 1


def test_measure_regards_ranked_rows_alone_and_each_group_by_itself():
    table = random_table(7, rows=100)
    draw = np.random.default_rng(8)
    ranking = draw.permutation(100)[:80]
    measured = measure(table, ranking)
    spoilt = table.copy()
    spoilt[np.setdiff1d(np.arange(100), ranking)] = 1e9
    assert measure(spoilt, ranking) == measured
    assert (measured["rows"], measured["dimensions"]) == (80, 6)
    sizes = {name: part["rows"] for name, part in measured["groups"].items()}
    assert sizes == {"frequent": 24, "medium": 40, "rare": 16}
    cuts = {"frequent": ranking[:24], "medium": ranking[24:64], "rare": ranking[64:]}
    for part, ids in [(measured, ranking)] + [
        (measured["groups"][name], ids) for name, ids in cuts.items()
    ]:
        rows = table[ids]
        np.testing.assert_allclose(part["isotropy"], slow_isotropy(rows), rtol=1e-9)
        assert part["isotropy_at_original_norm"] == part["isotropy"]
        np.testing.assert_allclose(part["mean_norm"], np.linalg.norm(rows, axis=1).mean())
        np.testing.assert_allclose(part["mean_cosine"], mean_cosine(rows), **EXACT)


def test_a_shrunken_table_is_measured_at_the_originals_length():
    table, ranking = random_table(9, rows=50), np.arange(50)
    original = measure(table, ranking)
    shrunk = measure(0.25 * table, ranking, original)
    # Only the rare group shrinks: the other groups and their lengths stay.
    partly = table.copy()
    partly[40:] *= 0.25
    rare = measure(partly, ranking, original)
    for name in ("frequent", "medium", "rare"):
        before, after = original["groups"][name], shrunk["groups"][name]
        assert after["isotropy"] > before["isotropy"]
        np.testing.assert_allclose(
            after["isotropy_at_original_norm"], before["isotropy"], rtol=1e-9
        )
        np.testing.assert_allclose(
            rare["groups"][name]["isotropy_at_original_norm"], before["isotropy"], rtol=1e-9
        )
    np.testing.assert_allclose(shrunk["isotropy_at_original_norm"], original["isotropy"], rtol=1e-9)
    lengthened = partly * (np.linalg.norm(table, axis=1).mean())
    lengthened /= np.linalg.norm(partly, axis=1).mean()
    np.testing.assert_allclose(
        rare["isotropy_at_original_norm"], slow_isotropy(lengthened), rtol=1e-9
    )


def test_what_is_not_defined_is_none():
    measured = measure(random_table(0), np.array([5]))
    assert measured["mean_cosine"] is None
    (filled,) = [part for part in measured["groups"].values() if part["rows"]]
    assert filled["isotropy"] == measured["isotropy"]
    empty = [part for part in measured["groups"].values() if not part["rows"]]
    assert len(empty) == 2
    for part in empty:
        assert {part[name] for name in part if name != "rows"} == {None}
    zeros = measure(np.zeros((4, 3)), np.arange(4), measure(np.ones((4, 3)), np.arange(4)))
    assert zeros["isotropy"] == 1
    assert zeros["isotropy_at_original_norm"] is None


def test_bad_tables_are_refused():
    with pytest.raises(DdrpError, match="not finite"):
        isotropy(np.array([[1.0, math.nan]]))
    with pytest.raises(DdrpError, match="no rows"):
        isotropy(np.zeros((0, 3)))
