"""Several real `ddrp pretrain` processes on this machine's CPU that make up one run."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tiny_run import CONFIG, DDRP, environment

# Far more than any of them needs, so that a run that hangs fails its test and not the suite.
SECONDS = 150


class Processes:
    """The processes of one run, each with one device; `stderr` of each is kept in a file."""

    def __init__(self, count: int, workdir: Path, arguments: list[str], logs: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        logs.mkdir(parents=True)
        self.workdir = workdir
        self.logs = [logs / f"{index}.log" for index in range(count)]
        hosts = [f"--coordinator=127.0.0.1:{port}", f"--processes={count}"] if count > 1 else []
        flags = [f"--config={CONFIG}", f"--workdir={workdir}", *arguments]
        self.processes = []
        for index, log in enumerate(self.logs):
            which = [*hosts, f"--process={index}"] if hosts else []
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [str(DDRP), "pretrain", *flags, *which],
                        env=environment(),
                        stdout=file,
                        stderr=file,
                    )
                )

    def wait(self) -> list[int]:
        """Returns the exit statuses."""
        end = time.monotonic() + SECONDS
        return [process.wait(max(1.0, end - time.monotonic())) for process in self.processes]

    def wait_for_lines(self, count: int) -> None:
        """Waits until the run has written so many lines of metrics."""
        end = time.monotonic() + SECONDS
        while self.lines() < count:
            ended = [process.poll() for process in self.processes]
            assert ended == [None] * len(ended), f"ended early: {ended}\n{self.said(0)}"
            assert time.monotonic() < end, f"not {count} lines in {SECONDS} s"
            time.sleep(0.002)

    def lines(self) -> int:
        path = self.workdir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def said(self, index: int) -> str:
        return self.logs[index].read_text()

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def started(count: int, workdir: Path, arguments: list[str]) -> Iterator[Processes]:
    """Starts a run's processes; none outlives the block."""
    logs = workdir.parent / f"{workdir.name}-logs-{time.monotonic_ns()}"
    run = Processes(count, workdir, arguments, logs)
    try:
        yield run
    finally:
        run.end()
