"""Random BART models that `transformers` makes, and ours with the same parameters."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from ddrp_jax.interop import huggingface
from ddrp_jax.models.seq2seq import Seq2Seq, build_model

transformers.utils.logging.disable_progress_bar()
VOCAB, LONGEST = 99, 40
SIZES = {
    "small": {},
    "deeper": {
        "vocab_size": 300,
        "d_model": 48,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 80,
        "decoder_ffn_dim": 80,
        "scale_embedding": True,
        "activation_function": "gelu_new",
        "max_position_embeddings": 30,
    },
}


def make(*, kind=transformers.BartForConditionalGeneration, seed=0, **changes) -> torch.nn.Module:
    """A model none of whose parameters is at a special value; its texts end now and then."""
    config = transformers.BartConfig(
        **{
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": LONGEST,
            "dropout": 0.0,
            "forced_eos_token_id": None,
        }
        | changes
    )
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_scale else 0.0, 0.25)
        if kind is transformers.BartForConditionalGeneration:
            model.final_logits_bias.normal_(0.0, 0.25)
            model.final_logits_bias[0, config.eos_token_id] = 5.0
    return model


def ours(model: torch.nn.Module, **changes) -> Seq2Seq:
    """Our model with a PyTorch model's parameters; `changes` are of our config."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        imported = huggingface.read_model(Path(folder))
        return model_of(imported, **changes)


def model_of(imported: huggingface.Imported, **changes) -> Seq2Seq:
    config = imported.config
    for name, value in changes.items():
        config = config.__class__(**(vars(config) | {name: value}))
    abstract = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(abstract), jax.tree.map(jnp.array, imported.state.params))


def batch(vocab_size=VOCAB, columns=9, spans=((0, 9), (0, 7), (2, 6), (0, 1), (1, 8)), seed=0):
    """Ids and mask of rows: full, padded on the right, on both sides, nearly empty."""
    draw = np.random.default_rng(seed)
    place = np.arange(columns)
    mask = np.stack([(place >= start) & (place < stop) for start, stop in spans])
    return np.where(mask, draw.integers(4, vocab_size, mask.shape), 1).astype(np.int32), mask


def tensors(ids, mask, prefix=""):
    """The arguments of a PyTorch model."""
    return {
        f"{prefix}input_ids": torch.tensor(ids, dtype=torch.long),
        f"{prefix}attention_mask": torch.tensor(mask, dtype=torch.long),
    }
