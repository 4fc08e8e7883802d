r"""A reconstructor of BART-large's embeddings, with the settings that the source published.

    ddrp import path/to/bart-large runs/bart
    ddrp definitions build --dictionary wiktextract:kaikki-en.jsonl.gz \
        --tokenizer runs/bart/tokenizer --output runs/bart-definitions
    ddrp definitions train --config configs/definitionemb_bart_large.py:runs/bart \
        --workdir runs/bart-reconstructor \
        --config.stages[0].records=runs/bart-definitions

Its word table is frozen, and only the wanted pieces are reconstructed.
A step takes 4,096 tokens: 32 rows of 128, each of whole examples (packing them is ours). Written
for a TPU with bfloat16 products; without a checkpoint the model is of BART-large's sizes, for
planning. It was never run to its end here: no such weights were at hand.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    DecoderConfig,
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
    hidden_size=1024,
    num_heads=16,
    intermediate_size=4096,
    norm_epsilon=1e-5,
    position=PositionConfig(kind="absolute"),
    max_length=1024,
    position_offset=2,
    pad_id=1,
    attention_dropout=0.0,
    decoder=DecoderConfig(num_layers=12, forced_eos_id=2),
)


def get_config(checkpoint: str = "") -> ConfigDict:
    """Returns the config of a run that rebuilds the embeddings of `checkpoint`."""
    from ddrp_jax.training.pretrained import model_config

    stage = StageConfig(
        length=128,
        batch_size=32,
        steps=250_000,
        schedule=ScheduleConfig(kind="inverse_sqrt", peak=1e-4, start=1e-7, warmup_steps=20_000),
    )
    config = DefinitionConfig(
        model=model_config(checkpoint) if checkpoint else PUBLISHED,
        optimizer=OptimizerConfig(b2=0.98, clip_norm=0.1),
        stages=(stage,),
        train=TrainConfig(log_every=100, eval_every=2000, save_every=2000),
        reconstruction=ReconstructionConfig(
            checkpoint=checkpoint,
            train_embeddings=False,
            reconstruct_definitions=False,
        ),
    )
    values = to_config_dict(config)
    values.model.dtype = "bfloat16"
    return values
