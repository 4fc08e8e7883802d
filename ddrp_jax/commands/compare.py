"""`ddrp compare`: hold runs against each other on the same held-out rows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from ddrp_jax.commands.output import aligned
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import local_path

EXAMPLE = """
ddrp compare runs/demo/ddrp runs/demo/absolute --records runs/demo/records \\
    --output runs/demo/report
"""

_MEASURES = ("mlm_loss", "mlm_accuracy", "token_cosine", "token_abs_cosine", "head_cosine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("runs", nargs="+", type=local_path, metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--records", required=True, metavar="DIR", help="a folder that 'ddrp prepare' wrote"
    )
    parser.add_argument(
        "--output",
        required=True,
        type=local_path,
        metavar="DIR",
        help="where comparison.json, comparison.txt and comparison.png go",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    names = _names(args.runs)

    from ddrp_jax.analysis.figures import training_curves
    from ddrp_jax.commands.evaluate import evaluate_checkpoint

    results = {
        name: evaluate_checkpoint(path, args.records)
        for name, path in zip(names, args.runs, strict=True)
    }
    histories = {
        name: _held_out_events(path, results[name]["split"])
        for name, path in zip(names, args.runs, strict=True)
    }
    entropy = next(iter(results.values()))["unigram_entropy"]
    table = _table(results, entropy)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "comparison.json").write_bytes(
        orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    (args.output / "comparison.txt").write_text(table + "\n", encoding="utf-8")
    training_curves(histories, args.output / "comparison.png", unigram_entropy=entropy)
    print(f"\n{table}\n")
    print(f"table   {args.output / 'comparison.txt'}  (as data: comparison.json beside it)")
    print(f"figure  {args.output / 'comparison.png'}")
    for name, path in zip(names, args.runs, strict=True):
        print(f"{name}  {path}  (config.json, metrics.jsonl, tensorboard/, checkpoints/)")


def _names(runs: Sequence[Path]) -> list[str]:
    """Returns the runs' last folder names, with the one above where two are the same."""
    names = [path.resolve().name for path in runs]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in runs]
    if len(set(names)) < len(names):
        raise UsageError(f"runs {', '.join(map(str, runs))}: the same run is named twice")
    return names


def _held_out_events(run: Path, split: str) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        raise UsageError(f"{run}: no metrics.jsonl there; name the folder of a 'ddrp pretrain' run")
    events = [orjson.loads(line) for line in path.read_bytes().split(b"\n") if line]
    return [event for event in events if event["split"] == split]


def _table(results: Mapping[str, Mapping[str, Any]], entropy: float) -> str:
    first = next(iter(results.values()))
    rows = [("", *results), ("steps", *(str(result["step"]) for result in results.values()))]
    for name in _MEASURES:
        rows.append((name, *(f"{result[name]:.4f}" for result in results.values())))
    below = (f"{entropy - result['mlm_loss']:.4f}" for result in results.values())
    rows.append(("nats below unigram entropy", *below))
    return (
        f"held-out rows: {first['rows']} of {first['length']} tokens, the same masks for every "
        f"model; unigram entropy {entropy:.4f} nats\n\n{aligned(rows)}"
    )
