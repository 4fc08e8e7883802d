"""Relative positions against plain loops over (query, key), and the facts that define DDRP."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from ddrp_jax.models.relative_position import (
    bucket_rows,
    ddrp_table,
    offset_rows,
    relative_scores,
    relative_values,
    rotate,
)

IMPLEMENTATIONS = ("auto", "dense", "one_hot", "skew", "gather")
LENGTH = 7
# Far below the length, at the longest offset, and beyond it; and lengths of one and of several
# blocks of queries.
LENGTHS_AND_DISTANCES = (
    *((LENGTH, distance) for distance in (1, 4, LENGTH - 1, 20)),
    (1, 3),
    (16, 6),
    (32, 20),
    (48, 63),
)


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def loop_vector(table, head, query, key):
    """Row of the offset, clipped, of a table `[R, H]` or `[N, R, H]`."""
    table = table[head] if table.ndim == 3 else table
    largest = (table.shape[0] - 1) // 2
    return table[max(-largest, min(largest, key - query)) + largest]


def loop_scores(q, table):
    batch, length, heads, _ = q.shape
    scores = np.zeros((batch, heads, length, length))
    for b, n, i, j in itertools.product(*map(range, scores.shape)):
        scores[b, n, i, j] = np.dot(q[b, i, n].astype(np.float64), loop_vector(table, n, i, j))
    return scores


def loop_values(probs, table):
    batch, heads, length, _ = probs.shape
    z = np.zeros((batch, length, heads, table.shape[-1]))
    for b, n, i, j in itertools.product(*map(range, probs.shape)):
        z[b, i, n] += probs[b, n, i, j].astype(np.float64) * loop_vector(table, n, i, j)
    return z


@pytest.mark.parametrize("heads", [(), (3,)], ids=["shared", "by_head"])
@pytest.mark.parametrize(("length", "distance"), LENGTHS_AND_DISTANCES)
def test_scores_and_values_are_those_of_a_double_loop(length, distance, heads):
    q, table = draw(2, length, 3, 4), draw(*heads, 2 * distance + 1, 4)
    wanted = loop_scores(q, table)
    for implementation in IMPLEMENTATIONS:
        got = relative_scores(jnp.asarray(q), jnp.asarray(table), implementation)
        np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg=implementation)
    probs = np.abs(draw(2, 3, length, length))
    np.testing.assert_allclose(
        relative_values(jnp.asarray(probs), jnp.asarray(table)),
        loop_values(probs, table),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("directions", [2, 3])
@pytest.mark.parametrize("heads", [(), (3,)], ids=["shared", "by_head"])
def test_ddrp_table_is_distance_times_direction(directions, heads):
    distance, direction = draw(*heads, 4, 5), draw(*heads, directions, 5)
    table = np.asarray(ddrp_table(jnp.asarray(distance), jnp.asarray(direction)))
    for offset in range(-3, 4):
        sign = (offset > 0) - (offset < 0)
        row = sign + 1 if directions == 3 else int(sign >= 0)
        wanted = distance[..., abs(offset), :] * direction[..., row, :]
        np.testing.assert_array_equal(table[..., offset + 3, :], wanted)


def test_opposite_directions_differ_by_the_same_ratio_at_every_distance():
    direction = draw(3, 5)
    table = np.asarray(ddrp_table(jnp.asarray(draw(9, 5)), jnp.asarray(direction)))
    for distance in range(1, 9):
        ratio = table[8 + distance] / table[8 - distance]
        np.testing.assert_allclose(ratio, direction[2] / direction[0], rtol=1e-5)


def test_equal_directions_cannot_tell_left_from_right():
    q = jnp.asarray(draw(1, LENGTH, 2, 4))
    table = ddrp_table(jnp.asarray(draw(5, 4)), jnp.ones((3, 4)))
    for implementation in IMPLEMENTATIONS:
        scores = relative_scores(q, table, implementation)
        turned = relative_scores(q[:, ::-1], table, implementation)
        np.testing.assert_allclose(turned[..., ::-1, ::-1], scores, atol=1e-5)


def test_rows_of_offsets_are_clipped():
    """Distances are clipped, never sequences: 11 tokens and K = 4."""
    rows = offset_rows(11, 4)
    assert rows.shape == (11, 11)
    assert rows[0].tolist() == [4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8]
    assert rows[10].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("directions", [2, 3])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "by_head"])
@pytest.mark.parametrize(("length", "distance"), [(5, 9), (8, 3)])
def test_gradients_reach_q_and_both_tables_and_equal_finite_differences(
    length, distance, heads, directions
):
    with jax.enable_x64(True):
        pull_scores = jnp.asarray(draw(1, 2, length, length, seed=1), jnp.float64)
        pull_values = jnp.asarray(draw(1, length, 2, 3, seed=2), jnp.float64)
        probs = jnp.asarray(np.abs(draw(1, 2, length, length, seed=3)), jnp.float64)
        factors = (
            jnp.asarray(draw(1, length, 2, 3), jnp.float64),
            jnp.asarray(draw(*heads, distance + 1, 3), jnp.float64),
            jnp.asarray(draw(*heads, directions, 3), jnp.float64),
        )

        @functools.partial(jax.jit, static_argnums=1)
        def total(factors, implementation):
            q, table = factors[0], ddrp_table(*factors[1:])
            scores = relative_scores(q, table, implementation)
            values = relative_values(probs, table)
            return (scores * pull_scores).sum() + (values * pull_values).sum()

        gradient = jax.jit(jax.grad(total), static_argnums=1)
        grads, by_skew = gradient(factors, "dense"), gradient(factors, "skew")
        for which, grad in enumerate(grads):
            reached = (length, min(distance, length - 1) + 1, directions)[which]
            rows = grad[0] if which == 0 else jnp.moveaxis(grad, -2, 0)
            assert np.abs(rows[:reached]).reshape(reached, -1).max(axis=1).min() > 0
            np.testing.assert_allclose(by_skew[which], grad, rtol=1e-11, atol=1e-11)
            places = list(np.ndindex(grad.shape))
            for index in places[:: max(1, len(places) // 40)]:
                ends = []
                for step in (1e-3, -1e-3):
                    moved = list(factors)
                    moved[which] = factors[which].at[index].add(step)
                    ends.append(total(tuple(moved), "dense"))
                # The sum is linear in each factor: central differences are exact.
                slope = (ends[0] - ends[1]) / 2e-3
                np.testing.assert_allclose(grad[index], slope, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "by_head"])
@pytest.mark.parametrize("length", [LENGTH, 32])
def test_gradients_of_every_implementation_are_those_of_the_gather(length, heads):
    q, table = jnp.asarray(draw(2, length, 2, 4)), jnp.asarray(draw(*heads, 9, 4))
    pull = jnp.asarray(draw(2, 2, length, length))

    def grads(implementation):
        def total(q, table):
            return (relative_scores(q, table, implementation) * pull).sum()

        return jax.jit(jax.grad(total, (0, 1)))(q, table)

    wanted = grads("gather")
    for implementation in IMPLEMENTATIONS[:-1]:
        for got, right in zip(grads(implementation), wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "is_skew"), [("cpu", True), ("tpu", False), ("cuda", False)])
def test_auto_follows_the_platform_that_a_program_is_lowered_for(platform, is_skew):
    """In both directions: whoever compiles for another machine gets that machine's program."""
    q, table, pull = draw(2, 32, 3, 4), draw(9, 4), draw(2, 3, 32, 32)

    def pulled(q, table):
        return jax.vjp(lambda *factors: relative_scores(*factors, "auto"), q, table)[1](pull)

    for function in (lambda q, table: relative_scores(q, table, "auto"), pulled):
        lowered = jax.jit(function).trace(q, table).lower(lowering_platforms=(platform,))
        # The rows of the table that two blocks of 16 queries need for 32 keys.
        assert ("tensor<2x47x4xf32>" in lowered.as_text()) == is_skew


@pytest.mark.parametrize(
    ("buckets", "distance"), [(32, 128), (16, 40), (4, 8), (32, 20), (64, 256)]
)
def test_buckets_are_those_of_t5_and_mpnet(buckets, distance):
    length = 300
    got = bucket_rows(length, buckets, distance)
    offsets = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    t5 = T5Attention._relative_position_bucket(offsets, True, buckets, distance)
    mpnet = MPNetEncoder.relative_position_bucket(offsets, buckets, distance)
    np.testing.assert_array_equal(got, t5.numpy())
    np.testing.assert_array_equal(got, mpnet.numpy())


def test_rotation_is_rotate_half():
    x, positions = draw(2, 6, 3, 8), np.array([[0, 1, 2, 0, 1, 2], [5, 9, 100, 511, 3, 0]])
    frequencies = 500.0 ** (-np.arange(4) / 4)
    angles = np.concatenate([positions[..., None] * frequencies] * 2, axis=-1)
    q = torch.from_numpy(x).transpose(1, 2)
    wanted, _ = apply_rotary_pos_emb(
        q, q, torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))
    )
    got = rotate(jnp.asarray(x), jnp.asarray(positions), 500.0)
    # An angle of 511 in float32 carries 511 * 2^-24 = 3e-5 by itself.
    np.testing.assert_allclose(got, wanted.transpose(1, 2).numpy(), atol=1e-4)


def test_rotated_products_depend_on_the_difference_of_positions_alone():
    q, k = (jnp.asarray(draw(1, 1, 1, 8, seed=seed)) for seed in (0, 1))

    def product(at_q, at_k):
        turned = (rotate(x, jnp.array([[p]]), 10_000.0) for x, p in ((q, at_q), (k, at_k)))
        return float(jnp.vdot(*turned))

    assert product(3, 5) == pytest.approx(product(0, 2), abs=1e-5)
    assert product(3, 5) == pytest.approx(product(40, 42), abs=1e-5)
    assert abs(product(3, 5) - product(5, 3)) > 1e-3
