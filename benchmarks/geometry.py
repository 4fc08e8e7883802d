"""Seconds and memory to measure the isotropy of a table of 50,000 rows of 768.

    python benchmarks/geometry.py [--json FILE]

The table is random, float32, and each run has a process of its own. `measure` is all that
`ddrp definitions report` tells of a table: isotropy as it is and at another length, mean cosine and
spectrum, of all rows and of three groups. Peak memory is that above the table's and NumPy's own.
Required: 30 s for the isotropy on 2 cores.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from pathlib import Path

import numpy as np

from ddrp_jax.analysis.geometry import isotropy, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dimensions", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = []
    for name in ("isotropy", "measure"):
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            job = (name, args.rows, args.dimensions)
            runs = [pool.apply(run, job) for _ in range(args.repeats)]
        results.append(
            {
                "name": name,
                "seconds": statistics.median(seconds for seconds, _, _ in runs),
                "peak_above_table_mb": max(peak for _, peak, _ in runs),
                "table_mb": 4 * args.rows * args.dimensions / 1e6,
                "isotropy": runs[0][2],
            }
        )
    for row in results:
        print("  ".join(f"{k} {v:.3f}" if k != "name" else f"{v:10}" for k, v in row.items()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def run(name: str, rows: int, dimensions: int) -> tuple[float, float, float]:
    """Returns seconds, memory in MB and the isotropy."""
    draw = np.random.default_rng(0)
    table = draw.standard_normal((rows, dimensions), np.float32)
    table *= 0.04  # in place, or the peak of making it would hide that of measuring
    before = peak()
    begin = time.perf_counter()
    measured = {"isotropy": isotropy, "measure": _measured}[name](table)
    return time.perf_counter() - begin, peak() - before, measured


def _measured(table: np.ndarray) -> float:
    return measure(table, np.arange(len(table)))["isotropy"]


def peak() -> float:
    """Returns the most memory that this process has had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
