r"""A reconstructor of RoBERTa-base's embeddings, with the settings that the source published.

    ddrp import path/to/roberta-base runs/roberta
    ddrp definitions build --dictionary wiktextract:kaikki-en.jsonl.gz \
        --tokenizer runs/roberta/tokenizer --output runs/roberta-definitions
    ddrp definitions train --config configs/definitionemb_roberta_base.py:runs/roberta \
        --workdir runs/roberta-reconstructor \
        --config.stages[0].records=runs/roberta-definitions

Its definitions' tokens are corrupted and reconstructed, and its word table learns.
A step takes 4,096 tokens: 32 rows of 128, each of whole examples (packing them is ours). Written
for a TPU with bfloat16 products; without a checkpoint the model is of RoBERTa-base's sizes, for
planning. It was never run to its end here: no such weights were at hand.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    DefinitionConfig,
    ModelConfig,
    OptimizerConfig,
    PositionConfig,
    ReconstructionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    to_config_dict,
)

PUBLISHED = ModelConfig(
    vocab_size=50265,
    norm_epsilon=1e-5,
    token_types=1,
    position=PositionConfig(kind="absolute"),
    position_offset=2,
    pad_id=1,
)


def get_config(checkpoint: str = "") -> ConfigDict:
    """Returns the config of a run that rebuilds the embeddings of `checkpoint`."""
    from ddrp_jax.training.pretrained import model_config

    stage = StageConfig(
        length=128,
        batch_size=32,
        steps=400_000,
        schedule=ScheduleConfig(kind="inverse_sqrt", peak=1e-4, start=1e-7, warmup_steps=24_000),
    )
    config = DefinitionConfig(
        model=model_config(checkpoint) if checkpoint else PUBLISHED,
        optimizer=OptimizerConfig(b2=0.98, clip_norm=0.1),
        stages=(stage,),
        train=TrainConfig(log_every=100, eval_every=2000, save_every=2000),
        reconstruction=ReconstructionConfig(
            checkpoint=checkpoint,
            train_embeddings=True,
            reconstruct_definitions=True,
        ),
    )
    values = to_config_dict(config)
    values.model.dtype = "bfloat16"
    return values
