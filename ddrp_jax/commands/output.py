"""What commands print: aligned rows, sizes, and JSON where asked for."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

# Where there is no terminal, a line this often tells that a job is alive.
LINE_SECONDS = 10.0


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--json FILE`."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON to this file ('-': to standard output, in place of the "
        "text)",
    )


def write_result(result: Any, text: str, json_file: str | None) -> None:
    """Prints `text`, and writes `result` as JSON where `--json` says."""
    # NumPy's NaN and infinity become null, as JSON has neither.
    data = orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if json_file == "-":
        sys.stdout.write(data.decode())
        return
    print(text)
    if json_file:
        Path(json_file).write_bytes(data)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as lines whose columns line up."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def readable_size(size: int) -> str:
    """Returns a number of bytes in the unit that suits it."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{size} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


@contextlib.contextmanager
def live_line() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows how far a job is: live on a terminal, else in a few lines."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield status.update
        return
    last = time.monotonic()

    def show_line(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield show_line
