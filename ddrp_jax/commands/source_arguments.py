"""The flags that say where text comes from, shared by the commands that read it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ddrp_jax.data.sources import FORMS, Source
from ddrp_jax.errors import UsageError


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--input` and what goes with it."""
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="SOURCE",
        help="where the text comes from; several are read one after the other. "
        + "; ".join(" ".join(form.split()) for form in FORMS.values()),
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field with the text in JSON lines, parquet and datasets (default: text)",
    )
    parser.add_argument(
        "--documents",
        choices=["blank-lines", "files"],
        default="blank-lines",
        help="what parts the documents of a text source (default: blank-lines)",
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="read Hugging Face datasets as a stream, without downloading them first",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        metavar="N",
        help="processes that work at once (default: one for each core)",
    )


def sources_from(args: argparse.Namespace, weights: Sequence[float] | None = None) -> list[Source]:
    """Returns the sources that the flags name, each of its weight (default: 1).

    Raises:
        UsageError: there is none, one cannot be right, or weights do not match inputs.
    """
    if not args.input:
        raise UsageError("--input: missing; name a source, such as 'text:corpus.txt' or 'demo'")
    if args.processes < 1:
        raise UsageError(f"--processes={args.processes}: expected at least 1")
    weights = weights or [1.0] * len(args.input)
    if len(weights) != len(args.input):
        raise UsageError(
            f"--weights: {len(weights)} given for {len(args.input)} inputs; give one for each"
        )
    return [
        Source(
            spec,
            weight=weight,
            text_field=args.text_field,
            per_file=args.documents == "files",
            streaming=args.streaming,
            processes=args.processes,
        )
        for spec, weight in zip(args.input, weights, strict=True)
    ]


def corpus(spec: str | None, text_field: str) -> str | Source | None:
    """Returns what `data.frequency` takes: a record folder, a source with its field, or None."""
    from ddrp_jax.data.records import INDEX_FILE

    if spec is None or (Path(spec) / INDEX_FILE).is_file():
        return spec
    return Source(spec, text_field=text_field)
