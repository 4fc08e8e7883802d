"""How well rows of held-out tokens are produced, beside baselines that cost nothing."""

from __future__ import annotations

import numpy as np

from ddrp_jax.definitions.examples import Examples
from ddrp_jax.definitions.reconstruct import TrainedReconstructor, check_examples
from ddrp_jax.definitions.ridge import fit_ridge
from ddrp_jax.errors import UsageError

_BLOCK = 512


def measure_reconstruction(
    reconstructor: TrainedReconstructor, examples: Examples
) -> dict[str, dict[str, float]]:
    """Measures produced rows of the held-out tokens, and those of baselines, on the same tokens.

    The baselines: the best constant row, the held-out rows' own mean; and a ridge regression of the
    training tokens' rows on the mean embedding of their definition's tokens, its strength chosen
    within the training tokens. The reconstructor and the ridge are each measured with a token's
    first definition, and with the mean over all definitions.

    Args:
        reconstructor: trained on these examples' training split.
        examples: with held-out headwords.

    Returns:
        For each method `relative_error` (squared error over that of the constant row), `cosine`
        (mean), `hits_1` and `hits_10` (share of tokens whose true row is among the nearest 1 and 10
        of the vocabulary by cosine), and `tokens`.

    Raises:
        UsageError: nothing is held out, or the examples are of another tokenizer.
    """
    check_examples(examples, reconstructor.path)
    token_ids = np.unique(examples.target_id[examples.split("heldout")])
    if not len(token_ids):
        raise UsageError(
            f"definitions {str(examples.path)!r} hold nothing out; build them with --holdout 5%"
        )
    table = np.asarray(reconstructor.model.targets, np.float64)
    produced: dict[str, np.ndarray] = {
        "constant": np.broadcast_to(table[token_ids].mean(0), (len(token_ids), table.shape[1]))
    }
    for senses in ("first", "mean"):
        rows = _ridge_rows(examples, table, token_ids, senses, reconstructor.tokenizer.mask_id)
        produced[f"ridge, {senses}"] = rows
    for senses in ("first", "mean"):
        produced[f"reconstructor, {senses}"] = reconstructor.produce(examples, token_ids, senses)
    return {name: row_measures(rows, table, token_ids) for name, rows in produced.items()}


def row_measures(rows: np.ndarray, table: np.ndarray, token_ids: np.ndarray) -> dict[str, float]:
    """Measures rows [n, D] that are to be those of `token_ids` [n] in `table` [V, D]."""
    rows, table = rows.astype(np.float64), table.astype(np.float64)
    wanted = table[token_ids]
    constant = np.square(wanted - wanted.mean(0)).sum()
    unit_table, unit_rows = _unit(table), _unit(rows)
    ranks = np.empty(len(token_ids), np.int64)
    for begin in range(0, len(token_ids), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        cosines = unit_rows[block] @ unit_table.T
        own = np.take_along_axis(cosines, token_ids[block, None], axis=1)
        ranks[block] = (cosines > own).sum(1)
    return {
        "relative_error": float(np.square(rows - wanted).sum() / constant),
        "cosine": float((unit_rows * unit_table[token_ids]).sum(1).mean()),
        "hits_1": float((ranks < 1).mean()),
        "hits_10": float((ranks < 10).mean()),
        "tokens": len(token_ids),
    }


def _ridge_rows(
    examples: Examples, table: np.ndarray, token_ids: np.ndarray, senses: str, mask_id: int
) -> np.ndarray:
    chosen = examples.split("train")
    # Words of their own alone: what a carrier says of its pieces makes the ridge worse.
    is_own = examples.slot_begin[chosen] == examples.slot_position[chosen]
    after = examples.input_ids[examples.offsets[chosen] + examples.slot_position[chosen] + 1]
    is_own &= after != mask_id
    trained = np.unique(examples.target_id[chosen[is_own]])
    features = _definition_means(examples, table, trained, senses)
    groups = examples.headword[examples.for_tokens(trained)]
    fit = fit_ridge(features, table[trained], groups=groups, intercept=True)
    return fit(_definition_means(examples, table, token_ids, senses))


def _definition_means(
    examples: Examples, table: np.ndarray, token_ids: np.ndarray, senses: str
) -> np.ndarray:
    """Returns [n, D]: the mean embedding of the tokens of each token's definitions."""
    chosen = examples.for_tokens(token_ids, senses)
    length = int(examples.lengths[chosen].max())
    ids, flags, _ = examples.padded(chosen, length, 0)
    group = np.searchsorted(np.unique(token_ids), examples.target_id[chosen])
    sums = np.zeros((len(token_ids), table.shape[1]))
    counts = np.zeros(len(token_ids))
    for begin in range(0, len(chosen), 4096):
        block = slice(begin, begin + 4096)
        rows, columns = np.nonzero(flags[block])
        np.add.at(sums, group[block][rows], table[ids[block][rows, columns]])
        np.add.at(counts, group[block][rows], 1)
    return sums / np.maximum(counts, 1)[:, None]


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt(np.square(rows).sum(-1, keepdims=True) + 1e-24)
