r"""One step of a reconstructor's training, side by side with PyTorch.

    python benchmarks/definitionemb_step.py [--json FILE]

Both train the same student, a BERT of MiniLM's shape (6 layers of 384, 12 heads, 1,536 hidden
units, 30,522 pieces) with a linear map on its last hidden states, by the same loss, the squared
error to rows of a frozen word table, in float32 with dropout 0.1, gradient clipping and AdamW; the
peer is `BertModel` of transformers (SDPA, fused AdamW). They make their steps in turns. Rows are
full, 16 of 128 tokens, one segment each, which spares the peer a mask. Targets are 4 places of a
row, as in the demo's packed rows ("slots"), or all of them, as where definitions are reconstructed
too ("all"). Required: our step takes no longer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import Contestant, serve, show, steps_of, take_turns

ROWS, LENGTH, SLOTS = 16, 128, 4
VOCABULARY, LAYERS, WIDTH, HEADS, HIDDEN = 30_522, 6, 384, 12, 1536
TARGETS = ("slots", "all")

Step = Callable[[], float]


def batch(targets: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns token ids, target ids and target weights, [B, T] each."""
    random = np.random.default_rng(0)
    ids = random.integers(1000, VOCABULARY, (ROWS, LENGTH), dtype=np.int32)
    target_ids = random.integers(1000, VOCABULARY, (ROWS, LENGTH), dtype=np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    if targets == "slots":
        weights[:] = 0
        places = random.random((ROWS, LENGTH)).argsort(axis=1)[:, :SLOTS]
        np.put_along_axis(weights, places, 1, axis=1)
    return ids, target_ids, weights


def our_step(targets: str) -> Step:
    from ddrp_jax.config import (
        DefinitionConfig,
        ModelConfig,
        OptimizerConfig,
        PositionConfig,
        ReconstructionConfig,
        StageConfig,
    )
    from ddrp_jax.definitions.reconstruct import objective
    from ddrp_jax.training.sharding import make_mesh
    from ddrp_jax.training.step import build_training

    config = DefinitionConfig(
        model=ModelConfig(
            vocab_size=VOCABULARY,
            num_layers=LAYERS,
            hidden_size=WIDTH,
            num_heads=HEADS,
            intermediate_size=HIDDEN,
            token_types=2,
            position=PositionConfig(kind="absolute"),
        ),
        optimizer=OptimizerConfig(clip_norm=1.0),
        stages=(StageConfig(length=LENGTH, batch_size=ROWS),),
        reconstruction=ReconstructionConfig(reconstruct_definitions=targets == "all"),
    )
    training = build_training(config, 0, make_mesh(config.mesh), objective(config))
    ids, target_ids, weights = batch(targets)
    rows = {
        "input_ids": ids,
        "segment_ids": np.ones_like(ids),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "target_ids": target_ids,
        "target_weights": weights,
        "slot_weights": weights,
    }
    return steps_of(training, rows)


def torch_step(targets: str) -> Step:
    import torch
    from transformers import BertConfig, BertModel

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        attn_implementation="sdpa",
    )
    student = BertModel(config, add_pooling_layer=False).train()
    linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    teacher = student.get_input_embeddings().weight.detach().clone()
    parameters = [*student.parameters(), *linear.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)
    made = batch(targets)
    ids, target_ids = (torch.tensor(each, dtype=torch.long) for each in made[:2])
    places = torch.tensor(np.flatnonzero(made[2]))
    wanted = teacher[target_ids.reshape(-1)[places]]

    def step() -> float:
        hidden = student(input_ids=ids).last_hidden_state.reshape(-1, WIDTH)
        loss = 100 * torch.nn.functional.mse_loss(linear(hidden[places]), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


STEPS = {"ours": our_step, "torch": torch_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=9, help="counted steps of each (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(STEPS[args.serve[0]](args.serve[1]))
        return
    rows = []
    for targets in TARGETS:
        contestants = [
            Contestant(name, [sys.executable, __file__, "--serve", name, targets]) for name in STEPS
        ]
        take_turns(contestants, args.steps, warm_up=1)
        theirs = contestants[1].median("seconds")
        rows += [
            {
                "name": each.name,
                "targets": targets,
                "step_seconds": each.median("seconds"),
                "time_to_torch": each.median("seconds") / theirs,
                "tokens_per_second": ROWS * LENGTH / each.median("seconds"),
                "first_seconds": each.first["seconds"],
                "peak_rss_mb": each.answers[-1]["peak_rss_mb"],
            }
            for each in contestants
        ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
