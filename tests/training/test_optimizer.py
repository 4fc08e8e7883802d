"""AdamW against PyTorch, LAMB against layers taken one by one, decay by name, schedules."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import torch
from flax import nnx

from ddrp_jax.config import OptimizerConfig, PositionConfig, ScheduleConfig
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.training.optimizer import (
    is_decayed,
    learning_rate,
    make_optimizer,
    parameter_paths,
)

RATE = 0.05


def steps(config, params, gradients):
    """Parameters after one update for each of `gradients`."""
    optimizer = make_optimizer(config, params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - RATE * u, params, updates), state

    state = optimizer.init(params)
    for grads in gradients:
        params, state = step(params, state, grads)
    return params


def draws(params, count, seed=0):
    draw = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), params)
        for _ in range(count)
    ]


def test_adamw_is_that_of_pytorch():
    config = OptimizerConfig(b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    params = {"up_kernel": jnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "up_bias": jnp.asarray([1.0, 2])}
    gradients = draws(params, 7)
    got = steps(config, params, gradients)

    theirs = {name: torch.nn.Parameter(torch.tensor(np.asarray(p))) for name, p in params.items()}
    groups = [
        {"params": [theirs["up_kernel"]], "weight_decay": 0.1},
        {"params": [theirs["up_bias"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.8, 0.95), eps=1e-6)
    for grads in gradients:
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(np.asarray(grads[name]))
        optimizer.step()
    for name, parameter in theirs.items():
        np.testing.assert_allclose(got[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def lamb(param, gradients, config, *, scaled):
    """LAMB of one unstacked layer, in float64 (You et al. 2020, algorithm 2)."""
    param = np.asarray(param, np.float64)
    mean = square = np.zeros_like(param)
    for t, gradient in enumerate(gradients, start=1):
        gradient = np.asarray(gradient, np.float64)
        mean = config.b1 * mean + (1 - config.b1) * gradient
        square = config.b2 * square + (1 - config.b2) * gradient**2
        update = mean / (1 - config.b1**t) / (np.sqrt(square / (1 - config.b2**t)) + config.eps) + (
            config.weight_decay * param if scaled else 0
        )
        size, step = np.linalg.norm(param), np.linalg.norm(update)
        ratio = size / step if scaled and size > 0 and step > 0 else 1.0
        param = param - RATE * ratio * update
    return param


def test_lamb_scales_each_stacked_layer_by_itself():
    config = OptimizerConfig(kind="lamb", weight_decay=0.1)
    draw = np.random.default_rng(1)
    layers = {
        # Layers of very different sizes: one norm for all of them would show.
        "up_kernel": draw.normal(size=(3, 4, 5)) * np.array([0.01, 1, 100])[:, None, None],
        "up_bias": draw.normal(size=(3, 5)),
        "distance": draw.normal(size=(3, 4, 2)),
    }
    params = {"layers": layers, "word": draw.normal(size=(6, 4)), "dense_kernel": np.zeros((2, 2))}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    gradients = draws(params, 4, seed=2)
    got = steps(config, params, gradients)
    for name, scaled in (("up_kernel", True), ("up_bias", False), ("distance", False)):
        for layer in range(3):
            own = [grads["layers"][name][layer] for grads in gradients]
            wanted = lamb(params["layers"][name][layer], own, config, scaled=scaled)
            np.testing.assert_allclose(got["layers"][name][layer], wanted, rtol=1e-4, atol=1e-6)
    for name in ("word", "dense_kernel"):  # one of them begins at zero, where the ratio is 1
        wanted = lamb(params[name], [grads[name] for grads in gradients], config, scaled=True)
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-6)


def decayed(position, optimizer, **changes):
    """Paths of a whole model's parameters that are decayed, and those that are not."""
    model = small.model_config(position, token_types=2, norm_order="pre", **changes)
    state = nnx.state(nnx.eval_shape(lambda: MaskedLM(model, rngs=nnx.Rngs(0))))
    paths = jax.tree.leaves(parameter_paths(nnx.to_pure_dict(state)))
    return {path for path in paths if is_decayed(path, optimizer)}, set(paths)


KERNELS = {
    "encoder/layers/attention/qkv_kernel",
    "encoder/layers/attention/out_kernel",
    "encoder/layers/feed_forward/up_kernel",
    "encoder/layers/feed_forward/down_kernel",
    "head/dense_kernel",
}
EMBEDDINGS = {f"encoder/embeddings/{name}" for name in ("word", "position", "token_type")}


@pytest.mark.parametrize("position", ["absolute", "shaw", "ddrp", "t5", "ddrp_model"])
def test_decay_goes_by_name(position):
    kind, sharing = (*position.split("_"), "layer")[:2]
    position = PositionConfig(
        kind, sharing=sharing, acts_on="keys_and_values", add_absolute=kind == "ddrp"
    )
    embeddings = (
        EMBEDDINGS if position.has_absolute else EMBEDDINGS - {"encoder/embeddings/position"}
    )
    chosen, paths = decayed(position, OptimizerConfig())
    assert chosen == KERNELS | embeddings
    chosen, _ = decayed(position, OptimizerConfig(decay_embeddings=False))
    assert chosen == KERNELS
    chosen, _ = decayed(position, OptimizerConfig(decay_relative=True))
    tables = chosen - KERNELS - embeddings
    names = {"shaw": 2, "ddrp": 4, "t5": 1, "absolute": 0}
    assert len(tables) == names[kind]
    never = paths - KERNELS - EMBEDDINGS - tables
    assert {path.rsplit("/", 1)[-1].rsplit("_", 1)[-1] for path in never} == {"bias", "scale"}


def test_a_free_head_is_decayed_as_a_kernel():
    chosen, _ = decayed(
        PositionConfig("none"), OptimizerConfig(decay_embeddings=False), tied_head=False
    )
    assert chosen == KERNELS | {"head/decoder_kernel"}


def rates(config, total, at):
    schedule = jax.jit(lambda step: learning_rate(config, total, step))
    return [float(schedule(jnp.int32(step))) for step in at]


@pytest.mark.parametrize("kind", ["linear", "cosine", "inverse_sqrt", "constant"])
def test_warm_up_rises_from_the_first_update_to_the_peak(kind):
    config = ScheduleConfig(kind, peak=0.8, warmup_steps=4, end=0.1)
    got = rates(config, 20, range(4))
    np.testing.assert_allclose(got, [0.2, 0.4, 0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("linear", lambda left: left),
        ("cosine", lambda left: 0.5 * (1 + math.cos(math.pi * (1 - left)))),
    ],
)
def test_decay_from_the_peak_to_the_end(kind, shape):
    config = ScheduleConfig(kind, peak=0.8, warmup_steps=4, end=0.1)
    at = [4, 5, 12, 19, 20, 25]  # the first after the warm-up, half way, the last, and beyond
    left = [1, 15 / 16, 0.5, 1 / 16, 0, 0]
    wanted = [0.1 + 0.7 * shape(share) for share in left]
    np.testing.assert_allclose(rates(config, 20, at), wanted, rtol=1e-5)


def test_inverse_square_root_and_constant():
    config = ScheduleConfig("inverse_sqrt", peak=0.8, warmup_steps=4)
    np.testing.assert_allclose(rates(config, 100, [3, 15, 63]), [0.8, 0.4, 0.2], rtol=1e-6)
    config = dataclasses.replace(config, end=0.3)
    np.testing.assert_allclose(rates(config, 100, [15, 63]), [0.4, 0.3], rtol=1e-6)
    config = dataclasses.replace(config, kind="constant")
    np.testing.assert_allclose(rates(config, 100, [4, 99, 1000]), 0.8, rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "cosine", "inverse_sqrt", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (10, 10), (20, 10), (0, 1)])
def test_no_schedule_leaves_its_range(kind, warmup, total):
    """Without warm-up, and with one as long as the stage or longer."""
    config = ScheduleConfig(kind, peak=0.8, warmup_steps=warmup, end=0.1)
    got = rates(config, total, range(25))
    assert all(0 < rate <= 0.8 + 1e-6 for rate in got)
    if not warmup:
        assert got[0] == pytest.approx(0.8)
