"""What must not go wrong quietly: losses that are not finite, records that do not fit."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from tiny_run import CONFIG, ddrp, events, write_records

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.data.pipeline import train_batches
from ddrp_jax.data.records import open_records
from ddrp_jax.training import checkpoint
from ddrp_jax.training.pretrained import load_pretrained

# One set of numbers for all short runs, so that they share their compiled step.
SHORT = ["--config.stages[0].steps=4", "--config.train.eval_every=0"]

# A test reads an array back as it lies there, which orbax warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def arguments(records, *overrides):
    return [
        "pretrain",
        f"--config={CONFIG}",
        f"--config.stages[0].records={records}",
        "--noconfig.train.tensorboard",
        *overrides,
    ]


def rows_of_step(records, step):
    """The rows that step `step` (from 1) of the tiny config trains on."""
    config = load_config(str(CONFIG))
    opened = open_records(records)
    batches = train_batches(
        opened, opened.tokenizer(), config.stages[0], config.masking, seed=0, start_step=step - 1
    )
    rows = next(batches)["row"].tolist()
    batches.close()
    return rows


# With a first update of 1e30 the second step's loss overflows.
@pytest.mark.parametrize("save_every", [0, 1])
def test_a_loss_that_is_not_finite(tiny_records, tmp_path, save_every):
    workdir = tmp_path / "run"
    command = arguments(
        tiny_records,
        "--config.stages[0].schedule.peak=1e30",
        "--config.stages[0].schedule.warmup_steps=0",
        f"--config.train.save_every={save_every}",
        "--config.train.eval_every=0",
    )
    result = ddrp(*command, "--workdir", workdir)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith("ddrp pretrain: error: step 2: loss ")
    rows = re.search(r"rows ([\d, ]+) of ", message).group(1)
    assert [int(row) for row in rows.split(", ")] == rows_of_step(tiny_records, 2)
    # The last good state is there, and it is the one before the step.
    newest = checkpoint.find_checkpoint(workdir)
    assert newest.name == "1"
    assert f"saved as {newest}" in message
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(load_pretrained(newest).params))
    arrays = ocp.load_checkpointables(newest / "arrays", {"optimizer": None})
    assert bool(arrays["optimizer"]["healthy"])
    progress = checkpoint.read_progress(newest)
    assert progress["iterator"]["step"] == 1
    assert progress["tokens_seen"] == events(workdir)[0]["tokens_seen"]
    assert [event["step"] for event in events(workdir)] == [1, 2]

    again = ddrp(*command, "--workdir", workdir)
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1] == message


def test_a_run_may_start_from_the_state_before_the_loss_was_lost(tiny_records, tmp_path):
    command = arguments(tiny_records, *SHORT)
    first = ddrp(*command, "--workdir", tmp_path / "first")
    assert first.returncode == 0, first.stderr
    init = ["--init", tmp_path / "first" / "checkpoints" / "4"]
    second = ddrp(*command, "--workdir", tmp_path / "second", *init)
    assert second.returncode == 0, second.stderr
    assert "starting from the parameters of" in second.stderr
    # Same rows, masks and dropout as the first run's, on parameters that have learnt something.
    before, after = events(tmp_path / "first")[0], events(tmp_path / "second")[0]
    assert after["tokens_seen"] == before["tokens_seen"]
    assert after["mlm_loss"] < before["mlm_loss"]
    # The run's own checkpoints come first from now on, even when the other run is gone.
    shutil.rmtree(tmp_path / "first")
    third = ddrp(*command, "--workdir", tmp_path / "second", *init)
    assert third.returncode == 0, third.stderr
    assert "nothing to do" in third.stderr


def test_init_names_every_parameter_that_does_not_fit(tiny_records, tmp_path):
    first = ddrp(*arguments(tiny_records, *SHORT), "--workdir", tmp_path / "first")
    assert first.returncode == 0, first.stderr
    other = [
        "--config.model.position.kind=absolute",
        "--config.model.intermediate_size=48",
        "--init",
        tmp_path / "first",
    ]
    result = ddrp(*arguments(tiny_records, *SHORT, *other), "--workdir", tmp_path / "second")
    assert result.returncode == 1
    assert "encoder/embeddings/position: missing in the checkpoint" in result.stderr
    assert re.search(r"encoder/\S*distance\S*: not in this model", result.stderr)
    assert "(2, 32, 64) in the checkpoint, (2, 32, 48) in this model" in result.stderr
    assert not (tmp_path / "second").exists()


@pytest.fixture(scope="module")
def other_records(tmp_path_factory):
    """Records made with another tokenizer."""
    return write_records(tmp_path_factory.mktemp("other"), seed=1)


def test_records_of_another_tokenizer(tiny_records, other_records, tmp_path):
    stages = [
        "pretrain",
        f"--config={CONFIG}:two_stages",
        f"--config.stages[0].records={tiny_records}",
        f"--config.stages[1].records={other_records}",
    ]
    result = ddrp(*stages, "--workdir", tmp_path / "run")
    assert result.returncode == 2
    assert f"{other_records}' were made with tokenizer" in result.stderr
    assert not (tmp_path / "run").exists()


def test_records_made_anew_with_another_tokenizer(tiny_records, other_records, tmp_path):
    records = shutil.copytree(tiny_records, tmp_path / "records")
    command = arguments(records, *SHORT)
    first = ddrp(*command, "--workdir", tmp_path / "run")
    assert first.returncode == 0, first.stderr
    shutil.rmtree(records)
    shutil.copytree(other_records, records)
    longer = [*command, "--config.stages[0].steps=5"]
    for workdir, more in (("run", []), ("new", ["--init", tmp_path / "run"])):
        result = ddrp(*longer, "--workdir", tmp_path / workdir, *more)
        assert result.returncode == 2
        assert "made with another tokenizer than checkpoint" in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("override", "status", "message"),
    [
        ("--config.stages[0].records=nowhere", 2, "records='nowhere': no index.json there"),
        ("--config.stages[0].records=", 2, "config.stages[0].records=''"),
        ("--config.model.vocab_size=40", 2, "beyond the model's vocab_size=40"),
        ("--config.masking.max_predictions=2", 2, "masking.max_predictions=2"),
        ("--config.model.num_heads=3", 2, "config.model.num_heads=3: expected a divisor"),
        ("--config.model.position.max_distance=0", 2, "max_distance=0: expected at least 1"),
        ("--config.mesh.fsdp=7", 2, "config.mesh: data=0 x fsdp=7 x tensor=1"),
        ("--config.train.wandb=project", 2, "pip install 'ddrp-jax[wandb]'"),
        ("--init=nowhere", 2, "nowhere': no such folder"),
    ],
)
def test_a_request_that_cannot_be_right_leaves_nothing(
    tiny_records, tmp_path, override, status, message
):
    result = ddrp(*arguments(tiny_records, override), "--workdir", tmp_path / "run", cwd=tmp_path)
    assert result.returncode == status, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_truncated_record_file(tiny_records, tmp_path):
    records = shutil.copytree(tiny_records, tmp_path / "records")
    file = next((records / "train").glob("tokens-*.bin"))
    file.write_bytes(file.read_bytes()[:-2])
    result = ddrp(*arguments(records), "--workdir", tmp_path / "run")
    assert result.returncode == 1
    assert str(file) in result.stderr
    assert not (tmp_path / "run").exists()


def test_other_rows_under_the_same_name_are_not_trained_on(tiny_records, tmp_path):
    records = shutil.copytree(tiny_records, tmp_path / "records")
    command = arguments(records, *SHORT)
    first = ddrp(*command, "--workdir", tmp_path / "run")
    assert first.returncode == 0, first.stderr
    index = json.loads((records / "index.json").read_text())
    index["splits"]["train"]["unigram_entropy"] += 0.5
    (records / "index.json").write_text(json.dumps(index))
    result = ddrp(*command, "--config.stages[0].steps=5", "--workdir", tmp_path / "run")
    assert result.returncode == 1
    assert "records" in result.stderr
