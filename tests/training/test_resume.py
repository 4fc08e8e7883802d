"""A run that is killed, stopped or damaged and started again ends as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from tiny_run import CONFIG, DDRP, ddrp, environment, events

from ddrp_jax.config import Config, StageConfig, TrainConfig, as_dict, from_config_dict
from ddrp_jax.errors import UsageError
from ddrp_jax.training import checkpoint, resume

STEPS = 15 + 25

# The tests read arrays back as they lie there, which orbax warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def arguments(tiny_records):
    """A run of two stages with dropout, saved every 5 steps and measured every 4."""
    return [
        "pretrain",
        f"--config={CONFIG}:two_stages",
        f"--config.stages[0].records={tiny_records}",
        f"--config.stages[1].records={tiny_records}",
        "--config.stages[0].steps=15",
        "--config.stages[1].steps=25",
        "--config.train.save_every=5",
        "--config.train.representations_every=10",
        "--noconfig.train.tensorboard",
    ]


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    result = ddrp(*arguments, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    config = from_config_dict(Config, checkpoint.read_config(workdir / "checkpoints" / "40"))
    assert config.model.dropout > 0
    assert config.model.attention_dropout > 0
    return workdir


@pytest.fixture
def copy(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted, tmp_path / "run")


def saved_arrays(workdir):
    from orbax.checkpoint import v1 as ocp

    folder = checkpoint.find_checkpoint(workdir)
    return folder.name, ocp.load_checkpointables(
        folder / "arrays", {"params": None, "optimizer": None}
    )


def assert_same_run(workdir, other):
    assert events(workdir) == events(other)
    (name, arrays), (other_name, other_arrays) = saved_arrays(workdir), saved_arrays(other)
    assert name == other_name
    jax.tree.map(np.testing.assert_array_equal, arrays, other_arrays)


def start(arguments, workdir):
    return subprocess.Popen(
        [str(DDRP), *map(str, arguments), "--workdir", str(workdir)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(process, condition):
    while process.poll() is None and not condition():
        time.sleep(0.001)


def kill(process):
    """Kills; returns whether the process was still at work."""
    process.kill()
    process.stderr.close()
    return process.wait() == -signal.SIGKILL


def stop_while_saving(process, workdir):
    """Freezes the process in the middle of a save, where it comes to one."""

    def is_saving():
        return any((workdir / "checkpoints").glob(".saving-*"))

    while process.poll() is None:
        wait_until(process, is_saving)
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            if is_saving():
                return
            process.send_signal(signal.SIGCONT)


def test_the_reference_run_is_what_it_should_be(uninterrupted):
    train = [event for event in events(uninterrupted) if event["split"] == "train"]
    held_out = [event for event in events(uninterrupted) if event["split"] == "heldout"]
    assert [event["step"] for event in train] == list(range(1, STEPS + 1))
    assert [event["step"] for event in held_out] == list(range(4, STEPS + 1, 4))
    assert ["token_abs_cosine" in event for event in train] == [s % 10 == 0 for s in range(1, 41)]
    assert train[-1]["mlm_loss"] < train[0]["mlm_loss"]


def test_killed_at_random_moments(arguments, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    draw = random.Random(time.time_ns())
    # Before anything is written; between saves; and a kill of a process that has just resumed.
    for more_lines in (0, draw.randint(1, 6), draw.randint(6, 18), draw.randint(1, 18)):
        process = start(arguments, workdir)
        goal = lines(workdir) + more_lines
        wait_until(process, lambda goal=goal: workdir.exists() and lines(workdir) >= goal)
        time.sleep(draw.random() * 0.02)
        assert kill(process)
    result = ddrp(*arguments, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    assert "resuming from step" in result.stderr
    assert_same_run(workdir, uninterrupted)


def test_killed_while_saving(arguments, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    for _ in range(2):
        process = start(arguments, workdir)
        stop_while_saving(process, workdir)
        assert kill(process)
        assert list((workdir / "checkpoints").glob(".saving-*"))
    result = ddrp(*arguments, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    assert_same_run(workdir, uninterrupted)
    assert not list((workdir / "checkpoints").glob(".saving-*"))


def test_sigterm_saves_the_step_and_says_so(arguments, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    process = start(arguments, workdir)
    wait_until(process, lambda: lines(workdir) >= 9)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    newest = checkpoint.find_checkpoint(workdir)
    assert f"stopped by SIGTERM after step {newest.name}, saved as {newest}" in stderr
    assert events(workdir)[-1]["step"] == int(newest.name) < STEPS
    assert "Traceback" not in stderr
    result = ddrp(*arguments, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    assert f"resuming from step {newest.name}" in result.stderr
    assert_same_run(workdir, uninterrupted)


def damage_newest(workdir):
    newest = workdir / "checkpoints" / str(STEPS)
    file = max(
        (newest / "arrays").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    return newest


def test_a_damaged_checkpoint_costs_its_steps_only(arguments, uninterrupted, copy):
    newest = damage_newest(copy)
    (copy / "checkpoints" / "99").mkdir()
    result = ddrp(*arguments, "--workdir", copy)
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert [
        str(path) in line
        for path, line in zip((copy / "checkpoints" / "99", newest), warnings, strict=True)
    ]
    assert "resuming from step 35" in result.stderr
    # The empty folder is not ours to remove, and it does not get in the way.
    shutil.rmtree(copy / "checkpoints" / "99")
    assert_same_run(copy, uninterrupted)


def test_a_run_goes_on_with_another_number_of_devices(arguments, uninterrupted, copy):
    for step in (35, 40):
        shutil.rmtree(copy / "checkpoints" / str(step))
    result = subprocess.run(
        [str(DDRP), *arguments, "--workdir", str(copy)],
        env=environment(devices=8),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "resuming from step 30" in result.stderr
    for event, expected in zip(events(copy), events(uninterrupted), strict=True):
        assert event.keys() == expected.keys()
        for name, value in event.items():
            if name == "split":
                assert value == expected[name]
            else:
                np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)


def test_no_usable_checkpoint_is_never_a_fresh_start(arguments, copy):
    before = (copy / "metrics.jsonl").read_bytes()
    damage_newest(copy)
    for path in (copy / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    result = ddrp(*arguments, "--workdir", copy)
    assert result.returncode == 1
    assert "checkpoints is usable" in result.stderr
    assert "Traceback" not in result.stderr
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_has_nothing_to_do(arguments, uninterrupted, copy):
    result = ddrp(*arguments, "--workdir", copy)
    assert result.returncode == 0
    assert "nothing to do: the run is at step 40" in result.stderr
    assert_same_run(copy, uninterrupted)


def test_what_may_change_on_resume_does(arguments, copy):
    changed = [
        *arguments,
        "--config.stages[1].steps=28",
        "--config.train.log_every=3",
        "--config.train.eval_every=0",
        "--config.train.save_every=0",
        "--config.train.workers=1",
    ]
    result = ddrp(*changed, "--workdir", copy)
    assert result.returncode == 0, result.stderr
    assert "config.stages[1].steps: 25 in the checkpoint, 28 asked for" in result.stderr
    added = [(event["step"], event["split"]) for event in events(copy) if event["step"] > 40]
    assert added == [(42, "train"), (43, "heldout")]
    assert checkpoint.find_checkpoint(copy).name == "43"
    assert checkpoint.read_config(copy / "checkpoints" / "43")["stages"][1]["steps"] == 28


def test_anything_else_is_refused_with_both_values(arguments, copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    changed = [*arguments, "--config.stages[1].schedule.peak=0.5", "--config.train.seed=9"]
    result = ddrp(*changed, "--workdir", copy)
    assert result.returncode == 2
    assert "config.stages[1].schedule.peak: 0.002 in the checkpoint, 0.5 asked for" in result.stderr
    assert "config.train.seed: 0 in the checkpoint, 9 asked for" in result.stderr
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def two_stages(first=10, second=20, **changes):
    stages = (StageConfig(name="a", steps=first), StageConfig(name="b", steps=second, **changes))
    return Config(stages=stages)


@pytest.mark.parametrize(
    ("step", "config", "problem"),
    [
        (5, two_stages(first=12), None),
        (5, two_stages(second=2), None),
        (15, two_stages(second=30), None),
        (15, two_stages(first=12), "stages[0].steps: 10 in the checkpoint, 12 asked for"),
        (10, two_stages(first=9), "stages[0].steps: 10 in the checkpoint, 9 asked for"),
        (15, two_stages(second=4), "14 steps asked for, but the run is at step 15"),
        (5, two_stages(length=64), "stages[1].length: 128 in the checkpoint, 64 asked for"),
        (5, Config(stages=two_stages().stages[:1]), "stages[1].length: 128 in the checkpoint"),
    ],
)
def test_stages_on_resume(step, config, problem):
    saved = as_dict(two_stages())
    if problem is None:
        assert len(resume.check_resume(saved, config, step)) == 1
    else:
        with pytest.raises(UsageError) as error:
            resume.check_resume(saved, config, step)
        assert problem in str(error.value)


def test_every_field_that_may_change_exists():
    leaves = resume._leaves(as_dict(Config()))
    known = {name.replace("[0]", "[*]") for name in leaves}
    assert set(resume.MAY_CHANGE) <= known
    # Every other field of TrainConfig changes what is computed.
    assert {f"train.{name}" for name in as_dict(TrainConfig())} - set(resume.MAY_CHANGE) == {
        "train.seed"
    }


def test_one_process_trains_in_a_folder(arguments, tmp_path):
    workdir = tmp_path / "run"
    process = start(arguments, workdir)
    wait_until(process, lambda: lines(workdir) >= 1)
    process.send_signal(signal.SIGSTOP)  # still there when the second one comes
    second = ddrp(*arguments, "--workdir", workdir)
    assert second.returncode == 1
    assert "another process is training there" in second.stderr
    assert kill(process)


def test_disk_full_while_saving(arguments, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    process = start(arguments, workdir)
    wait_until(process, lambda: (workdir / "checkpoints" / "5").exists())
    assert kill(process)
    # The kernel refuses larger files, as a full disk does: the arrays no longer fit.
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", str(DDRP), *arguments]
    result = subprocess.run(
        [*map(str, limited), "--workdir", str(workdir)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stderr
    assert "disk full while saving the checkpoint of step" in result.stderr
    assert "Traceback" not in result.stderr
    good = checkpoint.find_checkpoint(workdir)
    assert int(good.name) >= 5
    assert os.listdir(workdir / "checkpoints").count(good.name) == 1
    result = ddrp(*arguments, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    assert_same_run(workdir, uninterrupted)
