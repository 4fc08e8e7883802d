r"""One pre-training step, side by side with its peers.

    python benchmarks/pretrain_step.py --shape base small --json step.json
    python benchmarks/pretrain_step.py --flax-python path/to/python   # has transformers 4.57.6

The contestants make their steps in turns. Peers compute what their class computes:
`BertForMaskedLM` gives logits at every position. All run in float32 with dropout 0.1, gradient
clipping and AdamW, on the same number of cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import Contestant, serve, steps_of, take_turns


@dataclasses.dataclass(frozen=True)
class Shape:
    """Layers, width, heads, hidden units; rows and their length; share of tokens predicted."""

    layers: int
    width: int
    heads: int
    hidden: int
    rows: int
    length: int
    vocabulary: int = 30_522
    rate: float = 0.15

    @property
    def predictions(self) -> int:
        return round(self.rate * self.length)


SHAPES = {
    "base": Shape(12, 768, 12, 3072, 8, 128),
    "small": Shape(4, 256, 4, 1024, 16, 128),
    "tiny": Shape(2, 64, 2, 128, 4, 32, 1000),
}
OURS = {
    "absolute": {"position": "absolute"},
    "ddrp": {"position": "ddrp"},
    "ddrp+mth": {"position": "ddrp", "weight": 0.03},
}
TORCH = {"torch": "absolute"}
OLD_TRANSFORMERS = ("flax", "torch relative_key")


def batch(shape: Shape) -> dict[str, np.ndarray]:
    """Returns rows of random tokens, each with the same number of predictions."""
    random = np.random.default_rng(0)
    ids = random.integers(5, shape.vocabulary, (shape.rows, shape.length), dtype=np.int32)
    order = random.random((shape.rows, shape.length)).argsort(axis=1)
    places = np.sort(order[:, : shape.predictions], axis=1).astype(np.int32)
    return {"ids": ids, "places": places, "targets": np.take_along_axis(ids, places, axis=1)}


Step = Callable[[], float]


def our_step(shape: Shape, position: str, weight: float = 0.0) -> Step:
    from ddrp_jax.config import (
        Config,
        ModelConfig,
        ObjectiveConfig,
        PositionConfig,
        StageConfig,
    )
    from ddrp_jax.training.sharding import make_mesh
    from ddrp_jax.training.step import build_training

    config = Config(
        model=ModelConfig(
            vocab_size=shape.vocabulary,
            num_layers=shape.layers,
            hidden_size=shape.width,
            num_heads=shape.heads,
            intermediate_size=shape.hidden,
            token_types=2,
            position=PositionConfig(kind=position),
        ),
        objective=ObjectiveConfig(token_weight=weight, head_weight=weight),
        stages=(StageConfig(length=shape.length, batch_size=shape.rows),),
    )
    training = build_training(config, 0, make_mesh(config.mesh))
    made = batch(shape)
    rows = {
        "input_ids": made["ids"],
        "segment_ids": np.ones_like(made["ids"]),
        "positions": np.tile(np.arange(shape.length, dtype=np.int32), (shape.rows, 1)),
        "predict_positions": made["places"],
        "predict_ids": made["targets"],
        "predict_weights": np.ones(made["places"].shape, np.float32),
    }
    return steps_of(training, rows)


def torch_step(shape: Shape, position: str) -> Step:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    relative = {"position_embedding_type": "relative_key"} if position == "relative_key" else {}
    attention = {} if relative else {"attn_implementation": "sdpa"}
    model = BertForMaskedLM(BertConfig(**_bert_fields(shape), **relative, **attention)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    made = batch(shape)
    ids = torch.tensor(made["ids"], dtype=torch.long)
    labels = torch.full_like(ids, -100)
    places = torch.tensor(made["places"], dtype=torch.long)
    labels.scatter_(1, places, torch.gather(ids, 1, places))
    mask = torch.ones_like(ids)

    def step() -> float:
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def flax_step(shape: Shape) -> Step:
    import jax
    import jax.numpy as jnp
    import optax
    from transformers import BertConfig, FlaxBertForMaskedLM

    model = FlaxBertForMaskedLM(BertConfig(**_bert_fields(shape)), seed=0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
    made = batch(shape)
    ids, mask = jnp.asarray(made["ids"]), jnp.ones_like(made["ids"])
    is_predicted = np.zeros(made["ids"].shape, np.float32)
    np.put_along_axis(is_predicted, made["places"], 1.0, axis=1)
    params, opt_state, key = model.params, optimizer.init(model.params), jax.random.key(0)

    def loss_of(params: Any, key: Any) -> Any:
        logits = model(ids, mask, params=params, dropout_rng=key, train=True).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
        return (losses * is_predicted).sum() / is_predicted.sum()

    @jax.jit
    def update(params: Any, opt_state: Any, key: Any) -> Any:
        key, used = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_of)(params, used)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    def step() -> float:
        nonlocal params, opt_state, key
        params, opt_state, key, loss = update(params, opt_state, key)
        return float(loss)

    return step


def _bert_fields(shape: Shape) -> dict[str, int]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.hidden,
    }


def contestant(name: str, shape: Shape) -> Step:
    """Returns the step of a contestant by its name."""
    if name in OURS:
        return our_step(shape, **OURS[name])
    if name == "flax":
        return flax_step(shape)
    return torch_step(shape, "relative_key" if "relative_key" in name else "absolute")


def measure(shape_name: str, steps: int, names: dict[str, str]) -> list[dict[str, Any]]:
    """Returns a row for each contestant; `names` maps it to the interpreter that runs it."""
    shape = SHAPES[shape_name]
    contestants = [
        Contestant(name, [python, __file__, "--serve", name, "--shape", shape_name])
        for name, python in names.items()
    ]
    take_turns(contestants, steps, warm_up=1)
    rows = []
    for each in contestants:
        median = each.median("seconds")
        rows.append(
            {
                "name": each.name,
                "shape": shape_name,
                "tokens_per_second": shape.rows * shape.length / median,
                "step_seconds": median,
                # The first step compiles, and runs once.
                "compile_seconds": max(each.first["seconds"] - median, 0.0),
                "peak_rss_mb": each.answers[-1]["peak_rss_mb"],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows with each figure's ratio to the torch peer and to our absolute model."""
    lines = []
    head = ("name", "tokens/s", "s/step", "first s", "MB", "speed/torch", "time/absolute")
    for shape in dict.fromkeys(row["shape"] for row in rows):
        group = {row["name"]: row for row in rows if row["shape"] == shape}
        lines.append(f"\n{shape}: {SHAPES[shape]}")
        lines.append(("{:<20}" + "{:>14}" * 6).format(*head))
        for row in group.values():
            speed = row["tokens_per_second"]
            against = [
                f"{speed / group['torch']['tokens_per_second']:.2f}" if "torch" in group else "-",
                f"{group['absolute']['tokens_per_second'] / speed:.3f}"
                if "absolute" in group
                else "-",
            ]
            lines.append(
                f"{row['name']:<20}{speed:>14,.0f}{row['step_seconds']:>14.3f}"
                f"{row['compile_seconds']:>14.1f}{row['peak_rss_mb']:>14,.0f}"
                f"{against[0]:>14}{against[1]:>14}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["base", "small"], choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=7, help="counted steps of each (default: 7)")
    parser.add_argument("--only", nargs="+", help="names of the contestants to run")
    parser.add_argument("--flax-python", help="an interpreter that has transformers 4.57.6")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(contestant(args.serve, SHAPES[args.shape[0]]))
        return
    names = dict.fromkeys([*OURS, *TORCH], sys.executable)
    if args.flax_python:
        names |= dict.fromkeys(OLD_TRANSFORMERS, args.flax_python)
    if args.only:
        names = {name: python for name, python in names.items() if name in args.only}
    rows = [row for shape in args.shape for row in measure(shape, args.steps, names)]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
