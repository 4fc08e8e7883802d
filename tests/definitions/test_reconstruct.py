"""The reconstructor on a small model: its loss, what never changes, resuming, and its rows."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from vocabularies import built, byte_bpe, inputs, wordpiece

from ddrp_jax.config import (
    Config,
    DecoderConfig,
    DefinitionConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PositionConfig,
    ReconstructionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    as_dict,
)
from ddrp_jax.definitions.measure import measure_reconstruction, row_measures
from ddrp_jax.definitions.reconstruct import (
    Reconstruction,
    Reconstructor,
    load_reconstructor,
    objective,
    table_fingerprint,
    train_reconstructor,
    word_table,
)
from ddrp_jax.definitions.ridge import fit_ridge
from ddrp_jax.errors import UsageError
from ddrp_jax.models.seq2seq import build_model
from ddrp_jax.training import checkpoint
from ddrp_jax.training.evaluation import put
from ddrp_jax.training.sharding import make_mesh
from ddrp_jax.training.step import abstract_model

LENGTH = 80


def save_model(folder, tokenizer, **changes):
    """Saves a random model as a checkpoint of its own."""
    values = {
        "vocab_size": tokenizer.vocab_size,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "position": PositionConfig(kind="absolute"),
        "max_length": LENGTH,
        "pad_id": tokenizer.pad_id,
        "initializer": "fan_in",
    }
    model = ModelConfig(**(values | changes))
    params = nnx.to_pure_dict(nnx.state(build_model(model, rngs=nnx.Rngs(0)), nnx.Param))
    folder.mkdir()
    checkpoint.save_alone(
        folder,
        {"params": params},
        config=as_dict(Config(model=model, stages=(StageConfig(length=LENGTH),))),
        tokenizer=tokenizer,
        step=0,
        progress={"step": 0},
    )
    return SimpleNamespace(path=folder, config=model)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = wordpiece(folder / "tokenizer")
    made = save_model(folder / "model", tokenizer)
    made.examples = built(folder, tokenizer, holdout=0.25)
    return made


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart")
    tokenizer = byte_bpe(folder / "tokenizer")
    decoder = DecoderConfig(num_layers=2)
    made = save_model(folder / "model", tokenizer, position_offset=2, decoder=decoder)
    made.examples = built(folder, tokenizer, holdout=0.25)
    return made


def config_of(made, *, steps=4, train=None, **reconstruction):
    stage = StageConfig(
        records=str(made.examples.path),
        length=LENGTH,
        batch_size=8,
        steps=steps,
        schedule=ScheduleConfig("constant", peak=0.01),
    )
    every = {"log_every": 1, "eval_every": 2, "save_every": 2, "tensorboard": False}
    if made.config.decoder.num_layers:
        reconstruction = {"reconstruct_definitions": False} | reconstruction
    return DefinitionConfig(
        model=made.config,
        stages=(stage,),
        optimizer=OptimizerConfig(weight_decay=0.5),
        train=TrainConfig(**(every | (train or {}))),
        reconstruction=ReconstructionConfig(checkpoint=str(made.path), **reconstruction),
    )


def first_state(task):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    training = task.training(0, mesh)
    state = training.init(0)
    state.params = task.init_params(mesh)
    batches = task.batches(0, 0)
    placed = put(next(batches), training.batch_sharding)
    batches.close()
    return training, state, placed


def named(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def test_the_loss_is_the_error_over_all_wanted_rows(encoder):
    task = Reconstruction(config_of(encoder))
    _, state, batch = first_state(task)
    graphdef, _, _ = abstract_model(
        objective(task.config).create, make_mesh(MeshConfig(), jax.devices()[:1])
    )
    model = nnx.merge(graphdef, state.params)
    loss, metrics = objective(task.config).loss(model, batch, None, batch, state.step)
    table = word_table(encoder.path, encoder.config.vocab_size).astype(np.float64)
    predictions = np.asarray(model(batch), np.float64)
    errors, slots = [], []
    for row, place in np.argwhere(np.asarray(batch["target_weights"]) > 0):
        difference = predictions[row, place] - table[int(batch["target_ids"][row, place])]
        errors.append(100 / 16 * np.square(difference).sum())
        if batch["slot_weights"][row, place]:
            slots.append(errors[-1])
    assert 0 < len(slots) < len(errors)
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-4)
    np.testing.assert_allclose(metrics["slot_error"], np.mean(slots), rtol=1e-4)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "bart"])
def test_the_teacher_never_changes_and_a_frozen_table_neither(kind, trained, request):
    made = request.getfixturevalue(kind)
    task = Reconstruction(config_of(made, train_embeddings=trained))
    training, state, batch = first_state(task)
    before = named(jax.device_get(state.params))
    for _ in range(3):
        state, metrics = training.train_step(state, batch)
    after = named(jax.device_get(state.params))
    assert metrics["finite"]
    (word,) = [name for name in before if name.endswith("embeddings/word")]
    kept = {"teacher"} if trained else {word}
    assert ("teacher" in before) == trained
    for name in before:
        if name in kept:
            np.testing.assert_array_equal(after[name], before[name])
        elif name != "student/final_logits_bias":  # no part of this
            assert (after[name] != before[name]).any(), name
    moments = [name for name in named(state.opt_state) if name.endswith(tuple(kept))]
    assert not moments, "a frozen table needs no moments"


def test_no_gradient_reaches_the_targets(encoder):
    """With the student's table frozen, the loss is a constant of it, by finite differences."""
    task = Reconstruction(config_of(encoder, train_embeddings=False))
    _, state, batch = first_state(task)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    graphdef, _, _ = abstract_model(objective(task.config).create, mesh)

    def loss(params):
        model = nnx.merge(graphdef, params)
        return objective(task.config).loss(model, batch, None, batch, state.step)[0]

    gradient = jax.grad(loss)(state.params)
    assert not np.asarray(gradient["student"]["embeddings"]["word"]).any()
    assert np.asarray(gradient["map_kernel"]).any()


@pytest.mark.parametrize("kind", ["encoder", "bart"])
def test_packed_rows_give_what_examples_give_alone(kind, request):
    made = request.getfixturevalue(kind)
    task = Reconstruction(config_of(made))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = task.init_params(mesh)
    reader = load_from(params, task, mesh)
    examples = made.examples
    rows = reader.at_slots(examples, np.arange(len(examples)), hidden=False)
    graphdef, _, _ = abstract_model(objective(task.config).create, mesh)
    model: Reconstructor = nnx.merge(graphdef, params)
    for index in range(0, len(examples), 7):
        ids = np.array([inputs(examples, index)], np.int32)
        ones = np.ones_like(ids)
        batch = {
            "input_ids": ids,
            "segment_ids": ones,
            "positions": np.arange(ids.shape[1], dtype=np.int32)[None],
        }
        place = examples.slot_position[index]
        if kind == "bart":
            shown = ids[0, examples.slot_begin[index] : place]
            start = [2, made.examples.tokenizer().cls_id]
            decoder = np.array([[*start, *shown]], np.int32)
            batch |= {
                "decoder_ids": decoder,
                "decoder_segment_ids": np.ones_like(decoder),
                "decoder_positions": np.arange(decoder.shape[1], dtype=np.int32)[None],
            }
            place = -1
        alone = np.asarray(model(jax.tree.map(jax.numpy.asarray, batch)))[0, place]
        np.testing.assert_allclose(rows[index], alone, rtol=1e-4, atol=1e-4)


def load_from(params, task, mesh):
    from ddrp_jax.definitions.reconstruct import _Frozen

    return _Frozen(task.config, params, mesh, task.tokenizer)


def test_the_map_may_start_from_a_ridge_regression(encoder):
    task = Reconstruction(config_of(encoder, map_init="ridge"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = task.init_params(mesh)
    examples = encoder.examples
    chosen = examples.split("train")
    hidden = load_from(params, task, mesh).at_slots(examples, chosen, hidden=True)
    table = word_table(encoder.path, encoder.config.vocab_size)
    fit = fit_ridge(
        hidden,
        table[examples.target_id[chosen]],
        groups=examples.headword[chosen],
        intercept=False,
    )
    np.testing.assert_allclose(params["map_kernel"], fit.weights, rtol=1e-3, atol=1e-4)


def test_the_rarest_share_is_no_target(encoder):
    plain, filtered = (
        Reconstruction(config_of(encoder, filter_ratio=ratio)) for ratio in (0.0, 0.5)
    )
    size = encoder.config.vocab_size
    ranked = [
        token
        for token in range(size)
        if token not in plain.tokenizer.special_ids
        and "unused" not in plain.tokenizer.id_to_token(token)
    ]
    rare = set(ranked[len(ranked) - round(0.5 * size) :])
    seen = {}
    for name, task in (("plain", plain), ("filtered", filtered)):
        batches = task.batches(0, 0)
        batch = next(batches)
        batches.close()
        seen[name] = set(batch["target_ids"][batch["target_weights"] > 0].tolist())
    held_out = set(encoder.examples.held_out_ids.tolist())
    assert seen["plain"] & rare
    assert not seen["filtered"] & rare
    assert not (seen["plain"] | seen["filtered"]) & held_out


@pytest.fixture(scope="module")
def trained(encoder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "run"
    assert train_reconstructor(config_of(encoder, steps=6), workdir) == 0
    return workdir


def lines(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if not name.startswith("seconds_") and name != "tokens_per_second"
        }
        for line in text.splitlines()
    ]


def test_a_run_goes_on_bit_by_bit(encoder, trained, tmp_path):
    assert train_reconstructor(config_of(encoder, steps=4), tmp_path / "run") == 0
    assert train_reconstructor(config_of(encoder, steps=6), tmp_path / "run") == 0
    whole = {(line["step"], line["split"]): line for line in lines(trained)}
    for line in lines(tmp_path / "run"):
        assert line == whole[line["step"], line["split"]]
    assert lines(tmp_path / "run")[-1]["step"] == 6


def test_what_a_run_writes(encoder, trained):
    written = lines(trained)
    held_out = [line for line in written if line["split"] == "heldout"]
    assert [line["step"] for line in held_out] == [2, 4, 6]
    assert {"loss", "slot_error", "slot_cosine", "relative_error"} <= set(held_out[0])
    assert {"error", "cosine", "slot_error", "slot_cosine"} <= set(written[0])
    config = json.loads((trained / "config.json").read_text())
    table = word_table(encoder.path, encoder.config.vocab_size)
    assert config["reconstruction"]["fingerprint"] == table_fingerprint(table)


def test_the_best_checkpoint_is_the_one_that_is_used(trained):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    losses = {path.name: checkpoint.read_loss(path) for path in (trained / "checkpoints").iterdir()}
    best = min(losses, key=losses.get)
    assert load_reconstructor(trained, mesh).path.name == best


def test_measures_of_held_out_tokens(encoder, trained):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    reconstructor = load_reconstructor(trained, mesh)
    measured = measure_reconstruction(reconstructor, encoder.examples)
    assert set(measured) == {
        "constant",
        *(
            f"{name}, {senses}"
            for name in ("ridge", "reconstructor")
            for senses in ("first", "mean")
        ),
    }
    np.testing.assert_allclose(measured["constant"]["relative_error"], 1.0, rtol=1e-6)
    examples = encoder.examples
    tokens = np.unique(examples.target_id[examples.split("heldout")])
    table = word_table(encoder.path, encoder.config.vocab_size)
    for senses in ("first", "mean"):
        rows = reconstructor.produce(examples, tokens, senses)
        alone = []
        for token in tokens:
            chosen = examples.for_tokens([token], senses)
            values = reconstructor.model.at_slots(examples, chosen, hidden=False)
            alone.append(values.mean(0))
        np.testing.assert_allclose(rows, alone, rtol=1e-4, atol=1e-4)
        wanted = row_measures(rows, table, tokens)
        for name, value in measured[f"reconstructor, {senses}"].items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-4)


def test_row_measures_against_plain_loops():
    draw = np.random.default_rng(0)
    table, tokens = draw.normal(size=(40, 6)), np.array([3, 7, 11, 20])
    rows = table[tokens] + draw.normal(0, 1.0, (4, 6))
    found = row_measures(rows, table, tokens)
    mean = sum(table[token] for token in tokens) / 4
    error = sum(((row - table[t]) ** 2).sum() for row, t in zip(rows, tokens, strict=True))
    constant = sum(((mean - table[token]) ** 2).sum() for token in tokens)
    np.testing.assert_allclose(found["relative_error"], error / constant)

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    hits = {1: 0, 10: 0}
    for row, token in zip(rows, tokens, strict=True):
        order = sorted(range(40), key=lambda other: -cosine(row, table[other]))
        for count in hits:
            hits[count] += token in order[:count]
    assert (found["hits_1"], found["hits_10"]) == (hits[1] / 4, hits[10] / 4)
    cosines = [cosine(row, table[token]) for row, token in zip(rows, tokens, strict=True)]
    np.testing.assert_allclose(found["cosine"], np.mean(cosines))


def test_requests_that_cannot_be_right(encoder, bart, trained, tmp_path):
    with pytest.raises(UsageError, match="a decoder reads the pieces"):
        Reconstruction(config_of(bart, reconstruct_definitions=True))
    mixed = SimpleNamespace(path=encoder.path, config=encoder.config, examples=bart.examples)
    with pytest.raises(UsageError, match="made with another tokenizer"):
        Reconstruction(config_of(mixed))
    other = SimpleNamespace(path=tmp_path / "none", config=encoder.config, examples=bart.examples)
    with pytest.raises(UsageError, match="no such folder"):
        Reconstruction(config_of(other))
    with pytest.raises(UsageError, match="not a reconstructor"):
        load_reconstructor(encoder.path, make_mesh(MeshConfig()))
    assert not (tmp_path / "run").exists()


def test_another_model_s_reconstructor_does_not_go_on(encoder, trained, tmp_path):
    """The same shapes with another word table: the run's target has changed."""
    other = save_model(tmp_path / "model", encoder.examples.tokenizer(), initializer="normal")
    other.config, other.examples = encoder.config, encoder.examples
    with pytest.raises(UsageError, match=r"reconstruction\.fingerprint"):
        train_reconstructor(config_of(other, steps=8), trained)
