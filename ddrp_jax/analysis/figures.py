"""Figures of runs, drawn with matplotlib without a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours: told apart by readers who do not see red and green as different.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def training_curves(
    histories: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, unigram_entropy: float
) -> None:
    """Draws held-out loss, token similarity and head similarity of several runs.

    Args:
        histories: name of a run -> its held-out events, in order, as `metrics.jsonl` holds them.
        path: the file to write; its ending chooses the format.
        unigram_entropy: nats, drawn as the loss of knowing only how common each token is.
    """
    from matplotlib.figure import Figure

    panels = (
        ("mlm_loss", "held-out MLM loss (nats)"),
        ("token_cosine", "token cosine (last layer)"),
        ("head_cosine", "head cosine (mean over layers)"),
    )
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for colour, (run, events) in zip(_colours(), histories.items(), strict=False):
            points = [(event["step"], event[name]) for event in events if event.get(name)]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=run)
        if name == "mlm_loss":
            axes.axhline(unigram_entropy, color="grey", linestyle="--", label="unigram entropy")
        else:
            axes.set_ylim(0, 1)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _colours() -> list[str]:
    return [*COLOURS] * 4
