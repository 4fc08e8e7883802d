"""The task of pre-training: records, masked rows, MLM and its regularisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ddrp_jax.config import Config, ObjectiveConfig
from ddrp_jax.data import pipeline
from ddrp_jax.data.masking import Masker
from ddrp_jax.data.records import Records, check_records, open_records
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.errors import UsageError
from ddrp_jax.paths import as_path
from ddrp_jax.training import checkpoint, distributed, sharding
from ddrp_jax.training.evaluation import HELD_OUT, held_out_batches
from ddrp_jax.training.hardware import stage_flops
from ddrp_jax.training.loop import train
from ddrp_jax.training.step import Training, build_training


def pretrain(
    config: Config,
    workdir: Path,
    *,
    init: Path | None = None,
    profile: tuple[int, int] | None = None,
) -> int:
    """Trains, or goes on from the newest good checkpoint in `workdir`.

    Args:
        config: the run.
        workdir: the run's folder, as `loop.train` keeps it.
        init: a checkpoint whose parameters a fresh run starts from; a run that has checkpoints of
            its own goes on from those.
        profile: first and last step to trace.

    Returns:
        Exit status: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        UsageError: the config cannot be right, or may not change on resume.
        DdrpError: bad records, no usable checkpoint, a full disk, a loss that is not finite.
    """
    return train(Pretraining(config, init), workdir, origin=str(init), profile=profile)


class Pretraining:
    """The task of one config (`training.task.Task`).

    Args:
        config: the run, with or without what the tokenizer decides.
        init: a checkpoint to start from.
    """

    criterion = "mlm_loss"

    def __init__(self, config: Config, init: Path | None = None):
        self._init = init
        self._corpora = [_open(stage.records, index) for index, stage in enumerate(config.stages)]
        self.tokenizer = self._corpora[0].tokenizer()
        self.config = resolve(config, self.tokenizer)
        for records in self._corpora:
            check_records(records, self.tokenizer.fingerprint, self.config.model.vocab_size)
        for stage in config.stages:
            Masker(config.masking, self.tokenizer, stage.length)

    def source(self, stage_index: int) -> Path:
        return self._corpora[stage_index].path

    def batches(self, stage_index: int, step: int) -> pipeline.TrainBatches:
        config = self.config
        process_index, process_count = sharding.row_share(sharding.make_mesh(config.mesh))
        return pipeline.train_batches(
            self._corpora[stage_index],
            self.tokenizer,
            config.stages[stage_index],
            config.masking,
            seed=config.train.seed,
            process_index=process_index,
            process_count=process_count,
            start_step=step,
            prefetch=config.train.prefetch,
            workers=config.train.workers,
        )

    def held_out(self, stage_index: int) -> Any:
        records = self._corpora[stage_index]
        if HELD_OUT not in records.splits:
            return None
        return held_out_batches(records, self.tokenizer, self.config, stage_index)

    def training(self, stage_index: int, mesh: Mesh) -> Training:
        return build_training(self.config, stage_index, mesh)

    def step_flops(self, stage_index: int) -> float:
        return stage_flops(self.config, self.config.stages[stage_index])

    def init_params(self, mesh: Mesh) -> Any:
        if self._init is None:
            return None
        init = self._init
        path = as_path(distributed.on_main(lambda: str(checkpoint.find_checkpoint(init))))
        self.check_checkpoint(path)
        return checkpoint.restore_params(path, self.training(0, mesh).abstract_state.params)

    def check_checkpoint(self, path: Path) -> None:
        records = self._corpora[0]
        if load_tokenizer(path / "tokenizer").fingerprint != records.tokenizer_fingerprint:
            raise UsageError(
                f"records {str(records.path)!r} were made with another tokenizer than checkpoint "
                f"{path}; run 'ddrp prepare' with '--tokenizer {path / 'tokenizer'}'"
            )

    def measures(self, means: Mapping[str, Any]) -> dict[str, Any]:
        return with_loss(means, self.config.objective)


def resolve(config: Config, tokenizer: Tokenizer) -> Config:
    """Returns the config with what the tokenizer decides filled in."""
    model = dataclasses.replace(
        config.model,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
    )
    return dataclasses.replace(config, model=model)


def with_loss(means: Mapping[str, Any], objective: ObjectiveConfig) -> dict[str, Any]:
    """Returns the measures of held-out rows with the weighted sum of their losses, `loss`."""
    if not means:
        return {}
    heads = means["head_cosine"]
    if objective.head_layers == "last":
        heads = means["head_cosine_by_layer"][-1]
    loss = means["mlm_loss"]
    for weight, cosine in (
        (objective.token_weight, means["token_cosine"]),
        (objective.head_weight, heads),
    ):
        # 0 * NaN would spoil the loss of rows that have nothing to compare.
        loss += weight * cosine if weight else 0.0
    return {**means, "loss": loss}


def _open(path: str, index: int) -> Records:
    if not path:
        raise UsageError(
            f"config.stages[{index}].records='': name a folder that 'ddrp prepare' wrote"
        )
    return open_records(path)
