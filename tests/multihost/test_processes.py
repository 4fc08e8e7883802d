"""Runs of several processes: the same numbers as one, stopped, killed and gone on with."""

import shutil
import signal

import jax
import numpy as np
import pytest
from processes import started
from tiny_run import events

from ddrp_jax.training import checkpoint

STEPS = 12

# The tests read arrays back as they lie there, which orbax warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def arguments(tiny_records):
    """Rows of several segments of uneven lengths, with dropout; measured and saved every 4."""
    return [f"--config.stages[0].records={tiny_records}", "--noconfig.train.tensorboard"]


def finished(count, workdir, arguments):
    """Runs to the end; returns what the processes said."""
    with started(count, workdir, arguments) as run:
        assert run.wait() == [0] * count, run.said(0)
        return [run.said(index) for index in range(count)]


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    finished(1, workdir, arguments)
    return workdir


@pytest.fixture(scope="module")
def together(arguments, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("together") / "run"
    said = finished(2, workdir, arguments)
    assert f"done: {STEPS} steps, saved as {workdir}/checkpoints/{STEPS}" in said[0]
    assert "step" not in said[1], "process 0 speaks for all"
    return workdir


def saved_arrays(workdir):
    from orbax.checkpoint import v1 as ocp

    folder = checkpoint.find_checkpoint(workdir)
    assert folder.name == str(STEPS)
    saved = ocp.checkpointables_metadata(folder / "arrays").metadata
    # NumPy's, since the devices of those who saved are not here.
    wanted = {
        item: {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in saved[item].items()}
        for item in ("params", "optimizer")
    }
    return ocp.load_checkpointables(folder / "arrays", wanted)


def assert_same(workdir, other):
    assert events(workdir) == events(other)
    jax.tree.map(np.testing.assert_array_equal, saved_arrays(workdir), saved_arrays(other))


def assert_close(workdir, other):
    pairs = list(zip(events(workdir), events(other), strict=True))
    assert len(pairs) > STEPS
    for event, expected in pairs:
        assert event.keys() == expected.keys()
        for name, value in event.items():
            if name == "split":
                assert value == expected[name]
            else:
                np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)


def test_two_processes_measure_what_one_does(alone, together):
    assert_close(together, alone)


def test_four_processes_measure_what_one_does_with_parameters_split_over_them(
    alone, arguments, tmp_path
):
    workdir = tmp_path / "run"
    finished(4, workdir, [*arguments, "--config.mesh.data=2", "--config.mesh.fsdp=2"])
    assert_close(workdir, alone)


def test_a_signal_to_one_stops_all_after_the_same_step(alone, together, arguments, tmp_path):
    workdir = tmp_path / "run"
    with started(2, workdir, arguments) as run:
        run.wait_for_lines(5)
        run.processes[1].send_signal(signal.SIGTERM)
        assert run.wait() == [143, 143], run.said(0)
        newest = checkpoint.find_checkpoint(workdir)
        said = f"stopped by SIGTERM after step {newest.name}, saved as {newest}"
        assert said in run.said(0)
        assert "Traceback" not in run.said(0) + run.said(1)
    assert events(workdir)[-1]["step"] == int(newest.name) < STEPS
    copy = shutil.copytree(workdir, tmp_path / "copy")

    said = finished(2, workdir, arguments)
    assert f"resuming from step {newest.name}" in said[0]
    assert_same(workdir, together)

    # With another number of processes, the same rows in the same order.
    said = finished(1, copy, arguments)
    assert f"resuming from step {newest.name}" in said[0]
    assert_close(copy, together)


def test_a_killed_process_ends_the_others_and_costs_the_steps_since_the_last_checkpoint(
    together, arguments, tmp_path
):
    workdir = tmp_path / "run"
    with started(2, workdir, arguments) as run:
        run.wait_for_lines(7)
        run.processes[1].kill()
        assert run.wait() == [1, -signal.SIGKILL]
        assert "lost contact with another" in run.said(0)
        assert "Traceback" not in run.said(0)
    said = finished(2, workdir, arguments)
    assert "resuming from step 4" in said[0] or "resuming from step 8" in said[0]
    assert_same(workdir, together)


def test_a_process_that_fell_silent_is_given_up(arguments, tmp_path):
    workdir = tmp_path / "run"
    with started(2, workdir, [*arguments, "--heartbeat-seconds=10"]) as run:
        run.wait_for_lines(1)
        run.processes[1].send_signal(signal.SIGSTOP)
        assert run.processes[0].wait(60) not in (0, 2)
        assert "another" in run.said(0)
