"""Gives a checkpoint back as a folder that `transformers` loads. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.config import Config, from_config_dict
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.interop import model_card
from ddrp_jax.interop.families import FAMILIES, Family, Published, family_for, generation_config
from ddrp_jax.interop.name_tables import Part, Place, Shape, places
from ddrp_jax.interop.tensors import WEIGHTS, write_safetensors
from ddrp_jax.training import checkpoint

_MODELLING = ("configuration_ddrp.py", "modeling_ddrp.py")
# What the library that saves a model says of itself.
_NOT_KEPT = ("_name_or_path", "architectures", "auto_map", "torch_dtype", "transformers_version")


@dataclasses.dataclass(frozen=True)
class Export:
    """What an export of a checkpoint is made of.

    Attributes:
        path: the checkpoint's folder.
        config: of the run that wrote it.
        tokenizer: the checkpoint's.
        progress: the checkpoint's.
        shapes: of its parameters, by path.
        head_shapes: of a classification head or pooler, by path; perhaps none.
        family: what it is exported as.
        kind: "base", "masked_lm", "classification" or "generation".
        published: the `config.json` of the model that it was imported from, or empty.
        generation: its `generation_config.json`, or empty.
    """

    path: Path
    config: Config
    tokenizer: Tokenizer
    progress: dict[str, Any]
    shapes: dict[str, Shape]
    head_shapes: dict[str, Shape]
    family: Family
    kind: str
    published: Published
    generation: Published

    @property
    def architecture(self) -> str:
        """Name of the PyTorch class."""
        return self.family.architecture(self.kind)


def plan_export(source: str | Path) -> Export:
    """Decides what a checkpoint is exported as: what it was imported as, or with its head.

    Args:
        source: a run's folder (its newest good checkpoint), or one checkpoint's folder.

    Raises:
        UsageError: there is no checkpoint.
        DdrpError: it is damaged.
    """
    path = checkpoint.find_checkpoint(source)
    config = from_config_dict(Config, checkpoint.read_config(path), f"{path}/config.json")
    progress = checkpoint.read_progress(path)
    imported = progress.get("imported", {})
    kind = imported.get("kind", "generation" if config.model.decoder.num_layers else "masked_lm")
    head_shapes = checkpoint.task_head_shapes(path)
    if kind == "base" and Part.POOLER.value in imported["initialised"]:
        head_shapes = {}  # not learned: PyTorch makes one of its own
    published = imported.get("config", {})
    family = family_for(config.model)
    if published and family is not FAMILIES[published["model_type"]]:
        published = {}
    return Export(
        path=path,
        config=config,
        tokenizer=load_tokenizer(path / "tokenizer"),
        progress=progress,
        shapes={name: shape for name, (shape, _) in checkpoint.parameter_shapes(path).items()},
        head_shapes=head_shapes,
        family=family,
        kind=kind,
        published=published,
        generation=imported.get("generation", {}),
    )


def write_export(export: Export, folder: Path, dtype: str) -> None:
    """Writes config, weights, tokenizer and model card into an empty folder.

    Raises:
        UsageError: a value does not fit `dtype`.
    """
    config = published_config(export, dtype)
    _write_json(folder / "config.json", config)
    if export.kind == "generation":
        kept = {k: v for k, v in export.generation.items() if k not in _NOT_KEPT}
        generation = generation_config(export.config.model, kept)
        _write_json(folder / "generation_config.json", generation)
    # By our parameters, which hold the tensors of all layers.
    named = sorted(named_places(export), key=lambda pair: pair[1].path)
    shapes = [(name, place.shape) for name, place in named]
    write_safetensors(folder / WEIGHTS, shapes, _arrays(export, named), dtype)
    export.tokenizer.save(folder)
    _limit_tokenizer(export, folder)
    if "auto_map" in config:
        for file in _MODELLING:
            shutil.copyfile(Path(__file__).parent / "torch_export" / file, folder / file)
    card = model_card.model_card(
        export.path, export.config, export.tokenizer, export.progress, export.architecture, dtype
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def published_config(export: Export, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of an export."""
    base = {k: v for k, v in export.published.items() if k not in _NOT_KEPT}
    tokenizer = export.tokenizer
    if not base and export.family.model_type in ("roberta", "mpnet", "bart"):
        base = {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    config = export.family.write_config(export.config.model, base)
    (labels,) = export.head_shapes.get("bias", (2,))
    if labels != 2 and not config.get("id2label"):
        config["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
        config["label2id"] = {f"LABEL_{label}": label for label in range(labels)}
    return config | {"architectures": [export.architecture], "dtype": dtype}


def named_places(export: Export) -> Iterator[tuple[str, Place]]:
    """Yields each tensor's name in the file and its place in our parameters."""
    table, config = export.family.table, export.config.model
    shapes = export.shapes | export.head_shapes
    parts = table.parts[export.kind]
    has_head = export.kind != "base"
    for place in places(table, parts, shapes, config.vocab_size):
        names = [place.theirs]
        if place.row.copy and not config.tied_head:
            names.append(place.row.copy)  # an untied matrix has a bias of its own
        for name in names:
            yield table.full_name(place.row, name, has_head=has_head), place
    for row in table.rows:
        if row.rows_without and row.ours not in shapes:
            absent = Place(row, row.theirs, "", (), (row.rows_without, config.hidden_size))
            yield table.full_name(row, row.theirs, has_head=has_head), absent


def _arrays(export: Export, named: list[tuple[str, Place]]) -> Iterator[np.ndarray]:
    """Yields each tensor; no more than one parameter of ours is held at a time."""
    held: tuple[str, np.ndarray] | None = None
    for _, place in named:
        if not place.path:
            yield np.zeros(place.shape, np.float32)
            continue
        if held is None or held[0] != place.path:
            held = None
            item = "params" if place.path in export.shapes else "task_head"
            held = place.path, checkpoint.restore_array(export.path, place.path, item)
        yield place.row.transform.to_theirs(held[1][place.index], place.shape)


def _limit_tokenizer(export: Export, folder: Path) -> None:
    """Tells the tokenizer the longest legal text, where the model has one."""
    model = export.config.model
    if model.position.has_absolute:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, settings | {"model_max_length": model.max_length})


def _write_json(path: Path, values: Any) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
