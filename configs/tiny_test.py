r"""A model that trains in seconds, for tests and for a first look at a run's folder.

    ddrp tokenizer train --input text:corpus.txt --vocab-size 256 --output runs/tiny-tokenizer
    ddrp prepare --input text:corpus.txt --tokenizer runs/tiny-tokenizer --holdout 5% \
        --output runs/tiny-records
    ddrp pretrain --config configs/tiny_test.py --workdir runs/tiny
    ddrp pretrain --config configs/tiny_test.py:two_stages --workdir runs/tiny-stages

It is too small to learn more than how common each token is.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    Config,
    ModelConfig,
    ObjectiveConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    to_config_dict,
)

RECORDS = "runs/tiny-records"


def get_config(stages: str = "one_stage") -> ConfigDict:
    """Returns the config with one stage of rows of 32, or with rows of 16 before them."""
    schedule = ScheduleConfig(kind="linear", peak=2e-3, warmup_steps=2)
    long = StageConfig(
        name="long", records=RECORDS, length=32, batch_size=8, steps=12, schedule=schedule
    )
    short = StageConfig(
        name="short", records=RECORDS, length=16, batch_size=8, steps=7, schedule=schedule
    )
    config = Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_heads=2,
            intermediate_size=64,
            norm_order="pre",
            initializer="fan_in",
        ),
        objective=ObjectiveConfig(token_weight=0.1, head_weight=0.1, weight_warmup_steps=4),
        stages={"one_stage": (long,), "two_stages": (short, long)}[stages],
        train=TrainConfig(
            log_every=1, eval_every=4, eval_rows=16, save_every=4, keep_last=3, prefetch=2
        ),
    )
    return to_config_dict(config)
