"""Imported models compute what PyTorch's do: every family, head and option; gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import published
import pytest
import torch
from flax import nnx, traverse_util

from ddrp_jax.interop import huggingface
from ddrp_jax.interop.name_tables import places

# Family, head, and what differs from the family's own defaults.
MODELS = {
    "bert": ("bert", "masked_lm", {}),
    "bert_base": ("bert", "base", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert_classifier": ("bert", "classification", {"num_labels": 3}),
    "bert_tanh": ("bert", "masked_lm", {"hidden_act": "gelu_new", "num_attention_heads": 2}),
    "bert_untied": ("bert", "masked_lm", {"tie_word_embeddings": False, "type_vocab_size": 3}),
    "bert_padding_id": ("bert", "masked_lm", {"pad_token_id": 3, "type_vocab_size": 1}),
    "roberta": ("roberta", "masked_lm", {"layer_norm_eps": 1e-5, "type_vocab_size": 1}),
    "roberta_base": ("roberta", "base", {"hidden_act": "gelu_pytorch_tanh"}),
    "roberta_classifier": ("roberta", "classification", {"num_labels": 1}),
    "roberta_tanh": ("roberta", "masked_lm", {"hidden_act": "gelu_new"}),
    "roberta_padding_id": ("roberta", "masked_lm", {"pad_token_id": 3}),
    "mpnet": ("mpnet", "masked_lm", {"layer_norm_eps": 1e-5}),
    "mpnet_base": ("mpnet", "base", {"hidden_act": "gelu_new"}),
    "mpnet_classifier": ("mpnet", "classification", {"num_labels": 2}),
    "mpnet_untied": ("mpnet", "masked_lm", {"tie_word_embeddings": False}),
}


def pair(name, tmp_path):
    family, kind, changes = MODELS[name]
    model = published.make(family, kind, **changes)
    return model, huggingface.read_model(published.save(model, tmp_path / "published"))


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_head_are_pytorchs(name, tmp_path):
    model, imported = pair(name, tmp_path)
    assert (imported.family.model_type, imported.kind) == MODELS[name][:2]
    ids, mask = published.batch(model.config.pad_token_id)
    published.assert_same(published.ours(imported, ids, mask), published.theirs(model, ids, mask))


@pytest.mark.parametrize("name", ["bert", "roberta_padding_id", "mpnet"])
def test_the_longest_legal_text(name, tmp_path):
    model, imported = pair(name, tmp_path)
    config = imported.config
    offset = 0 if name == "bert" else config.pad_id + 1
    assert config.max_length == published.LONGEST - offset
    ids = np.random.default_rng(1).integers(6, published.VOCAB, (1, config.max_length))
    mask = np.ones_like(ids, bool)
    published.assert_same(published.ours(imported, ids, mask), published.theirs(model, ids, mask))


def test_token_types(tmp_path):
    model, imported = pair("bert_untied", tmp_path)
    ids, mask = published.batch(0)
    types = np.random.default_rng(2).integers(0, 3, ids.shape)
    wanted = published.theirs(model, ids, mask, token_type_ids=torch.tensor(types))
    ours = published.model_of(imported)
    positions = imported.family.positions(ids, mask, 0)
    rows = (jnp.asarray(array, jnp.int32) for array in (ids, mask, positions))
    encode = jax.jit(type(ours.encoder).__call__, static_argnames="output_hidden_states")
    output = encode(ours.encoder, *rows, token_types=jnp.asarray(types), output_hidden_states=True)
    np.testing.assert_allclose(
        np.asarray(output.hidden_states)[:, mask], wanted["hidden"], rtol=0, atol=2e-5
    )


def test_a_padding_id_within_a_text_is_placed_as_roberta_does(tmp_path):
    model, imported = pair("roberta", tmp_path)
    ids = np.array([[1, 7, 8, 1, 9, 1]])
    mask = np.array([[False, True, True, True, True, False]])
    published.assert_same(published.ours(imported, ids, mask), published.theirs(model, ids, mask))


@pytest.mark.parametrize("name", ["bert", "bert_untied", "roberta", "mpnet"])
def test_gradients_of_the_masked_lm_loss(name, tmp_path):
    model, imported = pair(name, tmp_path)
    ids, mask = published.batch(model.config.pad_token_id)
    labels = np.where(mask & (np.arange(7) % 2 == 0), ids[:, ::-1], -100)
    labels = np.where(labels == model.config.pad_token_id, -100, labels)
    loss = model(
        input_ids=torch.tensor(ids),
        attention_mask=torch.tensor(mask, dtype=torch.long),
        labels=torch.tensor(labels),
    ).loss
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}

    ours = published.model_of(imported)
    positions = imported.family.positions(ids, mask, imported.config.pad_id)

    def masked_lm_loss(model):
        logits = model.logits(published.encode(model, ids, mask, positions).hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(labels, 0))
        return (losses * (labels >= 0)).sum() / (labels >= 0).sum()

    value, grads = jax.jit(jax.value_and_grad(masked_lm_loss))(ours)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(grads)), sep="/")
    table, shapes = imported.family.table, {path: leaf.shape for path, leaf in flat.items()}
    compared = 0
    parts = table.parts["masked_lm"]
    scale = max(np.linalg.norm(gradient) for gradient in gradients.values())
    for place in places(table, parts, shapes, published.VOCAB):
        names = (place.row.copy, place.theirs)
        full = (table.full_name(place.row, name, has_head=True) for name in names if name)
        wanted = next(gradients[name] for name in full if name in gradients)
        slice_ = np.asarray(flat[place.path])[place.index]
        got = place.row.transform.to_theirs(slice_, place.shape)
        if place.theirs.endswith(("word_embeddings.weight", "position_embeddings.weight")):
            # PyTorch keeps the padding's row from learning.
            wanted[model.config.pad_token_id] = got[model.config.pad_token_id]
        # A key's bias moves no weight: its gradient is rounding on both sides.
        floor = 1e-3 * scale if place.theirs.endswith(("key.bias", "k.bias")) else 0
        error = np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), floor, 1e-12)
        assert error < 1e-4, (place.theirs, error)
        compared += 1
    assert compared == len({id(p) for p in gradients.values()})
