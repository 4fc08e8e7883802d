"""Ridge regression against the normal equations."""

import numpy as np
import pytest

from ddrp_jax.definitions.ridge import fit_ridge


@pytest.mark.parametrize("intercept", [False, True])
def test_the_fit_solves_the_penalised_equations(intercept):
    draw = np.random.default_rng(0)
    x = draw.normal(1.0, 2.0, (200, 6))
    y = x @ draw.normal(size=(6, 3)) + 4 + draw.normal(size=(200, 3))
    fit = fit_ridge(x, y, groups=np.arange(200), intercept=intercept)
    centred = x - x.mean(0) * intercept
    scale = np.linalg.eigvalsh(centred.T @ centred).mean()
    a, b = x, y
    penalty = np.sqrt(fit.strength * scale) * np.eye(6)
    if intercept:
        a = np.column_stack([x, np.ones(200)])
        penalty = np.column_stack([penalty, np.zeros(6)])
    solved = np.linalg.lstsq(np.vstack([a, penalty]), np.vstack([b, np.zeros((6, 3))]), rcond=None)[
        0
    ]
    np.testing.assert_allclose(fit.weights, solved[:6], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(fit(x), a @ solved, rtol=1e-8, atol=1e-8)
    assert intercept or not fit.intercept.any()


def test_noise_asks_for_a_stronger_penalty():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 60))
    signal = x @ draw.normal(size=(60, 2))
    clear = fit_ridge(x, signal, groups=np.arange(120), intercept=True)
    noisy = fit_ridge(
        x, signal + draw.normal(0, 50, signal.shape), groups=np.arange(120), intercept=True
    )
    assert clear.strength < noisy.strength


def test_groups_are_left_out_together():
    """Copies of a row on both sides of the split would choose no penalty at all."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 50)), draw.normal(size=(60, 2))
    copies = [np.repeat(a, 20, axis=0) for a in (x, y)]
    together = fit_ridge(*copies, groups=np.repeat(np.arange(60), 20), intercept=True)
    apart = fit_ridge(*copies, groups=np.arange(1200), intercept=True)
    assert together.strength > apart.strength


def test_one_group_is_fitted_too():
    fit = fit_ridge(np.eye(3), np.eye(3), groups=np.zeros(3, int), intercept=False)
    assert np.isfinite(fit.weights).all()
