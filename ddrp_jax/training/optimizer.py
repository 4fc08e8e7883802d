"""AdamW and LAMB with decay by parameter name, and the learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ddrp_jax.config import OptimizerConfig, ScheduleConfig

# The last name of a parameter's path decides; ranks would not do, since stacked layers give
# norms and biases a second axis.
_KERNELS = ("_kernel",)
_EMBEDDINGS = ("word", "position", "token_type")
_RELATIVE = ("distance", "direction", "table", "bucket_bias")


def is_decayed(path: str, config: OptimizerConfig) -> bool:
    """Returns whether weight decay applies to the parameter at `path` ("encoder/layers/...")."""
    names = path.split("/")
    if names[-1] in _RELATIVE or "bucket_bias" in names:
        return config.decay_relative
    if names[-1] in _EMBEDDINGS:
        return config.decay_embeddings
    return names[-1].endswith(_KERNELS)


def parameter_paths(params: Any) -> Any:
    """Returns a tree like `params` (plain dicts of arrays) with each leaf's path, "a/b/c"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(key.key) for key in path), params
    )


def make_optimizer(
    config: OptimizerConfig, params: Any, is_frozen: Callable[[str], bool] = lambda path: False
) -> optax.GradientTransformation:
    """Returns the transformation from gradients to a step of learning rate 1, not yet negated.

    Args:
        config: which optimiser.
        params: tree of plain dicts of (abstract) arrays, for the names that decide on decay.
        is_frozen: whether the parameter at a path never changes; it gets no moments, and its
            gradient has to be zero.
    """
    paths = parameter_paths(params)
    trained = jax.tree.map(lambda path: not is_frozen(path), paths)
    if not all(jax.tree.leaves(trained)):
        paths = jax.tree.map(
            lambda path, kept: path if kept else optax.MaskedNode(), paths, trained
        )
        return optax.masked(_chain(config, paths), trained)
    return _chain(config, paths)


def _chain(config: OptimizerConfig, paths: Any) -> optax.GradientTransformation:
    decayed = jax.tree.map(lambda path: is_decayed(path, config), paths)
    parts = [
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, decayed),
    ]
    if config.kind == "lamb":
        parts.append(_scale_by_trust_ratio(paths, decayed))
    return optax.chain(*parts)


def _scale_by_trust_ratio(paths: Any, decayed: Any) -> optax.GradientTransformation:
    """LAMB's layer-wise scaling by |parameter| / |update| (You et al. 2020, algorithm 2).

    Layers are stacked on a first axis and each is a layer of its own: the norms leave that axis
    out. What is not decayed (biases, norms) is not scaled either, as in the released code.
    """

    def scale(path: str, is_scaled: bool, update: jax.Array, param: jax.Array) -> jax.Array:
        if not is_scaled:
            return update
        axes = tuple(range("layers" in path.split("/"), param.ndim))
        size = jnp.sqrt(jnp.square(param).sum(axes, keepdims=True))
        step = jnp.sqrt(jnp.square(update).sum(axes, keepdims=True))
        ratio = jnp.where((size > 0) & (step > 0), size / jnp.where(step > 0, step, 1), 1.0)
        return update * ratio

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(scale, paths, decayed, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def learning_rate(config: ScheduleConfig, steps: int, step: jax.Array) -> jax.Array:
    """Returns the learning rate of the update that follows `step` steps of a stage.

    Warm-up is linear from `start` to `peak`, and its first update has moved already: at 0 it would
    be none.
    "linear" and "cosine" end at `end` after `steps`, "inverse_sqrt" falls as
    `peak * sqrt(warmup_steps / step)`, "constant" stays.

    Args:
        config: the schedule.
        steps: number of steps of the stage.
        step: steps already done in the stage.
    """
    done = (step + 1).astype(jnp.float32)
    warmup = float(max(config.warmup_steps, 1))
    rising = config.start + (config.peak - config.start) * jnp.minimum(done / warmup, 1.0)
    left = jnp.clip((steps - step) / max(steps - config.warmup_steps, 1), 0.0, 1.0)
    if config.kind == "linear":
        falling = config.end + (config.peak - config.end) * left
    elif config.kind == "cosine":
        shape = 0.5 * (1 - jnp.cos(jnp.pi * left))
        falling = config.end + (config.peak - config.end) * shape
    elif config.kind == "inverse_sqrt":
        falling = jnp.maximum(
            config.peak * jnp.sqrt(warmup / jnp.maximum(done, warmup)), config.end
        )
    else:
        falling = jnp.asarray(config.peak)
    return jnp.where(step < config.warmup_steps, rising, falling).astype(jnp.float32)
