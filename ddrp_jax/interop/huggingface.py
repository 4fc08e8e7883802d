"""Takes a published model in: a Hugging Face folder or hub name becomes a checkpoint of ours."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util

from ddrp_jax.config import Config, ModelConfig, StageConfig, as_dict
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.interop.families import KINDS, Family, family_of
from ddrp_jax.interop.name_tables import Part, Place, places
from ddrp_jax.interop.tensors import INDEX, TORCH_WEIGHTS, WEIGHTS, Tensor, open_weights
from ddrp_jax.models.encoder import padded_vocabulary
from ddrp_jax.models.heads import ClassificationHead, MaskedLMHead, Pooler
from ddrp_jax.models.seq2seq import build_model
from ddrp_jax.training.checkpoint import save_alone

_log = logging.getLogger(__name__)
_OPTIONAL = (Part.MASKED_LM, Part.POOLER, Part.GENERATION)
_GENERATION_CONFIG = "generation_config.json"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ImportedState:
    """What a checkpoint of an imported model holds in place of a training state.

    Attributes:
        params: of a `MaskedLM` or a `Seq2Seq`, nested dicts of float32 arrays.
        task_head: of a `ClassificationHead`, or its pooler alone; empty where there is none.
    """

    params: Any
    task_head: Any


@dataclasses.dataclass(frozen=True)
class Imported:
    """A published model, taken in.

    Attributes:
        family: what it is.
        kind: "base", "masked_lm", "classification" or "generation": which head it came with.
        config: our config of it.
        state: its parameters.
        published: its `config.json`.
        generation: its `generation_config.json`, or empty.
        initialised: parts that it lacks and that were initialised.
        left_out: names of tensors that nobody needs, with what they are.
    """

    family: Family
    kind: str
    config: ModelConfig
    state: ImportedState
    published: dict[str, Any]
    generation: dict[str, Any]
    initialised: tuple[Part, ...]
    left_out: dict[str, str]


def find_model(source: str) -> Path:
    """Returns the folder of a published model, from the hub where there is no such folder.

    Raises:
        UsageError: there is neither, or it has no `config.json`.
    """
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists() or source.count("/") > 1 or source.startswith((".", "/", "~")):
            raise UsageError(f"{source}: no such folder; name a Hugging Face model folder")
        folder = _download(source)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{source}: no config.json there; expected a Hugging Face model folder")
    return folder


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.txt", "*.model", "model*.safetensors"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
        if not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
            folder = Path(snapshot_download(name, allow_patterns=[*wanted, TORCH_WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(
            f"{name}: no such folder here, and not to be had from the hub: {reason}"
        ) from error
    return folder


def read_model(folder: Path) -> Imported:
    """Reads a published model.

    Raises:
        UsageError: a model that the encoder cannot express, or no weights.
        DdrpError: damaged files, or tensors that do not fit the config.
    """
    source = folder / "config.json"
    published = _read_json(source)
    family = family_of(published, str(source))
    generation: dict[str, Any] = {}
    if family.table.head is Part.GENERATION and (folder / _GENERATION_CONFIG).is_file():
        generation = _read_json(folder / _GENERATION_CONFIG)
    # Where both name a forced token, PyTorch's `generate` takes the second file's.
    forced = {name: token for name, token in generation.items() if name.startswith("forced_")}
    config = family.read_config({**published, **forced}, str(source))
    found = _Found(family, open_weights(folder))
    kind = _kind(published, found, family)
    config = _settle_tie(config, found, folder)
    model_shapes = _shapes(lambda: build_model(config, rngs=nnx.Rngs(0)))
    shapes = dict(model_shapes)
    parts = [*family.table.parts[kind], family.table.head]
    if Part.CLASSIFIER in parts:
        labels = len(published.get("id2label") or ()) or published.get("num_labels") or 2
        shapes |= _shapes(lambda: ClassificationHead(config, labels, rngs=nnx.Rngs(0)))
    elif Part.POOLER in parts:
        shapes |= _prefixed("pooler", _shapes(lambda: Pooler(config, rngs=nnx.Rngs(0))))

    wanted = list(places(family.table, dict.fromkeys(parts), shapes, config.vocab_size))
    initialised = tuple(
        part
        for part in _OPTIONAL
        if part in parts and not any(found.has(p) for p in wanted if p.row.part is part)
    )
    wanted = [place for place in wanted if place.row.part not in initialised]
    left_out = _check(found, wanted, family, folder)

    arrays: dict[str, np.ndarray] = {}
    for place in wanted:
        if place.path not in arrays:
            arrays[place.path] = np.zeros(shapes[place.path], np.float32)
        place.row.transform.to_ours(found.tensor(place).read(), arrays[place.path][place.index])
    for part in initialised:
        arrays |= _initialised(part, config)
    params = {path: array for path, array in arrays.items() if path in model_shapes}
    task_head = {path: array for path, array in arrays.items() if path not in params}
    state = ImportedState(
        traverse_util.unflatten_dict(params, "/"), traverse_util.unflatten_dict(task_head, "/")
    )
    return Imported(family, kind, config, state, published, generation, initialised, left_out)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise DdrpError(f"{path}: not a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise DdrpError(f"{path}: not a JSON object: it holds a {type(values).__name__}")
    return values


def save_model(imported: Imported, tokenizer: Tokenizer, folder: Path, source: str) -> None:
    """Writes an imported model as a checkpoint of step 0.

    Args:
        imported: the model.
        tokenizer: its own.
        folder: becomes the checkpoint's folder; it exists and is empty.
        source: where it came from.
    """
    model = imported.config
    stage = StageConfig(name="imported", length=min(StageConfig.length, model.max_length))
    progress = {
        "step": 0,
        "tokens_seen": 0,
        "seconds": {},
        "stage": 0,
        "iterator": None,
        "imported": {
            "source": source,
            "kind": imported.kind,
            "config": imported.published,
            "generation": imported.generation,
            "initialised": [part.value for part in imported.initialised],
        },
    }
    save_alone(
        folder,
        imported.state,
        config=as_dict(Config(model=model, stages=(stage,))),
        tokenizer=tokenizer,
        step=0,
        progress=progress,
    )


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig, source: str) -> None:
    """Raises UsageError where a tokenizer's ids do not fit a model."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UsageError(
            f"{source}: its tokenizer has {tokenizer.vocab_size} pieces, its config.json "
            f"vocab_size={config.vocab_size}; name the right one with --tokenizer"
        )
    if tokenizer.pad_id != config.pad_id:
        raise UsageError(
            f"{source}: its tokenizer pads with id {tokenizer.pad_id}, its config.json says "
            f"pad_token_id={config.pad_id}; name the right one with --tokenizer"
        )


class _Found:
    """The tensors of a folder under the names of a family's table."""

    def __init__(self, family: Family, tensors: Mapping[str, Tensor]):
        self.family = family
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        for name, tensor in tensors.items():
            canonical = family.table.canonical(name)
            if canonical in self.tensors:  # twice, with prefix and without: one is left over
                canonical = name
            self.tensors[canonical] = tensor
            self.names[canonical] = name

    def rename(self, name: str, new: str) -> None:
        self.tensors[new], self.names[new] = self.tensors.pop(name), self.names.pop(name)

    def name(self, place: Place) -> str | None:
        names = (place.row.copy, place.theirs)
        return next((name for name in names if name in self.tensors), None)

    def has(self, place: Place) -> bool:
        return self.name(place) is not None

    def tensor(self, place: Place) -> Tensor:
        return self.tensors[self.name(place) or place.theirs]


def _kind(published: Mapping[str, Any], found: _Found, family: Family) -> str:
    """Returns which head counts: what the config names, or what the tensors show."""
    rows = family.table.rows
    present = {row.part for row in rows if {row.theirs, row.copy} & found.tensors.keys()}
    architecture = str((published.get("architectures") or [""])[0])
    if family.table.head is Part.GENERATION:
        if architecture.endswith(KINDS["generation"]) or Part.GENERATION in present:
            return "generation"
        if architecture not in ("", family.architecture("base")):
            raise UsageError(
                f"config.json: architectures={architecture!r} is not supported; expected "
                f"{family.architecture('base')} or {family.architecture('generation')}"
            )
        return "base"
    if architecture.endswith(KINDS["classification"]) or (
        not architecture and Part.CLASSIFIER in present
    ):
        return "classification"
    if architecture.endswith((KINDS["masked_lm"], "ForPreTraining")) or Part.MASKED_LM in present:
        return "masked_lm"
    return "base"


def _settle_tie(config: ModelConfig, found: _Found, folder: Path) -> ModelConfig:
    """Returns the config with `tied_head` as the tensors have it, as transformers 5 decides it.

    A copy of the word table is taken out of `found`.
    """
    table, word = found.family.table, found.family.table.word_table
    for name in table.copies if config.tied_head else ():
        if name not in found.tensors:
            continue
        if word not in found.tensors:  # a file may keep a shared tensor under any of its names
            found.rename(name, word)
            continue
        copy, original = found.tensors[name], found.tensors[word]
        if copy.shape == original.shape and np.array_equal(copy.read(), original.read()):
            del found.tensors[name]
            continue
        names = f"{found.names[name]} differs from {found.names[word]}"
        if table.head is Part.GENERATION:
            raise UsageError(f"{folder}: {names}; a BART with several word tables is not supported")
        _log.warning(
            "%s: config.json ties the output matrix to the word table, but %s; they are kept apart",
            folder,
            names,
        )
        config = dataclasses.replace(config, tied_head=False)
    return config


def _check(found: _Found, wanted: list[Place], family: Family, folder: Path) -> dict[str, str]:
    """Returns what is left over and harmless; raises one error that names all that is wrong."""
    used: set[str] = set()
    left_out: dict[str, str] = {}
    problems = []
    for place in wanted:
        name = found.name(place)
        if name is None:
            problems.append(f"missing: {place.theirs} {list(place.shape)}")
            continue
        used |= {place.theirs, place.row.copy}
        tensor, shape = found.tensors[name], found.tensors[name].shape
        unused = found.tensors.get(place.theirs)
        if name != place.theirs and unused and not np.array_equal(unused.read(), tensor.read()):
            left_out[found.names[place.theirs]] = f"PyTorch reads {found.names[name]} in its place"
        if shape != place.shape:
            problems.append(
                f"wrong shape: {found.names[name]} is {list(shape)}, config.json asks for "
                f"{list(place.shape)}"
            )
    for name in sorted(found.tensors.keys() - used):
        reason = family.table.why_harmless(name)
        if reason is None:
            problems.append(f"left over: {found.names[name]} {list(found.tensors[name].shape)}")
        else:
            left_out[found.names[name]] = reason
    if problems:
        raise DdrpError(
            f"{folder}: its tensors do not fit its config.json:\n  " + "\n  ".join(problems)
        )
    return left_out


def _initialised(part: Part, config: ModelConfig) -> dict[str, np.ndarray]:
    if part is Part.GENERATION:
        return {"final_logits_bias": np.zeros(padded_vocabulary(config.vocab_size), np.float32)}
    head, prefix = (MaskedLMHead, "head") if part is Part.MASKED_LM else (Pooler, "pooler")
    state = nnx.to_pure_dict(nnx.state(head(config, rngs=nnx.Rngs(0)), nnx.Param))
    flat = traverse_util.flatten_dict(state, sep="/")
    return _prefixed(prefix, {path: np.asarray(array) for path, array in flat.items()})


def _shapes(make: Callable[[], nnx.Module]) -> dict[str, tuple[int, ...]]:
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(state, sep="/").items()}


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{path}": value for path, value in values.items()}
