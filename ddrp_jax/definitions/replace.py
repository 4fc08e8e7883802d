"""Puts produced rows into a model's word table (section 4 of the specification)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.definitions.examples import Examples
from ddrp_jax.definitions.reconstruct import check_examples, table_fingerprint, word_table
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.training import checkpoint

WORD_TABLE = "encoder/embeddings/word"


def choose_by_ratio(
    ranking: np.ndarray, ratio: float, vocab_size: int, defined_ids: np.ndarray
) -> np.ndarray:
    """Returns the sorted ids of the rarest `round(ratio * vocab_size)` tokens that are defined.

    Args:
        ranking: ids, the most frequent first; special tokens are not among them, and count as more
            frequent than all.
        ratio: in (0, 1]; 1 chooses every defined token.
        vocab_size: V.
        defined_ids: the tokens with a definition.

    Raises:
        UsageError: the ratio is out of range, or no token so rare is defined.
    """
    check_ratio(ratio)
    count = min(round(ratio * vocab_size), len(ranking))
    rarest = ranking[len(ranking) - count :]
    chosen = np.intersect1d(rarest, defined_ids)
    if not len(chosen):
        raise UsageError(
            f"ratio={ratio:g}: none of the rarest {count:,} of {vocab_size:,} tokens has a "
            "definition; choose a greater one"
        )
    return chosen


def choose_by_corpus(counts: np.ndarray, defined_ids: np.ndarray, corpus: str) -> np.ndarray:
    """Returns the sorted ids of the defined tokens that occur in a corpus.

    Args:
        counts: [V] how often each token occurs in it.
        defined_ids: the tokens with a definition.
        corpus: its name, for the error.

    Raises:
        UsageError: there is none.
    """
    chosen = np.intersect1d(np.flatnonzero(counts), defined_ids)
    if not len(chosen):
        raise UsageError(
            f"tokens-from={corpus!r}: none of the {np.count_nonzero(counts):,} tokens that occur "
            "there has a definition"
        )
    return chosen


def check_ratio(ratio: float) -> None:
    """Raises UsageError unless a ratio is in (0, 1]."""
    if not 0 < ratio <= 1:
        raise UsageError(
            f"ratio={ratio:g}: expected a share of the vocabulary above 0 and at most 1"
        )


def check_fit(base: Path, reconstructor: Path, examples: Examples) -> None:
    """Checks that a reconstructor and examples belong to a model.

    Args:
        base: the model's checkpoint.
        reconstructor: the reconstructor's.
        examples: whose definitions are to be used.

    Raises:
        UsageError: one has another tokenizer, vocabulary or word table than the model.
    """
    values = checkpoint.read_config(reconstructor)
    if "reconstruction" not in values:
        raise UsageError(
            f"reconstructor '{reconstructor}': not a reconstructor but another model; name the "
            "workdir of 'ddrp definitions train'"
        )
    check_examples(examples, base)
    prints = [load_tokenizer(path / "tokenizer").fingerprint for path in (base, reconstructor)]
    if prints[0] != prints[1]:
        raise UsageError(
            f"reconstructor '{reconstructor}': trained with tokenizer {prints[1]}, checkpoint "
            f"'{base}' has {prints[0]}; train one with 'ddrp definitions train' for this model"
        )
    model, trained = checkpoint.read_config(base)["model"], values["model"]
    for name, meaning in (("vocab_size", "rows"), ("hidden_size", "columns")):
        if model[name] != trained[name]:
            raise UsageError(
                f"reconstructor '{reconstructor}': trained for a word table of {trained[name]:,} "
                f"{meaning}, that of checkpoint '{base}' has {model[name]:,}"
            )
    if examples.vocab_size > model["vocab_size"]:
        raise UsageError(
            f"definitions '{examples.path}': of a vocabulary of {examples.vocab_size:,} tokens, "
            f"the word table of checkpoint '{base}' has {model['vocab_size']:,} rows"
        )
    table = word_table(base, model["vocab_size"])
    if table_fingerprint(table) != values["reconstruction"]["fingerprint"]:
        raise UsageError(
            f"reconstructor '{reconstructor}': trained for another model's word table than that of "
            f"checkpoint '{base}'; name the model that it was trained for, "
            f"{values['reconstruction']['checkpoint']!r}"
        )


def write_replaced(
    base: Path,
    folder: Path,
    token_ids: np.ndarray,
    rows: np.ndarray,
    provenance: Mapping[str, Any],
) -> None:
    """Writes a model's checkpoint with some rows of its word table replaced, all else as it is.

    The optimiser's state is left out: it belongs to the old rows.

    Args:
        base: the model's checkpoint.
        folder: becomes the new checkpoint's; it exists and is empty.
        token_ids: [n] distinct ids.
        rows: [n, D] what takes their places.
        provenance: plain JSON data on where the rows come from, appended to the list `replaced` of
            the checkpoint's progress.

    Raises:
        DdrpError: a row holds values that are not finite.
    """
    broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(broken):
        raise DdrpError(
            f"{len(broken):,} of {len(rows):,} produced rows hold values that are not finite, such "
            f"as that of token {token_ids[broken[0]]}; the reconstructor is not usable"
        )
    params = {
        name: checkpoint.restore_array(base, name) for name in checkpoint.parameter_shapes(base)
    }
    table = np.array(params[WORD_TABLE])
    table[token_ids] = rows
    state = {"params": params | {WORD_TABLE: table}}
    if heads := checkpoint.task_head_shapes(base):
        state["task_head"] = {
            name: checkpoint.restore_array(base, name, "task_head") for name in heads
        }
    progress = checkpoint.read_progress(base)
    earlier = progress.get("replaced", [])
    checkpoint.save_alone(
        folder,
        state,
        config=checkpoint.read_config(base),
        tokenizer=load_tokenizer(base / "tokenizer"),
        step=progress["step"],
        progress=progress | {"replaced": [*earlier, dict(provenance)]},
    )
