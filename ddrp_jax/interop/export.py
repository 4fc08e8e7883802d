"""Gives a checkpoint back as a folder that `transformers` loads. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from ddrp_jax.interop import model_card
from ddrp_jax.interop.families import FAMILIES, Family, Published, family_for
from ddrp_jax.interop.name_tables import Part, Place, Shape, places
from ddrp_jax.interop.tensors import WEIGHTS, write_safetensors
from ddrp_jax.training import checkpoint
from ddrp_jax.training.pretrained import Pretrained

_MODELLING = ("configuration_ddrp.py", "modeling_ddrp.py")
# What the library that saves a model says of itself.
_NOT_KEPT = ("_name_or_path", "architectures", "auto_map", "torch_dtype", "transformers_version")


@dataclasses.dataclass(frozen=True)
class Export:
    """What an export of a checkpoint is made of.

    Attributes:
        pretrained: the checkpoint's model.
        progress: the checkpoint's.
        task_head: arrays of a classification head or pooler by path; perhaps none.
        family: what it is exported as.
        kind: "base", "masked_lm" or "classification".
        published: the `config.json` of the model that it was imported from, or empty.
    """

    pretrained: Pretrained
    progress: dict[str, Any]
    task_head: dict[str, np.ndarray]
    family: Family
    kind: str
    published: Published

    @property
    def architecture(self) -> str:
        """Name of the PyTorch class."""
        return self.family.architecture(self.kind)


def plan_export(pretrained: Pretrained) -> Export:
    """Decides what a checkpoint is exported as: what it was imported as, or a masked LM."""
    progress = checkpoint.read_progress(pretrained.path)
    imported = progress.get("imported", {})
    task_head = checkpoint.restore_task_head(pretrained.path)
    if Part.POOLER.value in imported.get("initialised", ()) and imported["kind"] == "base":
        task_head = {}  # not learned: PyTorch may make one of its own
    published = imported.get("config", {})
    family = family_for(pretrained.config.model)
    if published and family is not FAMILIES[published["model_type"]]:
        published = {}
    kind = imported.get("kind", "masked_lm")
    return Export(pretrained, progress, task_head, family, kind, published)


def write_export(export: Export, folder: Path, dtype: str) -> None:
    """Writes config, weights, tokenizer and model card into an empty folder.

    Raises:
        UsageError: a value does not fit `dtype`.
    """
    config = published_config(export, dtype)
    _write_json(folder / "config.json", config)
    named = list(_named_places(export))
    shapes = [(name, place.shape) for name, place in named]
    write_safetensors(folder / WEIGHTS, shapes, _arrays(export, named), dtype)
    export.pretrained.tokenizer.save(folder)
    _limit_tokenizer(export, folder)
    if "auto_map" in config:
        for file in _MODELLING:
            shutil.copyfile(Path(__file__).parent / "torch_export" / file, folder / file)
    card = model_card.model_card(export.pretrained, export.progress, export.architecture, dtype)
    (folder / "README.md").write_text(card, encoding="utf-8")


def published_config(export: Export, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of an export."""
    base = {k: v for k, v in export.published.items() if k not in _NOT_KEPT}
    tokenizer = export.pretrained.tokenizer
    if not base and export.family.model_type in ("roberta", "mpnet"):
        base = {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    config = export.family.write_config(export.pretrained.config.model, base)
    labels = export.task_head["bias"].size if "bias" in export.task_head else 2
    if labels != 2 and not config.get("id2label"):
        config["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
        config["label2id"] = {f"LABEL_{label}": label for label in range(labels)}
    return config | {"architectures": [export.architecture], "dtype": dtype}


def _named_places(export: Export) -> Iterator[tuple[str, Place]]:
    """Yields each tensor's name in the file and its place in our parameters."""
    table, config = export.family.table, export.pretrained.config.model
    shapes: dict[str, Shape] = {path: array.shape for path, array in _flat(export).items()}
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
    flat = _flat(export)
    for _, place in named:
        if place.path:
            ours = np.asarray(flat[place.path])[place.index]
            yield place.row.transform.to_theirs(ours, place.shape)
        else:
            yield np.zeros(place.shape, np.float32)


def _flat(export: Export) -> dict[str, Any]:
    return traverse_util.flatten_dict(export.pretrained.params, sep="/") | export.task_head


def _limit_tokenizer(export: Export, folder: Path) -> None:
    """Tells the tokenizer the longest legal text, where the model has one."""
    model = export.pretrained.config.model
    if model.position.has_absolute:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, settings | {"model_max_length": model.max_length})


def _write_json(path: Path, values: Any) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
