"""Batches of packed and masked rows, made ahead of the training step by Grain.

Global batch s holds the rows at places `s * B` up to `(s + 1) * B` of an endless list: one random
permutation of the packing plan after the other. Row, epoch and masks follow from the place alone,
so any process, worker or resumed run makes the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from ddrp_jax.config import MaskingConfig, StageConfig
from ddrp_jax.data.hashing import random_bits
from ddrp_jax.data.masking import Masker
from ddrp_jax.data.packing import PackingPlan, packing_plan
from ddrp_jax.data.preparation import exit_with_parent
from ddrp_jax.data.records import Records, TokenStream, check_records
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.errors import DdrpError, UsageError

Batch = dict[str, np.ndarray]

# Grain wants a length; training ends long before.
_ENDLESS = 2**62
# Rounds of the permutation's cipher: the fewest that its library accepts as random enough.
_SHUFFLE_ROUNDS = 4


class Reader(Protocol):
    """Numbered rows that are made when they are asked for.

    Attributes:
        num_rows: rows of one epoch.
        seed: of their order, and of whatever is random in them.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def read(self, rows: np.ndarray, epochs: np.ndarray) -> Batch:
        """Returns the batch of rows [B] in epochs [B]; row -1 is one of padding."""


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads rows of a packing plan, packs and masks them."""

    stream: TokenStream
    plan: PackingPlan
    masker: Masker
    cls_id: int
    sep_id: int
    pad_id: int
    seed: int

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return self.plan.num_rows

    def read(self, rows: np.ndarray, epochs: np.ndarray) -> Batch:
        """Returns the batch of some rows, as the step takes it.

        Args:
            rows: [B] numbers of rows in the plan; -1 makes a row of padding.
            epochs: [B] which pass over the corpus each belongs to.

        Returns:
            `input_ids`, `segment_ids`, `positions` [B, T]; `predict_positions`, `predict_ids`,
            `predict_weights` [B, P]; `row` [B].
        """
        packed = self.pack(rows)
        masked = self.masker(
            packed["input_ids"], packed["segment_ids"], seed=self.seed, rows=rows, epochs=epochs
        )
        return packed | masked | {"row": np.asarray(rows, np.int32)}

    def pack(self, rows: np.ndarray) -> Batch:
        """Returns `input_ids`, `segment_ids` and `positions`, int32 [B, T], before masking."""
        plan, length = self.plan, self.plan.length
        real = np.flatnonzero(rows >= 0)
        firsts = plan.row_offsets[rows[real]]
        counts = plan.row_offsets[rows[real] + 1] - firsts
        total = int(counts.sum())
        number = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)  # within its row
        pieces = np.repeat(firsts, counts) + number
        piece_lengths = plan.lengths[pieces].astype(np.int64)

        sizes = piece_lengths + 2
        ends = np.cumsum(sizes)
        # Where each segment begins in the flat batch: its row, and what precedes it in that row.
        before = ends - sizes
        row_of_piece = np.repeat(np.arange(len(real)), counts)
        row_begin = before[np.cumsum(counts) - counts]
        begins = real[row_of_piece] * length + before - row_begin[row_of_piece]

        offset = np.arange(int(sizes.sum())) - np.repeat(before, sizes)  # within its segment
        place = np.repeat(begins, sizes) + offset
        tokens = np.empty(len(place), np.int32)
        is_piece = np.ones(len(place), bool)
        is_piece[before] = is_piece[ends - 1] = False
        tokens[before] = self.cls_id
        tokens[ends - 1] = self.sep_id
        tokens[is_piece] = self.stream.gather(plan.starts[pieces], piece_lengths)

        shape = (len(rows), length)
        input_ids = np.full(shape, self.pad_id, np.int32)
        segment_ids = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        input_ids.reshape(-1)[place] = tokens
        segment_ids.reshape(-1)[place] = np.repeat(number + 1, sizes)
        positions.reshape(-1)[place] = offset
        return {"input_ids": input_ids, "segment_ids": segment_ids, "positions": positions}


@dataclasses.dataclass(frozen=True)
class StepBatches:
    """Makes one process's slice of the batch of any step."""

    reader: Reader
    batch_size: int
    process_index: int
    process_count: int

    def __call__(self, step: int) -> Batch:
        from grain.experimental import index_shuffle

        num_rows = self.reader.num_rows
        size = self.batch_size // self.process_count
        first = step * self.batch_size + self.process_index * size
        epochs, places = np.divmod(np.arange(first, first + size), num_rows)
        seeds = random_bits(self.reader.seed, 2, epochs) >> np.uint64(33)
        rows = [
            index_shuffle(place, max_index=num_rows - 1, seed=seed, rounds=_SHUFFLE_ROUNDS)
            for place, seed in zip(places.tolist(), seeds.tolist(), strict=True)
        ]
        return self.reader.read(np.array(rows, np.int64), epochs)


class TrainBatches(Iterator[Batch]):
    """The endless batches of a stage; their state is the number of the next step."""

    def __init__(self, batches: StepBatches, identity: dict[str, Any], prefetch: int, workers: int):
        self._batches, self._identity = batches, identity
        self._prefetch, self._workers = prefetch, workers
        self._step = 0
        self._iterator: Any = None

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._start()
        batch = next(self._iterator)
        self._step += 1
        if self._workers:
            # Grain's arrays in shared memory complain when they outlive its modules.
            batch = {name: np.array(value) for name, value in batch.items()}
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns what `set_state` needs to go on with the next batch, as JSON data."""
        return {"step": self._step, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, whatever the number of processes or workers was.

        Raises:
            DdrpError: the state belongs to other records, rows or masks.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DdrpError(
                    f"data state: {name} was {state.get(name)!r} and is {value!r} now, so the same "
                    "batches cannot follow; restore the old records and settings"
                )
        self.close()
        self._step = int(state["step"])

    def close(self) -> None:
        """Stops the threads or processes that make batches ahead."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _start(self) -> Any:
        import grain

        steps = grain.MapDataset.range(self._step, _ENDLESS)
        threads = 0 if self._workers or not self._prefetch else 1
        dataset = steps.map(self._batches).to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=self._prefetch)
        )
        if self._workers:
            _mark_flags_parsed()
            options = grain.multiprocessing.MultiprocessingOptions(
                num_workers=self._workers,
                per_worker_buffer_size=max(1, self._prefetch // self._workers),
            )
            dataset = dataset.mp_prefetch(options, worker_init_fn=_start_worker)
        return iter(dataset)


def train_batches(
    records: Records,
    tokenizer: Tokenizer,
    stage: StageConfig,
    masking: MaskingConfig,
    *,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    start_step: int = 0,
    prefetch: int = 16,
    workers: int = 0,
) -> TrainBatches:
    """Returns the endless training batches of a stage: this process's slice of each global batch.

    Args:
        records: its split "train" is read.
        tokenizer: the one that made the records.
        stage: gives `length` and the global `batch_size`.
        masking: how tokens are masked.
        seed: of the packing, the order of rows and the masks.
        process_index, process_count: which slice, of how many.
        start_step: steps of this stage that are done already.
        prefetch: batches made ahead; 0 makes each when it is asked for.
        workers: processes that make them; 0 takes a thread.

    Raises:
        UsageError: the records are of another tokenizer, the mask rate can exceed the static
            number of predictions, or processes do not divide the batch.
    """
    reader = _row_reader(records, "train", tokenizer, stage.length, masking, seed)
    identity = {
        "records": records.fingerprint,
        "length": stage.length,
        "batch_size": stage.batch_size,
        "seed": seed,
        "masking": dataclasses.asdict(masking),
    }
    return endless_batches(
        reader,
        stage.batch_size,
        identity,
        process_index=process_index,
        process_count=process_count,
        start_step=start_step,
        prefetch=prefetch,
        workers=workers,
    )


def endless_batches(
    reader: Reader,
    batch_size: int,
    identity: dict[str, Any],
    *,
    process_index: int,
    process_count: int,
    start_step: int,
    prefetch: int,
    workers: int,
) -> TrainBatches:
    """Returns a reader's rows in the order of a run: this process's slice of each global batch.

    Args:
        reader: makes rows.
        batch_size: rows over all processes.
        identity: JSON data that tells these batches from others; part of their state.
        process_index, process_count, start_step, prefetch, workers: as for `train_batches`.

    Raises:
        UsageError: processes do not divide the batch.
    """
    _check_divides(batch_size, process_count)
    batches = StepBatches(reader, batch_size, process_index, process_count)
    iterator = TrainBatches(batches, identity, prefetch, workers)
    iterator.set_state({"step": start_step, **identity})
    return iterator


class EvalBatches:
    """A finite, repeatable list of batches: rows in plan order, always the same masks."""

    def __init__(
        self,
        reader: Reader,
        num_rows: int,
        batch_size: int,
        process_index: int,
        process_count: int,
    ):
        self._reader, self.num_rows = reader, num_rows
        self._batch_size = batch_size
        self._process_index, self._process_count = process_index, process_count

    def __len__(self) -> int:
        return -(-self.num_rows // self._batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        size = self._batch_size // self._process_count
        first = number * self._batch_size + self._process_index * size
        rows = np.arange(first, first + size)
        return self._reader.read(np.where(rows < self.num_rows, rows, -1), np.zeros_like(rows))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


def eval_batches(
    records: Records,
    tokenizer: Tokenizer,
    *,
    split: str = "heldout",
    length: int,
    batch_size: int,
    masking: MaskingConfig,
    seed: int,
    max_rows: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Returns the batches of an evaluation; the last is filled up with rows of padding (row -1).

    Args:
        records: what to read.
        tokenizer: the one that made the records.
        split: which split.
        length: T.
        batch_size: rows over all processes.
        masking: how tokens are masked.
        seed: of the packing and the masks.
        max_rows: only the first rows of the plan, which are a random sample; 0 takes all.
        process_index, process_count: which slice of each batch, of how many.

    Raises:
        UsageError: as for `train_batches`, or the split is not there.
    """
    reader = _row_reader(records, split, tokenizer, length, masking, seed)
    return finite_batches(
        reader,
        batch_size,
        max_rows=max_rows,
        process_index=process_index,
        process_count=process_count,
    )


def finite_batches(
    reader: Reader,
    batch_size: int,
    *,
    max_rows: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Returns a reader's rows in their own order, each once; the arguments are `eval_batches`'s."""
    _check_divides(batch_size, process_count)
    num_rows = min(max_rows or reader.num_rows, reader.num_rows)
    return EvalBatches(reader, num_rows, batch_size, process_index, process_count)


def _row_reader(
    records: Records,
    split: str,
    tokenizer: Tokenizer,
    length: int,
    masking: MaskingConfig,
    seed: int,
) -> RowReader:
    check_records(records, tokenizer.fingerprint, tokenizer.vocab_size)
    stream = records.split(split)
    return RowReader(
        stream=stream,
        plan=packing_plan(stream, length, seed),
        masker=Masker(masking, tokenizer, length),
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        seed=seed,
    )


def _check_divides(batch_size: int, process_count: int) -> None:
    if batch_size % process_count:
        raise UsageError(
            f"batch_size={batch_size}: expected a multiple of the {process_count} processes"
        )


def _start_worker(index: int, count: int) -> None:
    del index, count
    exit_with_parent()


def _mark_flags_parsed() -> None:
    # Grain reads absl flags when it starts processes, which fails in a program that parses its
    # command line itself.
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
