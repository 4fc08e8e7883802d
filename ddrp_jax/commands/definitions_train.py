"""`ddrp definitions train`: train a model to produce token embeddings from definitions."""

from __future__ import annotations

import argparse

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.commands.run_arguments import add_run_arguments, joined

EXAMPLE = """
ddrp definitions train --config configs/definitionemb_demo.py:runs/minilm \\
    --workdir runs/minilm-reconstructor \\
    --config.stages[0].records=runs/minilm-definitions
"""
CONFIG_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_run_arguments(
        parser,
        "a file that defines get_config(); the project's own take the model's checkpoint as arg",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; the status is 143 or 130 where SIGTERM or SIGINT stopped it."""
    from ddrp_jax.config import DefinitionConfig

    config = load_config(args.config, args.overrides, DefinitionConfig)

    with joined(args, "ddrp definitions train"):
        from ddrp_jax.definitions.reconstruct import train_reconstructor

        return train_reconstructor(config, args.workdir, profile=args.profile)
