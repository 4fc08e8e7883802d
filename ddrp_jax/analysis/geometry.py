"""How the rows of an embedding table lie in space.

Every function takes a table [rows, D] of any real type and computes in float64, a block of rows at
a time. A caller leaves out the rows of special tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddrp_jax.errors import DdrpError, UsageError

GROUPS = ("frequent", "medium", "rare")
# The groups' shares of a ranking: the first 30 %, the middle 50 %, the last 20 %.
_BOUNDS = (0.0, 0.3, 0.8, 1.0)
_BLOCK_ROWS = 4096

Plane = tuple[np.ndarray, np.ndarray]


def isotropy(table: np.ndarray, scale: float = 1.0) -> float:
    """Returns the isotropy of `scale * table`, in [0, 1]; 1 is isotropic.

    It is the least of `Z(v) = sum_i exp(e_i . v)` over the greatest, where v runs over the unit
    eigenvectors of `E^T E` and their negatives. Shrinking a table raises it.

    Raises:
        DdrpError: the table has no rows, or values that are not finite.

    Source: Mu & Viswanath 2018, section 2; both signs of each eigenvector are this project's.
    """
    return _isotropies(table, principal_axes(table)[1], [scale])[0]


def principal_axes(table: np.ndarray, mean: np.ndarray | None = None) -> Plane:
    """Returns singular values and right singular vectors, from the greatest value on.

    They come from the eigenvectors of `E^T E`: singular values below 1e-8 of the greatest are
    rounding.

    Args:
        table: [rows, D].
        mean: [D], taken from every row first.

    Returns:
        Singular values [D] and unit axes [D, D], an axis a column.

    Raises:
        DdrpError: the table has no rows, or values that are not finite.
    """
    gram = np.zeros((table.shape[1],) * 2)
    for block in _blocks(table):
        if not np.isfinite(block).all():
            raise DdrpError("the table holds values that are not finite")
        if mean is not None:
            block -= mean
        gram += block.T @ block
    values, axes = np.linalg.eigh(gram)
    return np.sqrt(values[::-1].clip(0)), axes[:, ::-1]


def row_norms(table: np.ndarray) -> np.ndarray:
    """Returns the Euclidean length of each row [rows]."""
    return np.concatenate([np.linalg.norm(block, axis=1) for block in _blocks(table)])


def mean_cosine(table: np.ndarray) -> float | None:
    """Returns the cosine expected between two different rows drawn at random.

    This is the mean over all pairs, not a sample: unit rows u_i sum over pairs to
    `|sum_i u_i|^2 - sum_i |u_i|^2`. Rows of zeros have no direction and are left out; None where
    fewer than two others are there. Source: ours.
    """
    total, rows = np.zeros(table.shape[1]), 0
    for block in _blocks(table):
        norms = np.linalg.norm(block, axis=1, keepdims=True)
        used = norms[:, 0] > 0
        total += (block[used] / norms[used]).sum(axis=0)
        rows += int(used.sum())
    if rows < 2:
        return None
    return float((total @ total - rows) / (rows * (rows - 1)))


def all_but_the_top(table: np.ndarray, components: int = 10) -> np.ndarray:
    """Returns the table without its mean and the greatest principal directions of what is left.

    Args:
        table: [rows, D].
        components: how many directions.

    Returns:
        Float64 [rows, D].

    Raises:
        UsageError: `components` is not in [0, D).

    Source: Mu & Viswanath 2018, algorithm 1; the directions are taken from the centred rows.
    """
    if not 0 <= components < table.shape[1]:
        raise UsageError(
            f"all-but-the-top with {components} components: expected fewer than the "
            f"{table.shape[1]} dimensions of the table"
        )
    mean = _mean(table)
    top = principal_axes(table, mean)[1][:, :components]
    left = np.empty(table.shape)
    done = 0
    for block in _blocks(table):
        block -= mean
        left[done : done + len(block)] = block - (block @ top) @ top.T
        done += len(block)
    return left


def principal_plane(table: np.ndarray) -> Plane:
    """Returns mean [D] and the two principal axes [D, 2] of a table, for `project`.

    Each axis points to where its greatest component is positive, so that it is the same anywhere.
    """
    mean = _mean(table)
    axes = principal_axes(table, mean)[1][:, :2]
    greatest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0)
    return mean, axes * np.sign(greatest)


def project(table: np.ndarray, plane: Plane) -> np.ndarray:
    """Returns each row's two coordinates [rows, 2] in a plane, perhaps that of another table."""
    mean, axes = plane
    return np.concatenate([(block - mean) @ axes for block in _blocks(table)])


def frequency_groups(ranking: np.ndarray) -> dict[str, np.ndarray]:
    """Cuts ids, the most frequent first, into the groups of `GROUPS`; a small one may be empty."""
    cuts = [round(bound * len(ranking)) for bound in _BOUNDS]
    return {
        name: ranking[begin:end]
        for name, begin, end in zip(GROUPS, cuts[:-1], cuts[1:], strict=True)
    }


def measure(
    table: np.ndarray, ranking: np.ndarray, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measures a table as a whole and inside each frequency group.

    Args:
        table: [V, D].
        ranking: ids to regard, the most frequent first.
        original: what this function gave for the table that this one came from; its mean row norms
            are those of "isotropy_at_original_norm". None: this table is the original.

    Returns:
        Plain data: "dimensions", "singular_values" from the greatest on, for all rows together
        "rows", "mean_norm", "isotropy", "isotropy_at_original_norm" and "mean_cosine", and in
        "groups" the same five for each group. "isotropy_at_original_norm" scales the rows, those
        of a group by themselves, to the mean norm that the same rows had in the original, since
        shorter rows are more isotropic by their length alone. What is not defined is None.

    Raises:
        DdrpError: the table holds values that are not finite.
    """
    whole = np.asarray(table)[ranking]
    result: dict[str, Any] = {"dimensions": table.shape[1]}
    result |= _measure_rows(whole, original)
    result["groups"] = {}
    for name, ids in frequency_groups(np.arange(len(ranking))).items():
        part = _measure_rows(whole[ids], None if original is None else original["groups"][name])
        del part["singular_values"]
        result["groups"][name] = part
    return result


def _measure_rows(rows: np.ndarray, original: Mapping[str, Any] | None) -> dict[str, Any]:
    if not len(rows):
        names = ("mean_norm", "isotropy", "isotropy_at_original_norm", "mean_cosine")
        return {"rows": 0, **dict.fromkeys(names), "singular_values": []}
    values, axes = principal_axes(rows)
    norm = float(row_norms(rows).mean())
    original_norm = norm if original is None else original["mean_norm"]
    # Rows of zeros alone have no length to scale.
    scales = [1.0, original_norm / norm] if norm > 0 else [1.0]
    isotropies = _isotropies(rows, axes, scales)
    return {
        "rows": len(rows),
        "mean_norm": norm,
        "isotropy": isotropies[0],
        "isotropy_at_original_norm": isotropies[1] if norm > 0 else None,
        "mean_cosine": mean_cosine(rows),
        "singular_values": values.tolist(),
    }


def _isotropies(table: np.ndarray, axes: np.ndarray, scales: list[float]) -> list[float]:
    """Returns the isotropy of the table times each scale; the axes are the same for all."""
    log_z = np.full((len(scales), 2, table.shape[1]), -np.inf)
    for block in _blocks(table):
        scores = block @ axes
        for number, scale in enumerate(scales):
            for sign, signed in enumerate((scale, -scale)):
                log_z[number, sign] = np.logaddexp(log_z[number, sign], _log_sum(scores * signed))
    return [math.exp(values.min() - values.max()) for values in log_z]


def _log_sum(scores: np.ndarray) -> np.ndarray:
    """Returns log sum exp over the rows, whatever the size of the scores."""
    greatest = scores.max(axis=0)
    return greatest + np.log(np.exp(scores - greatest).sum(axis=0))


def _mean(table: np.ndarray) -> np.ndarray:
    return sum(block.sum(axis=0) for block in _blocks(table)) / len(table)


def _blocks(table: np.ndarray) -> Iterator[np.ndarray]:
    """Yields float64 copies of some rows at a time."""
    if not len(table):
        raise DdrpError("the table has no rows to measure")
    for begin in range(0, len(table), _BLOCK_ROWS):
        yield np.array(table[begin : begin + _BLOCK_ROWS], np.float64)
