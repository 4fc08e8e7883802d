"""`ddrp plan`: compile a run's step for a TPU that is not there, and tell what it would cost."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.commands.output import add_json_argument, aligned, readable_size, write_result
from ddrp_jax.config import RunConfig
from ddrp_jax.errors import UsageError

if TYPE_CHECKING:
    from ddrp_jax.planning.aot import Plan, StagePlan

EXAMPLE = """
ddrp plan --config configs/ddrp_base.py --topology v5e:16x16
ddrp plan --config configs/ddrp_base.py --topology v5e:4x4 --stage short --sweep batch=32,64,128
ddrp plan --config configs/definitionemb_bart_large.py --topology v5e:2x4
ddrp plan --config configs/ddrp_base.py --sweep topology=v5e:4x4,v5p:2x2x2 --json plan.json
"""
CONFIG_OVERRIDES = True

# Where neither the config nor its records tell: BERT's release has 30,522, and the docstring of
# configs/bert_base.py trains 30,000.
ASSUMED_VOCABULARY = 30_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:arg]",
        help="a file that defines get_config(); --config.path.to.field=value overrides a field",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="the TPU slice, as in v5e:16x16; an unknown one is answered with those known",
    )
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="NAME",
        help="plan this stage alone (may be given again; default: all stages)",
    )
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B,...",
        help="make a table over 'topology', over 'batch' (rows on each chip; steps change so that "
        "the tokens stay), or over a field, as in config.model.remat=none,full",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    key, values = _sweep(args.sweep)
    if args.topology is None and key != "topology":
        raise UsageError("--topology is missing: name a TPU slice, as in --topology v5e:16x16")

    from ddrp_jax.planning import aot

    aot.prepare_environment()
    variants = []
    for value in values:
        extra = [f"--{key}={value}"] if key.startswith("config.") else []
        config, vocabulary = _known_vocabulary(
            load_config(args.config, [*args.overrides, *extra], kind=None)
        )
        topology = value if key == "topology" else args.topology
        aot.check_topology(topology)
        if key == "batch":
            config = aot.with_rows_per_chip(config, topology, int(value))
        variants.append((value, config, topology))
    print(f"vocabulary: {vocabulary}", file=sys.stderr)
    # Every variant is checked before the first one compiles.
    for _, config, topology in variants:
        aot.check(config, topology, tuple(args.stage))
    plans = []
    for value, config, topology in variants:
        if len(variants) > 1:
            print(f"compiling {key}={value}", file=sys.stderr, flush=True)
        plans.append(aot.make_plan(config, topology, tuple(args.stage)))
    result = [as_json(plan) for plan in plans]
    if not key:
        write_result(result[0], describe(plans[0]), args.json)
        return
    for row, value in zip(result, values, strict=True):
        row["sweep"] = {key: value}
    write_result(result, table(key, values, plans), args.json)


def _sweep(text: str | None) -> tuple[str, list[str]]:
    if text is None:
        return "", [""]
    key, _, values = text.partition("=")
    if not (key in ("batch", "topology") or key.startswith("config.")) or not values:
        raise UsageError(
            f"--sweep={text!r}: expected batch=32,64, topology=v5e:4x4,v5e:8x8 or "
            "config.path.to.field=a,b"
        )
    listed = values.split(",")
    if key == "batch":
        for value in listed:
            if not value.isdecimal() or int(value) < 1:
                raise UsageError(f"--sweep={text!r}: {value!r} is not a number of rows")
    return key, listed


def _known_vocabulary(config: RunConfig) -> tuple[RunConfig, str]:
    """Returns the config with a vocabulary, and where that comes from."""
    from ddrp_jax.data.records import open_records

    size, source = config.model.vocab_size, "as configured"
    records = config.stages[0].records
    if not size and records and os.path.exists(records):
        size, source = open_records(records).vocab_size, f"of the records {records}"
    if not size:
        size = ASSUMED_VOCABULARY
        source = "assumed, since there are no records; --config.model.vocab_size=N sets it"
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model), f"{size}, {source}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain data, its totals included."""
    return dataclasses.asdict(plan) | {
        "fits": plan.fits,
        "tokens": plan.tokens,
        "days": plan.days,
        "chip_hours": plan.chip_hours,
    }


def describe(plan: Plan) -> str:
    """Returns one plan as text: a column for each stage, then its exchanges and advice."""
    shape = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    stages = plan.stages
    rows = [["", *(stage.name for stage in stages)]]

    def add(label: str, cells: Sequence[str]) -> None:
        rows.append([label, *cells])

    add("row of tokens", [f"{stage.length}" for stage in stages])
    add("batch (rows a chip)", [f"{s.batch_size} ({s.rows_per_chip:g})" for s in stages])
    add("fits", ["yes" if stage.fits else "NO" for stage in stages])
    add("memory of a chip", [_of(stage, "available") for stage in stages])
    kinds = dict.fromkeys(kind for stage in stages for kind in stage.memory)
    for kind in (*(kind for kind in kinds if kind not in ("total", "available")), "total"):
        add(f"  {kind}", [_of(stage, kind) for stage in stages])
    for label, cell in _MEASURES:
        add(label, [cell(stage) if stage.fits else "-" for stage in stages])
    lines = [f"{plan.topology}: {plan.chips} chips, mesh {shape}", "", aligned(rows)]
    for stage in stages:
        if stage.collectives:
            lines += ["", f"exchanges of one step, {stage.name}:"]
            lines.append(
                aligned(
                    [
                        [
                            f"  {exchange.count} x",
                            exchange.kind,
                            readable_size(exchange.bytes),
                            f"over {exchange.axes} ({exchange.group} chips)",
                        ]
                        for exchange in stage.collectives
                    ]
                )
            )
        lines += [f"not counted, {stage.name}: {note}" for note in stage.uncounted]
        if not stage.fits:
            lines += ["", f"{stage.name} does not fit; what would help:"]
            lines += [f"  {advice}" for advice in stage.advice]
    if plan.days is not None and plan.chip_hours is not None:
        lines += [
            "",
            f"in all: {plan.tokens / 1e9:.1f} billion tokens, {plan.days:.2f} days, "
            f"{plan.chip_hours:.0f} chip-hours",
        ]
    return "\n".join(lines)


def _of(stage: StagePlan, kind: str) -> str:
    return f"{stage.memory[kind] / 1e9:.2f} GB" if kind in stage.memory else "-"


_MEASURES = (
    (
        "products, TFLOP a chip",
        lambda s: f"{s.flops / 1e12:.2f} ({s.model_flops / 1e12:.2f} model)",
    ),
    ("memory traffic a chip", lambda s: readable_size(s.traffic)),
    ("Mcycles", lambda s: f"{s.megacycles:.1f}"),
    ("step", lambda s: f"{1e3 * s.step_seconds:.1f} ms"),
    ("  computing", lambda s: f"{1e3 * s.compute_seconds:.1f} ms"),
    ("  exchanging, at least", lambda s: f"{1e3 * s.communication_seconds:.1f} ms"),
    ("tokens/s", lambda s: f"{s.tokens_per_second:.3g}"),
    ("MFU", lambda s: f"{s.mfu:.3f}"),
    ("tokens", lambda s: f"{s.tokens:.3g}"),
    ("days", lambda s: f"{s.days:.2f}"),
    ("chip-hours", lambda s: f"{s.chip_hours:.0f}"),
    ("compiled in", lambda s: f"{s.compile_seconds:.0f} s"),
)


def table(key: str, values: Sequence[str], plans: Sequence[Plan]) -> str:
    """Returns the plans of a sweep as a table, one line for each value and stage."""
    rows = [
        [
            *(key, "stage", "rows a chip", "fits", "memory", "temporaries", "Mcycles", "step"),
            *("tokens/s", "MFU", "days", "chip-hours"),
        ]
    ]
    notes = []
    for value, plan in zip(values, plans, strict=True):
        for stage in plan.stages:
            cells = [value, stage.name, f"{stage.rows_per_chip:g}"]
            if stage.fits:
                cells += ["yes", _of(stage, "total"), _of(stage, "temporaries")]
                cells += [f"{stage.megacycles:.1f}", f"{1e3 * stage.step_seconds:.1f} ms"]
                cells += [f"{stage.tokens_per_second:.3g}", f"{stage.mfu:.3f}"]
                cells += [f"{stage.days:.2f}", f"{stage.chip_hours:.0f}"]
            else:
                cells += ["NO", _of(stage, "total"), *["-"] * 7]
                notes += [f"{key}={value}, {stage.name}: {advice}" for advice in stage.advice]
            rows.append(cells)
    return "\n".join([aligned(rows), *notes])
