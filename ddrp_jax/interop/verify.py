"""Holds an export against the checkpoint it was made from: both read the same texts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from ddrp_jax.config import ModelConfig
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.interop.export import Export
from ddrp_jax.interop.tensors import DTYPES
from ddrp_jax.models.heads import ClassificationHead, MaskedLM, Pooler
from ddrp_jax.models.seq2seq import Seq2Seq
from ddrp_jax.training import checkpoint
from ddrp_jax.training.pretrained import load_pretrained

# Beside the size of the values: a wrong LayerNorm epsilon moves a real model by more.
TOLERANCE = 5e-5
_TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp.",
    "",
    "Zwei Fähren, trois îles, 四つの港 и одно море: 7,302 miles!",
    "One word and another, over and over. " * 100,
)


def check_installed() -> None:
    """Raises UsageError unless PyTorch and transformers are there."""
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"--verify needs {' and '.join(missing)}, not installed here; "
            f"run 'pip install {' '.join(missing)}', or export without --verify"
        )


def verify_export(export: Export, folder: Path, dtype: str) -> str:
    """Loads an export with PyTorch, runs both on the same batch, and tells the differences.

    Our side computes in float32 from parameters rounded to `dtype`, PyTorch from the file.

    Args:
        export: what was exported.
        folder: where to.
        dtype: of the file's tensors.

    Returns:
        One line for each output: its largest difference over all real tokens.

    Raises:
        DdrpError: the tokenizers disagree, or outputs differ by more than rounding.
    """
    ids, mask = _batch(export, folder)
    theirs = _run_torch(export, folder, ids, mask)
    ours = _run_ours(export, ids, mask, dtype)
    lines, failed = [], []
    for name, wanted in ours.items():
        difference = float(np.abs(theirs[name] - wanted).max())
        lines.append(f"{name}: largest difference {difference:.2e}")
        if not difference <= TOLERANCE * max(1.0, float(np.abs(wanted).max())):
            failed.append(lines[-1])
    if failed:
        raise DdrpError(f"PyTorch reads another model from the export: {'; '.join(failed)}")
    return "\n".join(lines)


def _batch(export: Export, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask of the texts, padded on the right."""
    import transformers
    from transformers import AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer, model = export.tokenizer, export.config.model
    # Even a tokenizer of a stock class makes the library read the config, and ask about its code.
    published = AutoTokenizer.from_pretrained(str(folder), **_own_code(export))
    rows = []
    for text in _TEXTS:
        ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
        if published(text, truncation=False)["input_ids"] != ids:
            raise DdrpError(f"the exported tokenizer gives other ids for {text[:40]!r}")
        longest = min(512, model.max_length if model.position.has_absolute else 512)
        rows.append(ids if len(ids) <= longest else [*ids[: longest - 1], tokenizer.sep_id])
    lengths = np.array([len(row) for row in rows])
    batch = np.full((len(rows), lengths.max()), tokenizer.pad_id, np.int32)
    for row, values in zip(batch, rows, strict=True):
        row[: len(values)] = values
    return batch, np.arange(batch.shape[1]) < lengths[:, None]


def _own_code(export: Export) -> dict[str, bool]:
    """Returns the leave to run an export's code: the copy of our own that it has just written."""
    return {"trust_remote_code": True} if export.family.model_type == "ddrp" else {}


def _run_torch(
    export: Export, folder: Path, ids: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    import torch
    import transformers

    auto = {
        "base": transformers.AutoModel,
        "masked_lm": transformers.AutoModelForMaskedLM,
        "classification": transformers.AutoModelForSequenceClassification,
        "generation": transformers.AutoModelForSeq2SeqLM,
    }[export.kind]
    model = auto.from_pretrained(str(folder), dtype=torch.float32, **_own_code(export)).eval()
    inputs = {
        "input_ids": torch.tensor(ids, dtype=torch.long),
        "attention_mask": torch.tensor(mask, dtype=torch.long),
    }
    if export.config.model.decoder.num_layers:
        # The decoder reads the same text.
        inputs |= {f"decoder_{name}": values for name, values in inputs.items()}
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
    names = {
        "hidden states": "hidden_states",
        "encoder's hidden states": "encoder_hidden_states",
        "decoder's hidden states": "decoder_hidden_states",
    }
    outputs = {
        ours: np.stack([hidden.numpy()[mask] for hidden in output[theirs]])
        for ours, theirs in names.items()
        if output.get(theirs) is not None
    }
    if export.kind != "base":
        logits = output.logits.numpy()
        outputs["logits"] = logits if export.kind == "classification" else logits[mask]
    elif getattr(output, "pooler_output", None) is not None:
        outputs["pooled"] = output.pooler_output.numpy()
    return outputs


def _run_ours(
    export: Export, ids: np.ndarray, mask: np.ndarray, dtype: str
) -> dict[str, np.ndarray]:
    config = export.config.model
    kind = DTYPES[dtype][1]

    def rounded(array: Any) -> jax.Array:
        return jnp.asarray(array).astype(kind).astype(jnp.float32)

    @jax.jit
    def run(
        model: MaskedLM | Seq2Seq, ids: jax.Array, mask: jax.Array, positions: jax.Array
    ) -> dict[str, Any]:
        if isinstance(model, Seq2Seq):
            decoded = model(ids, mask, ids, mask, output_hidden_states=True)
            states = {
                "encoder's hidden states": decoded.memory_states,
                "decoder's hidden states": decoded.hidden_states,
            }
            hidden = decoded.hidden
        else:
            segment_ids = mask.astype(jnp.int32)
            encoded = model.encoder(ids, segment_ids, positions, output_hidden_states=True)
            states = {"hidden states": encoded.hidden_states}
            hidden = encoded.hidden
        if export.kind in ("masked_lm", "generation"):
            states["logits"] = model.logits(hidden)
        return states

    pretrained = load_pretrained(export.path)
    model = nnx.merge(pretrained.graphdef, jax.tree.map(rounded, pretrained.params))
    positions = export.family.positions(ids, mask, config.pad_id)
    found = run(model, jnp.asarray(ids), jnp.asarray(mask), jnp.asarray(positions, jnp.int32))
    logits = found.pop("logits", None)
    outputs = {name: np.asarray(states)[:, mask] for name, states in found.items()}
    if logits is not None:
        outputs["logits"] = np.asarray(logits)[mask][:, : config.vocab_size]
    elif export.head_shapes:
        arrays = {
            name: rounded(checkpoint.restore_array(export.path, name, "task_head"))
            for name in export.head_shapes
        }
        head = build_task_head(config, arrays)
        if isinstance(head, ClassificationHead):
            outputs["logits"] = np.asarray(head(found["hidden states"][-1]))
        else:
            outputs["pooled"] = np.asarray(head(found["hidden states"][-1][:, 0]))
    return outputs


def build_task_head(
    config: ModelConfig, arrays: dict[str, jax.Array]
) -> ClassificationHead | Pooler:
    """Returns a checkpoint's classification head, or the pooler that stands alone.

    Args:
        config: the encoder's.
        arrays: those of the checkpoint's item `task_head`, by path.
    """
    head: ClassificationHead | Pooler
    if "kernel" in arrays:
        labels = arrays["bias"].size
        head = nnx.eval_shape(lambda: ClassificationHead(config, labels, rngs=nnx.Rngs(0)))
    else:
        head = nnx.eval_shape(lambda: Pooler(config, rngs=nnx.Rngs(0)))
        arrays = {path.removeprefix("pooler/"): array for path, array in arrays.items()}
    return nnx.merge(nnx.graphdef(head), traverse_util.unflatten_dict(arrays, "/"))
