"""Random models that `transformers` makes and saves, and both sides' outputs on the same batch."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx, traverse_util

from ddrp_jax.interop import huggingface
from ddrp_jax.interop.verify import build_task_head
from ddrp_jax.models.heads import ClassificationHead, MaskedLM

transformers.utils.logging.disable_progress_bar()
VOCAB, WIDTH, LAYERS, LONGEST = 99, 32, 2, 40
WORDS = ["the", "a", "of", "and", "sea", "ship", "sails", "wind", "over", "under", "green"]
_CONFIGS = {
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "mpnet": transformers.MPNetConfig,
}
_CLASSES = {
    "base": transformers.AutoModel,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "classification": transformers.AutoModelForSequenceClassification,
}


def make(family: str, kind: str, *, seed: int = 0, **changes) -> torch.nn.Module:
    """A model none of whose parameters is at a special value."""
    config = _CONFIGS[family](
        **{
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": LONGEST,
        }
        | changes
    )
    torch.manual_seed(seed)
    model = _CLASSES[kind].from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(1.0 if is_scale else 0.0, 0.15)
        if kind == "masked_lm" and not config.tie_word_embeddings:
            # An untied matrix has a bias of its own, and leaves the head's unused.
            head = model.cls.predictions if family == "bert" else model.lm_head
            head.bias.copy_(head.decoder.bias)
    return model


def write_tokenizer(folder: Path, pad_id: int = 0, longest: int = LONGEST) -> None:
    """Writes a WordPiece tokenizer whose padding has the id `pad_id`."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special.insert(pad_id, "[PAD]")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*special, *WORDS, *letters[1:], *(f"##{letter}" for letter in letters)]
    pieces += [f"[unused{i}]" for i in range(VOCAB - len(pieces))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, model_max_length=longest)
    tokenizer.save_pretrained(folder)


def save(model: torch.nn.Module, folder: Path) -> Path:
    """Saves a model as its authors would, with a tokenizer."""
    model.save_pretrained(folder)
    config = model.config
    offset = 0 if config.model_type == "bert" else config.pad_token_id + 1
    write_tokenizer(folder, config.pad_token_id, config.max_position_embeddings - offset)
    return folder


def batch(pad_id: int, lengths=((0, 7), (3, 4), (0, 1), (5, 2), (0, 3))):
    """Rows of 7: full, padded on the left, on the right, on both sides."""
    draw = np.random.default_rng(0)
    columns = np.arange(7)
    mask = np.stack([(columns >= start) & (columns < start + size) for start, size in lengths])
    ids = np.where(mask, draw.integers(6, VOCAB, mask.shape), pad_id)
    return ids, mask


def model_of(imported: huggingface.Imported) -> MaskedLM:
    abstract = nnx.eval_shape(lambda: MaskedLM(imported.config, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(abstract), jax.tree.map(jnp.asarray, imported.state.params))


def encode(model: MaskedLM, ids, mask, positions):
    return model.encoder(
        *(jnp.asarray(array, jnp.int32) for array in (ids, mask, positions)),
        output_hidden_states=True,
    )


def ours(imported: huggingface.Imported, ids, mask) -> dict[str, np.ndarray]:
    """Hidden states at real tokens, and what the head gives; of a text's first token (pooler,
    classifier) only where that stands in the first column, which is all that the heads look at."""
    model = model_of(imported)
    positions = imported.family.positions(ids, mask, imported.config.pad_id)
    output = jax.jit(encode)(model, ids, mask, positions)
    outputs = {"hidden": np.asarray(output.hidden_states)[:, mask]}
    if imported.kind == "masked_lm":
        logits = model.logits(output.hidden)[..., : imported.config.vocab_size]
        outputs["head"] = np.asarray(logits)[mask]
    elif imported.state.task_head:
        arrays = traverse_util.flatten_dict(imported.state.task_head, sep="/")
        head = build_task_head(imported.config, jax.tree.map(jnp.asarray, arrays))
        is_classifier = isinstance(head, ClassificationHead)
        result = head(output.hidden if is_classifier else output.hidden[:, 0])
        outputs["head"] = np.asarray(result)[mask[:, 0]]
    return outputs


def theirs(model: torch.nn.Module, ids, mask, **inputs) -> dict[str, np.ndarray]:
    """The same of a PyTorch model."""
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            output_hidden_states=True,
            **inputs,
        )
    outputs = {"hidden": np.stack([hidden.numpy()[mask] for hidden in output.hidden_states])}
    if "logits" in output:
        is_masked_lm = output.logits.ndim == 3
        outputs["head"] = output.logits.numpy()[mask if is_masked_lm else mask[:, 0]]
    elif output.get("pooler_output") is not None:
        outputs["head"] = output.pooler_output.numpy()[mask[:, 0]]
    return outputs


def assert_same(got, wanted, tolerance: float = 2e-5) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=0, atol=tolerance, err_msg=name)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, change) -> None:
    """Lets `change` turn a folder's tensors into others, under other names perhaps."""
    from safetensors.torch import save_file

    changed = {name: tensor.contiguous() for name, tensor in change(tensors(folder)).items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


def with_config(imported: huggingface.Imported, **changes) -> huggingface.Imported:
    return dataclasses.replace(imported, config=dataclasses.replace(imported.config, **changes))
