"""Tokens a second that one core packs and masks, from records on disk to batches.

    python benchmarks/input_pipeline.py [--records DIR] [--json FILE]

Without --records it prepares the demo corpus first, and tells how long that took. The required
rate is 300,000 tokens/s for rows of 128 tokens.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from ddrp_jax.config import MaskingConfig, StageConfig
from ddrp_jax.data.pipeline import train_batches
from ddrp_jax.data.preparation import prepare_records
from ddrp_jax.data.records import open_records
from ddrp_jax.data.sentencepiece_training import train_sentencepiece
from ddrp_jax.data.sources import Source

SHAPES = [(128, 256), (128, 32), (512, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [] if args.records else [prepare_demo(Path(folder))]
        records = open_records(args.records or Path(folder) / "records")
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for whole_word in (False, True):
            rows += [measure(records, *shape, whole_word, args.seconds) for shape in SHAPES]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def prepare_demo(folder: Path) -> dict:
    source = Source("demo")
    tokenizer, _ = train_sentencepiece(source.documents(), vocab_size=2048, model="bpe")
    begin = time.perf_counter()
    processes = os.cpu_count() or 1
    prepare_records([source], tokenizer, folder / "records", holdout=0.005, processes=processes)
    seconds = time.perf_counter() - begin
    print(f"prepare, demo corpus, {processes} processes: {seconds:.1f} s")
    return {"name": "prepare", "processes": processes, "seconds": seconds}


def measure(records, length: int, batch_size: int, whole_word: bool, seconds: float) -> dict:
    batches = train_batches(
        records,
        records.tokenizer(),
        StageConfig(length=length, batch_size=batch_size),
        MaskingConfig(whole_word=whole_word),
        seed=0,
        prefetch=0,
    )
    next(batches)
    filled = total = 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        batch = next(batches)
        filled += int((batch["segment_ids"] > 0).sum())
        total += batch["segment_ids"].size
    row = {
        "name": "whole words" if whole_word else "tokens",
        "shape": f"{batch_size} x {length}",
        "tokens_per_second": total / elapsed,
        "fill_rate": filled / total,
    }
    print(
        f"{row['name']:<12} {row['shape']:>9} {row['tokens_per_second']:>12,.0f} tokens/s, "
        f"{row['fill_rate']:.2%} filled"
    )
    return row


if __name__ == "__main__":
    main()
