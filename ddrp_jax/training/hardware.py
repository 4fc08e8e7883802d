"""What chips can do at most, and what a training step needs: the two sides of the MFU.

MFU (model FLOPs utilisation) is the FLOPs that the model asks for, not those that the program
runs, by the chips' published peak (Chowdhery et al. 2022, appendix B): recomputed layers and the
spreading of relative scores do not count.
"""

from __future__ import annotations

import dataclasses
import glob
import os

from ddrp_jax.config import Config, ModelConfig, RunConfig, StageConfig
from ddrp_jax.data.masking import predictions_of
from ddrp_jax.paths import cache_folder

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one TPU generation, per chip.

    Attributes:
        kind: what JAX calls it (`jax.Device.device_kind`).
        peak_flops: bf16 products, FLOP/s.
        memory: bytes of HBM.
        bandwidth: of the HBM, bytes/s.
        link_bandwidth: of all links to other chips together, one direction, bytes/s.
    """

    kind: str
    peak_flops: float
    memory: float
    bandwidth: float
    link_bandwidth: float


# Google Cloud's documentation, one page for each generation ("System architecture", table of key
# specifications, https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e). The pages give the
# links' bandwidth for both directions (v5e 400 GB/s, v6e 800 GB/s) or for one in bits (v4 2,400
# Gbit/s, v5p 4,800 Gbit/s).
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 32 * _GIB, 1200e9, 300e9),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * _GIB, 819e9, 200e9),
    "v5p": Chip("TPU v5", 459e12, 95 * _GIB, 2765e9, 600e9),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * _GIB, 1638e9, 400e9),
}


def has_tpu() -> bool:
    """Returns whether this machine has TPU chips; asks the system, not jax."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def chip_of(device_kind: str) -> Chip | None:
    """Returns the figures of a device by its `device_kind`, None where they are not known."""
    return next((chip for chip in CHIPS.values() if chip.kind == device_kind), None)


def peak_flops() -> float | None:
    """Returns the peak of all devices of the run together, None where it is not known."""
    import jax

    devices = jax.devices()
    chip = chip_of(devices[0].device_kind)
    return None if chip is None else chip.peak_flops * len(devices)


def keep_compilations() -> None:
    """Keeps what is compiled for accelerators in the user's cache folder, unless told where.

    Not so for CPUs: homes are shared by machines whose CPUs differ.
    """
    import jax

    if jax.default_backend() == "cpu" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))


def stage_flops(config: RunConfig, stage: StageConfig, decoder_length: int = 0) -> float:
    """Returns the FLOPs of one training step of a stage, over all devices.

    Args:
        config: the run; only pre-training has the masked-LM head.
        stage: one of its stages.
        decoder_length: tokens of a row of the decoder, where there is one.
    """
    predictions = predictions_of(config.masking, stage.length) if isinstance(config, Config) else 0
    return step_flops(config.model, stage.batch_size, stage.length, predictions, decoder_length)


def step_flops(
    model: ModelConfig, rows: int, length: int, predictions: int, decoder_length: int = 0
) -> float:
    """Returns the FLOPs of one training step of a model with its masked-LM head.

    Three times the forward pass's products (backward is two more), of which each parameter of a
    matrix counts 2 for each token that it is applied to, and attention 4 D for each pair of places
    (scores, and the weighted sum); the head counts at predicted positions only. Embedding lookups,
    norms, dropout and relative scores count nothing.

    Args:
        model: the model, with its vocabulary.
        rows: rows of the step's batch.
        length: tokens of a row.
        predictions: predicted positions of a row; 0 for a model without the head.
        decoder_length: tokens of a row of the decoder, where there is one.
    """
    d = model.hidden_size
    feed_forward = 2 * d * model.intermediate_size
    layer = 2 * (4 * d * d + feed_forward) * length + 4 * d * length**2
    # Self-attention, queries and output of cross-attention; its keys and values are of the source.
    decoder_layer = (
        2 * (6 * d * d + feed_forward) * decoder_length
        + 2 * (2 * d * d) * length
        + 4 * d * decoder_length * (decoder_length + length)
    )
    head = 2 * (d * d + d * model.vocab_size) * predictions
    layers = model.num_layers * layer
    if decoder_length:
        layers += model.decoder.num_layers * decoder_layer
    return 3.0 * rows * (layers + head)
