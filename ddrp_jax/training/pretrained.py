"""A trained model as later commands need it: parameters, config and tokenizer of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from ddrp_jax.config import Config, MeshConfig, ModelConfig, from_config_dict
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.errors import UsageError
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.models.seq2seq import Seq2Seq, build_model
from ddrp_jax.training import checkpoint
from ddrp_jax.training.sharding import make_mesh
from ddrp_jax.training.step import abstract_model


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What a checkpoint holds, without the optimiser.

    Attributes:
        path: the checkpoint's folder.
        config: of the run that wrote it, resolved.
        tokenizer: the one that it was trained with.
        params: nested dicts of float32 arrays, on all devices.
        graphdef: of the model; `model()` joins it with `params`.
        mesh: all devices along the data axis, whatever the run's own mesh was.
    """

    path: Path
    config: Config
    tokenizer: Tokenizer
    params: Any
    graphdef: Any
    mesh: Mesh

    def model(self) -> MaskedLM | Seq2Seq:
        """Returns the model with its parameters."""
        return nnx.merge(self.graphdef, self.params)


def read_config(folder: Path) -> Config:
    """Returns the config of a model's checkpoint.

    Raises:
        UsageError: it holds a reconstructor.
    """
    values = checkpoint.read_config(folder)
    if "reconstruction" in values:
        raise UsageError(
            f"checkpoint '{folder}': a reconstructor, which is no model by itself; "
            "'ddrp definitions apply' makes one with it"
        )
    return from_config_dict(Config, values, f"{folder}/config.json")


def model_config(path: str | Path) -> ModelConfig:
    """Returns the model's part of the config of a run or a checkpoint, for `configs/` files."""
    return read_config(checkpoint.find_checkpoint(path)).model


def load_pretrained(path: str | Path) -> Pretrained:
    """Loads the model of a run (its newest good checkpoint) or of one checkpoint's folder.

    Raises:
        UsageError: there is no checkpoint.
        DdrpError: it is damaged.
    """
    folder = checkpoint.find_checkpoint(path)
    config = read_config(folder)
    mesh = make_mesh(MeshConfig())
    graphdef, shapes, shardings = abstract_model(
        lambda rngs: build_model(config.model, rngs=rngs), mesh
    )
    abstract_params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings,
    )
    params = checkpoint.restore_params(folder, abstract_params)
    return Pretrained(folder, config, load_tokenizer(folder / "tokenizer"), params, graphdef, mesh)
