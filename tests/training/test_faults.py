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
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.training import checkpoint
from ddrp_jax.training.pretrained import load_pretrained
from ddrp_jax.training.pretraining import pretrain

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

    if save_every:
        again = ddrp(*command, "--workdir", workdir)
        assert again.returncode == 1
        assert again.stderr.splitlines()[-1] == message


@pytest.fixture(scope="module")
def short_run(tiny_records, tmp_path_factory):
    """A folder with `records` and a `run` of four steps on them."""
    folder = tmp_path_factory.mktemp("short")
    shutil.copytree(tiny_records, folder / "records")
    result = ddrp(*arguments("records", *SHORT), "--workdir", "run", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def folder(short_run, tmp_path):
    return shutil.copytree(short_run, tmp_path / "folder")


def test_a_run_may_start_from_the_parameters_of_another(folder):
    command = arguments("records", *SHORT)
    init = ["--init", "run/checkpoints/4"]
    result = ddrp(*command, "--workdir", "second", *init, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "starting from the parameters of run/checkpoints/4" in result.stderr
    # Same rows, masks and dropout as the first run's, on parameters that have learnt something.
    before, after = events(folder / "run")[0], events(folder / "second")[0]
    assert after["tokens_seen"] == before["tokens_seen"]
    assert after["mlm_loss"] < before["mlm_loss"]
    # The run's own checkpoints come first from now on, even when the other run is gone.
    shutil.rmtree(folder / "run")
    result = ddrp(*command, "--workdir", "second", *init, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stderr


def test_init_names_every_parameter_that_does_not_fit(folder):
    other = ["--config.model.position.kind=absolute", "--config.model.intermediate_size=48"]
    command = arguments("records", *SHORT, *other, "--init", "run")
    result = ddrp(*command, "--workdir", "second", cwd=folder)
    assert result.returncode == 1
    assert "encoder/embeddings/position: missing in the checkpoint" in result.stderr
    assert re.search(r"encoder/\S*distance\S*: not in this model", result.stderr)
    assert "(2, 32, 64) in the checkpoint, (2, 32, 48) in this model" in result.stderr
    assert not (folder / "second").exists()


@pytest.fixture(scope="module")
def other_records(tmp_path_factory):
    """Records made with another tokenizer."""
    return write_records(tmp_path_factory.mktemp("other"), seed=1)


def test_records_made_anew_with_another_tokenizer(folder, other_records):
    shutil.rmtree(folder / "records")
    shutil.copytree(other_records, folder / "records")
    longer = arguments("records", *SHORT, "--config.stages[0].steps=5")
    for workdir, more in (("run", []), ("new", ["--init", "run"])):
        result = ddrp(*longer, "--workdir", workdir, *more, cwd=folder)
        assert result.returncode == 2
        assert "made with another tokenizer than checkpoint" in result.stderr
    assert not (folder / "new").exists()


def test_other_rows_under_the_same_name_are_not_trained_on(folder):
    index = json.loads((folder / "records" / "index.json").read_text())
    index["splits"]["train"]["unigram_entropy"] += 0.5
    (folder / "records" / "index.json").write_text(json.dumps(index))
    longer = arguments("records", *SHORT, "--config.stages[0].steps=5")
    result = ddrp(*longer, "--workdir", "run", cwd=folder)
    assert result.returncode == 1
    assert "data state: records was" in result.stderr


def refused(error_class, workdir, config, *overrides, init=None):
    """Starts a run in this process, sees it refused, and returns the message."""
    with pytest.raises(DdrpError) as error:
        pretrain(load_config(config, overrides), workdir, init=init)
    assert error.type is error_class
    assert not workdir.exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.stages[0].records=nowhere", "records='nowhere': no index.json there"),
        ("--config.stages[0].records=", "config.stages[0].records=''"),
        ("--config.model.vocab_size=40", "beyond the model's vocab_size=40"),
        ("--config.masking.max_predictions=2", "masking.max_predictions=2"),
        ("--config.model.num_heads=3", "config.model.num_heads=3: expected a divisor"),
        ("--config.model.position.max_distance=0", "max_distance=0: expected at least 1"),
        ("--config.mesh.fsdp=7", "is not the number of devices"),
        ("--config.stages[0].batch_size=6", "do not divide over data x fsdp = 8 devices"),
        ("--config.train.eval_batch_size=6", "eval_batch_size=6: expected a multiple of the 8"),
    ],
)
def test_a_request_that_cannot_be_right_leaves_nothing(tiny_records, tmp_path, override, message):
    records = f"--config.stages[0].records={tiny_records}"
    assert message in refused(UsageError, tmp_path / "run", str(CONFIG), records, override)


def test_an_init_that_is_not_there_leaves_nothing(tiny_records, tmp_path):
    records = f"--config.stages[0].records={tiny_records}"
    init = tmp_path / "nowhere"
    message = refused(UsageError, tmp_path / "run", str(CONFIG), records, init=init)
    assert f"checkpoint '{init}': no such folder" in message


def test_records_of_two_tokenizers(tiny_records, other_records, tmp_path):
    message = refused(
        UsageError,
        tmp_path / "run",
        f"{CONFIG}:two_stages",
        f"--config.stages[0].records={tiny_records}",
        f"--config.stages[1].records={other_records}",
    )
    assert f"records '{other_records}' were made with tokenizer" in message


def test_a_truncated_record_file(tiny_records, tmp_path):
    records = shutil.copytree(tiny_records, tmp_path / "records")
    file = next((records / "train").glob("tokens-*.bin"))
    file.write_bytes(file.read_bytes()[:-2])
    message = refused(
        DdrpError, tmp_path / "run", str(CONFIG), f"--config.stages[0].records={records}"
    )
    assert message.startswith(f"{file}: ")
