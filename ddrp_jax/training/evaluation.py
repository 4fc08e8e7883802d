"""Measuring a model on rows that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ddrp_jax.config import Config
from ddrp_jax.data import pipeline
from ddrp_jax.data.records import Records
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.training import sharding

HELD_OUT = "heldout"
# Rows are packed and masked with this seed in every run, so that runs can be compared.
MASK_SEED = 0


def held_out_batches(
    records: Records,
    tokenizer: Tokenizer,
    config: Config,
    stage_index: int,
    *,
    split: str = HELD_OUT,
) -> Any:
    """Returns the rows on which a stage is measured, with masks that never change."""
    stage = config.stages[stage_index]
    process_index, process_count = sharding.row_share(sharding.make_mesh(config.mesh))
    return pipeline.eval_batches(
        records,
        tokenizer,
        split=split,
        length=stage.length,
        batch_size=config.train.eval_batch_size or stage.batch_size,
        masking=config.masking,
        seed=MASK_SEED,
        max_rows=config.train.eval_rows,
        process_index=process_index,
        process_count=process_count,
    )


def evaluate(
    function: Callable[[Any, dict[str, jax.Array]], Mapping[str, Any]],
    params: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
    where: NamedSharding,
) -> dict[str, Any]:
    """Measures a model on batches; means are over all of their tokens.

    Args:
        function: `Training.evaluate`.
        params: the model's.
        batches: held-out rows.
        where: sharding of a batch.

    Returns:
        What `function` measures, by name; NaN where there was nothing to measure.
    """
    totals: dict[str, np.ndarray] = {}
    for batch in batches:
        sums = jax.device_get(function(params, put(batch, where)))
        for name, pair in sums.items():
            total = np.asarray(pair, np.float64)
            totals[name] = totals[name] + total if name in totals else total
    return {name: mean(total) for name, total in totals.items()}


def put(batch: Mapping[str, np.ndarray], where: NamedSharding) -> dict[str, jax.Array]:
    """Places this process's rows of a batch on its devices."""
    # With several processes JAX does not count this as a transfer that was asked for.
    with jax.transfer_guard_host_to_device("allow"):
        return {
            name: jax.make_array_from_process_local_data(where, value)
            for name, value in batch.items()
            if name != "row"
        }


def mean(pair: Any) -> Any:
    """Returns sum / weight of one pair or of a list of them; NaN where the weight is 0."""
    total, weight = np.asarray(pair, np.float64)
    nothing = np.full_like(total, np.nan)
    return np.divide(total, weight, out=nothing, where=weight > 0).tolist()
