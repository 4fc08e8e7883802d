r"""The demo: a small DDRP + MTH encoder, or its baseline with absolute positions and MLM alone.

    ddrp tokenizer train --input demo --vocab-size 2048 --max-sentences 20000 \
        --output runs/demo/tokenizer
    ddrp prepare --input demo --tokenizer runs/demo/tokenizer --holdout 1% \
        --output runs/demo/records
    ddrp pretrain --config configs/demo.py:ddrp --workdir runs/demo/ddrp
    ddrp pretrain --config configs/demo.py:absolute --workdir runs/demo/absolute

`make demo` does all of it, and compares the two.
"""

from ml_collections import ConfigDict

from ddrp_jax.config import (
    Config,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PositionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    to_config_dict,
)

POSITIONS = {
    "ddrp": PositionConfig(kind="ddrp", max_distance=63),
    "absolute": PositionConfig(kind="absolute"),
}
OBJECTIVES = {
    "ddrp": ObjectiveConfig(token_weight=0.03, head_weight=0.03, weight_warmup_steps=200),
    "absolute": ObjectiveConfig(),
}


def get_config(model: str = "ddrp") -> ConfigDict:
    """Returns the config of "ddrp" (DDRP + MTH) or of "absolute" (absolute positions, MLM)."""
    schedule = ScheduleConfig(kind="cosine", peak=2e-3, warmup_steps=100, end=2e-4)
    config = Config(
        model=ModelConfig(
            num_layers=4,
            hidden_size=128,
            num_heads=4,
            intermediate_size=512,
            # Pre-norm with fan-in scaling leaves the unigram plateau within a few hundred steps;
            # post-norm with N(0, 0.02) stays on it for the whole of a run this short.
            norm_order="pre",
            initializer="fan_in",
            position=POSITIONS[model],
            max_length=64,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        objective=OBJECTIVES[model],
        optimizer=OptimizerConfig(),
        stages=(
            StageConfig(
                records="runs/demo/records",
                length=64,
                batch_size=32,
                steps=1400,
                schedule=schedule,
            ),
        ),
        train=TrainConfig(log_every=20, eval_every=200, eval_rows=512, save_every=800),
    )
    return to_config_dict(config)
