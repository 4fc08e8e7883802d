"""`ddrp definitions evaluate`: how well a reconstructor produces rows that it never saw."""

from __future__ import annotations

import argparse

from ddrp_jax.commands.output import add_json_argument, aligned, write_result
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp definitions evaluate --reconstructor runs/minilm-reconstructor \\
    --definitions runs/minilm-definitions
"""
_COLUMNS = {
    "relative_error": "error / constant's",
    "cosine": "cosine",
    "hits_1": "within 1",
    "hits_10": "within 10",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--reconstructor",
        required=True,
        metavar="DIR",
        help="a run of 'ddrp definitions train' (its best checkpoint) or one checkpoint's folder",
    )
    parser.add_argument(
        "--definitions",
        required=True,
        type=local_path,
        metavar="DIR",
        help="the examples that it was trained on; their held-out tokens are measured",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.config import MeshConfig
    from ddrp_jax.definitions.examples import open_examples
    from ddrp_jax.definitions.measure import measure_reconstruction
    from ddrp_jax.definitions.reconstruct import load_reconstructor
    from ddrp_jax.training.sharding import make_mesh

    examples = open_examples(args.definitions)
    reconstructor = load_reconstructor(args.reconstructor, make_mesh(MeshConfig()))
    measured = measure_reconstruction(reconstructor, examples)
    rows: list[tuple[str, ...]] = [("", *_COLUMNS.values())]
    for name, values in measured.items():
        rows.append((name, *(f"{values[column]:.4f}" for column in _COLUMNS)))
    tokens = next(iter(measured.values()))["tokens"]
    text = (
        f"{reconstructor.path}: rows of {tokens:,.0f} held-out tokens\n\n{aligned(rows)}\n\n"
        "error / constant's: 1 is worthless, 0 perfect; within n: the true row is among the n "
        "nearest by cosine.\nThe ridge reads the mean embedding of a definition's tokens; 'first' "
        "takes a token's first definition, 'mean' all of them."
    )
    result = {
        "reconstructor": str(reconstructor.path),
        "definitions": str(examples.path),
        "measures": measured,
    }
    write_result(result, text, args.json)
