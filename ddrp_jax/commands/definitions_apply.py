"""`ddrp definitions apply`: put rows made from definitions into a model's word table."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ddrp_jax.commands.output import live_line
from ddrp_jax.commands.source_arguments import corpus
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp definitions apply --checkpoint runs/minilm --definitions runs/definitions \\
    --reconstructor runs/reconstructor --ratio 0.5 --output runs/repaired --export exported/repaired
ddrp definitions apply --checkpoint runs/roberta --definitions runs/definitions \\
    --reconstructor runs/reconstructor --tokens-from text:rte.txt --senses mean \\
    --output runs/repaired
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="the model: a run's folder (its newest good checkpoint) or one checkpoint's folder",
    )
    parser.add_argument(
        "--reconstructor",
        required=True,
        metavar="DIR",
        help="workdir of 'ddrp definitions train' (its best checkpoint) or one checkpoint's folder",
    )
    parser.add_argument(
        "--definitions",
        required=True,
        metavar="DIR",
        help="examples that 'ddrp definitions build' wrote",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--ratio",
        type=_ratio,
        metavar="R",
        help="replace this share of the vocabulary, the rarest tokens, as far as they have a "
        "definition: above 0, and 1 (or 100%%) for every defined token",
    )
    which.add_argument(
        "--tokens-from",
        metavar="CORPUS",
        help="replace the tokens that occur there, as far as they have a definition: a source as "
        "'ddrp prepare --input' takes it, or a folder that 'ddrp prepare' wrote",
    )
    parser.add_argument(
        "--frequency",
        metavar="CORPUS",
        help="with --ratio: rank tokens by their counts there (default: the vocabulary's order)",
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field with the text, where CORPUS is JSON lines, parquet or a dataset "
        "(default: text)",
    )
    parser.add_argument(
        "--senses",
        choices=["first", "mean"],
        default="first",
        help="make a row of the word's first definition, or of the mean over all of them "
        "(default: first)",
    )
    parser.add_argument(
        "--output", required=True, type=local_path, metavar="DIR", help="the checkpoint to make"
    )
    parser.add_argument(
        "--export",
        type=local_path,
        metavar="DIR",
        help="write the result as a PyTorch model folder too, as 'ddrp export' does",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.interop.folders import check_free

    check_free(args.output)
    if args.export:
        check_free(args.export)
        if args.export.absolute() == args.output.absolute():
            raise UsageError(f"--export={args.export}: the same folder as --output; name another")
    if args.frequency and args.ratio is None:
        raise UsageError("--frequency: goes with --ratio; --tokens-from ranks nothing")
    source = corpus(args.tokens_from or args.frequency, args.text_field)

    from ddrp_jax.config import MeshConfig
    from ddrp_jax.data.folders import whole_folder
    from ddrp_jax.data.frequency import count_tokens, rank_tokens
    from ddrp_jax.definitions import replace
    from ddrp_jax.definitions.examples import open_examples
    from ddrp_jax.definitions.reconstruct import produce_rows
    from ddrp_jax.training import checkpoint
    from ddrp_jax.training.sharding import make_mesh

    base = checkpoint.find_checkpoint(args.checkpoint)
    reconstructor = checkpoint.find_best(args.reconstructor)
    examples = open_examples(args.definitions)
    replace.check_fit(base, reconstructor, examples)
    tokenizer = examples.tokenizer()
    with live_line() as show:
        if source is not None:
            show(f"counting the tokens of {args.tokens_from or args.frequency}")
        if source is not None and args.tokens_from:
            counts = count_tokens(tokenizer, source)
            chosen = replace.choose_by_corpus(counts, examples.defined_ids, args.tokens_from)
        else:
            ranking = rank_tokens(tokenizer, source)
            chosen = replace.choose_by_ratio(
                ranking, args.ratio, tokenizer.vocab_size, examples.defined_ids
            )
        show(f"producing {len(chosen):,} rows")
        rows = produce_rows(reconstructor, examples, chosen, args.senses, make_mesh(MeshConfig()))
        provenance: dict[str, Any] = {
            "ids": len(chosen),
            "ratio": args.ratio,
            "frequency": args.frequency,
            "tokens_from": args.tokens_from,
            "senses": args.senses,
            "reconstructor": args.reconstructor,
            "reconstructor_step": checkpoint.read_progress(reconstructor)["step"],
            "definitions": args.definitions,
            "definitions_fingerprint": examples.fingerprint,
        }
        show("writing")
        with whole_folder(args.output, marker="manifest.json", overwrite=False) as working:
            replace.write_replaced(base, working, chosen, rows, provenance)
    print(
        f"wrote {args.output}: {len(chosen):,} of {tokenizer.vocab_size:,} rows replaced "
        f"({len(examples.defined_ids):,} have a definition)"
    )
    if args.export:
        from ddrp_jax.interop.export import plan_export, write_export

        export = plan_export(args.output)
        with whole_folder(args.export, marker="config.json", overwrite=False) as working:
            write_export(export, working, "float32")
        print(f"wrote {args.export}: {export.architecture}, float32")


def _ratio(text: str) -> float:
    """Parses `50%` or `0.5`, in (0, 1]."""
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(
            f"--ratio={text!r}: expected a share of the vocabulary above 0 and at most 1, such as "
            "0.5 or 50%"
        )
    return value
