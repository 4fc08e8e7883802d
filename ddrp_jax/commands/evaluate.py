"""`ddrp evaluate`: measure a checkpoint on held-out records."""

from __future__ import annotations

import argparse
import dataclasses
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

    from ddrp_jax.data.records import check_records, open_records
    from ddrp_jax.training import checkpoint
    from ddrp_jax.training.evaluation import evaluate, held_out_batches
    from ddrp_jax.training.pretrained import load_pretrained
    from ddrp_jax.training.step import build_training

    records = open_records(args.records)
    stream = records.split(args.split)
    pretrained = load_pretrained(args.checkpoint)
    config, tokenizer = pretrained.config, pretrained.tokenizer
    check_records(records, tokenizer.fingerprint, config.model.vocab_size)
    progress = checkpoint.read_progress(pretrained.path)

    # The run's mesh may have had another number of devices.
    devices = pretrained.mesh.size
    stage = config.stages[progress["stage"]]
    batch_size = config.train.eval_batch_size or stage.batch_size
    stage = dataclasses.replace(
        stage, batch_size=-(-batch_size // devices) * devices, accumulation=1
    )
    train = dataclasses.replace(config.train, eval_rows=args.rows, eval_batch_size=0)
    config = dataclasses.replace(config, stages=(stage,), train=train)
    training = build_training(config, 0, pretrained.mesh)
    batches = held_out_batches(records, tokenizer, config, 0, split=args.split)
    values = evaluate(
        training.evaluate, config.objective, pretrained.params, batches, training.batch_sharding
    )
    result = {
        "checkpoint": str(pretrained.path),
        "records": str(records.path),
        "step": progress["step"],
        "split": args.split,
        "length": stage.length,
        **values,
        "unigram_entropy": stream.unigram_entropy,
    }
    write_result(result, _table(result), args.json)


def _table(result: dict[str, Any]) -> str:
    rows = []
    for name, value in result.items():
        if isinstance(value, list):
            text = " ".join(f"{item:.4f}" for item in value)
        else:
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
        rows.append((name, text))
    return aligned(rows)
