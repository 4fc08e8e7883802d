"""The encoder against BERT, RoBERTa and MPNet of `transformers`, and against PyTorch's pre-norm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import torch
from flax import nnx
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from ddrp_jax.config import PositionConfig
from ddrp_jax.models.encoder import single_segments
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.objectives.masked_lm import masked_lm

VOCAB, WIDTH, HEADS, LAYERS, INNER, LONGEST = 150, 24, 3, 3, 40, 16
ABSOLUTE = PositionConfig("absolute")


def config(**changes):
    values = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_heads": HEADS,
        "num_layers": LAYERS,
        "intermediate_size": INNER,
        "max_length": LONGEST,
        "token_types": 2,
    }
    return small.model_config(ABSOLUTE, **(values | changes))


def published(activation):
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "hidden_act": activation,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


# name: the published model, and the config of ours that must be the same function.
MODELS = {
    "bert": (
        lambda: BertForMaskedLM(BertConfig(max_position_embeddings=LONGEST, **published("gelu"))),
        config(norm_epsilon=1e-12),
    ),
    "bert_gelu_new": (
        lambda: BertForMaskedLM(
            BertConfig(
                max_position_embeddings=LONGEST, layer_norm_eps=1e-6, **published("gelu_new")
            )
        ),
        config(norm_epsilon=1e-6, activation="gelu_tanh"),
    ),
    "roberta": (
        lambda: RobertaForMaskedLM(
            RobertaConfig(
                max_position_embeddings=LONGEST + 2,
                type_vocab_size=1,
                layer_norm_eps=1e-5,
                pad_token_id=1,
                **published("gelu"),
            )
        ),
        config(norm_epsilon=1e-5, token_types=1, position_offset=2, pad_id=1),
    ),
    "mpnet": (
        lambda: MPNetForMaskedLM(
            MPNetConfig(
                max_position_embeddings=LONGEST + 2,
                layer_norm_eps=1e-5,
                **published("gelu"),
            )
        ),
        dataclasses.replace(
            config(norm_epsilon=1e-5, token_types=0, position_offset=2, pad_id=1),
            position=PositionConfig("t5", num_buckets=32, add_absolute=True),
        ),
    ),
    "bert_untied": (
        lambda: BertForMaskedLM(
            BertConfig(
                max_position_embeddings=LONGEST, tie_word_embeddings=False, **published("gelu")
            )
        ),
        config(norm_epsilon=1e-12, tied_head=False),
    ),
}
# Our path, and the published path below the model's own name; `{}` is a layer.
ENCODER_NAMES = {
    "embeddings/word": "embeddings.word_embeddings.weight",
    "embeddings/position": "embeddings.position_embeddings.weight",
    "embeddings/token_type": "embeddings.token_type_embeddings.weight",
    "embeddings/norm/scale": "embeddings.LayerNorm.weight",
    "embeddings/norm/bias": "embeddings.LayerNorm.bias",
    "bucket_bias/bias": "encoder.relative_attention_bias.weight",
}
LAYER_NAMES = {
    "attention/out_kernel": "attention.output.dense.weight",
    "attention/out_bias": "attention.output.dense.bias",
    "attention_norm/scale": "attention.output.LayerNorm.weight",
    "attention_norm/bias": "attention.output.LayerNorm.bias",
    "feed_forward/up_kernel": "intermediate.dense.weight",
    "feed_forward/up_bias": "intermediate.dense.bias",
    "feed_forward/down_kernel": "output.dense.weight",
    "feed_forward/down_bias": "output.dense.bias",
    "feed_forward_norm/scale": "output.LayerNorm.weight",
    "feed_forward_norm/bias": "output.LayerNorm.bias",
}
MPNET_LAYER_NAMES = LAYER_NAMES | {
    "attention/out_kernel": "attention.attn.o.weight",
    "attention/out_bias": "attention.attn.o.bias",
    "attention_norm/scale": "attention.LayerNorm.weight",
    "attention_norm/bias": "attention.LayerNorm.bias",
}
HEAD_NAMES = {
    "bert": {
        "dense_kernel": "cls.predictions.transform.dense.weight",
        "dense_bias": "cls.predictions.transform.dense.bias",
        "norm/scale": "cls.predictions.transform.LayerNorm.weight",
        "norm/bias": "cls.predictions.transform.LayerNorm.bias",
        "decoder_bias": "cls.predictions.decoder.bias",
    },
    "roberta": {
        "dense_kernel": "lm_head.dense.weight",
        "dense_bias": "lm_head.dense.bias",
        "norm/scale": "lm_head.layer_norm.weight",
        "norm/bias": "lm_head.layer_norm.bias",
        "decoder_bias": "lm_head.bias",
    },
}
HEAD_NAMES["mpnet"] = HEAD_NAMES["roberta"]
UNTIED = {"decoder_kernel": "cls.predictions.decoder.weight"}


def as_ours(family, tensors, like):
    """Rearranges published tensors (weights or gradients) into our tree of arrays."""
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}

    def array(path, shape):
        section, _, rest = path.partition("/")
        if section == "head":
            value = tensors[(HEAD_NAMES[family] | UNTIED)[rest]]
        elif rest in ENCODER_NAMES:
            value = tensors[f"{family}.{ENCODER_NAMES[rest]}"]
        else:
            value = np.stack([layer(rest.removeprefix("layers/"), n) for n in range(LAYERS)])
        if path.endswith("kernel") and path != "head/decoder_kernel":
            value = np.swapaxes(value, -1, -2)  # ours is [in, out]
        if "qkv" in path:  # three matrices side by side
            value = value.reshape(shape)
        missing = shape[0] - value.shape[0] if section == "head" or "word" in path else 0
        if missing:  # the padded vocabulary
            value = np.pad(value, [(0, missing)] + [(0, 0)] * (value.ndim - 1))
        return value.reshape(shape)

    def layer(path, number):
        prefix = f"{family}.encoder.layer.{number}."
        if "qkv" not in path:
            names = MPNET_LAYER_NAMES if family == "mpnet" else LAYER_NAMES
            return tensors[prefix + names[path]]
        kind = "weight" if path.endswith("kernel") else "bias"
        names = [f"attention.self.{name}" for name in ("query", "key", "value")]
        if family == "mpnet":
            names = [f"attention.attn.{name}" for name in "qkv"]
        return np.concatenate([tensors[f"{prefix}{name}.{kind}"] for name in names])

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: array("/".join(key.key for key in path), leaf.shape), like
    )


def graph_and_shapes(config):
    graph, state = nnx.split(nnx.eval_shape(lambda: MaskedLM(config, rngs=nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_loss_and_gradients_are_the_published_models(name):
    make, config = MODELS[name]
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    family = name.split("_")[0]
    graph, shapes = graph_and_shapes(config)
    params = jax.tree.map(jnp.asarray, as_ours(family, theirs.state_dict(), shapes))

    draw = np.random.default_rng(0)
    ids = draw.integers(5, VOCAB, (3, LONGEST))
    ids[1, 9:] = ids[2, 4:] = config.pad_id
    is_real = ids != config.pad_id
    # Row by row 3, 2 and 1 predicted tokens.
    places = np.array([[2, 7, 15], [1, 5, 0], [3, 0, 0]])
    used = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], np.float32)
    wanted_ids = draw.integers(5, VOCAB, places.shape)
    labels = np.full_like(ids, -100)
    for row, column in zip(*np.nonzero(used), strict=True):
        labels[row, places[row, column]] = wanted_ids[row, column]

    out = theirs(
        torch.tensor(ids),
        attention_mask=torch.tensor(is_real.astype(np.int64)),
        labels=torch.tensor(labels),
        output_hidden_states=True,
    )
    out.loss.backward()

    @jax.jit
    def run(params):
        def loss(params):
            model = nnx.merge(graph, params)
            segment_ids, positions = single_segments(jnp.asarray(ids), config.pad_id)
            encoded = model.encoder(
                jnp.asarray(ids), segment_ids, positions, output_hidden_states=True
            )
            logits = model.logits(encoded.hidden, jnp.asarray(places))
            total, count = masked_lm(logits, jnp.asarray(wanted_ids), jnp.asarray(used))["mlm_loss"]
            return total / count, (encoded.hidden_states, model.logits(encoded.hidden))

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, (hidden_states, logits)), grads = run(params)
    for ours, right in zip(hidden_states, out.hidden_states, strict=True):
        np.testing.assert_allclose(ours[is_real], right.detach()[is_real], atol=2e-5)
    np.testing.assert_allclose(
        logits[is_real][:, :VOCAB], out.logits.detach()[is_real], rtol=1e-4, atol=1e-4
    )
    assert float(loss) == pytest.approx(float(out.loss.detach()), rel=1e-5)

    # The position row of padding gets no gradient in either, whatever row that is.
    named = theirs.named_parameters(remove_duplicate=False)  # tied ones under every name
    right = as_ours(family, {name: parameter.grad for name, parameter in named}, shapes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        wanted = right
        for key in path:
            wanted = wanted[key.key]
        # Relative to the array's own size; gradients of key biases are zero but for rounding.
        error = np.linalg.norm(leaf - wanted)
        assert error <= 1e-4 * np.linalg.norm(wanted) + 1e-7, jax.tree_util.keystr(path)
    assert not np.any(grads["encoder"]["embeddings"]["word"][VOCAB:])


def test_the_padded_vocabulary_is_never_likely():
    model = small.build(config())
    logits = model.logits(
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, WIDTH)), "float32")
    )
    assert logits.shape == (2, 3, 256)
    assert not np.any(jax.nn.softmax(logits)[..., VOCAB:])


def test_token_types_are_looked_up_and_zero_by_default():
    model = small.build(config())
    ids, ones = jnp.full((1, 4), 7), jnp.ones((1, 4), jnp.int32)
    run = lambda **types: model.encoder.embeddings(ids, ones, jnp.arange(4)[None], **types)  # noqa: E731
    np.testing.assert_array_equal(run(), run(token_types=0 * ones))
    assert np.abs(run() - run(token_types=ones)).max() > 1e-2


def test_pre_norm_is_that_of_pytorch():
    """`x + f(norm(x))` and a last norm, written with PyTorch's functions."""
    ours_config = dataclasses.replace(
        config(token_types=0, norm_order="pre", norm_epsilon=1e-5),
        position=PositionConfig("none"),
        embedding_norm=False,
    )
    model = small.build(ours_config)
    params = jax.tree.map(
        lambda p: torch.tensor(np.asarray(p)), nnx.to_pure_dict(nnx.state(model))
    )["encoder"]
    ids = np.random.default_rng(0).integers(5, VOCAB, (2, 6))
    segment_ids, positions = small.rows([[6], [4]], 6)
    blocked = torch.tensor(segment_ids == 0)[:, None, None, :]

    def norm(x, weights):
        return torch.nn.functional.layer_norm(x, (WIDTH,), weights["scale"], weights["bias"], 1e-5)

    x = params["embeddings"]["word"][torch.tensor(ids)]
    for number in range(LAYERS):
        layer = jax.tree.map(lambda p, n=number: p[n], params["layers"])
        attention, inner = layer["attention"], layer["feed_forward"]
        y = norm(x, layer["attention_norm"])
        qkv = torch.einsum("btd,dcnh->cbnth", y, attention["qkv_kernel"])
        q, k, v = qkv + attention["qkv_bias"][:, None, :, None]
        z = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~blocked)
        x = x + torch.einsum("bnth,nhd->btd", z, attention["out_kernel"]) + attention["out_bias"]
        y = norm(x, layer["feed_forward_norm"]) @ inner["up_kernel"] + inner["up_bias"]
        y = torch.nn.functional.gelu(y) @ inner["down_kernel"]
        x = x + y + inner["down_bias"]
    wanted = norm(x, params["final_norm"])
    got = model.encoder(*map(jnp.asarray, (ids, segment_ids, positions))).hidden
    real = segment_ids > 0
    np.testing.assert_allclose(np.asarray(got)[real], wanted.numpy()[real], atol=1e-4, rtol=1e-4)
