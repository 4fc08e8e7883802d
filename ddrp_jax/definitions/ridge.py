"""Ridge regression in float64, its strength chosen on groups left out."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddrp_jax.data.hashing import random_bits

# Strengths tried, as shares of the mean eigenvalue of the features' covariance.
_STRENGTHS = 10.0 ** np.arange(-5, 3)
_LEFT_OUT = 10  # one group in so many chooses the strength


@dataclasses.dataclass(frozen=True)
class Ridge:
    """A linear map of features.

    Attributes:
        weights: float64 [F, D].
        intercept: float64 [D]; zeros where none was fitted.
        strength: what was chosen, as a share of the mean eigenvalue.
    """

    weights: np.ndarray
    intercept: np.ndarray
    strength: float

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns predictions [n, D] for features [n, F]."""
        return features @ self.weights + self.intercept


def fit_ridge(
    features: np.ndarray, targets: np.ndarray, *, groups: np.ndarray, intercept: bool
) -> Ridge:
    """Fits `targets ~ features @ W (+ b)` with a penalty on |W|^2.

    The strength is the one of the least squared error on every tenth group (by a hash); the fit
    then takes all rows.

    Args:
        features: [n, F].
        targets: [n, D].
        groups: int [n]: rows of one group are left out together, as those of one headword.
        intercept: whether there is one; it is not penalised.
    """
    features, targets = features.astype(np.float64), targets.astype(np.float64)
    left_out = random_bits(0, groups) % np.uint64(_LEFT_OUT) == 0
    best = _STRENGTHS[len(_STRENGTHS) // 2]
    if 0 < left_out.sum() < len(left_out):
        fits = _fits(features[~left_out], targets[~left_out], _STRENGTHS, intercept)
        errors = [np.square(fit(features[left_out]) - targets[left_out]).sum() for fit in fits]
        best = _STRENGTHS[int(np.argmin(errors))]
    return _fits(features, targets, np.array([best]), intercept)[0]


def _fits(
    features: np.ndarray, targets: np.ndarray, strengths: np.ndarray, intercept: bool
) -> list[Ridge]:
    size = features.shape[1], targets.shape[1]
    centre_x = features.mean(0) if intercept else np.zeros(size[0])
    centre_y = targets.mean(0) if intercept else np.zeros(size[1])
    features = features - centre_x
    values, vectors = np.linalg.eigh(features.T @ features)
    rotated = vectors.T @ (features.T @ (targets - centre_y))
    scale = max(float(values.mean()), np.finfo(np.float64).tiny)
    found = []
    for strength in strengths:
        weights = vectors @ (rotated / (np.maximum(values, 0) + strength * scale)[:, None])
        found.append(Ridge(weights, centre_y - centre_x @ weights, float(strength)))
    return found
