"""What must not change an encoder's output: packing, padding, place in the row, how it is run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from ddrp_jax.config import PositionConfig
from ddrp_jax.models import ops
from ddrp_jax.models.encoder import position_rows, single_segments
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.models.initializers import parameter
from ddrp_jax.models.relative_position import ddrp_table

KINDS = {
    "absolute": PositionConfig("absolute"),
    "shaw": PositionConfig("shaw", max_distance=3),
    "ddrp": PositionConfig("ddrp", max_distance=3, acts_on="keys_and_values"),
    "ddrp_absolute": PositionConfig("ddrp", max_distance=3, add_absolute=True),
    "ddrp_model": PositionConfig("ddrp", max_distance=3, sharing="model", directions=2),
    "t5": PositionConfig("t5", num_buckets=8, bucket_max_distance=6),
    "rope": PositionConfig("rope"),
    "none": PositionConfig("none"),
}
LENGTH = 12


def encode(model, ids, segment_ids, positions, **options):
    return model.encoder(*map(jnp.asarray, (ids, segment_ids, positions)), **options)


@pytest.mark.parametrize(
    ("kind", "norm_order"), [*((kind, "post") for kind in KINDS), ("ddrp", "pre")]
)
def test_a_segment_does_not_know_its_neighbours_nor_its_place(kind, norm_order):
    """One batch holds segments packed, each alone, each moved, and with other padding."""
    model = small.build(small.model_config(KINDS[kind], norm_order=norm_order))
    draw = np.random.default_rng(1)
    texts = [draw.integers(5, 40, n) for n in (5, 1, 4)]
    starts = [(0, 5, 6), (0, None, None), (None, 0, None), (None, None, 0)]  # packed, and alone
    starts += [(7, None, None), (None, 11, None), (None, None, 3)]  # moved to the right
    ids = draw.integers(5, 40, (len(starts), LENGTH))  # padding holds any ids
    segment_ids, positions = np.zeros((2, len(starts), LENGTH), np.int32)
    for row, row_starts in enumerate(starts):
        for number, (start, text) in enumerate(zip(row_starts, texts, strict=True), start=1):
            if start is not None:
                where = slice(start, start + len(text))
                ids[row, where] = text
                segment_ids[row, where] = number
                positions[row, where] = np.arange(len(text))
    hidden = np.asarray(encode(model, ids, segment_ids, positions).hidden)
    assert np.isfinite(hidden).all()
    for number, text in enumerate(texts):
        packed = starts[0][number]
        wanted = hidden[0, packed : packed + len(text)]
        for row in range(1, len(starts)):
            if starts[row][number] is not None:
                start = starts[row][number]
                got = hidden[row, start : start + len(text)]
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_order_matters_with_positions(kind):
    """Without this, the invariances above could hold because positions do nothing."""
    model = small.build(small.model_config(KINDS[kind]))
    ids = np.array([[5, 6, 7, 8, 9, 10], [6, 5, 7, 8, 9, 10]])
    ones, positions = np.ones_like(ids), np.tile(np.arange(6), (2, 1))
    hidden = encode(model, ids, ones, positions).hidden
    assert np.abs(hidden[0, 2:] - hidden[1, 2:]).max() > 1e-2


def test_equal_directions_cannot_tell_left_from_right():
    model = small.build(small.model_config(KINDS["ddrp"]))
    for tables in (
        model.encoder.layers.attention.relative.keys,
        model.encoder.layers.attention.relative.values,
    ):
        tables.direction[...] = jnp.ones_like(tables.direction[...])
    ids, ones, positions = np.arange(5, 14)[None], np.ones((1, 9), int), np.arange(9)[None]
    hidden = encode(model, ids, ones, positions).hidden
    turned = encode(model, ids[:, ::-1], ones, positions).hidden
    np.testing.assert_allclose(turned[:, ::-1], hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharing", ["layer", "model", "head"])
def test_a_shaw_table_set_to_the_product_is_ddrp(sharing):
    position = PositionConfig("ddrp", max_distance=4, sharing=sharing, acts_on="keys_and_values")
    ddrp = small.build(small.model_config(position))
    shaw = small.build(small.model_config(dataclasses.replace(position, kind="shaw")))

    def product(tree):
        if isinstance(tree, dict) and "distance" in tree:
            return {"table": ddrp_table(tree["distance"], tree["direction"])}
        return {k: product(v) for k, v in tree.items()} if isinstance(tree, dict) else tree

    nnx.update(shaw, product(nnx.to_pure_dict(nnx.state(ddrp))))
    batch = small.batch()
    rows = (batch["input_ids"], batch["segment_ids"], batch["positions"])
    np.testing.assert_allclose(
        encode(shaw, *rows).hidden, encode(ddrp, *rows).hidden, rtol=1e-5, atol=1e-5
    )


def test_positions_of_roberta_begin_after_the_padding_id():
    config = small.model_config(position_offset=2, pad_id=1)
    for ids, wanted in (
        ([0, 31414, 232, 2, 1, 1], [2, 3, 4, 5, 1, 1]),
        ([1, 0, 9, 2, 1, 9], [1, 2, 3, 4, 1, 5]),
    ):
        segment_ids, positions = single_segments(jnp.asarray([ids]), pad_id=1)
        assert position_rows(config, positions, segment_ids).tolist() == [wanted]


@pytest.mark.parametrize(("rows", "pad_id"), [(514, 1), (514, 3)])
def test_the_longest_legal_sequence_takes_the_last_row(rows, pad_id):
    longest = rows - pad_id - 1
    config = small.model_config(
        PositionConfig("absolute"), position_offset=pad_id + 1, pad_id=pad_id, max_length=longest
    )
    model = nnx.eval_shape(lambda: MaskedLM(config, rngs=nnx.Rngs(0)))
    assert model.encoder.embeddings.position.shape[0] == rows
    segment_ids, positions = small.rows([[longest]], longest)
    last = position_rows(config, jnp.asarray(positions), jnp.asarray(segment_ids)).max()
    assert last == rows - 1


def statistic(probs):
    return (probs**2).sum()


def loss(model, batch, dropout_keys, layers):
    out = encode(
        model,
        batch["input_ids"],
        batch["segment_ids"],
        batch["positions"],
        dropout_keys=dropout_keys,
        statistic=statistic,
        statistic_layers=layers,
    )
    logits = model.logits(out.hidden, jnp.asarray(batch["predict_positions"]))
    return jnp.square(logits[..., :40]).mean() + 0.1 * out.statistics[-1], out.statistics


BATCH = small.batch(small.LAYOUTS[:4])
RUNS = {
    "plain": ({}, "all"),
    "unrolled_remat_dots": ({"scan_layers": False, "remat": "dots"}, "all"),
    "remat_full": ({"remat": "full"}, "all"),
    "last_layer_measured": ({}, "last"),
}


@pytest.fixture(scope="module")
def run():
    """Loss, statistics and gradients of one model, run in the ways of RUNS."""
    base = small.model_config(num_layers=3, dropout=0.2, attention_dropout=0.2)
    params = nnx.to_pure_dict(nnx.state(small.build(base)))
    keys = ops.row_keys(jnp.uint32(0), jnp.uint32(0), jnp.arange(4, dtype=jnp.uint32))

    def run(changes, layers):
        config = dataclasses.replace(base, **changes)
        graph, _ = nnx.split(nnx.eval_shape(lambda: MaskedLM(config, rngs=nnx.Rngs(0))))
        gradient = jax.jit(
            jax.value_and_grad(
                lambda params: loss(nnx.merge(graph, params), BATCH, keys, layers), has_aux=True
            )
        )
        return gradient(params)

    return run


@pytest.fixture(scope="module")
def plain(run):
    return run(*RUNS["plain"])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "plain"])
def test_how_layers_are_run_changes_nothing(run, plain, name):
    """With dropout on: recomputed layers draw the same masks."""
    (value, statistics), grads = run(*RUNS[name])
    (wanted, all_statistics), wanted_grads = plain
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert statistics.shape == ((1,) if RUNS[name][1] == "last" else (3,))
    np.testing.assert_allclose(statistics, all_statistics[-len(statistics) :], rtol=1e-5)
    small.assert_trees_close(grads, wanted_grads)


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_hidden_states_of_every_layer(layers, norm_order):
    """The first are the embeddings, the last the output, the one between a single layer's."""
    config = small.model_config(norm_order=norm_order, num_layers=2)
    model = small.build(config)
    rows = (BATCH["input_ids"], BATCH["segment_ids"], BATCH["positions"])
    out = encode(
        model, *rows, statistic=small.tap, statistic_layers=layers, output_hidden_states=True
    )
    assert out.hidden_states.shape == (3, 4, 12, 16)
    np.testing.assert_array_equal(out.hidden_states[-1], out.hidden)
    first = model.encoder.embeddings(*map(jnp.asarray, rows))
    np.testing.assert_allclose(out.hidden_states[0], first, atol=1e-6)
    one_layer = small.build(dataclasses.replace(config, num_layers=1))
    params = nnx.to_pure_dict(nnx.state(model))
    params["encoder"]["layers"] = jax.tree.map(lambda p: p[:1], params["encoder"]["layers"])
    nnx.update(one_layer, params)
    shallow = encode(one_layer, *rows, output_hidden_states=True).hidden_states
    if norm_order == "post":
        np.testing.assert_allclose(shallow[1], out.hidden_states[1], rtol=1e-5, atol=1e-5)
    else:  # its last hidden state has passed the final norm
        normed = one_layer.encoder.final_norm(out.hidden_states[1])
        np.testing.assert_allclose(shallow[1], normed, rtol=1e-5, atol=1e-5)
    assert out.statistics.shape == ((2 if layers == "all" else 1), 4, 2, 12, 12)


def test_one_layer_can_be_the_last():
    model = small.build(small.model_config(num_layers=1))
    rows = (BATCH["input_ids"], BATCH["segment_ids"], BATCH["positions"])
    last = encode(model, *rows, statistic=small.tap, statistic_layers="last")
    every = encode(model, *rows, statistic=small.tap)
    np.testing.assert_allclose(last.hidden, every.hidden, atol=1e-6)
    np.testing.assert_allclose(last.statistics, every.statistics, atol=1e-6)


def test_bfloat16_computes_close_to_float32_over_float32_parameters():
    """Each of the residual additions and norms rounds by at most 2^-8 of values of order one."""
    config = small.model_config(num_layers=2)
    rows = (BATCH["input_ids"], BATCH["segment_ids"], BATCH["positions"])
    exact = small.build(config)
    half = small.build(dataclasses.replace(config, dtype="bfloat16"))
    hidden = encode(half, *rows).hidden
    assert hidden.dtype == jnp.bfloat16
    logits = half.logits(hidden)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    real = BATCH["segment_ids"] > 0
    wanted = np.asarray(encode(exact, *rows).hidden)[real]
    error = np.asarray(hidden, np.float32)[real] - wanted
    # Four branches of about six roundings each add up like noise: sqrt(24) * 2^-9 rms, 1 %.
    assert np.sqrt((error**2).mean() / (wanted**2).mean()) < 0.02


def test_initial_values():
    """Fan-in scaling gives kernels N(0, 1/fan_in), and each layer values of its own."""
    config = small.model_config(hidden_size=64, num_heads=4, intermediate_size=128, vocab_size=500)
    make = jax.jit(lambda: nnx.state(MaskedLM(config, rngs=nnx.Rngs(0))))
    params = nnx.to_pure_dict(make())
    layers = params["encoder"]["layers"]
    tables = layers["attention"]["relative"]["keys"]
    for leaf, deviation in (
        (params["encoder"]["embeddings"]["word"], 1 / 8),
        (layers["attention"]["qkv_kernel"], 1 / 8),
        (layers["attention"]["out_kernel"], 1 / 8),
        (layers["feed_forward"]["up_kernel"], 1 / 8),
        (layers["feed_forward"]["down_kernel"], 128**-0.5),
        (tables["distance"], 0.02),
        (tables["direction"], 1.0),
    ):
        assert float(jnp.std(leaf)) == near(deviation, leaf)
    assert not np.allclose(
        layers["feed_forward"]["up_kernel"][0], layers["feed_forward"]["up_kernel"][1]
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key.endswith(("bias", "scale")):
            assert np.all(leaf == (path[-1].key == "scale"))


def near(deviation, leaf):
    """The sample deviation of n normal values is off by sigma/sqrt(2n); five times that."""
    return pytest.approx(deviation, rel=5 / (2 * leaf.size) ** 0.5)


def test_the_other_initializer_has_one_deviation():
    config = small.model_config(initializer="normal", initializer_range=0.05)
    for fan_in in (9, 900):
        kernel = parameter(config, nnx.Rngs(0), (60, 50), ("embed", "mlp"), fan_in=fan_in)[...]
        assert float(jnp.std(kernel)) == near(0.05, kernel)
