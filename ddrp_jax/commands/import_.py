"""`ddrp import`: take a published PyTorch model in, as a checkpoint."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp import path/to/bert-base-uncased runs/bert
ddrp import FacebookAI/roberta-base runs/roberta
ddrp pretrain --config configs/go_on.py:runs/bert --init runs/bert --workdir runs/bert-go-on \\
    --config.stages[0].records=runs/records
"""

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face model folder (config.json with model.safetensors, its shards, or "
        "pytorch_model.bin), or a name on the hub; BERT, RoBERTa, MPNet, BART, or one "
        "that 'ddrp export' wrote",
    )
    parser.add_argument("output", type=local_path, metavar="OUTPUT", help="the checkpoint to make")
    parser.add_argument(
        "--tokenizer",
        type=local_path,
        metavar="DIR",
        help="a folder with its tokenizer, where SOURCE has none",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from ddrp_jax.data.folders import whole_folder
    from ddrp_jax.data.tokenizers import load_tokenizer
    from ddrp_jax.interop.folders import check_free

    check_free(args.output)
    from ddrp_jax.interop import huggingface

    folder = huggingface.find_model(args.source)
    imported = huggingface.read_model(folder)
    try:
        tokenizer = load_tokenizer(args.tokenizer or folder)
    except UsageError as error:
        if args.tokenizer:
            raise
        raise UsageError(f"{error}; or name its folder with --tokenizer") from error
    huggingface.check_tokenizer(tokenizer, imported.config, str(args.tokenizer or args.source))
    with whole_folder(args.output, marker="manifest.json", overwrite=False) as working:
        # A card may show the source: a path on this machine means nothing elsewhere.
        name = folder.resolve().name if Path(args.source).is_dir() else args.source
        huggingface.save_model(imported, tokenizer, working, name)
    for part in imported.initialised:
        _log.warning("%s has no %s; it was initialised", args.source, part.value)
    for name, reason in imported.left_out.items():
        print(f"left out  {name}: {reason}")
    config = imported.config
    layers = str(config.num_layers)
    if config.decoder.num_layers:
        layers += f" + {config.decoder.num_layers}"
    print(
        f"wrote {args.output}: {imported.family.architecture(imported.kind)}, "
        f"{layers} layers of {config.hidden_size}, {config.vocab_size:,} pieces "
        f"({tokenizer.kind})"
    )
