"""`ddrp tokenizer`: train a SentencePiece tokenizer, or adopt a published one."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence

from ddrp_jax.commands.source_arguments import add_source_arguments, sources_from
from ddrp_jax.data.sentencepiece_training import MAX_SENTENCES
from ddrp_jax.data.sources import Source
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp tokenizer train --input demo --vocab-size 2048 --model bpe --output runs/tokenizer
ddrp tokenizer adopt path/to/bert-base-uncased --output runs/tokenizer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "action",
        choices=["train", "adopt"],
        help="train: make a SentencePiece model from --input; adopt: take the published tokenizer "
        "in FOLDER (tokenizer.json; vocab.txt; or vocab.json and merges.txt)",
    )
    parser.add_argument(
        "folder", nargs="?", type=local_path, metavar="FOLDER", help="what to adopt"
    )
    parser.add_argument(
        "--output",
        required=True,
        type=local_path,
        metavar="DIR",
        help="the tokenizer folder to make",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer there")
    parser.add_argument(
        "--model",
        choices=["unigram", "bpe"],
        default="unigram",
        help="train: how SentencePiece divides words (default: unigram; bpe trains faster)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=32_000,
        metavar="N",
        help="train: number of pieces, five special ones included (default: 32000)",
    )
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="SHARE",
        help="train: share of the text's characters that get pieces; rarer ones are unknown "
        "(default: 0.9995)",
    )
    parser.add_argument(
        "--max-sentences",
        type=int,
        default=MAX_SENTENCES,
        metavar="N",
        help=f"train: learn from a random sample of this many (default: {MAX_SENTENCES})",
    )
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.data.folders import check_replaceable, whole_folder
    from ddrp_jax.data.tokenizers import TOKENIZER_JSON, load_tokenizer

    if args.action == "adopt" and (args.folder is None or args.input):
        raise UsageError("adopt: expected one FOLDER and no --input; see 'ddrp tokenizer --help'")
    if args.action == "train" and args.folder is not None:
        raise UsageError(f"train: unexpected argument {str(args.folder)!r}; name text with --input")
    check_replaceable(args.output, marker=TOKENIZER_JSON, overwrite=args.overwrite)
    tokenizer = load_tokenizer(args.folder) if args.action == "adopt" else _train(args)
    with whole_folder(args.output, marker=TOKENIZER_JSON, overwrite=args.overwrite) as working:
        tokenizer.save(working)
    print(
        f"wrote {args.output}: {tokenizer.kind}, {tokenizer.vocab_size:,} pieces, "
        f"fingerprint {tokenizer.fingerprint}"
    )


def _train(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    from ddrp_jax.data.sentencepiece_training import train_sentencepiece

    sources = sources_from(args)
    begin = time.monotonic()
    print(f"training {args.model} on {', '.join(source.spec for source in sources)}", flush=True)
    tokenizer, report = train_sentencepiece(
        _documents(sources),
        vocab_size=args.vocab_size,
        model=args.model,
        character_coverage=args.character_coverage,
        max_sentences=args.max_sentences,
    )
    print(
        f"{report.lines:,} lines, of which {report.split_lines:,} were split for their length; "
        f"{report.sentences:,} sentences, of which {report.dropped_sentences:,} dropped and "
        f"{report.unsampled_sentences:,} beyond the sample; {time.monotonic() - begin:.1f} s"
    )
    return tokenizer


def _documents(sources: Sequence[Source]) -> Iterator[str]:
    return itertools.chain.from_iterable(source.documents() for source in sources)
