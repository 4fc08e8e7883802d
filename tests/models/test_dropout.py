"""Dropout: its rate and scale, independent masks, and one mask for forward and backward."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from ddrp_jax.config import PositionConfig
from ddrp_jax.models import ops

RATE = 0.1
PLACES = 20_000


def keys(rows, seed=0, step=0):
    return ops.row_keys(
        jnp.uint32(seed), jnp.uint32(step), jnp.asarray(np.atleast_1d(rows), jnp.uint32)
    )


def dropped(keys, rate=RATE, places=PLACES):
    """Which places of each row are zeroed."""
    return np.asarray(ops.dropout(jnp.ones((len(keys), places)), keys, rate)) == 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_scale(rate):
    out = np.asarray(ops.dropout(jnp.ones((8, PLACES)), keys(np.arange(8)), rate))
    assert set(np.unique(out)) == {np.float32(0), np.float32(1 / (1 - rate))}
    # Five standard deviations of a binomial share, for each row and for all.
    for zeros in (out[0] == 0, out == 0):
        assert abs(zeros.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / zeros.size)


def test_masks_of_rows_layers_places_steps_and_seeds_are_independent():
    """Two independent masks of rate p both drop a share p^2 of the places."""
    base = keys([3])
    masks = {
        "row 3": dropped(base),
        "row 4": dropped(keys([4])),
        "next step": dropped(keys([3], step=1)),
        "other seed": dropped(keys([3], seed=1)),
        "seed and step swapped": dropped(keys([3], seed=1, step=1)),
        **{f"layer {n}": dropped(ops.fold(base, n)) for n in range(3)},
        "place in a layer": dropped(ops.fold(ops.fold(base, 1), 0)),
        "another place": dropped(ops.fold(ops.fold(base, 1), 1)),
    }
    bound = 5 * math.sqrt(RATE**2 * (1 - RATE**2) / PLACES)
    for (one, a), (two, b) in itertools.combinations(masks.items(), 2):
        assert abs((a & b).mean() - RATE**2) < bound, (one, two)


def test_neighbouring_places_and_rows_are_independent():
    mask = dropped(keys(np.arange(64)), places=1000)
    bound = 5 * math.sqrt(RATE**2 * (1 - RATE**2) / (64 * 990))
    for shift in (1, 2, 3, 8):
        assert abs((mask[:, shift:] & mask[:, :-shift]).mean() - RATE**2) < bound
    # No place is dropped in more or fewer rows than chance has it, nor do rows differ in number.
    for axis in (0, 1):
        share, n = mask.mean(axis), mask.shape[axis]
        deviation = math.sqrt(RATE * (1 - RATE) / n)
        assert np.abs(share - RATE).max() < 6 * deviation
        # The variance over m places is within 6 of its own standard deviations, sqrt(2/m).
        assert share.var() / deviation**2 == pytest.approx(1, abs=6 * math.sqrt(2 / share.size))


def test_a_mask_depends_on_the_row_not_on_where_it_stands():
    whole = dropped(keys(np.arange(6)))
    np.testing.assert_array_equal(dropped(keys([4, 1])), whole[[4, 1]])


def test_the_backward_pass_uses_the_same_mask():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 6)), jnp.float32)
    out, pull = jax.vjp(lambda x: ops.dropout(x, keys(np.arange(4)), 0.5), x)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], out / x, rtol=1e-6)
    assert 0 < (np.asarray(out) == 0).sum() < x.size


def test_no_keys_or_no_rate_change_nothing():
    x = jnp.ones((2, 3))
    assert ops.dropout(x, None, 0.5) is x
    assert ops.dropout(x, keys([0, 1]), 0.0) is x


def test_bfloat16_keeps_the_mean():
    """The factor 1/(1 - rate) must not be rounded to bfloat16 before it multiplies."""
    x = jnp.full((1, PLACES), 0.9, jnp.bfloat16)
    out = np.asarray(ops.dropout(x, keys([0]), 0.1), np.float32)
    np.testing.assert_array_equal(
        out[out != 0], np.float32(jnp.bfloat16(np.float32(x[0, 0]) / np.float32(0.9)))
    )


def constant_layers():
    """An encoder that adds the mask of each of its places of dropout to the residual stream.

    The words are all 1, attention and feed-forward give their biases, 2 and 100: every difference
    between hidden states is a sum of two masks that can be told apart.
    """
    config = small.model_config(
        PositionConfig("none"),
        norm_order="pre",
        embedding_norm=False,
        num_layers=3,
        hidden_size=64,
        dropout=0.5,
    )
    model = small.build(config)
    zero = jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(nnx.state(model)))
    zero["encoder"]["embeddings"]["word"] += 1
    zero["encoder"]["layers"]["attention"]["out_bias"] += 2
    zero["encoder"]["layers"]["feed_forward"]["down_bias"] += 100
    nnx.update(model, zero)
    return model


def test_an_encoder_draws_a_mask_for_every_row_layer_and_place():
    encoder = constant_layers().encoder
    rows, length = 8, 32
    ids, positions = jnp.full((rows, length), 7), jnp.tile(jnp.arange(length), (rows, 1))
    run = jax.jit(
        lambda dropout_keys: encoder(
            ids,
            jnp.ones_like(ids),
            positions,
            dropout_keys=dropout_keys,
            output_hidden_states=True,
        ).hidden_states[:-1]  # the last has passed the final norm
    )

    def masks(keys):
        states = np.asarray(run(keys))
        steps = np.diff(states, axis=0)
        feed_forward = np.where(steps > 100, 200, 0)
        found = {"embeddings": states[0] / 2}
        for layer, (both, inner) in enumerate(zip(steps, feed_forward, strict=True)):
            found[f"attention {layer}"] = (both - inner) / 4
            found[f"feed-forward {layer}"] = inner / 200
        return {name: mask.reshape(rows, -1) for name, mask in found.items()}

    first = masks(keys(np.arange(rows)))
    assert len(first) == 5
    for name, mask in first.items():
        np.testing.assert_allclose(mask, np.round(mask), atol=1e-5)
        assert set(np.unique(np.round(mask))) == {0, 1}, name
    every = [(name, row, mask[row]) for name, mask in first.items() for row in range(rows)]
    for step, seed in ((1, 0), (0, 1)):
        for name, mask in masks(keys(np.arange(rows), seed=seed, step=step)).items():
            every.append((f"{name} of step {step}, seed {seed}", 0, mask[0]))
    share = np.stack([mask for *_, mask in every])
    both = share @ share.T / share.shape[1]
    np.fill_diagonal(both, 0.25)
    # 50 masks make 1225 pairs: six standard deviations of a share of 1/4.
    bound = 6 * math.sqrt(0.25 * 0.75 / share.shape[1])
    one, two = np.unravel_index(np.abs(both - 0.25).argmax(), both.shape)
    assert abs(both[one, two] - 0.25) < bound, (every[one][:2], every[two][:2])


def test_equal_keys_agree_and_attention_weights_are_dropped():
    """With the residual dropout off, rows with other keys differ, and those with equal ones not."""
    config = small.model_config(PositionConfig("none"), attention_dropout=0.5)
    encoder = small.build(config).encoder
    ids = jnp.tile(jnp.arange(5, 11), (3, 1))
    positions = jnp.tile(jnp.arange(6), (3, 1))
    hidden = np.asarray(
        encoder(ids, jnp.ones_like(ids), positions, dropout_keys=keys([0, 1, 0])).hidden
    )
    np.testing.assert_array_equal(hidden[0], hidden[2])
    assert np.abs(hidden[0] - hidden[1]).max() > 1e-2
