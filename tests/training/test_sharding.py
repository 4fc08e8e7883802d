"""Eight devices against one: the same losses and gradients, however a step is split."""

import functools
import re

import jax
import numpy as np
import pytest
import small
from jax.sharding import PartitionSpec as Spec

from ddrp_jax.config import MeshConfig, ObjectiveConfig, PositionConfig, StageConfig
from ddrp_jax.errors import UsageError
from ddrp_jax.training.sharding import check_batch, make_mesh

# Every kind of parameter, dropout on, and all three objectives over uneven rows.
MODEL = small.model_config(
    PositionConfig("ddrp", max_distance=3, sharing="head", acts_on="keys_and_values"),
    token_types=1,
    dropout=0.2,
    attention_dropout=0.2,
)
MTH = ObjectiveConfig(token_weight=0.3, head_weight=0.5)
MAPS = ObjectiveConfig(token_weight=0.3, head_weight=0.5, head_layers="last", head_unit="map")


@functools.cache
def first_step(objective, accumulation, sizes):
    """Metrics, gradient and next parameters of one step on a mesh of `sizes`."""
    config = small.run_config(MODEL, objective=objective, accumulation=accumulation)
    data, fsdp, tensor = sizes
    training = small.training(config, data=data, fsdp=fsdp, tensor=tensor)
    state, metrics = training.train_step(small.state_at(training, config, step=5), small.batch())
    return jax.device_get(metrics), small.gradient(state), jax.device_get(state.params)


@pytest.mark.parametrize(
    ("objective", "accumulation", "sizes"),
    [
        pytest.param(MTH, 1, (8, 1, 1), id="data"),
        pytest.param(MTH, 1, (1, 8, 1), id="fsdp"),
        pytest.param(MTH, 8, (1, 1, 1), id="8_microbatches"),
        pytest.param(MAPS, 2, (2, 2, 2), id="all_axes_in_2_microbatches"),
    ],
)
def test_devices_and_microbatches_change_neither_losses_nor_gradients(
    objective, accumulation, sizes
):
    metrics, grads, params = first_step(objective, accumulation, sizes)
    wanted, wanted_grads, wanted_params = first_step(objective, 1, (1, 1, 1))
    assert metrics["finite"]
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    small.assert_trees_close(grads, wanted_grads)
    # AdamW's first update is the sign of the gradient: where that is rounding alone, any.
    small.assert_trees_close(params, wanted_params, atol=0.021)


def test_dropout_is_on_in_these_steps():
    """Or the masks of rows that move between microbatches would not have been tested."""
    config = small.run_config(MODEL, objective=MTH)
    training = small.training(config)
    _, metrics = training.train_step(small.state_at(training, config, step=6), small.batch())
    assert abs(float(metrics["loss"]) - first_step(MTH, 1, (1, 1, 1))[0]["loss"]) > 1e-3


def test_parameters_are_born_split_and_the_same_on_any_mesh():
    config = small.run_config(MODEL)
    one = small.training(config)
    many = small.training(config, data=2, fsdp=2, tensor=2)
    whole, state = one.init(3), many.init(3)
    small.assert_trees_close(jax.device_get(state.params), jax.device_get(whole.params), atol=1e-7)
    for leaf, abstract in zip(
        jax.tree.leaves(state), jax.tree.leaves(many.abstract_state), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
    layers = state.params["encoder"]["layers"]
    attention, inner = layers["attention"], layers["feed_forward"]
    for leaf, spec in (
        (state.params["encoder"]["embeddings"]["word"], ("tensor", "fsdp")),
        (attention["qkv_kernel"], (None, "fsdp", None, "tensor", None)),
        (attention["relative"]["keys"]["direction"], (None, "tensor", None, None)),
        (inner["up_kernel"], (None, "fsdp", "tensor")),
        (inner["down_kernel"], (None, "tensor", "fsdp")),
        (layers["attention_norm"]["scale"], (None, "fsdp")),
    ):
        assert leaf.sharding.spec == Spec(*spec)
        shard = leaf.addressable_shards[0].data.shape
        assert shard == tuple(n // (2 if s else 1) for n, s in zip(leaf.shape, spec, strict=True))
    # Moments live where their parameters do.
    for moments in (state.opt_state[0].mu, state.opt_state[0].nu):
        for moment, param in zip(
            jax.tree.leaves(moments), jax.tree.leaves(state.params), strict=True
        ):
            assert moment.sharding.is_equivalent_to(param.sharding, param.ndim)


def test_an_axis_that_does_not_divide_stays_whole():
    training = small.training(small.run_config(MODEL), tensor=8)  # two heads
    params = training.abstract_state.params["encoder"]
    assert params["layers"]["attention"]["qkv_kernel"].sharding.spec == Spec(
        None, "fsdp", None, None, None
    )
    assert params["embeddings"]["word"].sharding.spec == Spec("tensor", "fsdp")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (MeshConfig(), (8, 1, 1)),
        (MeshConfig(data=1, fsdp=-1, tensor=2), (1, 4, 2)),
        (MeshConfig(data=2, fsdp=2, tensor=2), (2, 2, 2)),
    ],
)
def test_mesh_takes_all_devices(config, sizes):
    mesh = make_mesh(config)
    assert tuple(mesh.shape[axis] for axis in ("data", "fsdp", "tensor")) == sizes


@pytest.mark.parametrize(
    "config", [MeshConfig(data=3), MeshConfig(fsdp=3), MeshConfig(tensor=16), MeshConfig(2, 2, 1)]
)
def test_a_mesh_that_does_not_fit_the_devices(config):
    with pytest.raises(UsageError, match=r"is not the number of devices, 8; set one axis to -1"):
        make_mesh(config)


@pytest.mark.parametrize(
    ("stage", "rows"),
    [
        (StageConfig(name="short", batch_size=12), "in 1 microbatches gives 12 rows"),
        (StageConfig(name="short", batch_size=8, accumulation=2), "in 2 microbatches gives 4 rows"),
    ],
)
def test_a_batch_that_does_not_divide_over_the_devices(stage, rows):
    with pytest.raises(UsageError, match=re.escape(rows) + r".*data x fsdp = 8"):
        check_batch(stage, make_mesh(MeshConfig(data=4, fsdp=2)))
    check_batch(stage, make_mesh(MeshConfig(data=4, fsdp=1, tensor=2)))
