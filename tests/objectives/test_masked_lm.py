"""Masked language modelling: the token mean, and what happens where nothing is predicted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrp_jax.objectives import masked_lm as objective

masked_lm = jax.jit(objective.masked_lm)


def draw(seed=0, shape=(3, 4, 11)):
    generator = np.random.default_rng(seed)
    logits = jnp.asarray(3 * generator.normal(size=shape), jnp.float32)
    ids = jnp.asarray(generator.integers(0, shape[-1], shape[:-1]), jnp.int32)
    return logits, ids


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=12, max_size=12))
def test_sums_are_those_of_a_loop_over_the_predicted_tokens(seed, used):
    logits, ids = draw(seed)
    weights = jnp.asarray(np.reshape(used, (3, 4)), jnp.float32)
    sums = masked_lm(logits, ids, weights)
    loss = right = 0.0
    for place in np.argwhere(weights):
        scores = np.asarray(logits, np.float64)[tuple(place)]
        wanted = int(ids[tuple(place)])
        loss += np.log(np.exp(scores).sum()) - scores[wanted]
        right += scores.argmax() == wanted
    np.testing.assert_allclose(sums["mlm_loss"], (loss, sum(used)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums["mlm_accuracy"], (right, sum(used)))


def test_gradient_is_that_of_the_plain_cross_entropy_and_zero_in_unused_places():
    logits, ids = draw()
    weights = jnp.asarray([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], jnp.float32)
    got = jax.grad(lambda x: masked_lm(x, ids, weights)["mlm_loss"][0])(logits)
    plain = optax.softmax_cross_entropy_with_integer_labels
    wanted = jax.grad(lambda x: (plain(x, ids) * weights).sum())(logits)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert not np.any(got[weights == 0])


def test_gradient_equals_finite_differences():
    with jax.enable_x64(True):
        logits, ids = draw(shape=(1, 2, 5))
        logits = logits.astype(jnp.float64)
        total = jax.jit(lambda x: masked_lm(x, ids, jnp.ones((1, 2)))["mlm_loss"][0])
        grad = jax.grad(total)(logits)
        for place in np.ndindex(*logits.shape):
            ends = [float(total(logits.at[place].add(step))) for step in (1e-4, -1e-4)]
            assert float(grad[place]) == pytest.approx((ends[0] - ends[1]) / 2e-4, abs=1e-7)


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[[1e4, -1e4, 0.0], [-1e30, 0.0, 3e38]]])
    ids, weights = jnp.asarray([[0, 1]]), jnp.ones((1, 2))
    sums, grads = jax.value_and_grad(lambda x: masked_lm(x, ids, weights)["mlm_loss"][0])(logits)
    assert sums == pytest.approx(3e38, rel=1e-6)
    assert np.isfinite(grads).all()


def test_the_mean_is_over_tokens_not_over_devices_or_microbatches():
    """One token of 2.0 nats on one side and nine of 1.0 on the other are 1.1, not 1.5."""

    def side(nats, count):
        # Two words: the right one has probability e^-nats.
        other = np.log(np.expm1(nats))
        logits = np.zeros((1, 9, 2), np.float32)
        logits[..., 1] = other
        weights = (np.arange(9) < count).astype(np.float32)[None]
        return masked_lm(jnp.asarray(logits), jnp.zeros((1, 9), jnp.int32), jnp.asarray(weights))

    sums = [side(2.0, 1)["mlm_loss"], side(1.0, 9)["mlm_loss"]]
    total, count = (sum(float(pair[i]) for pair in sums) for i in (0, 1))
    assert total / count == pytest.approx(1.1, abs=1e-6)


def test_nothing_predicted_gives_zero_and_no_gradient():
    logits, ids = draw()
    weights = jnp.zeros(ids.shape)
    sums, grads = jax.value_and_grad(lambda x: masked_lm(x, ids, weights)["mlm_loss"][0])(logits)
    assert sums == 0
    assert not np.any(grads)
