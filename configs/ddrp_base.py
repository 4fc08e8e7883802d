r"""DDRP + MTH at base size: 12 layers, 768 wide; rows of 128, then of 512.

    ddrp pretrain --config configs/ddrp_base.py --workdir runs/ddrp_base

Tokenizer and records are made as `bert_base.py` says, and all but positions and objective is as
there. The weights of the regularisers are the demo's, chosen there by measurement; the source's
are not known. Seen: a step of this shape on CPU (`benchmarks/pretrain_step.py`), never the whole
run.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from ddrp_jax.config import ObjectiveConfig, PositionConfig, to_config_dict

# A config file is run, not imported, so it finds its neighbour by path.
BASE = runpy.run_path(str(Path(__file__).parent / "bert_base.py"))


def get_config() -> ConfigDict:
    """Returns the config."""
    position = PositionConfig(kind="ddrp", max_distance=63)
    objective = ObjectiveConfig(token_weight=0.03, head_weight=0.03, weight_warmup_steps=10_000)
    return to_config_dict(BASE["base_config"](position, objective))
