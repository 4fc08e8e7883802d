"""What the training loop asks of a task: pre-training is one, rebuilding embeddings another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from ddrp_jax.config import RunConfig
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.training.step import Training


class Batches(Protocol):
    """Endless batches whose state is part of a checkpoint (`data.pipeline.TrainBatches`)."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Task(Protocol):
    """A run's model, data and measures.

    Attributes:
        config: resolved.
        tokenizer: stored with every checkpoint.
        criterion: name of the held-out measure by which the best checkpoints are kept; lower is
            better.
    """

    tokenizer: Tokenizer
    criterion: str

    @property
    def config(self) -> RunConfig: ...

    def source(self, stage_index: int) -> Path:
        """Returns the folder that a stage's rows come from."""

    def batches(self, stage_index: int, step: int) -> Batches:
        """Returns this process's batches of a stage, from the one after `step` of its steps."""

    def held_out(self, stage_index: int) -> Iterable[dict[str, np.ndarray]] | None:
        """Returns the batches on which a stage is measured; None where nothing is held out."""

    def training(self, stage_index: int, mesh: Mesh) -> Training:
        """Returns the compiled functions of a stage."""

    def step_flops(self, stage_index: int) -> float:
        """Returns the FLOPs of a stage's step (`hardware.stage_flops`)."""

    def init_params(self, mesh: Mesh) -> Any:
        """Returns the parameters that a fresh run starts from; None takes `Training.init`'s."""

    def check_checkpoint(self, path: Path) -> None:
        """Raises UsageError where this task's data cannot go on from a checkpoint."""

    def measures(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is written of an evaluation, with `loss`, from the means of its sums."""
