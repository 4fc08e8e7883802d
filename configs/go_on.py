r"""Goes on with the pre-training of a model that 'ddrp import' took in, or that a run left.

    ddrp import path/to/bert-base-uncased runs/bert
    ddrp prepare --input text:corpus.txt --tokenizer runs/bert/tokenizer --holdout 0.5% \
        --output runs/records
    ddrp pretrain --config configs/go_on.py:runs/bert --init runs/bert --workdir runs/bert-go-on
    ddrp export runs/bert-go-on exported/bert --verify

The model is the checkpoint's own; rows are as long as it can read, at most 512 tokens.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    Config,
    OptimizerConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    to_config_dict,
)


def get_config(checkpoint: str) -> ConfigDict:
    """Returns the config of a run that starts from `checkpoint` (give it to --init as well)."""
    from ddrp_jax.training.pretrained import model_config

    model = model_config(checkpoint)
    stage = StageConfig(
        records="runs/records",
        length=min(512, model.max_length),
        batch_size=32,
        steps=10_000,
        schedule=ScheduleConfig(peak=5e-5, warmup_steps=500),
    )
    config = Config(
        model=model,
        optimizer=OptimizerConfig(b2=0.98),
        stages=(stage,),
        train=TrainConfig(eval_every=500, save_every=500),
    )
    return to_config_dict(config)
