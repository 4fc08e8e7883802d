"""What a run counts, measures and writes."""

import json
import time

import jax
import numpy as np
import pytest
from tiny_run import CONFIG, ddrp, events, write_records

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.config import MeshConfig, ObjectiveConfig
from ddrp_jax.data.pipeline import train_batches
from ddrp_jax.data.records import open_records
from ddrp_jax.training import checkpoint
from ddrp_jax.training.evaluation import evaluate, held_out_batches
from ddrp_jax.training.pretraining import with_loss
from ddrp_jax.training.sharding import batch_sharding, make_mesh


def overrides(records, **train):
    values = [f"--config.train.{name}={value}" for name, value in train.items()]
    return [f"--config.stages[0].records={records}", *values]


@pytest.fixture(scope="module")
def run(tiny_records, tmp_path_factory):
    """A run that logs every third step and measures similarities every fourth."""
    workdir = tmp_path_factory.mktemp("loop") / "run"
    changes = overrides(
        tiny_records, log_every=3, representations_every=4, eval_every=5, save_every=0
    )
    before = time.perf_counter()
    result = ddrp("pretrain", f"--config={CONFIG}", *changes, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    return load_config(str(CONFIG), changes), workdir, time.perf_counter() - before


def test_which_steps_are_written(run):
    _, workdir, _ = run
    written = [(event["step"], event["split"]) for event in events(workdir)]
    assert [step for step, split in written if split == "train"] == [3, 4, 6, 8, 9, 12]
    assert [step for step, split in written if split == "heldout"] == [5, 10, 12]
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["12"]


def test_what_a_line_holds(run):
    _, workdir, elapsed = run
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {"step", "split", "loss", "mlm_loss", "mlm_accuracy", "token_cosine", "head_cosine"}
    times = {"seconds_training", "seconds_compiling", "seconds_evaluating", "seconds_saving"}
    train = losses | times | {"grad_norm", "learning_rate", "tokens_per_second", "tokens_seen"}
    similarities = {"token_abs_cosine", "head_cosine_by_layer"}
    for line in lines:
        if line["split"] == "heldout":
            assert set(line) == losses | times | similarities | {"tokens_seen"}
        else:
            assert set(line) == train | (similarities if line["step"] in (4, 8, 12) else set())
        assert None not in line.values()
    last = lines[-1]
    assert all(last[name] > 0 for name in times - {"seconds_saving"})
    assert sum(last[name] for name in times) <= elapsed


def test_tokens_are_counted_without_padding(run):
    config, workdir, _ = run
    records = open_records(config.stages[0].records)
    batches = train_batches(
        records, records.tokenizer(), config.stages[0], config.masking, seed=config.train.seed
    )
    seen, counts = 0, {}
    for step in range(1, 13):
        for row in next(batches)["segment_ids"]:
            seen += sum(int(segment) != 0 for segment in row)
        counts[step] = seen
    batches.close()
    assert counts[12] < 12 * 8 * 32
    for event in events(workdir):
        assert event["tokens_seen"] == counts[event["step"]]


def test_the_learning_rate_written_is_the_one_used(run):
    config, workdir, _ = run
    schedule, steps = config.stages[0].schedule, config.stages[0].steps
    for event in events(workdir):
        if event["split"] == "train":
            done = event["step"] - 1
            left = (steps - done) / (steps - schedule.warmup_steps)
            expected = schedule.peak * min((done + 1) / schedule.warmup_steps, left, 1)
            np.testing.assert_allclose(event["learning_rate"], expected, rtol=1e-6)


def test_the_config_written_is_resolved(run):
    config, workdir, _ = run
    written = json.loads((workdir / "config.json").read_text())
    assert config.model.vocab_size == 0
    assert written["model"]["vocab_size"] == 60
    assert written == checkpoint.read_config(workdir / "checkpoints" / "12")


def test_the_held_out_loss_goes_with_its_checkpoint(run):
    _, workdir, _ = run
    assert checkpoint.read_loss(workdir / "checkpoints" / "12") == events(workdir)[-1]["mlm_loss"]


def test_tensorboard_events_are_written(run):
    _, workdir, _ = run
    assert len(list((workdir / "tensorboard").iterdir())) == 1


def test_records_that_hold_nothing_out(tmp_path):
    records = write_records(tmp_path / "corpus", holdout=0.0)
    changes = overrides(records, save_every=0, tensorboard="false")
    result = ddrp("pretrain", f"--config={CONFIG}", *changes, "--workdir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "holds nothing out, so nothing is evaluated" in result.stderr
    assert {event["split"] for event in events(tmp_path / "run")} == {"train"}
    assert checkpoint.read_loss(tmp_path / "run" / "checkpoints" / "12") is None


def test_means_are_over_all_tokens_of_all_batches():
    draw = np.random.default_rng(0)
    sizes = [1, 9, 4]
    nll = [draw.normal(size=size) for size in sizes]
    cosine_ln = [draw.normal(size=(2, size)) for size in sizes]

    def function(params, batch):
        number = int(batch["number"][0])
        layers, size = cosine_ln[number].sum(-1), sizes[number]
        return {
            "mlm_loss": (nll[number].sum(), size),
            "token_cosine": (np.float32(0), np.float32(0)),
            "head_cosine": (layers.sum(), 2 * size),
            "head_cosine_by_layer": (layers, np.full(2, size)),
        }

    batches = [{"number": np.array([n]), "row": np.array([-1])} for n in range(3)]
    where = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1]))
    mlm = sum(value for part in nll for value in part) / 14
    layers = [sum(value for part in cosine_ln for value in part[layer]) / 14 for layer in (0, 1)]
    for head_layers, cosine in (("all", sum(layers) / 2), ("last", layers[1])):
        objective = ObjectiveConfig(head_weight=0.5, head_layers=head_layers)
        means = with_loss(evaluate(function, None, batches, where), objective)
        np.testing.assert_allclose(means["mlm_loss"], mlm, rtol=1e-6)
        np.testing.assert_allclose(means["head_cosine_by_layer"], layers, rtol=1e-6)
        np.testing.assert_allclose(means["loss"], mlm + 0.5 * cosine, rtol=1e-6)
        assert np.isnan(means["token_cosine"])


def test_every_run_is_measured_on_the_same_masked_rows(tiny_records):
    records = open_records(tiny_records)
    first, second = (
        held_out_batches(records, records.tokenizer(), load_config(str(CONFIG), changes), 0)
        for changes in (overrides(tiny_records, seed=0), overrides(tiny_records, seed=1))
    )
    assert len(first) == len(second) == 2
    for batch, other in zip(first, second, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])
