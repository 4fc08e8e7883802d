"""Seconds and memory to take a published 110M model in and to give it back.

    python benchmarks/export_import.py [--json FILE]

The model is a random BERT-base that transformers writes (12 layers of 768, 30,522 pieces).
`ddrp import` and `ddrp export` run as processes of their own, three times each. Required: 10 s
each on 2 cores; an export's peak memory, above that of a process that only imported the package,
at most 1.3 times the file.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DDRP = Path(sys.executable).parent / "ddrp"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own: what this one holds would count as its children's peak.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_model, args=(folder / "published",)
        )
        writer.start()
        writer.join()
        size = (folder / "published" / "model.safetensors").stat().st_size
        _, idle = measure([sys.executable, "-c", "import ddrp_jax"])
        rows = [{"name": "import ddrp_jax", "peak_rss_mb": idle}]
        for command in ("import", "export"):
            runs = []
            for repeat in range(args.repeats):
                source = folder / ("published" if command == "import" else "import-0")
                target = folder / f"{command}-{repeat}"
                runs.append(measure([DDRP, command, source, target]))
            seconds, peak = statistics.median(s for s, _ in runs), max(m for _, m in runs)
            rows.append(
                {
                    "name": f"ddrp {command}",
                    "file_mb": size / 1e6,
                    "seconds": seconds,
                    "peak_rss_mb": peak,
                    "peak_above_idle_in_files": (peak - idle) * 1e6 / size,
                }
            )
    for row in rows:
        print("  ".join(f"{k} {v:.2f}" if k != "name" else f"{v:15}" for k, v in row.items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def write_model(folder: Path) -> None:
    """Writes a random BERT-base with a tokenizer of as many pieces."""
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig()).save_pretrained(folder)
    pieces = [*SPECIAL, *(f"w{i}" for i in range(30_522 - len(SPECIAL)))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


def measure(command: list) -> tuple[float, float]:
    """Returns wall-clock seconds and peak memory in MB of a process."""
    begin = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - begin, usage.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
