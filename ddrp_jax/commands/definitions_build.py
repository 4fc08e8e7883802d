"""`ddrp definitions build`: a dictionary and a tokenizer in, definition examples out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddrp_jax.commands.output import (
    add_json_argument,
    aligned,
    live_line,
    readable_size,
    write_result,
)
from ddrp_jax.commands.prepare import share
from ddrp_jax.paths import local_path

if TYPE_CHECKING:
    from ddrp_jax.data.dictionary import Dictionary, Entry
    from ddrp_jax.definitions.examples import Examples

EXAMPLE = """
ddrp definitions build --dictionary gcide --tokenizer runs/minilm --output runs/definitions
ddrp definitions build --dictionary wiktextract:kaikki-en.jsonl.gz --tokenizer runs/roberta \\
    --output runs/definitions --holdout 2%
"""
# Entries between two looks at the clock.
_STRIDE = 5000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    from ddrp_jax.data.dictionary import FORMS
    from ddrp_jax.definitions.prompts import DEFAULT_TEMPLATE

    parser.add_argument(
        "--dictionary",
        required=True,
        metavar="DICT",
        help="where definitions come from. "
        + "; ".join(" ".join(form.split()) for form in FORMS.values()),
    )
    parser.add_argument(
        "--language",
        default="en",
        metavar="CODE",
        help="language of the entries to read from a wiktextract file (default: en)",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=local_path,
        metavar="DIR",
        help="a tokenizer's folder, or a checkpoint or run that has one",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=local_path,
        metavar="DIR",
        help="the folder of examples to make",
    )
    parser.add_argument(
        "--template",
        default=DEFAULT_TEMPLATE,
        metavar="TEXT",
        help=f"the prompt; without a part of speech its brackets go too "
        f"(default: {DEFAULT_TEMPLATE!r})",
    )
    parser.add_argument(
        "--holdout",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="share of the headwords that are tokens to hold out for measuring (default: 5%%)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=64,
        metavar="N",
        help="tokens of an example; longer definitions are cut (default: 64)",
    )
    parser.add_argument(
        "--max-examples-per-token",
        type=int,
        default=8,
        metavar="N",
        help="definitions used for one token at most (default: 8)",
    )
    parser.add_argument(
        "--max-carriers",
        type=int,
        default=4,
        metavar="N",
        help="words that explain a token that is only a piece of words, at most (default: 4)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="chooses the held-out headwords (default: 0)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace finished examples there")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.data.dictionary import open_dictionary
    from ddrp_jax.data.folders import check_replaceable
    from ddrp_jax.data.tokenizers import load_tokenizer
    from ddrp_jax.definitions.building import build_examples
    from ddrp_jax.definitions.choosing import BuildOptions
    from ddrp_jax.definitions.examples import INDEX_FILE

    options = BuildOptions(
        template=args.template,
        holdout=args.holdout,
        max_length=args.max_length,
        max_examples=args.max_examples_per_token,
        max_carriers=args.max_carriers,
        seed=args.seed,
    )
    check_replaceable(args.output, marker=INDEX_FILE, overwrite=args.overwrite)
    dictionary = open_dictionary(args.dictionary, args.language)
    tokenizer = load_tokenizer(_tokenizer_folder(args.tokenizer))
    begin = time.monotonic()
    with live_line() as show:
        examples = build_examples(
            dictionary,
            tokenizer,
            args.output,
            options,
            overwrite=args.overwrite,
            entries=_shown(dictionary, show),
        )
    result = {name: value for name, value in examples.index.items() if name != "headwords"}
    text = f"{_describe(examples, dictionary)}\nwrote {args.output} in "
    write_result(result, f"{text}{time.monotonic() - begin:.1f} s", args.json)


def _tokenizer_folder(path: Path) -> Path:
    """Returns the tokenizer's folder of a checkpoint or run, or `path` itself."""
    if (path / "tokenizer").is_dir():
        return path / "tokenizer"
    if (path / "checkpoints").is_dir():
        from ddrp_jax.training.checkpoint import find_checkpoint

        return find_checkpoint(path) / "tokenizer"
    return path


def _shown(dictionary: Dictionary, show: Callable[[str], None]) -> Iterator[Entry]:
    for number, entry in enumerate(dictionary):
        if number % _STRIDE == 0:
            report = dictionary.report
            size = f", {readable_size(report.bytes)}" if report.bytes else ""
            show(f"reading: {report.lines:,} lines{size}, {report.definitions:,} definitions")
        yield entry
    show("choosing definitions")


def _describe(examples: Examples, dictionary: Dictionary) -> str:
    rows = [("tokens", "in all", "defined", "by their own word", "by a carrier word", "share")]
    coverage = examples.index["coverage"]
    columns = ("tokens", "defined", "own_definition", "carrier_word")
    total = {name: sum(kind[name] for kind in coverage.values()) for name in columns}
    for kind, counts in {**coverage, "all": total}.items():
        cells = [f"{counts[name]:,}" for name in columns]
        rows.append((kind, *cells, f"{counts['defined'] / max(counts['tokens'], 1):.1%}"))
    counts = examples.index["counts"]
    held_out = examples.index["held_out_examples"]
    notes = (
        f"dictionary: {dictionary.report}",
        f"examples: {len(examples):,} of {counts['definitions']:,} definitions, "
        f"{held_out:,} held out with {len(examples.held_out_ids):,} tokens",
        f"definitions: {counts['definitions_cut']:,} cut at --max-length, "
        f"{counts['definitions_with_their_headword']:,} with their own word in them (masked)",
    )
    return "\n".join([aligned(rows), *notes])
