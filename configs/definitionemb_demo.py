r"""A reconstructor for a small model, in minutes on a CPU (`make demo-definitions`).

    ddrp import path/to/model runs/definitions/model
    ddrp definitions build --dictionary gcide --tokenizer runs/definitions/model/tokenizer \
        --output runs/definitions/examples
    ddrp definitions train --config configs/definitionemb_demo.py:runs/definitions/model \
        --workdir runs/definitions/reconstructor

The linear map starts from a ridge regression: at random, it would take thousands of steps to get
there.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    DefinitionConfig,
    OptimizerConfig,
    ReconstructionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    to_config_dict,
)


def get_config(checkpoint: str) -> ConfigDict:
    """Returns the config of a run that rebuilds the embeddings of `checkpoint`."""
    from ddrp_jax.training.pretrained import model_config

    stage = StageConfig(
        records="runs/definitions/examples",
        length=128,
        batch_size=16,
        steps=600,
        schedule=ScheduleConfig(kind="linear", peak=5e-4, warmup_steps=50),
    )
    config = DefinitionConfig(
        model=model_config(checkpoint),
        optimizer=OptimizerConfig(b2=0.98, clip_norm=1.0),
        stages=(stage,),
        train=TrainConfig(log_every=20, eval_every=150, eval_rows=256, save_every=200, keep_last=1),
        reconstruction=ReconstructionConfig(
            checkpoint=checkpoint,
            reconstruct_definitions=False,
            map_init="ridge",
            ridge_examples=3000,
        ),
    )
    return to_config_dict(config)
