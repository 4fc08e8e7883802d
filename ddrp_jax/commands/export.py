"""`ddrp export`: give a checkpoint back as a folder for PyTorch."""

from __future__ import annotations

import argparse

from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp export runs/demo exported/demo --verify
ddrp export runs/bert exported/bert --dtype bfloat16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's folder (its newest good checkpoint) or one checkpoint's folder",
    )
    parser.add_argument(
        "output", type=local_path, metavar="OUTPUT", help="the Hugging Face model folder to make"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="type of the tensors (default: float32)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="load the result with PyTorch, run both on the same text and print the largest "
        "differences (needs torch and transformers)",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.data.folders import whole_folder
    from ddrp_jax.interop.folders import check_free

    check_free(args.output)
    if args.verify:
        from ddrp_jax.interop.verify import check_installed

        check_installed()

    from ddrp_jax.interop.export import plan_export, write_export

    export = plan_export(args.checkpoint)
    with whole_folder(args.output, marker="config.json", overwrite=False) as working:
        write_export(export, working, args.dtype)
        if args.verify:
            from ddrp_jax.interop.verify import verify_export

            print(verify_export(export, working, args.dtype))
    print(f"wrote {args.output}: {export.architecture}, {args.dtype}")
