"""Where a run's numbers go: `metrics.jsonl`, TensorBoard, optionally wandb, and the screen.

`metrics.jsonl` has one JSON object a line, with `step` and `split` first. After a resume the file
is cut back to the checkpoint, so no step appears twice.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ddrp_jax.errors import UsageError
from ddrp_jax.paths import copy_tree, is_remote, write_whole

FILE = "metrics.jsonl"
CATEGORIES = ("training", "waiting", "compiling", "evaluating", "saving", "lost")


class Chrono:
    """Wall-clock seconds by what they were spent on, over all the lives of a run.

    Args:
        seconds: what earlier lives spent; `Chrono.seconds` of a checkpoint. "lost" is what a
            restart threw away: all that was done after that checkpoint.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None):
        self._seconds = dict.fromkeys(CATEGORIES, 0.0) | dict(seconds or {})
        self._stack: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def spend(self, category: str) -> Iterator[None]:
        """Books the time inside to `category`; an inner one interrupts an outer one."""
        self._book()
        self._stack.append(category)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each category until now."""
        self._book()
        return dict(self._seconds)

    def _book(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now


def goodput(seconds: Mapping[str, float]) -> str:
    """Returns a line that tells what a run's time went into, over all its lives."""
    total = sum(seconds.values())
    if total <= 0:
        return "goodput: nothing was done"
    names = {"waiting": "waiting for data", "lost": "lost to restarts"}
    shares = [
        f"{names.get(name, name)} {100 * seconds.get(name, 0.0) / total:.1f} %"
        for name in CATEGORIES
        if name != "training"
    ]
    share = 100 * seconds.get("training", 0.0) / total
    return f"goodput: training {share:.1f} % of {_clock(total)}; {', '.join(shares)}"


def cut_back(workdir: Path, step: int, split: str | None = None) -> float:
    """Drops what `metrics.jsonl` says of steps after `step`, and a line that a kill tore.

    The new file replaces the old one in one move.

    Args:
        workdir: the run's folder.
        step: the last to keep.
        split: what it says of this split at `step` itself is dropped too.

    Returns:
        Seconds that the run had spent by the last line that was dropped; 0 where none was.
    """
    path = workdir / FILE
    spent = 0.0
    if not path.exists():
        return spent
    kept = []
    with path.open("rb") as file:
        for line in file:
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            is_kept = event["step"] <= step and (event["step"], event["split"]) != (step, split)
            if line.endswith(b"\n") and is_kept:
                kept.append(line)
            else:
                spent = sum(event.get(f"seconds_{name}", 0.0) for name in CATEGORIES)
    write_whole(path, b"".join(kept))
    return spent


def check_wandb(project: str) -> None:
    """Raises UsageError where a wandb project is named and wandb is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UsageError(
            f"config.train.wandb={project!r}: wandb is not installed; run "
            "pip install 'ddrp-jax[wandb]'"
        )


class MetricsWriter:
    """Writes events of one run; opens what `config.train` asks for.

    Args:
        workdir: the run's folder.
        first_step: the step that the run starts or resumes from.
        tensorboard: whether to write TensorBoard events to `workdir/tensorboard`.
        wandb: a wandb project (`check_wandb` has seen it), or "".
        config: plain JSON data, shown by wandb.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        first_step: int,
        tensorboard: bool,
        wandb: str,
        config: Mapping[str, Any],
    ):
        self._workdir = workdir
        # A bucket's files cannot grow: they do so here, and are sent as a whole.
        self._mirror: tempfile.TemporaryDirectory[str] | None = None
        folder = workdir
        if is_remote(workdir):
            self._mirror = tempfile.TemporaryDirectory()
            folder = Path(self._mirror.name)
            if (workdir / FILE).exists():
                (folder / FILE).write_bytes((workdir / FILE).read_bytes())
        # Unbuffered: a line goes out in one write, so a kill hardly ever tears one.
        self._file = (folder / FILE).open("ab", buffering=0)
        self._tensorboard: Any = None
        self._wandb: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            # TensorBoard then hides what an earlier life wrote beyond the checkpoint.
            purge_step = first_step + 1 if first_step else None
            self._tensorboard = SummaryWriter(
                str(folder / "tensorboard"), purge_step=purge_step, flush_secs=10
            )
        if wandb:
            self._wandb = _start_wandb(wandb, workdir, folder, config)

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Writes one event.

        Args:
            step: updates done when it was measured.
            split: "train" or the name of a record split.
            values: numbers, or lists of them; what is not finite becomes null.
        """
        event = {"step": step, "split": split} | {k: _plain(v) for k, v in values.items()}
        line = orjson.dumps(event) + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        scalars = {
            f"{split}/{name}": value
            for name, value in event.items()
            if name not in ("step", "split") and isinstance(value, int | float)
        }
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def upload(self) -> None:
        """Sends what was written so far to the bucket, where the workdir is in one."""
        if self._mirror is not None:
            if self._tensorboard is not None:
                self._tensorboard.flush()
            for name in (FILE, "tensorboard"):
                path = Path(self._mirror.name) / name
                if path.is_dir():
                    copy_tree(path, self._workdir / name)
                elif path.exists():
                    write_whole(self._workdir / name, path.read_bytes())

    def close(self) -> None:
        """Writes out what is still in memory."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self.upload()
        if self._mirror is not None:
            self._mirror.cleanup()


class Silent:
    """Writer and screen of a process that leaves both to process 0."""

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Writes nothing."""

    def upload(self) -> None:
        """Sends nothing."""

    def advance(self, step: int) -> None:
        """Shows nothing."""

    def report(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Shows nothing."""

    def say(self, text: str) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Has nothing to close."""


class Progress:
    """The state of a run on the screen: a bar on a terminal, plain lines elsewhere.

    Args:
        total_steps: where the run ends.
        first_step: where this process begins.
    """

    def __init__(self, total_steps: int, first_step: int):
        from rich.console import Console

        self._total = total_steps
        self._console = Console(stderr=True, highlight=False)
        self._bar: Any = None
        self._started: tuple[float, int] | None = None
        if self._console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.BarColumn(bar_width=20),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, text="")
            self._bar.start()

    def advance(self, step: int) -> None:
        """Says that `step` is done; only a bar shows it."""
        # The first step compiles; what is left goes by the others.
        self._started = self._started or (time.monotonic(), step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Shows an event that was measured."""
        labels = {
            "loss": ("loss", ".4f"),
            "mlm_loss": ("mlm", ".4f"),
            "mlm_accuracy": ("accuracy", ".3f"),
            "token_cosine": ("token cosine", ".3f"),
            "head_cosine": ("head cosine", ".3f"),
            "relative_error": ("error / constant's", ".4f"),
            "tokens_per_second": ("tokens/s", ",.0f"),
            "mfu": ("MFU", ".3f"),
        }
        on_bar = self._bar is not None and split == "train"
        # A bar has the width of a terminal to share with its counts.
        shown = ("loss", "tokens_per_second") if on_bar else tuple(labels)
        text = "  ".join(
            f"{labels[name][0]} {values[name]:{labels[name][1]}}"
            for name in shown
            if name in values
        )
        if on_bar:
            self._bar.update(self._task, completed=step, text=text)
        else:
            self.say(f"step {step}/{self._total}  {split}  {text}{self._time_left(step)}")

    def say(self, text: str) -> None:
        """Shows a line of text."""
        if self._bar is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the screen as it is."""
        if self._bar is not None:
            self._bar.stop()

    def _time_left(self, step: int) -> str:
        start, first_step = self._started or (0.0, step)
        if self._bar is not None or step <= first_step or step >= self._total:
            return ""
        seconds = (time.monotonic() - start) / (step - first_step) * (self._total - step)
        return f"  left {_clock(seconds)}"


def _clock(seconds: float) -> str:
    hours, minutes = int(seconds // 3600), int(seconds // 60 % 60)
    return f"{hours}:{minutes:02}:{int(seconds % 60):02}"


def _start_wandb(project: str, workdir: Path, folder: Path, config: Mapping[str, Any]) -> Any:
    import wandb

    # One run folder is one wandb run, through every resume.
    identity = workdir / "wandb_run"
    if not identity.exists():
        identity.write_text(wandb.util.generate_id())
    return wandb.init(
        project=project,
        id=identity.read_text(),
        resume="allow",
        dir=str(folder),
        config=dict(config),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, int | str | None):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int) or math.isfinite(value) else None
