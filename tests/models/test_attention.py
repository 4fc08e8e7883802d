"""The attention layer against a plain double loop over queries and keys, in float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import torch
from flax import nnx

from ddrp_jax.config import PositionConfig
from ddrp_jax.models.attention import Attention, RelativeTables, segment_mask

LENGTH, WIDTH, HEADS, SIZE = 6, 6, 2, 3
SEGMENTS, POSITIONS = small.rows([[4, 2], [5], [6]], LENGTH)
OPTIONS = [
    PositionConfig(kind, max_distance=k, directions=directions, acts_on=acts_on, sharing=sharing)
    for kind, directions in (("ddrp", 3), ("ddrp", 2), ("shaw", 3))
    for sharing in ("layer", "model", "head")
    for acts_on in ("keys", "keys_and_values")
    for k in (2, 9)  # below and above the length
]


def vector(tables, head, offset):
    """What one offset stands for, from the definition: `D[min(|o|, K)] * S[sign(o) + 1]`."""

    def of_head(table):
        return table[head] if table.ndim == 3 else table

    if "table" in tables:
        table = of_head(tables["table"])
        largest = (len(table) - 1) // 2
        return table[max(-largest, min(largest, offset)) + largest]
    distance, direction = of_head(tables["distance"]), of_head(tables["direction"])
    sign = (offset > 0) - (offset < 0)
    row = sign + 1 if len(direction) == 3 else int(sign >= 0)
    return distance[min(abs(offset), len(distance) - 1)] * direction[row]


def loop_attention(x, layer, tables):
    """One layer by double loop; returns its output and its attention weights."""
    bias = layer["qkv_bias"][:, None, None]
    q, k, v = torch.einsum("btd,dcnh->cbtnh", x, layer["qkv_kernel"]) + bias
    weights = torch.zeros(len(x), HEADS, LENGTH, LENGTH, dtype=x.dtype)
    z = []
    for b, i, n in itertools.product(range(len(x)), range(LENGTH), range(HEADS)):
        own = SEGMENTS[b, i]
        keys = [j for j in range(LENGTH) if own > 0 and SEGMENTS[b, j] == own]
        if not keys:
            z.append(torch.zeros(SIZE, dtype=x.dtype))
            continue
        scores = [
            q[b, i, n] @ (k[b, j, n] + vector(tables["keys"], n, j - i)) / SIZE**0.5 for j in keys
        ]
        probs = torch.softmax(torch.stack(scores), 0)
        values = [v[b, j, n] for j in keys]
        if "values" in tables:
            values = [
                value + vector(tables["values"], n, j - i)
                for j, value in zip(keys, values, strict=True)
            ]
        z.append(probs @ torch.stack(values))
        weights[b, n, i, keys] = probs.detach()
    z = torch.stack(z).reshape(len(x), LENGTH, HEADS, SIZE)
    return torch.einsum("btnh,nhd->btd", z, layer["out_kernel"]) + layer["out_bias"], weights


def graph_and_params(module):
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


@pytest.mark.parametrize(
    "position",
    OPTIONS,
    ids=lambda p: f"{p.kind}{p.directions}-{p.sharing}-{p.acts_on}-{p.max_distance}",
)
def test_attention_is_that_of_a_double_loop(position):
    def configured(scores):
        return small.model_config(
            dataclasses.replace(position, scores=scores), hidden_size=WIDTH, num_heads=HEADS
        )

    graphs = {}
    for scores in ("dense", "one_hot", "skew", "gather"):
        graphs[scores], own = graph_and_params(Attention(configured(scores), rngs=nnx.Rngs(0)))
    shared_graph, shared = None, {}
    if position.sharing == "model":
        tables = RelativeTables(configured("dense"), rngs=nnx.Rngs(0))
        shared_graph, shared = graph_and_params(tables)
        assert "relative" not in own
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape), (own, shared))
    x = draw.normal(size=(3, LENGTH, WIDTH))
    pull = draw.normal(size=x.shape) * (SEGMENTS > 0)[..., None]

    own64, shared64 = jax.tree.map(lambda p: torch.tensor(p, requires_grad=True), params)
    x64 = torch.tensor(x, requires_grad=True)
    wanted, weights = loop_attention(x64, own64, shared64 or own64["relative"])
    (wanted * torch.tensor(pull)).sum().backward()

    def run(params, x, scores):
        own, shared = params
        return nnx.merge(graphs[scores], own)(
            x,
            segment_mask(jnp.asarray(SEGMENTS)),
            jnp.asarray(POSITIONS),
            relative=nnx.merge(shared_graph, shared) if shared else None,
            statistic=small.tap,
        )

    params, x = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), (params, x))
    real = SEGMENTS > 0
    by_query = np.moveaxis(weights.numpy(), 1, 2)[real]
    for scores in graphs:
        got, probs = run(params, x, scores)
        np.testing.assert_allclose(
            got[real], wanted.detach().numpy()[real], rtol=1e-4, atol=1e-4, err_msg=scores
        )
        np.testing.assert_allclose(np.moveaxis(probs, 1, 2)[real], by_query, atol=1e-5)

    if position.max_distance > LENGTH:
        return  # the gradient differs from the shorter table's in rows that nothing reaches
    grads = jax.grad(lambda p, x: (run(p, x, "dense")[0] * pull).sum(), (0, 1))(params, x)
    right = jax.tree.map(lambda p: p.grad.numpy(), ((own64, shared64), x64))
    small.assert_trees_close(grads, right, rtol=1e-4, atol=1e-4)


def test_no_weight_crosses_a_segment_or_falls_on_padding():
    segment_ids, _ = small.rows(small.LAYOUTS, 12)
    mask = np.asarray(segment_mask(jnp.asarray(segment_ids)))[:, 0]
    for b, i, j in itertools.product(*map(range, mask.shape)):
        same = segment_ids[b, i] == segment_ids[b, j]
        assert mask[b, i, j] == (same and segment_ids[b, j] > 0)


def plain_attention(x, layer, rotate, bias):
    """Attention of PyTorch over one segment, with q and k rotated and scores biased."""
    qkv = torch.einsum("btd,dcnh->cbnth", x, layer["qkv_kernel"])
    q, k, v = qkv + layer["qkv_bias"][:, None, :, None]
    z = torch.nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=bias)
    return torch.einsum("bnth,nhd->btd", z, layer["out_kernel"]) + layer["out_bias"]


@pytest.mark.parametrize("kind", ["none", "rope", "biased"])
def test_rotation_is_before_the_product_and_bias_after_the_scaling(kind):
    width, size = 8, 4
    position = PositionConfig("rope" if kind == "rope" else "none", rope_theta=20.0)
    config = small.model_config(position, hidden_size=width, num_heads=HEADS)
    graph, params = graph_and_params(Attention(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape), params)
    x = draw.normal(size=(2, LENGTH, width))
    bias = draw.normal(size=(1, HEADS, LENGTH, LENGTH)) * (kind == "biased")
    positions = np.array([np.arange(LENGTH), np.arange(LENGTH) + 9])

    def rotate(x):
        if kind != "rope":
            return x
        angles = positions[..., None] * 20.0 ** (-np.arange(size // 2) / (size // 2))
        turn = torch.polar(torch.ones(angles.shape).double(), torch.tensor(angles))[:, None]
        turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    wanted = plain_attention(
        torch.tensor(x), jax.tree.map(torch.tensor, params), rotate, torch.tensor(bias)
    )
    got, _ = nnx.merge(graph, jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params))(
        jnp.asarray(x, jnp.float32),
        segment_mask(jnp.ones((2, LENGTH), jnp.int32)),
        jnp.asarray(positions),
        bias=jnp.asarray(bias, jnp.float32),
    )
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-4)
