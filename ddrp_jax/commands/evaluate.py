"""`ddrp evaluate`: measure a checkpoint on held-out records."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ddrp_jax.commands.output import add_json_argument, aligned, write_result
from ddrp_jax.errors import UsageError

EXAMPLE = """
ddrp evaluate --checkpoint runs/demo --records runs/demo-records
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run's folder (its newest good checkpoint) or one checkpoint's folder",
    )
    parser.add_argument(
        "--records", required=True, metavar="DIR", help="a folder that 'ddrp prepare' wrote"
    )
    parser.add_argument("--split", default="heldout", help="which split (default: heldout)")
    parser.add_argument(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="how many rows, from the first; 0 takes all (default: 0)",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if args.rows < 0:
        raise UsageError(f"--rows={args.rows}: expected at least 0")

    result = evaluate_checkpoint(args.checkpoint, args.records, args.split, args.rows)
    write_result(result, _table(result), args.json)


def evaluate_checkpoint(
    checkpoint: str | Path, records: str | Path, split: str = "heldout", rows: int = 0
) -> dict[str, Any]:
    """Measures a checkpoint on rows whose order and masks are the same for every model.

    Args:
        checkpoint: a run's folder or one checkpoint's.
        records: a record folder made with the checkpoint's tokenizer.
        split: which split.
        rows: how many rows, from the first; 0 takes all.

    Returns:
        Losses, accuracy and similarities by name, the split's unigram entropy, and what was
        measured.
    """
    from ddrp_jax.data.records import check_records, open_records
    from ddrp_jax.training import checkpoint as checkpoints
    from ddrp_jax.training.evaluation import evaluate, held_out_batches
    from ddrp_jax.training.pretrained import load_pretrained
    from ddrp_jax.training.pretraining import with_loss
    from ddrp_jax.training.step import build_training

    corpus = open_records(records)
    stream = corpus.split(split)
    pretrained = load_pretrained(checkpoint)
    config, tokenizer = pretrained.config, pretrained.tokenizer
    check_records(corpus, tokenizer.fingerprint, config.model.vocab_size)
    progress = checkpoints.read_progress(pretrained.path)

    # The run's mesh may have had another number of devices.
    devices = pretrained.mesh.size
    stage = config.stages[progress["stage"]]
    batch_size = config.train.eval_batch_size or stage.batch_size
    stage = dataclasses.replace(
        stage, batch_size=-(-batch_size // devices) * devices, accumulation=1
    )
    train = dataclasses.replace(config.train, eval_rows=rows, eval_batch_size=0)
    config = dataclasses.replace(config, stages=(stage,), train=train)
    training = build_training(config, 0, pretrained.mesh)
    batches = held_out_batches(corpus, tokenizer, config, 0, split=split)
    means = evaluate(training.evaluate, pretrained.params, batches, training.batch_sharding)
    return {
        "checkpoint": str(pretrained.path),
        "records": str(corpus.path),
        "step": progress["step"],
        "tokens_seen": progress["tokens_seen"],
        "split": split,
        "rows": batches.num_rows,
        "length": stage.length,
        **with_loss(means, config.objective),
        "unigram_entropy": stream.unigram_entropy,
    }


def _table(result: dict[str, Any]) -> str:
    rows = []
    for name, value in result.items():
        if isinstance(value, list):
            text = " ".join(f"{item:.4f}" for item in value)
        else:
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
        rows.append((name, text))
    return aligned(rows)
