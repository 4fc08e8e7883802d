"""Figures of runs, drawn with matplotlib without a screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def spectra(singular_values: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws the singular values of several tables, from the greatest on.

    Args:
        singular_values: name of a table -> its values.
        path: the file to write; its ending chooses the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for colour, (name, values) in zip(_colours(), singular_values.items(), strict=False):
        # Rounding leaves a little in directions that a table lacks, far below all that it has.
        least = 1e-6 * max(values)
        shown = [value if value > least else math.nan for value in values]
        axes.plot(range(1, len(shown) + 1), shown, color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("direction, by singular value")
    axes.set_title("singular values of the word table", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def projections(points: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Draws tables as points in a plane, coloured by frequency group.

    Args:
        points: name of a table -> name of a group -> coordinates [rows, 2]; the same plane for all.
        path: the file to write; its ending chooses the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(points), 4.6), layout="constrained")
    panels = figure.subplots(1, len(points), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, groups) in zip(panels, points.items(), strict=True):
        for colour, (group, rows) in zip(_colours(), groups.items(), strict=False):
            axes.scatter(*rows.T, s=2, alpha=0.3, linewidths=0, color=colour, label=group)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("first principal axis of the original")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("second principal axis of the original")
    legend = panels[0].legend(frameon=False, fontsize=9, markerscale=4)
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    figure.savefig(path, dpi=150)


def _colours() -> list[str]:
    return [*COLOURS] * 4
