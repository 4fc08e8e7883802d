"""What replacing rows did to a checkpoint's word table: measures of both tables, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.analysis.geometry import (
    all_but_the_top,
    frequency_groups,
    measure,
    principal_plane,
    project,
)
from ddrp_jax.analysis.word_similarity import WordPairs, word_similarity
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.training import checkpoint

BASELINES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"all-but-the-top": all_but_the_top}
# The decoder of an encoder-decoder shares it.
_WORD_TABLE = "encoder/embeddings/word"


@dataclasses.dataclass(frozen=True)
class WordTable:
    """The input embeddings of a checkpoint.

    Attributes:
        path: the checkpoint's folder.
        rows: float32 [V, D], without the rows that pad the vocabulary.
        tokenizer: the one that it was trained with.
    """

    path: Path
    rows: np.ndarray
    tokenizer: Tokenizer


def load_word_table(path: str | Path) -> WordTable:
    """Reads the word table of a run (its newest good checkpoint) or of one checkpoint's folder.

    Raises:
        UsageError: there is no checkpoint, or it has no word table.
        DdrpError: it is damaged, or its table holds values that are not finite.
    """
    folder = checkpoint.find_checkpoint(path)
    if _WORD_TABLE not in checkpoint.parameter_shapes(folder):
        raise UsageError(
            f"checkpoint '{folder}': no word table ({_WORD_TABLE}) there; name a model that "
            "'ddrp pretrain', 'ddrp import' or 'ddrp definitions apply' wrote"
        )
    vocab_size = checkpoint.read_config(folder)["model"]["vocab_size"]
    rows = checkpoint.restore_array(folder, _WORD_TABLE)[:vocab_size]
    if not np.isfinite(rows).all():
        raise DdrpError(f"{folder}: its word table holds values that are not finite")
    return WordTable(folder, rows, load_tokenizer(folder / "tokenizer"))


def check_comparable(before: WordTable, after: WordTable) -> None:
    """Raises UsageError unless both tables have the same tokens and dimensions."""
    prints = before.tokenizer.fingerprint, after.tokenizer.fingerprint
    if prints[0] != prints[1]:
        raise UsageError(
            f"'{before.path}' has tokenizer {prints[0]} and '{after.path}' {prints[1]}: their rows "
            "stand for different tokens; name two checkpoints of the same vocabulary"
        )
    if before.rows.shape != after.rows.shape:
        shapes = [" x ".join(map(str, table.rows.shape)) for table in (before, after)]
        raise UsageError(
            f"'{before.path}' has a word table of {shapes[0]} and '{after.path}' of {shapes[1]}; "
            "name two checkpoints of the same model"
        )


def compare_tables(
    before: WordTable,
    after: WordTable,
    ranking: np.ndarray,
    *,
    pair_sets: Sequence[WordPairs] = (),
    baseline: str | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measures two tables, and a baseline made from the first.

    Args:
        before: the original.
        after: the table that came from it.
        ranking: ids to regard, the most frequent first.
        pair_sets: judged pairs of words.
        baseline: a name of `BASELINES`, applied to the regarded rows of the original.
        progress: called with the name of each table before it is measured.

    Returns:
        Plain data: "vocabulary" (rows "total", "measured" and "changed", the last by group as
        well), and in "tables" what `geometry.measure` gives for "before", "after" and the baseline,
        with "word_similarity" by the set's name.
    """
    tables = {"before": before.rows, "after": after.rows}
    if baseline is not None:
        tables[baseline] = before.rows.copy()
        tables[baseline][ranking] = BASELINES[baseline](before.rows[ranking])
    measured: dict[str, Any] = {}
    for name, rows in tables.items():
        progress(name)
        measured[name] = measure(rows, ranking, measured.get("before"))
        measured[name]["word_similarity"] = {
            pairs.name: word_similarity(rows, before.tokenizer, pairs) for pairs in pair_sets
        }
    differ = np.any(before.rows != after.rows, axis=1)
    groups = frequency_groups(ranking)
    return {
        "vocabulary": {
            "total": len(differ),
            "measured": len(ranking),
            "changed": int(differ.sum()),
            "changed_by_group": {name: int(differ[ids].sum()) for name, ids in groups.items()},
        },
        "tables": measured,
    }


def projections(
    before: WordTable, after: WordTable, ranking: np.ndarray
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the 2-D points of each group, before and after, on the original's principal axes."""
    plane = principal_plane(before.rows[ranking])
    groups = frequency_groups(ranking)
    return {
        name: {group: project(table.rows[ids], plane) for group, ids in groups.items() if len(ids)}
        for name, table in (("before", before), ("after", after))
    }


def table_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of the printed table; the first row names the columns."""
    tables = report["tables"]
    rows: list[tuple[str, ...]] = [("", *tables)]

    def add(label: str, values: Sequence[float | None]) -> None:
        rows.append((label, *("undefined" if v is None else f"{v:.4g}" for v in values)))

    first = next(iter(tables.values()))
    sizes = {name: part["rows"] for name, part in first["groups"].items()}
    for measure_name, label in (
        ("isotropy", "isotropy"),
        ("isotropy_at_original_norm", "isotropy at the original's mean row norm"),
        ("mean_cosine", "cosine of a random pair of rows"),
        ("mean_norm", "mean row norm"),
    ):
        add(label, [table[measure_name] for table in tables.values()])
        for group, size in sizes.items():
            values = [table["groups"][group][measure_name] for table in tables.values()]
            add(f"  {group}, {size:,} rows", values)
    add("spectrum: share of the first direction", [_first_share(t) for t in tables.values()])
    for set_name, kinds in first["word_similarity"].items():
        for kind, result in kinds.items():
            values = [t["word_similarity"][set_name][kind]["spearman"] for t in tables.values()]
            coverage = f"{result['used']:,} of {result['pairs']:,} pairs"
            add(f"Spearman, {set_name}, {kind.replace('_', ' ')}, {coverage}", values)
    return rows


def _first_share(table: Mapping[str, Any]) -> float | None:
    """Returns the greatest direction's part of the squared length of all rows."""
    squares = np.square(table["singular_values"])
    return float(squares[0] / squares.sum()) if squares.any() else None
