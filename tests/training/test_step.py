"""One step: what it reports, what it decays and clips, and what it refuses to take in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from ddrp_jax.config import (
    Config,
    ObjectiveConfig,
    OptimizerConfig,
    PositionConfig,
    ScheduleConfig,
)
from ddrp_jax.training.step import objective_weights

FIRST_STAGE = 7  # steps
RATE = 0.5


@pytest.fixture(scope="module")
def second_stage():
    """MLM alone in the second stage of a run, with decay and a schedule, and its config."""
    config = small.run_config(
        small.model_config(PositionConfig("ddrp", max_distance=3), norm_order="pre"),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=0.0),
    )
    (stage,) = config.stages
    schedule = ScheduleConfig("linear", peak=RATE, warmup_steps=2)
    stages = (
        dataclasses.replace(stage, name="first", steps=FIRST_STAGE),
        dataclasses.replace(stage, name="second", steps=12, schedule=schedule),
    )
    config = dataclasses.replace(config, stages=stages)
    return small.training(config, stage=1), config


def start(stage, **options):
    training, config = stage
    return small.state_at(training, config, **({"step": FIRST_STAGE} | options))


def host(tree):
    return jax.tree.map(np.array, jax.device_get(tree))  # a copy: the step takes the memory


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_identical(got, wanted):
    got, wanted = flat(got), flat(wanted)
    assert got.keys() == wanted.keys()
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_a_step_with_nothing_masked_decays_kernels_and_touches_no_norm_or_bias(second_stage):
    training, _ = second_stage
    state = start(second_stage)
    before = flat(host(state.params))
    batch = small.batch()
    batch["predict_weights"][:] = 0
    state, metrics = training.train_step(state, batch)
    assert metrics["finite"]
    assert [float(metrics[name]) for name in ("loss", "mlm_loss", "grad_norm")] == [0, 0, 0]
    factor = np.float32(1) - metrics["learning_rate"] * np.float32(0.1)
    assert factor < 0.99
    kernels = 0
    for name, after in flat(host(state.params)).items():
        if "_kernel" in name or "word" in name:
            wanted = before[name] * factor
            np.testing.assert_array_max_ulp(after, wanted, maxulp=1)
            kernels += 1
        else:  # norms, biases and relative tables
            np.testing.assert_array_equal(after, before[name], err_msg=name)
    assert kernels == 6


def test_each_stage_has_its_own_schedule(second_stage):
    training, _ = second_stage
    for done, wanted in ((0, RATE / 2), (1, RATE), (7, RATE / 2), (11, RATE / 10)):
        state = start(second_stage, step=FIRST_STAGE + done)
        state, metrics = training.train_step(state, small.batch())
        assert float(metrics["learning_rate"]) == pytest.approx(wanted, rel=1e-5)
        assert int(state.step) == FIRST_STAGE + done + 1


def test_a_step_takes_the_memory_of_its_state(second_stage):
    training, _ = second_stage
    state = start(second_stage)
    held = state.params["encoder"]["embeddings"]["word"]
    state, _ = training.train_step(state, small.batch())
    assert held.is_deleted()
    assert not state.params["encoder"]["embeddings"]["word"].is_deleted()


def poisoned(stage, path, value):
    """A state with one parameter at a bad value."""
    state = start(stage)
    *folders, name = path.split("/")
    place = state.params
    for folder in folders:
        place = place[folder]
    token = int(small.batch()["input_ids"][0, 0]) if name == "word" else 0
    place[name] = jax.device_put(place[name].at[token].set(value), place[name].sharding)
    return state


@pytest.mark.parametrize(
    ("path", "value", "loss_is_finite"),
    [
        ("encoder/embeddings/word", np.nan, False),
        ("encoder/embeddings/word", np.inf, False),
        # Logits of 1e25 and a gradient whose square overflows.
        ("head/norm/scale", 1e25, True),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_none_after_it_does(
    second_stage, path, value, loss_is_finite
):
    training, _ = second_stage
    good = start(second_stage)
    good, metrics = training.train_step(good, small.batch())  # moments that are not zero
    assert metrics["finite"]
    assert good.healthy
    state = dataclasses.replace(poisoned(second_stage, path, value), opt_state=good.opt_state)
    before = host(state)
    state, metrics = training.train_step(state, small.batch())
    assert not metrics["finite"]
    assert np.isfinite(metrics["loss"]) == loss_is_finite
    assert not np.isfinite(metrics["grad_norm"])
    assert not state.healthy
    assert_identical(host(state), dataclasses.replace(before, healthy=np.bool_(False)))

    # Not even a batch of which nothing is not finite.
    batch = small.batch([[], [], [], [], [], [], [], []])
    before = host(state)
    state, metrics = training.train_step(state, batch)
    assert not metrics["finite"]
    assert_identical(host(state), before)


def test_a_repaired_state_is_still_not_trained_on(second_stage):
    training, _ = second_stage
    state = dataclasses.replace(start(second_stage), healthy=jnp.bool_(False))
    before = host(state)
    state, metrics = training.train_step(state, small.batch())
    assert np.isfinite(metrics["loss"])
    assert not metrics["finite"]
    assert_identical(host(state), before)


# --- MTH, with dropout ---------------------------------------------------------------------------

OBJECTIVE = ObjectiveConfig(token_weight=0.2, head_weight=0.6, weight_warmup_steps=4)


def mth_config(**changes) -> Config:
    model = small.model_config(dropout=0.2, attention_dropout=0.2)
    return small.run_config(model, **({"objective": OBJECTIVE} | changes))


@pytest.fixture(scope="module")
def mth():
    config = mth_config()
    return small.training(config), config


def test_weights_of_the_regularisers_warm_up(mth):
    training, _ = mth
    for step, share in ((0, 0.25), (1, 0.5), (3, 1.0), (9, 1.0)):
        _, metrics = training.train_step(start(mth, step=step), small.batch())
        parts = {name: float(metrics[name]) for name in ("mlm_loss", "token_cosine", "head_cosine")}
        wanted = parts["mlm_loss"] + share * (
            0.2 * parts["token_cosine"] + 0.6 * parts["head_cosine"]
        )
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)
        assert abs(parts["token_cosine"]) > 0.01
        assert parts["head_cosine"] > 0.1


def test_a_weight_of_zero_turns_its_term_off(second_stage):
    training, _ = second_stage
    _, metrics = training.train_step(start(second_stage), small.batch())
    assert not {"token_cosine", "head_cosine"} & metrics.keys()
    assert float(metrics["loss"]) == float(metrics["mlm_loss"])
    weights = objective_weights(ObjectiveConfig(token_weight=0.5), jnp.int32(0))
    assert {name: float(value) for name, value in weights.items()} == {"token_cosine": 0.5}


def test_dropout_is_a_function_of_the_step(mth):
    training, _ = mth

    def loss(step):
        return float(training.train_step(start(mth, step=step), small.batch())[1]["mlm_loss"])

    assert loss(5) == loss(5)
    assert abs(loss(5) - loss(6)) > 1e-3


def test_clipping_scales_the_whole_gradient(mth):
    free, metrics = mth[0].train_step(start(mth), small.batch())
    grads = flat(small.gradient(free))
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)

    config = mth_config(optimizer=OptimizerConfig(b1=0.0, clip_norm=float(norm) / 4))
    training = small.training(config)
    clipped, metrics = training.train_step(small.state_at(training, config, step=7), small.batch())
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)  # as it was
    for name, grad in flat(small.gradient(clipped)).items():
        np.testing.assert_allclose(grad, grads[name] / 4, rtol=1e-4, atol=1e-6, err_msg=name)


def without_dropout(objective):
    config = small.run_config(small.model_config(), objective=objective)
    training = small.training(config)
    state = small.state_at(training, config)
    sums = host(training.evaluate(state.params, small.batch()))
    _, metrics = training.train_step(state, small.batch())
    return host(metrics), sums


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(token_weight=0.2, head_weight=0.6),
        ObjectiveConfig(token_weight=0.2, head_weight=0.6, head_layers="last", head_unit="map"),
    ],
    ids=["queries_of_all_layers", "maps_of_the_last_layer"],
)
def test_training_and_evaluation_measure_the_same(objective):
    metrics, sums = without_dropout(objective)
    for name in ("mlm_loss", "mlm_accuracy", "token_cosine"):
        total, weight = sums[name]
        assert float(metrics[name]) == pytest.approx(total / weight, rel=1e-5), name
    total, weight = sums["head_cosine_by_layer"]
    assert total.shape == weight.shape == (2,)
    np.testing.assert_allclose(sums["head_cosine"], (total.sum(), weight.sum()), rtol=1e-5)
    if objective.head_layers == "last":
        total, weight = total[-1:], weight[-1:]
    assert float(metrics["head_cosine"]) == pytest.approx(total.sum() / weight.sum(), rel=1e-5)
    # Weights are numbers of tokens: those of segments of two or more, and predictions.
    segment_ids = small.batch()["segment_ids"]
    count = sum(
        (row == n).sum() for row in segment_ids for n in set(row) - {0} if (row == n).sum() > 1
    )
    assert sums["token_cosine"][1] == sums["head_cosine_by_layer"][1][0] == count
    assert sums["mlm_loss"][1] == small.batch()["predict_weights"].sum()


def test_evaluation_adds_up_over_batches_and_filler_rows_count_nothing(mth):
    """Each half of the batch is filled up with rows of nothing, as a last batch is."""
    training, _ = mth
    params = start(mth).params
    whole = small.batch()
    parts = []
    for rows in (slice(0, 4), slice(4, 8)):
        part = {name: np.zeros_like(value) for name, value in whole.items()}
        for name, value in whole.items():
            part[name][: rows.stop - rows.start] = value[rows]
        parts.append(host(training.evaluate(params, part)))
    added = jax.tree.map(np.add, *parts)
    sums = host(training.evaluate(params, whole))
    for name, pair in sums.items():
        np.testing.assert_allclose(added[name], pair, rtol=1e-5, err_msg=name)
    # The function of the similarities alone gives the same ones.
    similar = host(training.representations(params, whole))
    assert sums.keys() - similar.keys() == {"mlm_loss", "mlm_accuracy"}
    for name, pair in similar.items():
        np.testing.assert_allclose(pair, sums[name], rtol=1e-5, err_msg=name)


def test_training_learns(mth):
    """The same batch again and again: its tokens are learned by heart."""
    training, _ = mth
    state, losses = start(mth), []
    for _ in range(60):
        state, metrics = training.train_step(state, small.batch())
        losses.append(float(metrics["mlm_loss"]))
    assert losses[-1] < 0.3 * losses[0]
