"""`ddrp show`: what a checkpoint or a record folder holds."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ddrp_jax.commands.output import add_json_argument, aligned, readable_size, write_result
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp show runs/demo
ddrp show runs/demo-records --json -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "folder",
        type=local_path,
        metavar="DIR",
        help="a run's folder (its newest good checkpoint), one checkpoint's folder, or a folder "
        "that 'ddrp prepare' wrote",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if not args.folder.is_dir():
        raise UsageError(f"{args.folder}: there is no such folder")
    if (args.folder / "index.json").is_file():
        result, text = _records(args.folder)
    else:
        result, text = _checkpoint(args.folder)
    write_result(result, text, args.json)


def _checkpoint(folder: Path) -> tuple[dict[str, Any], str]:
    from ddrp_jax.training import checkpoint

    path = checkpoint.find_checkpoint(folder)
    progress = checkpoint.read_progress(path)
    config = checkpoint.read_config(path)
    parameters: dict[str, dict[str, Any]] = {
        name: {"shape": list(shape), "dtype": dtype, "size": math.prod(shape)}
        for name, (shape, dtype) in checkpoint.parameter_shapes(path).items()
    }
    total: int = sum(parameter["size"] for parameter in parameters.values())
    result = {
        "checkpoint": str(path),
        "step": progress["step"],
        "stage": config["stages"][progress["stage"]]["name"],
        "tokens_seen": progress["tokens_seen"],
        "held_out_loss": checkpoint.read_loss(path),
        "bytes": _folder_size(path),
        "tokenizer": _tokenizer(path / "tokenizer"),
        "config": config,
        "parameters": parameters,
        "total_parameters": total,
    }
    loss = result["held_out_loss"]
    summary = [
        ("checkpoint", str(path)),
        ("step", f"{progress['step']:,} (stage '{result['stage']}')"),
        ("tokens seen", f"{progress['tokens_seen']:,}"),
        ("held-out loss", "not measured at this step" if loss is None else f"{loss:.4f}"),
        ("size on disk", readable_size(result["bytes"])),
        ("tokenizer", _describe_tokenizer(result["tokenizer"])),
    ]
    table = [("parameter", "shape", "size")] + [
        (name, " x ".join(map(str, entry["shape"])), f"{entry['size']:,}")
        for name, entry in parameters.items()
    ]
    table.append(("total", "", f"{total:,}"))
    text = f"{aligned(summary)}\n\n{aligned(_leaves(config))}\n\n{aligned(table)}"
    return result, text


def _records(folder: Path) -> tuple[dict[str, Any], str]:
    from ddrp_jax.data.records import open_records

    records = open_records(folder)
    result: dict[str, Any] = {
        "records": str(folder),
        "bytes": _folder_size(folder),
        "tokenizer": _tokenizer(folder / "tokenizer"),
        "index": records.index,
    }
    summary = [
        ("records", str(folder)),
        ("size on disk", readable_size(result["bytes"])),
        ("tokenizer", _describe_tokenizer(result["tokenizer"])),
        *(
            ("source", f"{source['spec']}, {source['documents']:,} documents")
            for source in records.index["sources"]
        ),
    ]
    table = [("split", "documents", "tokens", "text", "unigram entropy")] + [
        (
            name,
            f"{stream.documents:,}",
            f"{stream.tokens:,}",
            readable_size(stream.bytes),
            f"{stream.unigram_entropy:.4f} nats",
        )
        for name, stream in records.splits.items()
    ]
    return result, f"{aligned(summary)}\n\n{aligned(table)}"


def _tokenizer(folder: Path) -> dict[str, Any]:
    from ddrp_jax.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return {
        "kind": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "special_tokens": {
            str(token): tokenizer.id_to_token(token) for token in sorted(tokenizer.special_ids)
        },
    }


def _describe_tokenizer(tokenizer: dict[str, Any]) -> str:
    special = " ".join(tokenizer["special_tokens"].values())
    return (
        f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} pieces, special tokens {special}, "
        f"fingerprint {tokenizer['fingerprint']}"
    )


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _leaves(value: Any, path: str = "config") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        items = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return [(path, repr(value))]
    return [leaf for name, item in items for leaf in _leaves(item, name)]
