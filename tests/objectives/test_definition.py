"""Reconstruction losses against plain loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ddrp_jax.objectives import definition


def drawn(seed=0, shape=(3, 4, 5)):
    draw = np.random.default_rng(seed)
    predictions, targets = (draw.normal(size=shape).astype(np.float32) for _ in range(2))
    weights = (draw.random(shape[:2]) < 0.5).astype(np.float32)
    assert 0 < weights.sum() < weights.size
    return jnp.asarray(predictions), jnp.asarray(targets), jnp.asarray(weights)


def test_squared_error_is_the_source_s():
    predictions, targets, weights = drawn()
    total, count = definition.squared_error(predictions, targets, weights)
    wanted = 0.0
    for row in range(3):
        for place in range(4):
            if weights[row, place]:
                difference = [
                    float(p) - float(t)
                    for p, t in zip(predictions[row, place], targets[row, place], strict=True)
                ]
                wanted += 100 / 5 * sum(d * d for d in difference)
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    assert count == weights.sum()


def test_cosine_is_that_of_each_pair():
    predictions, targets, weights = drawn()
    predictions, weights = predictions.at[0, 0].set(0), weights.at[0, 0].set(1)
    total, count = definition.cosine(predictions, targets, weights)
    wanted = 0.0
    for row in range(3):
        for place in range(4):
            p, t = predictions[row, place].tolist(), targets[row, place].tolist()
            size = math.hypot(*p) * math.hypot(*t)
            if weights[row, place] and size:
                wanted += sum(a * b for a, b in zip(p, t, strict=True)) / size
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    assert count == weights.sum()


def test_the_constant_row_s_error_follows_from_the_moments():
    _, targets, weights = drawn()
    moments = definition.target_moments(targets, weights)
    mean = np.divide(*moments["target"])
    square = np.divide(*moments["target_square"])
    chosen = np.asarray(targets)[np.asarray(weights) > 0]
    wanted = np.square(chosen - chosen.mean(0)).sum(-1).mean()
    np.testing.assert_allclose(square - np.square(mean).sum(), wanted, rtol=1e-5)


def test_nothing_to_predict_gives_no_loss_and_no_gradient():
    predictions, targets, weights = drawn()
    gradient = jax.grad(lambda p: definition.squared_error(p, targets, 0 * weights)[0])(predictions)
    assert not np.asarray(gradient).any()
