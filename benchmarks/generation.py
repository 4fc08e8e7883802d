r"""Beam generation of a BART-base-shaped model, side by side with PyTorch's `generate`.

    python benchmarks/generation.py [--json FILE]

Both hold the same random weights (6 + 6 layers of 768, 12 heads, 3072 hidden units, 50,265
pieces) in float32 and write 64 new tokens for 8 sources with 4 beams; each lives in a process of
its own and generates when it is told to, in turns. Required: ours takes no longer. The ids of
both are compared as well.

PyTorch's threads wait for each other in a loop, so where other work shares the cores its seconds
say little; there, compare `cpu_seconds` on one core:

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/generation.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {
    "base": {
        "vocab_size": 50_265,
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
    },
    "tiny": {
        "vocab_size": 1000,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    },
}
ROWS, SOURCE_LENGTH, NEW_TOKENS, BEAMS = 8, 64, 64, 4
# No text ends early, so that both do the same work.
OPTIONS = {"num_beams": BEAMS, "max_length": NEW_TOKENS + 1, "min_length": NEW_TOKENS + 1}

Run = Callable[[], np.ndarray]


def write_model(folder: Path, shape: str) -> None:
    """Saves a random model whose logits differ enough for beams to be told apart."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(**SHAPES[shape], init_std=0.05, forced_eos_token_id=None)
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)


def sources(vocab_size: int) -> np.ndarray:
    """Returns random token ids `[B, S]`."""
    return np.random.default_rng(0).integers(4, vocab_size, (ROWS, SOURCE_LENGTH), dtype=np.int32)


def torch_run(folder: Path) -> Run:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.BartForConditionalGeneration.from_pretrained(folder).eval()
    ids = torch.tensor(sources(model.config.vocab_size), dtype=torch.long)
    mask = torch.ones_like(ids)

    def run() -> np.ndarray:
        return model.generate(ids, attention_mask=mask, do_sample=False, **OPTIONS).numpy()

    return run


def our_run(folder: Path) -> Run:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from ddrp_jax.interop.huggingface import read_model
    from ddrp_jax.models.generation import GenerationOptions, generate
    from ddrp_jax.models.seq2seq import build_model

    imported = read_model(folder)
    abstract = nnx.eval_shape(lambda: build_model(imported.config, rngs=nnx.Rngs(0)))
    params = jax.tree.map(jnp.asarray, imported.state.params)
    model = nnx.merge(nnx.graphdef(abstract), params)
    ids = jnp.asarray(sources(imported.config.vocab_size))
    mask = jnp.ones(ids.shape, bool)
    options = GenerationOptions(**OPTIONS)
    return lambda: np.asarray(generate(model, ids, mask, options).ids)


RUNS = {"ours": our_run, "torch": torch_run}


def serve(name: str, folder: Path) -> None:
    """Generates for each line on standard input, and answers with its seconds."""
    run = RUNS[name](folder)
    for _ in sys.stdin:
        begin, cpu = time.perf_counter(), time.process_time()
        ids = run()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss_mb": peak}
        answer["ids"] = ids.tolist()
        print(json.dumps(answer), flush=True)


class Contestant:
    """A process that generates on request."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, __file__, "--serve", name, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = name
        self.first = self.run()  # compiles
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: its process ended with status {self.process.wait()}")
        self.last = json.loads(line)
        return self.last

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="base", choices=list(SHAPES))
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], Path(args.serve[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.shape)
        contestants = [Contestant(each, Path(name)) for each in RUNS]
        for _ in range(args.runs):
            for each in contestants:
                answer = each.run()
                each.seconds.append(answer["seconds"])
                each.cpu_seconds.append(answer["cpu_seconds"])
        for each in contestants:
            each.close()
    ours, theirs = contestants
    same = np.mean(np.array(ours.last["ids"]) == np.array(theirs.last["ids"]))
    rows = []
    for each in contestants:
        median = statistics.median(each.seconds)
        rows.append(
            {
                "name": each.name,
                "shape": args.shape,
                "seconds": median,
                "cpu_seconds": statistics.median(each.cpu_seconds),
                "new_tokens_per_second": ROWS * NEW_TOKENS / median,
                "time_to_torch": median / statistics.median(theirs.seconds),
                "cpu_time_to_torch": statistics.median(each.cpu_seconds)
                / statistics.median(theirs.cpu_seconds),
                "first_seconds": each.first["seconds"],
                "peak_rss_mb": each.last["peak_rss_mb"],
                "same_ids": same,
            }
        )
    for row in rows:
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
