"""Where a run's numbers go."""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrp_jax.errors import UsageError
from ddrp_jax.training import metrics


def open_writer(workdir, **options):
    defaults = {"first_step": 0, "tensorboard": False, "wandb": "", "config": {}}
    return metrics.MetricsWriter(workdir, **(defaults | options))


def read(workdir):
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    text = (workdir / metrics.FILE).read_text()
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def test_lines_hold_numbers_and_null_for_what_is_not_finite(tmp_path):
    writer = open_writer(tmp_path)
    values = {
        "loss": np.float32(0.1),
        "mlm_loss": math.nan,
        "grad_norm": math.inf,
        "tokens_seen": np.int64(3),
        "head_cosine_by_layer": np.array([0.5, -math.inf]),
    }
    writer.write(4, "train", values)
    writer.close()
    assert read(tmp_path) == [
        {
            "step": 4,
            "split": "train",
            "loss": float(np.float32(0.1)),
            "mlm_loss": None,
            "grad_norm": None,
            "tokens_seen": 3,
            "head_cosine_by_layer": [0.5, None],
        }
    ]


def test_a_line_is_on_the_disk_as_soon_as_it_is_written(tmp_path):
    writer = open_writer(tmp_path)
    writer.write(1, "train", {"loss": 1.0})
    assert len(read(tmp_path)) == 1
    writer.close()


@given(
    steps=st.lists(st.integers(1, 20), min_size=1),
    cut=st.integers(0, 21),
    torn=st.integers(0, 30),
)
def test_cutting_back_keeps_whole_lines_up_to_the_step(tmp_path_factory, steps, cut, torn):
    workdir = tmp_path_factory.mktemp("run")
    writer = open_writer(workdir)
    for step in steps:
        writer.write(step, "train", {"loss": step / 3})
    writer.close()
    path = workdir / metrics.FILE
    path.write_bytes(path.read_bytes() + b'{"step":1,"split":"train","loss":0.25}'[:torn])
    metrics.cut_back(workdir, cut)
    assert [event["step"] for event in read(workdir)] == [step for step in steps if step <= cut]
    assert [path.name for path in workdir.iterdir()] == [metrics.FILE]


def test_cutting_back_nothing(tmp_path):
    metrics.cut_back(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_hold_the_same_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    writer = open_writer(tmp_path, tensorboard=True)
    writer.write(3, "heldout", {"mlm_loss": 1.5, "head_cosine_by_layer": [1.0], "loss": math.nan})
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, seen = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        seen += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[12 + size + 4 :]
    assert seen == [(3, "heldout/mlm_loss", 1.5)]


def test_wandb_is_asked_for_with_the_line_that_installs_it():
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    metrics.check_wandb("")
    with pytest.raises(UsageError, match=r"pip install 'ddrp-jax\[wandb\]'"):
        metrics.check_wandb("project")


def test_time_is_booked_to_the_innermost_category():
    chrono = metrics.Chrono({"saving": 100.0})
    before = time.perf_counter()
    with chrono.spend("training"):
        time.sleep(0.01)
        with chrono.spend("evaluating"):
            time.sleep(0.02)
        time.sleep(0.01)
    elapsed = time.perf_counter() - before
    time.sleep(0.01)
    seconds = chrono.seconds
    assert tuple(seconds) == metrics.CATEGORIES
    assert seconds["training"] >= 0.02
    assert seconds["evaluating"] >= 0.02
    assert (seconds["compiling"], seconds["saving"]) == (0.0, 100.0)
    assert seconds["training"] + seconds["evaluating"] <= elapsed


def test_plain_lines_where_there_is_no_terminal(capfd):
    progress = metrics.Progress(total_steps=10, first_step=0)
    progress.advance(1)
    progress.report(5, "train", {"loss": 2.5, "tokens_per_second": 12345.6})
    progress.report(10, "heldout", {"mlm_loss": 2.25})
    progress.close()
    out, err = capfd.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("step 5/10  train  loss 2.5000  tokens/s 12,346  left 0:00:")
    assert second == "step 10/10  heldout  mlm 2.2500"


STOP = """
import os, signal, sys, time
from ddrp_jax.training.preemption import StopSignal
with StopSignal() as stop:
    assert not stop.should_stop()
    print("ready", flush=True)
    while not stop.should_stop():
        time.sleep(0.01)
    print(stop.received.name, stop.exit_status, flush=True)
    if sys.argv[1] == "wait":
        time.sleep(60)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_asks_for_a_stop_and_a_second_one_ends_it(number, status):
    for mode in ("leave", "wait"):
        process = subprocess.Popen(
            [sys.executable, "-c", STOP, mode], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name} {status}\n"
        if mode == "wait":
            process.send_signal(number)
        assert process.wait(timeout=30) == (0 if mode == "leave" else -number)
        process.stdout.close()


BAR = """
from ddrp_jax.training import metrics
progress = metrics.Progress(total_steps=10, first_step=0)
for step in range(1, 11):
    progress.advance(step)
    progress.report(step, "train", {"loss": step / 4, "mlm_loss": 1.0, "tokens_per_second": 1234.0})
progress.report(10, "heldout", {"mlm_loss": 2.25})
progress.close()
"""


def test_a_bar_on_a_terminal():
    terminal, process_end = pty.openpty()
    fcntl.ioctl(process_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", BAR], stderr=process_end, env=environment)
    os.close(process_end)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "step 10/10  heldout  mlm 2.2500" in text
    last = text.strip().splitlines()[-1].split("\r")[-1]
    assert "10/10" in last
    assert "loss 2.5000  tokens/s 1,234" in last
