r"""BERT base: 12 layers, 768 wide, absolute positions, MLM alone; rows of 128, then of 512.

    ddrp tokenizer train --input hf:wikimedia/wikipedia:20231101.en@train --streaming \
        --vocab-size 30000 --output runs/base/tokenizer
    ddrp prepare --input hf:wikimedia/wikipedia:20231101.en@train hf:rojagtap/bookcorpus@train \
        --tokenizer runs/base/tokenizer --holdout 0.5% --output runs/base/records
    ddrp pretrain --config configs/bert_base.py --workdir runs/bert_base

Batch, steps and learning rate are those of BERT's release (256 rows, a million steps, nine in ten
of them short). Seen: a step of this shape on CPU (`benchmarks/pretrain_step.py`), never the whole
run.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    Config,
    ModelConfig,
    ObjectiveConfig,
    PositionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    to_config_dict,
)

RECORDS = "runs/base/records"


def base_config(position: PositionConfig, objective: ObjectiveConfig) -> Config:
    """Returns the run that `bert_base.py` and `ddrp_base.py` share."""
    return Config(
        model=ModelConfig(dtype="bfloat16", token_types=2, position=position),
        objective=objective,
        stages=(
            StageConfig(
                name="short",
                records=RECORDS,
                length=128,
                batch_size=256,
                steps=900_000,
                schedule=ScheduleConfig(kind="linear", peak=1e-4, warmup_steps=10_000, end=1e-5),
            ),
            # The second stage goes on at the learning rate that the first one ends with.
            StageConfig(
                name="long",
                records=RECORDS,
                length=512,
                batch_size=256,
                steps=100_000,
                schedule=ScheduleConfig(kind="linear", peak=1e-5),
            ),
        ),
        train=TrainConfig(log_every=100, eval_every=10_000, eval_rows=4096, save_every=5_000),
    )


def get_config() -> ConfigDict:
    """Returns the config."""
    return to_config_dict(base_config(PositionConfig(kind="absolute"), ObjectiveConfig()))
