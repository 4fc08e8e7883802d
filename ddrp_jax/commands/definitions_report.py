"""`ddrp definitions report`: what replaced rows did to the word table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import orjson

from ddrp_jax.commands.output import aligned, live_line
from ddrp_jax.commands.source_arguments import corpus
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp definitions report --before runs/roberta --after runs/repaired --output runs/report
ddrp definitions report --before runs/roberta --after runs/repaired --output runs/report \\
    --frequency text:corpus.txt --word-similarity wordsim353.txt simlex999.txt \\
    --baseline all-but-the-top
"""

_MARKER = "report.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    for name, what in (("before", "the original"), ("after", "the one with replaced rows")):
        parser.add_argument(
            f"--{name}",
            required=True,
            metavar="CHECKPOINT",
            help=f"{what}: a run's folder (its newest good checkpoint) or one checkpoint's folder",
        )
    parser.add_argument(
        "--output",
        required=True,
        type=local_path,
        metavar="DIR",
        help="where report.json, report.txt, spectrum.png and projection.png go",
    )
    parser.add_argument(
        "--frequency",
        metavar="CORPUS",
        help="rank tokens by their counts there: a source as 'ddrp prepare --input' takes it, or a "
        "folder that 'ddrp prepare' wrote (default: the vocabulary's own order)",
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field with the text, where CORPUS is JSON lines, parquet or a dataset "
        "(default: text)",
    )
    parser.add_argument(
        "--word-similarity",
        nargs="+",
        action="extend",
        default=[],
        type=local_path,
        metavar="FILE",
        help="judged pairs, 'word word score' a line, such as WordSim-353 or SimLex-999",
    )
    parser.add_argument(
        "--baseline",
        choices=["all-but-the-top"],
        help="measure beside them the original without its mean and ten greatest directions",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a finished report of that name"
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.data.folders import check_replaceable, whole_folder

    check_replaceable(args.output, marker=_MARKER, overwrite=args.overwrite)

    from ddrp_jax.analysis import figures
    from ddrp_jax.analysis.report import (
        check_comparable,
        compare_tables,
        load_word_table,
        projections,
        table_rows,
    )
    from ddrp_jax.analysis.word_similarity import read_pairs
    from ddrp_jax.data.frequency import rank_tokens

    pair_sets = [read_pairs(path) for path in args.word_similarity]
    names = [pairs.name for pairs in pair_sets]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--word-similarity: two files are called {name!r}; rename one")
    frequency = corpus(args.frequency, args.text_field)
    with live_line() as progress:
        progress("reading the checkpoints")
        before, after = load_word_table(args.before), load_word_table(args.after)
        check_comparable(before, after)
        if args.frequency:
            progress(f"counting the tokens of {args.frequency}")
        ranking = rank_tokens(before.tokenizer, frequency)
        result = {
            "before": str(before.path),
            "after": str(after.path),
            "tokenizer": before.tokenizer.fingerprint,
            "frequency": args.frequency,
            "word_similarity": {
                pairs.name: {"file": str(path), "header": pairs.header, "pairs": len(pairs.pairs)}
                for path, pairs in zip(args.word_similarity, pair_sets, strict=True)
            },
            **compare_tables(
                before,
                after,
                ranking,
                pair_sets=pair_sets,
                baseline=args.baseline,
                progress=lambda name: progress(f"measuring: {name}"),
            ),
        }
        text = _text(result, aligned(table_rows(result)))
        with whole_folder(args.output, marker=_MARKER, overwrite=args.overwrite) as working:
            progress("drawing the figures")
            figures.spectra(
                {name: table["singular_values"] for name, table in result["tables"].items()},
                working / "spectrum.png",
            )
            figures.projections(projections(before, after, ranking), working / "projection.png")
            (working / "report.txt").write_text(text + "\n", encoding="utf-8")
            (working / _MARKER).write_bytes(
                orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            )
    print(f"{text}\n\nwrote {args.output}: report.json, report.txt, spectrum.png, projection.png")


def _text(result: Mapping[str, Any], table: str) -> str:
    vocabulary = result["vocabulary"]
    changed = ", ".join(
        f"{count:,} {name}" for name, count in vocabulary["changed_by_group"].items()
    )
    order = result["frequency"] or "the vocabulary's own order"
    lines = [
        f"before  {result['before']}",
        f"after   {result['after']}",
        f"{vocabulary['total']:,} rows, of which {vocabulary['total'] - vocabulary['measured']:,} "
        "special or reserved ones are left out",
        f"{vocabulary['changed']:,} rows differ ({changed}); ranked by {order}",
    ]
    for name, pairs in result["word_similarity"].items():
        if pairs["header"]:
            lines.append(f"{name}: its first line was taken as a header: {pairs['header']}")
    return "\n".join(lines) + f"\n\n{table}"
