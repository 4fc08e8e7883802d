"""What a run counts, measures and writes."""

import json
import shutil
import time

import jax
import numpy as np
import pytest
from tiny_run import CONFIG, ddrp, events, write_records

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.config import MeshConfig, ModelConfig, ObjectiveConfig
from ddrp_jax.data.pipeline import train_batches
from ddrp_jax.data.records import open_records
from ddrp_jax.training import checkpoint, hardware, metrics
from ddrp_jax.training.evaluation import evaluate, held_out_batches
from ddrp_jax.training.pretraining import with_loss
from ddrp_jax.training.sharding import batch_sharding, make_mesh


def overrides(records, **train):
    values = [f"--config.train.{name}={value}" for name, value in train.items()]
    return [f"--config.stages[0].records={records}", *values]


def changes(records):
    return overrides(records, log_every=3, representations_every=4, eval_every=5, save_every=0)


@pytest.fixture(scope="module")
def run(tiny_records, tmp_path_factory):
    """A run that logs every third step and measures similarities every fourth."""
    workdir = tmp_path_factory.mktemp("loop") / "run"
    arguments = changes(tiny_records)
    before = time.perf_counter()
    result = ddrp("pretrain", f"--config={CONFIG}", *arguments, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    return load_config(str(CONFIG), arguments), workdir, time.perf_counter() - before


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
    times = {f"seconds_{name}" for name in metrics.CATEGORIES}
    train = losses | times | {"grad_norm", "learning_rate", "tokens_per_second", "tokens_seen"}
    similarities = {"token_abs_cosine", "head_cosine_by_layer"}
    for line in lines:
        if line["split"] == "heldout":
            assert set(line) == losses | times | similarities | {"tokens_seen"}
        else:
            assert set(line) == train | (similarities if line["step"] in (4, 8, 12) else set())
        assert None not in line.values()
    last = lines[-1]
    assert last["seconds_lost"] == 0
    assert all(last[name] > 0 for name in times - {"seconds_saving", "seconds_lost"})
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


def test_a_resumed_run_counts_what_was_lost_and_traces_the_steps_asked_for(
    run, tiny_records, tmp_path
):
    _, finished, _ = run
    workdir = shutil.copytree(finished, tmp_path / "run")
    spent = sum(checkpoint.read_progress(workdir / "checkpoints" / "12")["seconds"].values())
    with (workdir / "metrics.jsonl").open("a") as file:
        # What a killed life wrote after its last checkpoint.
        file.write(json.dumps({"step": 13, "split": "train", "seconds_training": spent + 7}) + "\n")
    command = ("pretrain", f"--config={CONFIG}", *changes(tiny_records), "--workdir", workdir)
    more = "--config.stages[0].steps=15"
    refused = ddrp(*command, more, "--profile=steps=12:13")
    assert refused.returncode == 2
    assert "this run goes from step 13 to 15" in refused.stderr
    result = ddrp(*command, more, "--profile=steps=13:14")
    assert result.returncode == 0, result.stderr
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert "lost to restarts" in result.stderr
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    np.testing.assert_allclose(last["seconds_lost"], 7, atol=1e-6)


@pytest.mark.parametrize("text", ["3", "steps=3", "steps=3:2", "steps=0:2", "steps=a:b", "3:4"])
def test_a_trace_of_steps_that_cannot_be_is_refused(text, tmp_path):
    result = ddrp(
        "pretrain", f"--config={CONFIG}", "--workdir", tmp_path / "x", f"--profile={text}"
    )
    assert result.returncode == 2
    assert f"--profile='{text}': expected steps=A:B" in result.stderr
    assert not (tmp_path / "x").exists()


def test_goodput_tells_every_share():
    seconds = {"training": 3600.0, "compiling": 300.0, "saving": 60.0, "lost": 40.0}
    line = metrics.goodput(seconds)
    assert line.startswith("goodput: training 90.0 % of 1:06:40; ")
    assert "compiling 7.5 %" in line
    assert "lost to restarts 1.0 %" in line
    assert "waiting for data 0.0 %" in line


def test_the_share_of_the_peak_counts_the_model_s_products_alone():
    """Against a count by hand: a matrix of the model is 6 FLOPs for each token and parameter."""
    model = ModelConfig(
        vocab_size=100, hidden_size=8, num_layers=3, num_heads=2, intermediate_size=16
    )
    rows, length, predictions = 5, 7, 2
    products = [(rows * length, 8, 8)] * 4 + [(rows * length, 8, 16)] * 2
    products += [(rows * length, 8, length)] * 2  # scores, and the weighted sum, of all heads
    head = [(rows * predictions, 8, 8), (rows * predictions, 8, 100)]
    forward = 3 * sum(2 * m * k * n for m, k, n in products)
    forward += sum(2 * m * k * n for m, k, n in head)
    assert hardware.step_flops(model, rows, length, predictions) == 3 * forward
    assert hardware.peak_flops() is None, "a CPU's is not known"
    assert hardware.chip_of("TPU v5 lite").peak_flops == 197e12


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
