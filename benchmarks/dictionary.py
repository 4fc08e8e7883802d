"""Speed and memory of reading a Wiktionary dump.

    python benchmarks/dictionary.py [--megabytes 300] [--json FILE]

The file is made here: entries of the size and shape of wiktextract's English ones (translations,
forms, sounds, nested glosses), one in five of them of another language. Each reading is a process
of its own on one core. Required: 50 MB/s of plain text, plain or gzipped, and memory that does not
grow with the file.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import orjson

READ = """
import sys, time
from ddrp_jax.data.dictionary import open_dictionary
begin = time.perf_counter()
dictionary = open_dictionary("wiktextract:" + sys.argv[1])
definitions = sum(len(entry.senses) for entry in dictionary)
print(time.perf_counter() - begin, definitions, dictionary.report.bytes)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300, help="of plain text (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for share, suffix in ((10, ".jsonl"), (1, ".jsonl"), (1, ".jsonl.gz")):
            path = Path(name) / f"wiktionary{suffix}"
            write(path, args.megabytes * 10**6 // share)
            rows.append({"file": f"{args.megabytes // share} MB as {suffix}", **read(path)})
            path.unlink()
    for row in rows:
        print(
            f"{row['file']:20} {row['mb_per_second']:7.1f} MB/s of plain text  "
            f"{row['definitions']:,} definitions  peak memory {row['peak_rss_mb']:.0f} MB"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def write(path: Path, size: int) -> None:
    """Writes about `size` bytes of entries."""
    opener = gzip.open if path.suffix == ".gz" else open
    written = number = 0
    with opener(path, "wb") as file:
        while written < size:
            line = orjson.dumps(entry(number)) + b"\n"
            file.write(line)
            written += len(line)
            number += 1


def entry(number: int) -> dict:
    """An entry of about three thousand bytes."""
    word = f"word{number}"
    return {
        "pos": ("noun", "verb", "adj")[number % 3],
        "head_templates": [
            {"name": "en-noun", "args": {"1": "~"}, "expansion": f"{word} (plural)"}
        ],
        "forms": [{"form": f"{word}{end}", "tags": ["plural"]} for end in ("s", "es", "ing", "ed")],
        "etymology_text": f"From Middle English {word}, from Old French, from Latin. " * 4,
        "sounds": [{"ipa": f"/{word}/", "tags": ["US"]}, {"audio": f"En-us-{word}.ogg"}],
        "word": word,
        "lang": "French" if number % 5 == 4 else "English",
        "lang_code": "fr" if number % 5 == 4 else "en",
        "translations": [
            {"lang": f"Language {i}", "code": f"l{i}", "word": f"{word}-{i}", "sense": "a thing"}
            for i in range(number % 20)
        ],
        "senses": [
            {
                "glosses": ["A thing of some kind.", f"Such a thing, number {i} of {number}, " * 3],
                "examples": [{"text": f"They saw the {word} and were glad. " * 2, "type": "quote"}],
                "categories": ["English lemmas", "English nouns"],
                "id": f"en-{word}-{i}",
                "links": [["thing", "thing#English"], ["kind", "kind#English"]],
            }
            for i in range(1 + number % 4)
        ],
    }


def read(path: Path) -> dict:
    """Reads a file in a process of its own, on one core."""
    command = [sys.executable, "-c", READ, str(path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    seconds, definitions, size = output.split()
    return {
        "mb_per_second": int(size) / 1e6 / float(seconds),
        "definitions": int(definitions),
        "peak_rss_mb": usage.ru_maxrss * 1024 / 1e6,
    }


if __name__ == "__main__":
    main()
