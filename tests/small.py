"""Small models and batches that the tests of the mathematical core share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddrp_jax.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PositionConfig,
    ScheduleConfig,
    StageConfig,
)
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.training.sharding import make_mesh
from ddrp_jax.training.state import TrainState
from ddrp_jax.training.step import Training, build_training


def tap(probs: jax.Array) -> jax.Array:
    """The attention statistic that keeps the maps themselves."""
    return probs


def model_config(position: PositionConfig | None = None, **changes) -> ModelConfig:
    """Two layers of 16, two heads, 40 words, no dropout."""
    values = {
        "vocab_size": 40,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "max_length": 16,
        "initializer": "fan_in",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "position": position or PositionConfig(max_distance=3),
    }
    return ModelConfig(**(values | changes))


def run_config(model: ModelConfig, *, accumulation=1, **changes) -> Config:
    """A run of one stage on `batch()`: a constant rate, and moments that are the gradient."""
    stage = StageConfig(
        length=12,
        batch_size=len(LAYOUTS),
        accumulation=accumulation,
        schedule=ScheduleConfig("constant", peak=0.01),
    )
    values = {"stages": (stage,), "optimizer": OptimizerConfig(b1=0.0, clip_norm=0.0)}
    return Config(model=model, **(values | changes))


def training(config: Config, *, stage=0, data=1, fsdp=1, tensor=1) -> Training:
    """The functions of a run on the first `data * fsdp * tensor` devices."""
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = make_mesh(MeshConfig(data, fsdp, tensor), devices)
    return build_training(config, stage, mesh)


def state_at(training: Training, config: Config, *, step=0, seed=0) -> TrainState:
    """A state whose parameters are those of `build`: none is at the value it starts from."""
    places = jax.tree.map(lambda leaf: leaf.sharding, training.abstract_state)
    params = nnx.to_pure_dict(nnx.state(build(config.model, seed)))
    moments = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), training.abstract_state.opt_state
    )
    return jax.device_put(TrainState(jnp.int32(step), params, moments, jnp.bool_(True)), places)


def gradient(state: TrainState):
    """The gradient of the step that led to a state of a `run_config`."""
    return jax.device_get(state.opt_state[0].mu)


def build(config: ModelConfig, seed: int = 0) -> MaskedLM:
    """A model none of whose parameters is at a special value: biases and scales move too."""
    graph, state = nnx.split(nnx.eval_shape(lambda: MaskedLM(config, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(seed)

    def value(path, leaf):
        centre, deviation = {"scale": (1, 0.3), "direction": (0, 1)}.get(path[-1].key, (0, 0.3))
        return jnp.asarray(draw.normal(centre, deviation, leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(value, nnx.to_pure_dict(state)))


def rows(layouts, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions of rows that hold segments of the given lengths, then padding."""
    segment_ids = np.zeros((len(layouts), length), np.int32)
    positions = np.zeros_like(segment_ids)
    for row, sizes in enumerate(layouts):
        start = 0
        for number, size in enumerate(sizes, start=1):
            segment_ids[row, start : start + size] = number
            positions[row, start : start + size] = np.arange(size)
            start += size
    return segment_ids, positions


# Rows of 12: full, one long and short segments, segments of one token, and nothing but padding.
LAYOUTS = ([12], [5, 4], [1, 2, 9], [], [3, 3, 3, 3], [1], [7], [2, 1, 1, 6])


def batch(layouts=LAYOUTS, *, length=12, predictions=3, vocab_size=40, seed=0):
    """A batch whose rows have from none to `predictions` predicted tokens."""
    draw = np.random.default_rng(seed)
    segment_ids, positions = rows(layouts, length)
    count = len(layouts)
    made = {
        "input_ids": np.where(segment_ids > 0, draw.integers(5, vocab_size, segment_ids.shape), 0),
        "segment_ids": segment_ids,
        "positions": positions,
        "predict_positions": np.zeros((count, predictions)),
        "predict_ids": np.zeros((count, predictions)),
        "predict_weights": np.zeros((count, predictions), np.float32),
    }
    for row in range(count):
        real = np.flatnonzero(segment_ids[row])
        used = min(len(real), row % (predictions + 1))
        made["predict_positions"][row, :used] = np.sort(draw.choice(real, used, replace=False))
        made["predict_ids"][row, :used] = draw.integers(5, vocab_size, used)
        made["predict_weights"][row, :used] = 1
    return {
        name: value if name == "predict_weights" else value.astype(np.int32)
        for name, value in made.items()
    }


def assert_trees_close(got, wanted, *, rtol=1e-5, atol=1e-5):
    """Every leaf of two trees agrees; the message names the leaf."""
    got, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, wanted))
    assert [path for path, _ in got] == [path for path, _ in wanted]
    for (path, one), (_, other) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path)
        )
