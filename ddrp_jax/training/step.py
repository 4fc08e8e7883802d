"""The one compiled training step, and the functions that measure a model on held-out rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from ddrp_jax.config import Config, ObjectiveConfig, RunConfig
from ddrp_jax.errors import UsageError
from ddrp_jax.models import ops
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.objectives import masked_lm, mth
from ddrp_jax.training import distributed, sharding
from ddrp_jax.training.optimizer import learning_rate, make_optimizer
from ddrp_jax.training.state import TrainState

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Training:
    """The compiled functions of one stage.

    Attributes:
        init: `seed -> TrainState`, born sharded.
        abstract_state: shapes, types and shardings of a state.
        batch_sharding: where rows of a batch live.
        train_step: `(state, batch) -> (state, metrics)`; takes the state's memory.
        evaluate: `(params, batch) -> {name: (sum, weight)}` of what is measured on held-out rows.
        representations: `(params, batch) -> {name: (sum, weight)}` of the similarities alone, or
            None where the objective has none.
    """

    init: Callable[[int], TrainState]
    abstract_state: TrainState
    batch_sharding: jax.sharding.NamedSharding
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Batch], Sums]
    representations: Callable[[Any, Batch], Sums] | None


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a run trains and by which loss; `build_training` does the rest.

    Attributes:
        create: makes the model, from `nnx.Rngs`.
        loss: `(model, microbatch, dropout keys, whole batch, step) -> (loss, metrics)`, where every
            term is a sum over the microbatch divided by its weight over the whole batch.
        evaluate, representations: as in `Training`, of the model in place of its parameters.
        is_frozen: whether the parameter at a path ("student/encoder/...") never changes. The loss
            stops its gradient; here it gets no moments and no decay.
    """

    create: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Batch], Sums]
    representations: Callable[[Any, Batch], Sums] | None = None
    is_frozen: Callable[[str], bool] = lambda path: False


def build_training(
    config: RunConfig, stage_index: int, mesh: Mesh, objective: Objective | None = None
) -> Training:
    """Builds the functions of stage `stage_index`; nothing compiles before they are called.

    Args:
        config: the run.
        stage_index: which of its stages.
        mesh: devices.
        objective: what to train; that of a pre-training config if None.

    Raises:
        UsageError: a batch that does not divide over the mesh.
    """
    if distributed.mixes_up_loops():
        model = dataclasses.replace(config.model, scan_layers=False)
        config = dataclasses.replace(config, model=model)
    if objective is None:
        assert isinstance(config, Config), "another kind of run names its objective"
        objective = pretraining(config)
    stage = config.stages[stage_index]
    sharding.check_batch(stage, mesh)
    graphdef, abstract_params, shardings = abstract_model(objective.create, mesh)
    optimizer = make_optimizer(config.optimizer, abstract_params, objective.is_frozen)
    first_step = sum(earlier.steps for earlier in config.stages[:stage_index])
    rows = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)

    def create(seed: jax.Array) -> TrainState:
        model = objective.create(nnx.Rngs(jax.random.key(seed)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return TrainState(jnp.int32(0), params, optimizer.init(params), jnp.bool_(True))

    def is_absent(moment: Any) -> bool:  # that of a frozen parameter
        return isinstance(moment, optax.MaskedNode)

    # Moments live where their parameters do; everything else is whole on every device.
    by_shape = jax.eval_shape(create, 0)
    state_shardings = TrainState(
        whole,
        shardings,
        optax.tree_map_params(
            optimizer,
            lambda moment, place: moment if is_absent(moment) else place,
            by_shape.opt_state,
            shardings,
            transform_non_params=lambda _: whole,
            is_leaf=is_absent,
        ),
        whole,
    )
    abstract_state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        by_shape,
        state_shardings,
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        keys = ops.row_keys(
            jnp.uint32(config.train.seed),
            state.step.astype(jnp.uint32),
            jnp.arange(stage.batch_size, dtype=jnp.uint32),
        )

        def loss_of(params: Any, *arguments: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return objective.loss(nnx.merge(graphdef, params), *arguments, state.step)

        grads, metrics = accumulate(loss_of, state.params, batch, keys, stage.accumulation)
        rate = learning_rate(stage.schedule, stage.steps, state.step - first_step)
        norm = optax.tree.norm(grads)
        clip = config.optimizer.clip_norm
        factor = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12)) if clip else jnp.float32(1)
        grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        keep = finite & state.healthy
        updated = TrainState(state.step + 1, params, opt_state, jnp.bool_(True))
        state = dataclasses.replace(
            jax.tree.map(lambda new, old: jnp.where(keep, new, old), updated, state), healthy=keep
        )
        return state, metrics | {"grad_norm": norm, "learning_rate": rate, "finite": keep}

    def measured(function: Callable[[Any, Batch], Sums]) -> Callable[[Any, Batch], Sums]:
        return jax.jit(
            lambda params, batch: function(nnx.merge(graphdef, params), batch),
            in_shardings=(shardings, rows),
            out_shardings=whole,
        )

    represented = objective.representations
    return Training(
        init=jax.jit(create, out_shardings=state_shardings),
        abstract_state=abstract_state,
        batch_sharding=rows,
        train_step=jax.jit(
            train_step,
            in_shardings=(state_shardings, rows),
            out_shardings=(state_shardings, whole),
            donate_argnums=0,
        ),
        evaluate=measured(objective.evaluate),
        representations=measured(represented) if represented is not None else None,
    )


def abstract_model(create: Callable[[nnx.Rngs], nnx.Module], mesh: Mesh) -> tuple[Any, Any, Any]:
    """Returns the model's graph, its parameters' shapes and their shardings, as plain dicts."""
    model = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    return (
        graphdef,
        nnx.to_pure_dict(state),
        nnx.to_pure_dict(sharding.parameter_shardings(state, mesh)),
    )


def pretraining(config: Config) -> Objective:
    """Returns the objective of a pre-training run: MLM, and the regularisers that are on.

    Raises:
        UsageError: a model with a decoder.
    """
    if config.model.decoder.num_layers:
        raise UsageError(
            f"config.model.decoder.num_layers={config.model.decoder.num_layers}: pre-training and "
            "its measures are of an encoder alone; expected 0"
        )
    unit = config.objective.head_unit

    def evaluate(model: MaskedLM, batch: Batch) -> Sums:
        sums, hidden = _similarities(model, unit, batch)
        logits = model.logits(hidden, batch["predict_positions"])
        return sums | masked_lm.masked_lm(logits, batch["predict_ids"], batch["predict_weights"])

    return Objective(
        create=lambda rngs: MaskedLM(config.model, rngs=rngs),
        loss=functools.partial(_loss, config.objective),
        evaluate=evaluate,
        representations=lambda model, batch: _similarities(model, unit, batch)[0],
    )


def objective_weights(config: ObjectiveConfig, step: jax.Array) -> dict[str, jax.Array]:
    """Returns the weight of each regulariser that is on, at a step (a linear warm-up)."""
    share = jnp.minimum(1.0, (step + 1) / max(config.weight_warmup_steps, 1))
    weights = {"token_cosine": config.token_weight, "head_cosine": config.head_weight}
    return {name: weight * share for name, weight in weights.items() if weight}


def denominators(config: ObjectiveConfig, num_layers: int, batch: Batch) -> dict[str, jax.Array]:
    """Returns the weight of each term over a batch: a function of the batch alone."""
    tokens = mth.has_others(batch["segment_ids"]).sum()
    layers = num_layers if config.head_layers == "all" else 1
    return {
        "mlm_loss": batch["predict_weights"].sum(),
        "mlm_accuracy": batch["predict_weights"].sum(),
        "token_cosine": tokens,
        "head_cosine": tokens * layers,
    }


def accumulate(
    loss_of: Callable[..., Any], params: Any, batch: Batch, keys: jax.Array, microbatches: int
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns gradients and metrics of a batch, summed over equal microbatches.

    Every term is divided by its weight over the whole batch, which is known before the backward
    pass, so any split gives the same result.

    Args:
        loss_of: `(params, microbatch, keys, whole batch) -> (loss, metrics)`.
        params: what to differentiate.
        batch: the whole batch.
        keys: dropout keys `[B]`.
        microbatches: a divisor of B.
    """
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    if microbatches == 1:
        (loss, metrics), grads = gradient(params, batch, keys, batch)
        return grads, metrics | {"loss": loss}

    # Row b goes to microbatch b % microbatches: each device keeps its rows.
    def split(leaf: jax.Array) -> jax.Array:
        return jnp.moveaxis(leaf.reshape(-1, microbatches, *leaf.shape[1:]), 1, 0)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        microbatch, micro_keys = part
        (loss, metrics), grads = gradient(params, microbatch, micro_keys, batch)
        return jax.tree.map(jnp.add, total, (grads, metrics | {"loss": loss})), None

    parts = jax.tree.map(split, (batch, keys))
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    rest = jax.tree.map(lambda leaf: leaf[1:], parts)
    (loss, metrics), grads = gradient(params, *first, batch)
    start = (grads, metrics | {"loss": loss})
    total, _ = jax.lax.scan(add, start, rest, unroll=distributed.mixes_up_loops())
    return total


def _loss(
    objective: ObjectiveConfig,
    model: MaskedLM,
    batch: Batch,
    keys: jax.Array,
    whole_batch: Batch,
    step: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    weights = objective_weights(objective, step)
    statistic = None
    if "head_cosine" in weights:
        statistic = functools.partial(
            mth.head_cosine, segment_ids=batch["segment_ids"], unit=objective.head_unit
        )
    out = model.encoder(
        batch["input_ids"],
        batch["segment_ids"],
        batch["positions"],
        dropout_keys=keys,
        statistic=statistic,
        statistic_layers=objective.head_layers,
    )
    logits = model.logits(out.hidden, batch["predict_positions"])
    sums = masked_lm.masked_lm(logits, batch["predict_ids"], batch["predict_weights"])
    if "token_cosine" in weights:
        sums["token_cosine"] = mth.token_cosine(out.hidden, batch["segment_ids"])
    if "head_cosine" in weights:
        sums["head_cosine"] = jax.tree.map(jnp.sum, out.statistics)
    totals = denominators(objective, model.encoder.config.num_layers, whole_batch)
    metrics = {name: sums[name][0] / jnp.maximum(totals[name], 1) for name in sums}
    loss = metrics["mlm_loss"]
    for name, weight in weights.items():
        loss += weight * metrics[name]
    return loss, metrics


def _similarities(model: MaskedLM, unit: str, batch: Batch) -> tuple[Sums, jax.Array]:
    """Returns the token and head similarities, overall and of each layer, and the hidden states."""
    segment_ids = batch["segment_ids"]
    out = model.encoder(
        batch["input_ids"],
        segment_ids,
        batch["positions"],
        statistic=functools.partial(mth.head_cosine, segment_ids=segment_ids, unit=unit),
    )
    head_sum_l, head_weight_l = out.statistics
    sums = {
        "token_cosine": mth.token_cosine(out.hidden, segment_ids),
        "token_abs_cosine": mth.token_absolute_cosine(out.hidden, segment_ids),
        "head_cosine": (head_sum_l.sum(), head_weight_l.sum()),
        "head_cosine_by_layer": (head_sum_l, head_weight_l),
    }
    return sums, out.hidden
