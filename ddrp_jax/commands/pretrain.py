"""`ddrp pretrain`: train an encoder by a config, or go on with a run."""

from __future__ import annotations

import argparse

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.commands.run_arguments import add_run_arguments, joined
from ddrp_jax.paths import as_path

EXAMPLE = """
ddrp pretrain --config configs/demo.py --workdir runs/demo
ddrp pretrain --config configs/demo.py:absolute --workdir runs/absolute \\
    --config.stages[0].steps=400 --config.train.seed=1
"""
CONFIG_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_run_arguments(parser, "a file that defines get_config()")
    parser.add_argument(
        "--init",
        type=as_path,
        metavar="CHECKPOINT",
        help="start a new run from the parameters of another run or checkpoint",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; the status is 143 or 130 where SIGTERM or SIGINT stopped it."""
    config = load_config(args.config, args.overrides)
    with joined(args, "ddrp pretrain"):
        from ddrp_jax.training.pretraining import pretrain

        return pretrain(config, args.workdir, init=args.init, profile=args.profile)
