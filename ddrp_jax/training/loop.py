"""A training run, from the checks before the first compilation to the last checkpoint.

The order in the loop is the argument for exact resume: evaluate on the old state, save, take the
next batch, step, log the previous step's metrics. The batch iterator advances only after the save,
and every line of `metrics.jsonl` up to a checkpoint's step is written before the checkpoint. One
line may come after it: a stop does not wait for an evaluation; the next life begins with it.

Several processes run this same loop; process 0 alone writes metrics, the config and messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import orjson
from jax.sharding import Mesh

from ddrp_jax.config import RunConfig, StageConfig, as_dict
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import write_whole
from ddrp_jax.training import checkpoint, distributed, hardware, metrics, resume, sharding
from ddrp_jax.training.evaluation import HELD_OUT, evaluate, mean, put
from ddrp_jax.training.preemption import Stopped, StopSignal
from ddrp_jax.training.profiling import Trace, check_steps
from ddrp_jax.training.state import TrainState
from ddrp_jax.training.step import Training
from ddrp_jax.training.task import Batches, Task


def train(
    task: Task, workdir: Path, *, origin: str = "", profile: tuple[int, int] | None = None
) -> int:
    """Trains, or goes on from the newest good checkpoint in `workdir`.

    Args:
        task: the model, its data and its measures.
        workdir: the run's folder, made if absent: `config.json`, `metrics.jsonl`,
            `tensorboard/`, `checkpoints/<step>/`, and `profile/` where a trace is asked for.
        origin: where the task's initial parameters come from, for a message.
        profile: first and last step to trace.

    Returns:
        Exit status: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        UsageError: the config cannot be right, or may not change on resume.
        DdrpError: bad data, no usable checkpoint, a full disk, a loss that is not finite.
    """
    config = task.config
    mesh = sharding.make_mesh(config.mesh)
    _check_batches(config, mesh)
    metrics.check_wandb(config.train.wandb)
    check_steps(profile, 0, config.total_steps)
    hardware.keep_compilations()
    distributed.check_same(as_dict(config))
    is_fresh = distributed.on_main(lambda: not checkpoint.has_checkpoints(workdir / "checkpoints"))
    # Before anything is written: a wrong start leaves no folder behind.
    init_params = task.init_params(mesh) if is_fresh else None

    checkpoints = checkpoint.Checkpoints(
        workdir / "checkpoints",
        config=as_dict(config),
        tokenizer=task.tokenizer,
        keep_last=config.train.keep_last,
        keep_best=config.train.keep_best,
    )
    with contextlib.ExitStack() as stack:

        def claim() -> None:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(resume.only_process(workdir))
            checkpoints.clean()

        distributed.on_main(claim)
        distributed.check_shared(workdir)
        stack.enter_context(contextlib.closing(checkpoints))
        found = checkpoints.newest()
        progress: dict[str, Any] = {
            "step": 0,
            "tokens_seen": 0,
            "seconds": {},
            "stage": 0,
            "iterator": None,
        }
        changes: list[str] = []
        evaluation_due = False
        if found is not None:
            progress = checkpoint.read_progress(found)
            evaluation_due = checkpoint.is_evaluation_due(found)
            task.check_checkpoint(found)
            saved_config = checkpoint.read_config(found)
            changes = resume.check_resume(saved_config, config, progress["step"])
        check_steps(profile, progress["step"], config.total_steps)
        if distributed.is_main():
            options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
            write_whole(workdir / "config.json", orjson.dumps(as_dict(config), option=options))
            spent = metrics.cut_back(
                workdir, progress["step"], HELD_OUT if evaluation_due else None
            )
            seconds = progress["seconds"]
            lost = max(spent - sum(seconds.values()), 0.0)
            progress |= {"seconds": seconds | {"lost": seconds.get("lost", 0.0) + lost}}
        run = _Run(
            task, workdir, mesh, checkpoints, progress, evaluation_due, Trace(profile, workdir)
        )
        with contextlib.closing(run):
            if found is not None:
                run.screen.say(f"resuming from step {run.step}: {found}")
                for change in changes:
                    run.screen.say(change)
            elif init_params is not None:
                run.screen.say(f"starting from the parameters of {origin}")
            return run.train(lambda training: _first_state(training, config, found, init_params))


def _first_state(
    training: Training, config: RunConfig, found: Path | None, init_params: Any
) -> TrainState:
    if found is not None:
        return checkpoint.restore(found, training.abstract_state)
    state = training.init(config.train.seed)
    return state if init_params is None else dataclasses.replace(state, params=init_params)


def _check_batches(config: RunConfig, mesh: Mesh) -> None:
    """Finds what would stop a later stage before the first one starts."""
    for stage in config.stages:
        sharding.check_batch(stage, mesh)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.train.eval_batch_size % ways:
        raise UsageError(
            f"config.train.eval_batch_size={config.train.eval_batch_size}: expected a multiple of "
            f"the {ways} devices that rows are divided over"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The stage that is being trained.

    Attributes:
        index: its place in the config.
        begin: steps of all stages before it.
        config: the stage.
        source: the folder that its rows come from.
        training: its compiled functions.
        held_out: batches to measure on, or None where nothing is held out.
        flops: of one step, None where the devices' peak is not known.
    """

    index: int
    begin: int
    config: StageConfig
    source: Path
    training: Training
    held_out: Any
    flops: float | None


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step whose metrics are still on the device.

    Attributes:
        number: from 1.
        rows: this process's.
        tokens: in the rows of all processes.
        values: metrics.
        similarities: sums and weights, where they were due.
    """

    number: int
    rows: np.ndarray
    tokens: Any
    values: dict[str, jax.Array]
    similarities: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Moment:
    """What had been done when a line was written: steps, tokens, and seconds spent stepping."""

    step: int
    tokens: int
    seconds: float


class _Run:
    """One process's life of a run.

    Args:
        task: what is trained.
        workdir: the run's folder.
        mesh: devices.
        checkpoints: of this run.
        progress: of the checkpoint that it goes on from, or that of step 0.
        evaluation_due: whether that checkpoint's state has still to be measured.
        trace: of the steps that are to be profiled.
    """

    def __init__(
        self,
        task: Task,
        workdir: Path,
        mesh: Mesh,
        checkpoints: checkpoint.Checkpoints,
        progress: Mapping[str, Any],
        evaluation_due: bool,
        trace: Trace,
    ):
        config = task.config
        self.task = task
        self.config = config
        self.mesh = mesh
        self.checkpoints = checkpoints
        self.step: int = progress["step"]
        self.saved_step = self.step if progress["iterator"] is not None else None
        self.tokens_seen: int = progress["tokens_seen"]
        self.iterator = progress["stage"], progress["iterator"]
        self.evaluation_due = evaluation_due
        self.trace = trace
        self.peak_flops = hardware.peak_flops()
        self.chrono = metrics.Chrono(progress["seconds"])
        self.compiled: set[Any] = set()
        self.count = jax.jit(jnp.count_nonzero, out_shardings=sharding.replicated(mesh))
        self.logged = _Moment(self.step, self.tokens_seen, self._stepping_seconds())
        self.writer: metrics.MetricsWriter | metrics.Silent = metrics.Silent()
        self.screen: metrics.Progress | metrics.Silent = metrics.Silent()
        if distributed.is_main():
            self.writer = metrics.MetricsWriter(
                workdir,
                first_step=self.step,
                tensorboard=config.train.tensorboard,
                wandb=config.train.wandb,
                config=as_dict(config),
            )
            self.screen = metrics.Progress(config.total_steps, self.step)

    def close(self) -> None:
        self.trace.close()
        self.writer.close()
        self.screen.close()

    def train(self, first_state: Callable[[Training], TrainState]) -> int:
        """Trains every stage that is not over; returns the exit status."""
        if self.step >= self.config.total_steps and not self.evaluation_due:
            self.screen.say(f"nothing to do: the run is at step {self.step}, its last")
            return 0
        state = None
        begin = 0
        with StopSignal() as stop, self.chrono.spend("training"):
            for index, stage in enumerate(self.config.stages):
                end = begin + stage.steps
                was_last = self.evaluation_due and index == self.iterator[0]
                if self.step < end or was_last:
                    now = self._stage(index, begin)
                    if state is None:
                        with self.chrono.spend("compiling"):
                            state = first_state(now.training)
                    state = self._train_stage(now, state, stop)
                    if stop.received is not None:
                        break
                begin = end
            with self.chrono.spend("saving"):
                self.checkpoints.wait()
        where = self.checkpoints.folder / str(self.step)
        ended = self.step == self.config.total_steps and not self.evaluation_due
        self.screen.say(metrics.goodput(self.chrono.seconds))
        if stop.received is not None and not ended:
            self.screen.say(
                f"stopped by {stop.received.name} after step {self.step}, saved as {where}; the "
                "same command goes on from there"
            )
            return stop.exit_status
        self.screen.say(f"done: {self.step} steps, saved as {where}")
        return 0

    def _stage(self, index: int, begin: int) -> _Stage:
        source, held_out = self.task.source(index), self.task.held_out(index)
        if held_out is None:
            self.screen.say(
                f"{source} holds nothing out, so nothing is evaluated; --holdout of the command "
                "that made it does"
            )
        training = self.task.training(index, self.mesh)
        flops = None if self.peak_flops is None else self.task.step_flops(index)
        return _Stage(index, begin, self.config.stages[index], source, training, held_out, flops)

    def _train_stage(self, now: _Stage, state: TrainState, stop: StopSignal) -> TrainState:
        train = self.config.train
        end = now.begin + now.config.steps
        previous: _Step | None = None
        stopping = self.evaluation_due and not self._settle_evaluation(now, state, stop)
        with contextlib.closing(self.task.batches(now.index, self.step - now.begin)) as batches:
            if self.iterator[0] == now.index and self.iterator[1] is not None:
                batches.set_state(self.iterator[1])
            while self.step < end and not stopping:
                with self.chrono.spend("waiting"):
                    batch = next(batches)
                state, current = self._take_step(now, state, batch)
                self._log(now, state, previous)
                previous = current
                self.checkpoints.check()

                # The state is now old: measure it and save it before the next batch is taken.
                stopping = stop.should_stop()
                is_last = self.step == self.config.total_steps
                evaluates = _is_due(self.step, train.eval_every) or is_last
                saves = _is_due(self.step, train.save_every) or is_last
                if evaluates or saves or stopping:
                    self._log(now, state, current)
                    loss = None
                    if evaluates:
                        # A stop puts it off: a machine that is taken away grants few seconds.
                        self.evaluation_due = True
                        loss = None if stopping else self._evaluate(now, state.params, stop)
                        stopping = stopping or self.evaluation_due
                    if saves or stopping:
                        self._save(now, state, batches, loss)
                    previous = None
            self._log(now, state, previous)
        return state

    def _take_step(
        self, now: _Stage, state: TrainState, batch: dict[str, np.ndarray]
    ) -> tuple[TrainState, _Step]:
        number = self.step + 1
        training = now.training
        self.trace.before(number)
        similarities: Mapping[str, Any] = {}
        with jax.transfer_guard("disallow"):
            placed = put(batch, training.batch_sharding)
            due = _is_due(number, self.config.train.representations_every)
            if due and training.representations is not None:
                similarities = self._call(training.representations, state.params, placed)
            state, values = self._call(training.train_step, state, placed)
            if jax.process_count() == 1:
                tokens = np.count_nonzero(batch["segment_ids"])
            else:
                tokens = self.count(placed["segment_ids"])
        self.step = number
        if self.trace.after(number, values):
            self.screen.say(f"wrote the trace of steps up to {number} to {self.trace.folder}")
        self.screen.advance(number)
        return state, _Step(number, batch["row"], tokens, values, similarities)

    def _log(self, now: _Stage, state: TrainState, step: _Step | None) -> None:
        """Counts a step, once, and writes its line if due; stops the run if it was not finite.

        Args:
            now: the stage.
            state: the newest state; unhealthy, it is the one that the step began from.
            step: None does nothing.
        """
        if step is None:
            return
        self.tokens_seen += int(step.tokens)
        is_finite = bool(jax.device_get(step.values["finite"]))
        is_due = _is_due(step.number, self.config.train.log_every) or step.similarities
        if is_finite and not is_due:
            return
        values = {k: v.item() for k, v in jax.device_get(step.values).items() if k != "finite"}
        pairs = jax.device_get(step.similarities)
        values = {name: mean(pair) for name, pair in pairs.items()} | values
        before = self.logged
        self.logged = _Moment(step.number, self.tokens_seen, self._stepping_seconds())
        seconds = max(self.logged.seconds - before.seconds, 1e-9)
        values["tokens_per_second"] = (self.tokens_seen - before.tokens) / seconds
        if self.peak_flops is not None and now.flops is not None:
            steps = step.number - before.step
            values["mfu"] = steps * now.flops / seconds / self.peak_flops
        self._write(step.number, "train", values | {"tokens_seen": self.tokens_seen})
        if not is_finite:
            self._stop_unhealthy(now, state, step, values)

    def _write(self, step: int, split: str, values: dict[str, Any]) -> None:
        seconds = {f"seconds_{name}": value for name, value in self.chrono.seconds.items()}
        self.writer.write(step, split, values | seconds)
        self.screen.report(step, split, values)

    def _stepping_seconds(self) -> float:
        seconds = self.chrono.seconds
        return seconds["training"] + seconds["waiting"]

    def _settle_evaluation(self, now: _Stage, state: TrainState, stop: StopSignal) -> bool:
        """Measures the checkpoint that an earlier life had no time for; False if stopped again."""
        loss = self._evaluate(now, state.params, stop)
        if not self.evaluation_due and distributed.is_main():
            self.checkpoints.settle(self.step, loss)
        return not self.evaluation_due

    def _evaluate(self, now: _Stage, params: Any, stop: StopSignal) -> float | None:
        """Measures and writes what it found; returns the criterion. A stop leaves it due."""
        if now.held_out is None:
            self.evaluation_due = False
            return None
        with self.chrono.spend("evaluating"):
            function = functools.partial(self._call, now.training.evaluate)
            batches = stop.watch(now.held_out)
            try:
                means = evaluate(function, params, batches, now.training.batch_sharding)
            except Stopped:
                return None
        self.evaluation_due = False
        values = self.task.measures(means)
        self._write(self.step, HELD_OUT, values | {"tokens_seen": self.tokens_seen})
        loss = values.get(self.task.criterion, math.nan)
        return loss if math.isfinite(loss) else None

    def _save(self, now: _Stage, state: TrainState, batches: Batches, loss: float | None) -> None:
        with self.chrono.spend("saving"):
            self.writer.upload()
            progress = {
                "step": self.step,
                "stage": now.index,
                "iterator": batches.get_state(),
                "tokens_seen": self.tokens_seen,
                "seconds": self.chrono.seconds,
            }
            self.checkpoints.save(
                state,
                step=self.step,
                progress=progress,
                held_out_loss=loss,
                evaluation_due=self.evaluation_due,
            )
        self.saved_step = self.step

    def _stop_unhealthy(
        self, now: _Stage, state: TrainState, step: _Step, values: Mapping[str, Any]
    ) -> NoReturn:
        self.step = step.number - 1
        self.tokens_seen -= int(step.tokens)
        if self.saved_step != self.step:
            # The guard kept the parameters; the batches have gone on and are built again.
            good = dataclasses.replace(state, healthy=jnp.ones_like(state.healthy))
            with contextlib.closing(self.task.batches(now.index, self.step - now.begin)) as batches:
                self._save(now, good, batches, None)
            self.checkpoints.wait()
        where = self.checkpoints.folder / str(self.step)
        rows = ", ".join(str(row) for row in distributed.gather_rows(step.rows) if row >= 0)
        raise DdrpError(
            f"step {step.number}: loss {values['loss']} or gradient norm {values['grad_norm']} is "
            f"not finite, in stage '{now.config.name}', rows {rows} of {now.source}; "
            f"the state before it is saved as {where}. The same command would end here again: "
            f"start a new run with --init {where} and a lower schedule.peak or optimizer.clip_norm"
        )

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls a compiled function; its first call counts as compiling, one run included."""
        if function in self.compiled:
            return function(*arguments)
        self.compiled.add(function)
        with self.chrono.spend("compiling"):
            if jax.process_count() > 1:
                function.lower(*arguments).compile()
                distributed.barrier(f"compiled-{len(self.compiled)}")
            return jax.block_until_ready(function(*arguments))
