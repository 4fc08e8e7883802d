r"""Beam generation of a BART-base-shaped model, side by side with PyTorch's `generate`.

    python benchmarks/generation.py [--json FILE]

Both hold the same random weights (6 + 6 layers of 768, 12 heads, 3072 hidden units, 50,265
pieces) in float32 and write 64 new tokens for 8 sources with 4 beams, in turns. Required: ours
takes no longer. The ids of both are compared as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import Contestant, serve, show, take_turns

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="base", choices=list(SHAPES))
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run = RUNS[args.serve[0]](Path(args.serve[1]))
        serve(lambda: run().tolist())
        return
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.shape)
        contestants = [
            Contestant(each, [sys.executable, __file__, "--serve", each, name]) for each in RUNS
        ]
        take_turns(contestants, args.runs)
    theirs = contestants[1]
    ids = [np.array(each.answers[-1]["result"]) for each in contestants]
    same = np.mean(ids[0] == ids[1])
    rows = []
    for each in contestants:
        median = each.median("seconds")
        rows.append(
            {
                "name": each.name,
                "shape": args.shape,
                "seconds": median,
                "cpu_seconds": each.median("cpu_seconds"),
                "new_tokens_per_second": ROWS * NEW_TOKENS / median,
                "time_to_torch": median / theirs.median("seconds"),
                "cpu_time_to_torch": each.median("cpu_seconds") / theirs.median("cpu_seconds"),
                "first_seconds": each.first["seconds"],
                "peak_rss_mb": each.answers[-1]["peak_rss_mb"],
                "same_ids": same,
            }
        )
    show(rows, args.json)


if __name__ == "__main__":
    main()
