"""The model card of an export: what the model is, what it was trained on, how it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from ddrp_jax import __version__
from ddrp_jax.config import Config, ModelConfig, as_dict
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.training import checkpoint
from ddrp_jax.training.evaluation import HELD_OUT

_MEASURES = (
    "mlm_loss",
    "mlm_accuracy",
    "token_cosine",
    "token_abs_cosine",
    "head_cosine",
    "unigram_entropy",
)
_AUTO_CLASSES = {
    "Model": "AutoModel",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


def model_card(
    path: Path,
    config: Config,
    tokenizer: Tokenizer,
    progress: dict[str, Any],
    architecture: str,
    dtype: str,
) -> str:
    """Returns the text of a model card.

    Args:
        path: the checkpoint's folder.
        config: of the run that wrote it.
        tokenizer: the checkpoint's.
        progress: the checkpoint's.
        architecture: the PyTorch class it is exported as.
        dtype: of the tensors.
    """
    # An imported model's run is not ours to tell of.
    described = config.model if "imported" in progress else config
    sections = [
        _front_matter(architecture),
        f"# {architecture}\n\nWritten by `ddrp export` (ddrp_jax {__version__}).",
        f"## Use\n\n{_usage(architecture)}",
        f"## Model\n\n{_table(_model_rows(config.model, tokenizer, dtype))}",
        f"## Data and steps\n\n{_training(config, progress)}",
        f"## Measures\n\n{_measures(path, progress)}",
        f"## Config\n\n```json\n{_json(as_dict(described))}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _json(values: Any) -> str:
    return orjson.dumps(values, option=orjson.OPT_INDENT_2).decode()


def _front_matter(architecture: str) -> str:
    task = {
        "ForMaskedLM": "fill-mask",
        "ForSequenceClassification": "text-classification",
        "ForConditionalGeneration": "text2text-generation",
        "Model": "feature-extraction",
    }
    pipeline = next(tag for ending, tag in task.items() if architecture.endswith(ending))
    return f"---\nlibrary_name: transformers\npipeline_tag: {pipeline}\n---"


def _usage(architecture: str) -> str:
    auto = next(auto for ending, auto in _AUTO_CLASSES.items() if architecture.endswith(ending))
    own_code = architecture.startswith("Ddrp")
    options = ", trust_remote_code=True" if own_code else ""
    note = (
        "\n\nThe model's code is in `modeling_ddrp.py` in this folder; read it before trusting it."
        if own_code
        else ""
    )
    return (
        f"```python\nfrom transformers import AutoTokenizer, {auto}\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("this/folder")\n'
        f'model = {auto}.from_pretrained("this/folder"{options})\n```{note}'
    )


def _model_rows(model: ModelConfig, tokenizer: Tokenizer, dtype: str) -> list[tuple[str, Any]]:
    position = model.position
    positions: str = position.kind
    if position.kind in ("shaw", "ddrp"):
        positions += (
            f", distances up to {position.max_distance}, on {position.acts_on}, "
            f"tables for each {position.sharing}"
        )
    if position.add_absolute and position.kind != "absolute":
        positions += ", with absolute positions"
    return [
        ("layers", _layers(model)),
        ("width", f"{model.hidden_size} ({model.intermediate_size} inside the feed-forward)"),
        ("heads", model.num_heads),
        ("positions", positions),
        ("norm", f"{model.norm_order}, epsilon {model.norm_epsilon:g}"),
        ("activation", model.activation),
        ("longest text", model.max_length if position.has_absolute else "not limited"),
        ("tokenizer", f"{tokenizer.kind}, {model.vocab_size:,} pieces"),
        ("tensors", dtype),
    ]


def _layers(model: ModelConfig) -> str:
    decoder = model.decoder.num_layers
    return f"{model.num_layers} and {decoder} in the decoder" if decoder else str(model.num_layers)


def _training(config: Config, progress: dict[str, Any]) -> str:
    imported = progress.get("imported")
    if imported:
        return f"Imported from `{imported['source']}` and not trained since."
    header = ("stage", "records", "tokens in a row", "rows in a step", "steps")
    rows = [
        (stage.name, f"`{stage.records}`", stage.length, stage.batch_size, stage.steps)
        for stage in config.stages
    ]
    return (
        f"{_table(rows, header)}\n\nTaken after step {progress['step']:,} of "
        f"{config.total_steps:,}; {progress['tokens_seen']:,} tokens seen."
    )


def _measures(path: Path, progress: dict[str, Any]) -> str:
    values = _held_out(path, progress["step"])
    loss = checkpoint.read_loss(path)
    if loss is not None:
        values.setdefault("mlm_loss", loss)
    if not values:
        return "None were taken at this step; `ddrp evaluate` takes them."
    rows = [(name, f"{values[name]:.4f}") for name in _MEASURES if name in values]
    return f"On the held-out rows of its records:\n\n{_table(rows)}"


def _held_out(path: Path, step: int) -> dict[str, float]:
    """Returns what the run's `metrics.jsonl` says of a step; a copied checkpoint has none."""
    metrics = path.parent.parent / "metrics.jsonl"
    if path.parent.name != "checkpoints" or not metrics.is_file():
        return {}
    lines = (orjson.loads(line) for line in metrics.read_bytes().split(b"\n") if line)
    found = [line for line in lines if line["step"] == step and line["split"] == HELD_OUT]
    return {k: v for k, v in found[-1].items() if isinstance(v, float)} if found else {}


def _table(rows: Any, header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
