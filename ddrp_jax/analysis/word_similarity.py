"""How well cosines of table rows agree with people's judgement of how alike two words are."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.data.frequency import reserved_ids
from ddrp_jax.data.sources import read_lines
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.errors import DdrpError, UsageError

_log = logging.getLogger(__name__)
# Decimals that a cosine keeps: errors of rounding would part equal ones and rank them by chance.
_DECIMALS = 12


@dataclasses.dataclass(frozen=True)
class WordPairs:
    """A set of judged pairs.

    Attributes:
        name: of its file, without the ending.
        header: the first line where it names the columns.
        pairs: (word, word, score), in the order of the file.
    """

    name: str
    header: str | None
    pairs: tuple[tuple[str, str, float], ...]


def read_pairs(path: str | Path) -> WordPairs:
    r"""Reads a set such as WordSim-353, SimLex-999 or the rare-word set.

    A line holds two words and a score, parted by tabs, else by commas, else by spaces, and ends
    with `\n` or `\r\n`. Where other columns stand before the score, as SimLex-999's part of
    speech, or behind it, the score is the first column of numbers. Empty lines and those that begin
    with `#` are left out, and so is a first line without any number.

    Raises:
        UsageError: there is no such file.
        DdrpError: it is not UTF-8, a line is not a pair with a score, or there is none.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"word similarity '{path}': no such file")
    lines = [
        (number, line)
        for number, line in enumerate(read_lines(path), 1)
        if line.strip() and not line.startswith("#")
    ]
    header = None
    if lines and _score_column(_fields(lines[0][1])) is None:
        header = lines.pop(0)[1]
    if not lines:
        raise DdrpError(f"{path}: no line with two words and a score")
    column = _score_column(_fields(lines[0][1]))
    pairs = []
    for number, line in lines:
        fields = _fields(line)
        score = _number(fields[column]) if column and len(fields) > column else None
        if score is None or not fields[0] or not fields[1]:
            raise DdrpError(
                f"{path}: line {number} is {line[:80]!r}, expected two words and a score"
            )
        pairs.append((fields[0], fields[1], score))
    return WordPairs(path.stem, header, tuple(pairs))


def word_pieces(tokenizer: Tokenizer, word: str) -> list[int]:
    """Returns the ids of a word as it stands inside a sentence, behind a space.

    Byte-level BPE has other pieces for that than for the same word at the beginning of a text,
    which is the rarer form; SentencePiece and WordPiece take every word as behind a space.
    """
    return tokenizer.encode(f" {word}" if tokenizer.kind == "byte_bpe" else word)


def word_similarity(
    table: np.ndarray, tokenizer: Tokenizer, pair_set: WordPairs
) -> dict[str, dict[str, Any]]:
    """Ranks pairs by the cosine of their words' vectors, against the ranking by score.

    Args:
        table: [V, D], rows by token id.
        tokenizer: whose ids they are.
        pair_set: the judged pairs.

    Returns:
        "single_tokens", of the pairs whose words are one token each, and "mean_of_pieces", of all,
        a word's vector the mean of its pieces' rows. Each has "pairs", those there are, "used",
        those with two vectors that have a direction, and "spearman", None where there are fewer
        than two or all scores, or all cosines, are equal. A word with an unknown piece has no
        vector.
    """
    reserved = reserved_ids(tokenizer)
    pieces = {
        word: ids
        for pair in pair_set.pairs
        for word in pair[:2]
        if (ids := word_pieces(tokenizer, word)) and not reserved.intersection(ids)
    }
    kinds = {
        "single_tokens": {word: ids for word, ids in pieces.items() if len(ids) == 1},
        "mean_of_pieces": pieces,
    }
    return {
        kind: _agreement(table, words, pair_set, kind.replace("_", " "))
        for kind, words in kinds.items()
    }


def _agreement(
    table: np.ndarray, words: dict[str, list[int]], pair_set: WordPairs, kind: str
) -> dict[str, Any]:
    from scipy.stats import spearmanr

    vectors = {word: np.mean(table[ids], axis=0, dtype=np.float64) for word, ids in words.items()}
    scores: list[float] = []
    cosines: list[float] = []
    for first, second, score in pair_set.pairs:
        if first in vectors and second in vectors:
            a, b = vectors[first], vectors[second]
            norms = float(np.linalg.norm(a) * np.linalg.norm(b))
            if norms > 0:
                scores.append(score)
                cosines.append(round(float(np.dot(a, b)) / norms, _DECIMALS))
    spearman = None
    if len(scores) < 2:
        problem = f"only {len(scores)} of its {len(pair_set.pairs)} pairs can be used"
    elif np.ptp(scores) == 0:
        problem = "all scores are equal"
    elif np.ptp(cosines) == 0:
        problem = "all cosines are equal"
    else:
        spearman, problem = float(spearmanr(scores, cosines).statistic), ""
    if problem:
        _log.warning("%s, %s: no rank correlation, %s", pair_set.name, kind, problem)
    return {"pairs": len(pair_set.pairs), "used": len(scores), "spearman": spearman}


def _fields(line: str) -> list[str]:
    separator = next((mark for mark in "\t," if mark in line), None)
    return [field.strip() for field in line.split(separator)]


def _score_column(fields: Sequence[str]) -> int | None:
    # What stands behind the two words; a word itself may look like a number.
    return next((i for i in range(2, len(fields)) if _number(fields[i]) is not None), None)


def _number(field: str) -> float | None:
    try:
        value = float(field)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
