"""The encoder-decoder: PyTorch's BART in values and gradients; causality; dropout; options."""

import functools

import bart
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx, traverse_util

from ddrp_jax.config import DecoderConfig, ModelConfig, PositionConfig
from ddrp_jax.interop import name_tables
from ddrp_jax.models import ops
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.models.seq2seq import Seq2Seq, build_model, shift_right

SPANS = ((0, 6), (0, 4), (0, 6), (0, 3), (0, 1))


def both(vocab_size=bart.VOCAB):
    """A batch of sources, and of what the decoder reads."""
    return bart.batch(vocab_size), bart.batch(vocab_size, columns=6, spans=SPANS, seed=1)


def run(model, source, target, **options):
    arguments = (jnp.asarray(array) for array in (*source, *target))

    @jax.jit
    def call(model, *arrays):
        output = model(*arrays, **options)
        return output, model.logits(output.hidden)

    return call(model, *arguments)


@pytest.mark.parametrize("size", bart.SIZES)
def test_hidden_states_and_logits_are_pytorchs(size):
    theirs = bart.make(**bart.SIZES[size])
    source, target = both(theirs.config.vocab_size)
    with torch.no_grad():
        wanted = theirs(
            **bart.tensors(*source),
            **bart.tensors(*target, "decoder_"),
            output_hidden_states=True,
        )
    output, logits = run(bart.ours(theirs), source, target, output_hidden_states=True)
    for name, got, states, (_, mask) in (
        ("encoder", output.memory_states, wanted.encoder_hidden_states, source),
        ("decoder", output.hidden_states, wanted.decoder_hidden_states, target),
    ):
        states = np.stack([state.numpy() for state in states])
        assert got.shape == states.shape
        np.testing.assert_allclose(
            np.asarray(got)[:, mask], states[:, mask], rtol=0, atol=2e-5, err_msg=name
        )
    mask, vocab_size = target[1], theirs.config.vocab_size
    np.testing.assert_array_equal(output.hidden, output.hidden_states[-1])
    np.testing.assert_allclose(
        np.asarray(logits)[mask][:, :vocab_size], wanted.logits.numpy()[mask], rtol=0, atol=2e-5
    )
    assert (np.asarray(logits)[..., vocab_size:] < -1e29).all()


def test_the_longest_legal_texts():
    theirs = bart.make()
    spans = ((0, bart.LONGEST),)
    source = bart.batch(columns=bart.LONGEST, spans=spans)
    target = bart.batch(columns=bart.LONGEST, spans=spans, seed=1)
    with torch.no_grad():
        wanted = theirs(**bart.tensors(*source), **bart.tensors(*target, "decoder_")).logits
    _, logits = run(bart.ours(theirs), source, target)
    np.testing.assert_allclose(logits[..., : bart.VOCAB], wanted, rtol=0, atol=2e-5)


def test_logits_at_some_positions():
    model = bart.ours(bart.make())
    source, target = both()
    output, logits = run(model, source, target)
    places = jnp.asarray([[0, 3], [1, 1], [5, 2], [2, 0], [0, 0]])
    some = model.logits(output.hidden, places)
    np.testing.assert_allclose(
        some, np.take_along_axis(np.asarray(logits), np.asarray(places)[..., None], 1), atol=1e-5
    )


def test_gradients_are_pytorchs():
    theirs = bart.make(scale_embedding=True)
    source, (labels, mask) = both()
    read = np.asarray(shift_right(jnp.asarray(labels), 2))
    loss = theirs(
        **bart.tensors(*source),
        decoder_input_ids=torch.tensor(read, dtype=torch.long),
        decoder_attention_mask=torch.tensor(mask, dtype=torch.long),
        labels=torch.tensor(np.where(mask, labels, -100), dtype=torch.long),
    ).loss
    loss.backward()
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}

    def loss_of(model):
        hidden = model(*(jnp.asarray(a) for a in (*source, read, mask))).hidden
        log_probs = jax.nn.log_softmax(model.logits(hidden))
        losses = -jnp.take_along_axis(log_probs, jnp.asarray(labels)[..., None], -1)[..., 0]
        return (losses * mask).sum() / mask.sum()

    value, grads = jax.jit(jax.value_and_grad(loss_of))(bart.ours(theirs))
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(grads)), sep="/")
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    table = name_tables.BART
    scale = max(np.linalg.norm(gradient) for gradient in wanted.values())
    compared = set()
    for place in name_tables.places(table, table.parts["base"], shapes, bart.VOCAB):
        name = table.full_name(place.row, place.theirs, has_head=True)
        got = place.row.transform.to_theirs(np.asarray(flat[place.path])[place.index], place.shape)
        if name == "model.shared.weight":  # PyTorch keeps the padding's row from learning
            wanted[name][1] = got[1]
        # A key's bias moves no weight: its gradient is rounding on both sides.
        floor = 1e-3 * scale if name.endswith("k_proj.bias") else 1e-12
        error = np.linalg.norm(got - wanted[name]) / max(np.linalg.norm(wanted[name]), floor)
        assert error < 1e-4, (name, error)
        compared.add(name)
    assert compared == wanted.keys()


def test_no_position_sees_what_comes_after_it_nor_padding():
    """Gradients to the rows of the position tables are zero to the last bit, or not at all."""
    model = bart.ours(bart.make())
    (source_ids, source_mask), _ = both()
    length = 6
    target_ids, _ = bart.batch(columns=length, spans=((0, length),) * 5, seed=1)
    target_mask = np.ones_like(target_ids, bool)
    target_mask[:, 1] = False  # the second token is padding

    @jax.jit
    @jax.grad
    def gradient(model, row, column):
        arrays = (jnp.asarray(a) for a in (source_ids, source_mask, target_ids, target_mask))
        return jnp.square(model(*arrays).hidden[row, column]).sum()

    for row in (0, 2):
        for column in (0, 2, 5):
            grads = gradient(model, row, column)
            moved = np.asarray(grads.decoder.position[...]).any(axis=1)[2 : 2 + length]
            sees = np.arange(length) <= column
            sees[1] = False
            np.testing.assert_array_equal(moved, sees)
            moved = np.asarray(grads.encoder.embeddings.position[...]).any(axis=1)[2:11]
            np.testing.assert_array_equal(moved, source_mask[row])


def test_texts_packed_in_a_row_do_not_see_each_other():
    model = bart.ours(bart.make())
    (ids, mask), (read, read_mask) = both()
    wanted, _ = run(model, (ids, mask), (read, read_mask))
    # Texts 0 and 1 in one row, each with a source of its own; text 1's are 7 and 4 tokens.
    source = np.concatenate([ids[0], ids[1, :7]])[None]
    target = np.concatenate([read[0], read[1, :4]])[None]
    segments = [np.repeat([[1, 2]], counts, axis=1) for counts in ([9, 7], [6, 4])]
    positions = tuple(
        jnp.asarray(np.concatenate([np.arange(n) for n in counts])[None])
        for counts in ([9, 7], [6, 4])
    )
    packed, _ = run(model, (source, segments[0]), (target, segments[1]), positions=positions)
    np.testing.assert_allclose(packed.hidden[0, :6], wanted.hidden[0], atol=1e-5)
    np.testing.assert_allclose(packed.hidden[0, 6:], wanted.hidden[1, :4], atol=1e-5)


def test_dropout_belongs_to_a_row():
    theirs = bart.make(dropout=0.2, attention_dropout=0.2)
    model = bart.ours(theirs)
    source, target = both()
    keys = ops.row_keys(jnp.uint32(0), jnp.uint32(0), jnp.arange(5, dtype=jnp.uint32))
    plain, _ = run(model, source, target)
    dropped, _ = run(model, source, target, dropout_keys=keys)
    order = np.array([3, 0, 4, 1, 2])
    moved, _ = run(
        model,
        tuple(a[order] for a in source),
        tuple(a[order] for a in target),
        dropout_keys=keys[order],
    )
    np.testing.assert_allclose(moved.hidden, dropped.hidden[order], atol=1e-5)
    np.testing.assert_allclose(moved.memory, dropped.memory[order], atol=1e-5)
    assert np.abs(dropped.hidden - plain.hidden).max() > 0
    assert np.abs(dropped.memory - plain.memory).max() > 0


@pytest.mark.parametrize("changes", [{"scan_layers": False}, {"remat": "full"}])
def test_how_layers_are_run_changes_no_value_and_no_gradient(changes):
    wanted, got = loss_and_gradient(), loss_and_gradient(**changes)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@functools.cache
def loss_and_gradient(**changes):
    """With dropout, of a model whose config is changed."""
    source, target = both()
    keys = ops.row_keys(jnp.uint32(0), jnp.uint32(0), jnp.arange(5, dtype=jnp.uint32))

    @jax.jit
    @jax.value_and_grad
    def loss_of(model):
        arrays = (jnp.asarray(a) for a in (*source, *target))
        return jnp.square(model(*arrays, dropout_keys=keys).hidden).mean()

    return loss_of(bart.ours(bart.make(dropout=0.1), **changes))


def test_bfloat16_is_near():
    theirs = bart.make()
    source, target = both()
    wanted, _ = run(bart.ours(theirs), source, target)
    got, logits = run(bart.ours(theirs, dtype="bfloat16"), source, target)
    assert got.hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    mask = target[1]
    error = np.abs(np.asarray(got.hidden, np.float32) - np.asarray(wanted.hidden))[mask]
    assert 0 < error.mean() < 0.05


def test_the_config_decides_what_is_built():
    encoder = ModelConfig(vocab_size=9, num_layers=1, hidden_size=8, num_heads=2)
    assert isinstance(nnx.eval_shape(lambda: build_model(encoder, rngs=nnx.Rngs(0))), MaskedLM)
    both_ = ModelConfig(
        **(
            vars(encoder)
            | {
                "position": PositionConfig("absolute"),
                "position_offset": 2,
                "decoder": DecoderConfig(num_layers=2),
            }
        )
    )
    model = nnx.eval_shape(lambda: build_model(both_, rngs=nnx.Rngs(0)))
    assert isinstance(model, Seq2Seq)
    assert model.encoder.embeddings.word.shape == (128, 8)
    assert model.decoder.layers.feed_forward.up_kernel.shape == (2, 8, 3072)
