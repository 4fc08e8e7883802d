"""`ddrp prepare`: documents in, records out."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

from ddrp_jax.commands.output import aligned, live_line, readable_size
from ddrp_jax.commands.source_arguments import add_source_arguments, sources_from
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp prepare --input demo --tokenizer runs/tokenizer --output runs/records --holdout 0.5%
ddrp prepare --input text:books jsonl:web.jsonl --weights 2 0.3 --tokenizer runs/tokenizer \\
    --output runs/records
ddrp prepare --input hf:wikitext:wikitext-103-raw-v1@train --tokenizer runs/tokenizer \\
    --output runs/records
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_source_arguments(parser)
    parser.add_argument(
        "--weights",
        nargs="+",
        type=float,
        metavar="W",
        help="for each input, how often its documents are taken: 0.3 keeps three in ten, 2 takes "
        "each twice (default: 1)",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=local_path,
        metavar="DIR",
        help="a folder that 'ddrp tokenizer' wrote, or a published tokenizer's",
    )
    parser.add_argument(
        "--output", required=True, type=local_path, metavar="DIR", help="the record folder to make"
    )
    parser.add_argument(
        "--holdout",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of the documents to hold out for evaluation, such as 0.5%% (default: 0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="chooses the held-out documents, and those that a weight takes (default: 0)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace finished records of that name"
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.data.preparation import prepare_records
    from ddrp_jax.data.tokenizers import load_tokenizer

    sources = sources_from(args, args.weights)
    tokenizer = load_tokenizer(args.tokenizer)
    begin = time.monotonic()
    with _progress() as progress:
        records = prepare_records(
            sources,
            tokenizer,
            args.output,
            holdout=args.holdout,
            seed=args.seed,
            processes=args.processes,
            overwrite=args.overwrite,
            progress=progress,
        )
    rows = [("split", "documents", "tokens", "text", "unigram entropy")]
    for name, split in records.splits.items():
        rows.append(
            (
                name,
                f"{split.documents:,}",
                f"{split.tokens:,}",
                readable_size(split.bytes),
                f"{split.unigram_entropy:.3f} nats",
            )
        )
    print(aligned(rows))
    empty = sum(source["empty_documents"] for source in records.index["sources"])
    if empty:
        print(f"{empty:,} empty documents were left out")
    print(f"wrote {args.output} in {time.monotonic() - begin:.1f} s")


def share(text: str) -> float:
    """Parses `0.5%` or `0.005`."""
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(
            f"--holdout={text!r}: expected a share such as 0.5% or 0.005, at least 0 and below 1"
        )
    return value


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Gives a function of documents, tokens and bytes that shows them: live on a terminal."""
    begin = time.monotonic()

    def describe(documents: int, tokens: int, text_bytes: int) -> str:
        rate = text_bytes / max(time.monotonic() - begin, 1e-9)
        return (
            f"{documents:,} documents, {tokens:,} tokens, {readable_size(text_bytes)} of text, "
            f"{readable_size(int(rate))}/s"
        )

    with live_line() as show:
        yield lambda *counts: show(describe(*counts))
