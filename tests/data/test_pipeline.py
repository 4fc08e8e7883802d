import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from ddrp_jax.config import MaskingConfig, StageConfig
from ddrp_jax.data.packing import packing_plan
from ddrp_jax.data.pipeline import eval_batches, train_batches
from ddrp_jax.data.preparation import prepare_records
from ddrp_jax.data.sources import Source
from ddrp_jax.errors import DdrpError, UsageError

STAGE = StageConfig(length=64, batch_size=12)
MASKING = MaskingConfig(whole_word=True)


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def train(records, tokenizer, stage=STAGE, **options):
    options = {"seed": 5, "prefetch": 0} | options
    return train_batches(records, tokenizer, stage, MASKING, **options)


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def originals(batch):
    """Undoes the masking."""
    ids = batch["input_ids"].copy()
    row, slot = np.nonzero(batch["predict_weights"])
    ids[row, batch["predict_positions"][row, slot]] = batch["predict_ids"][row, slot]
    return ids


@pytest.fixture(scope="module")
def short_records(bpe, tmp_path_factory):
    """Short documents, several to a row; a heldout split of fewer rows than a batch."""
    folder = tmp_path_factory.mktemp("short")
    rng = np.random.default_rng(0)
    documents = [" ".join(["fox"] * rng.integers(1, 60)) + f" {i}" for i in range(300)]
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    source = Source(f"text:{folder / 'corpus.txt'}")
    return prepare_records([source], bpe, folder / "records", holdout=0.1)


def test_rows_are_cls_piece_sep_as_a_plain_loop_makes_them(short_records, bpe):
    stream = short_records.split("train")
    plan = packing_plan(stream, STAGE.length, seed=5)
    tokens = np.concatenate([stream.document(i) for i in range(stream.num_documents)])
    for batch in take(train(short_records, bpe), 10):
        unmasked = originals(batch)
        for i, row in enumerate(batch["row"]):
            ids, segments, positions = [], [], []
            pieces = range(plan.row_offsets[row], plan.row_offsets[row + 1])
            for number, piece in enumerate(pieces, 1):
                start, length = plan.starts[piece], plan.lengths[piece]
                ids += [bpe.cls_id, *tokens[start : start + length], bpe.sep_id]
                segments += [number] * (length + 2)
                positions += range(length + 2)
            padding = [0] * (STAGE.length - len(ids))
            assert unmasked[i].tolist() == ids + [bpe.pad_id] * len(padding)
            assert batch["segment_ids"][i].tolist() == segments + padding
            assert batch["positions"][i].tolist() == positions + padding


def test_the_shapes_and_types_of_a_batch(demo_records, bpe):
    (batch,) = take(train(demo_records, bpe), 1)
    shapes = {name: (value.shape, value.dtype.name) for name, value in batch.items()}
    predicted = round(0.15 * 64)
    assert shapes == {
        "input_ids": ((12, 64), "int32"),
        "segment_ids": ((12, 64), "int32"),
        "positions": ((12, 64), "int32"),
        "predict_positions": ((12, predicted), "int32"),
        "predict_ids": ((12, predicted), "int32"),
        "predict_weights": ((12, predicted), "float32"),
        "row": ((12,), "int32"),
    }


def test_a_94_token_corpus_trains_on_one_padded_row(bpe, tmp_path):
    (tmp_path / "a.txt").write_text("the" + " the" * 93)
    records = prepare_records([Source(f"text:{tmp_path / 'a.txt'}")], bpe, tmp_path / "out")
    assert records.split("train").num_tokens == 94
    stage = StageConfig(length=128, batch_size=4)
    (batch,) = take(train(records, bpe, stage), 1)
    assert batch["row"].tolist() == [0, 0, 0, 0]
    assert (batch["segment_ids"] > 0).sum(axis=1).tolist() == [96] * 4
    # Four epochs, four masks.
    assert len(np.unique(batch["predict_positions"], axis=0)) == 4


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own(short_records, bpe):
    num_rows = packing_plan(short_records.split("train"), STAGE.length, seed=5).num_rows
    count = -(-3 * num_rows // STAGE.batch_size)
    rows = np.concatenate([batch["row"] for batch in take(train(short_records, bpe), count)])
    epochs = rows[: 3 * num_rows].reshape(3, num_rows)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(num_rows), (3, 1)))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    # A shuffle, not a rotation: neighbours of one epoch are not those of the next.
    steps = [set(zip(epoch[:-1].tolist(), epoch[1:].tolist(), strict=True)) for epoch in epochs]
    assert len(steps[0] & steps[1]) < 0.1 * num_rows


def test_the_seed_changes_order_and_masks(demo_records, bpe):
    first, second = (take(train(demo_records, bpe, seed=seed), 1)[0] for seed in (5, 6))
    assert not np.array_equal(first["row"], second["row"])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_process_slices_join_to_the_global_batch(demo_records, bpe, count):
    whole = take(train(demo_records, bpe), 3)
    slices = [
        take(train(demo_records, bpe, process_index=index, process_count=count), 3)
        for index in range(count)
    ]
    joined = [
        {name: np.concatenate([part[name] for part in parts]) for name in whole[0]}
        for parts in zip(*slices, strict=True)
    ]
    assert_same(whole, joined)


@pytest.mark.parametrize(("prefetch", "workers"), [(4, 0), (4, 1), (3, 2)])
def test_threads_and_workers_make_the_same_batches(demo_records, bpe, prefetch, workers):
    expected = take(train(demo_records, bpe), 7)
    assert_same(take(train(demo_records, bpe, prefetch=prefetch, workers=workers), 7), expected)


@pytest.mark.parametrize("start", [1, 10_000_000_000])
def test_start_step_begins_exactly_there(demo_records, bpe, start):
    iterator = train(demo_records, bpe, start_step=start - 1)
    expected = take(iterator, 3)[1:]
    assert_same(take(train(demo_records, bpe, start_step=start), 2), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_goes_on_with_the_next_batch(demo_records, bpe, workers):
    expected = take(train(demo_records, bpe), 6)
    first = train(demo_records, bpe, prefetch=4, workers=workers)
    seen = [next(first) for _ in range(3)]
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    resumed = train(demo_records, bpe, prefetch=2)
    next(resumed)
    resumed.set_state(state)
    assert_same(seen + take(resumed, 3), expected)


def test_prefetched_batches_are_not_counted_as_taken(demo_records, bpe):
    iterator = train(demo_records, bpe, prefetch=8)
    next(iterator)
    assert iterator.get_state()["step"] == 1
    iterator.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"stage": StageConfig(length=32, batch_size=12)}, "length was 64 and is 32"),
        ({"stage": StageConfig(length=64, batch_size=6)}, "batch_size was 12 and is 6"),
    ],
)
def test_a_state_of_another_run_is_refused(demo_records, bpe, change, name):
    state = train(demo_records, bpe).get_state()
    with pytest.raises(DdrpError, match=name):
        train(demo_records, bpe, **change).set_state(state)


def test_a_state_of_other_records_is_refused(demo_records, short_records, bpe):
    state = train(demo_records, bpe).get_state()
    with pytest.raises(DdrpError, match="records was"):
        train(short_records, bpe).set_state(state)


def evaluate(records, tokenizer, **options):
    options = {"length": 64, "batch_size": 4, "masking": MASKING, "seed": 1} | options
    return eval_batches(records, tokenizer, **options)


def test_evaluation_reads_every_row_once_and_fills_up_with_padding(short_records, bpe):
    batches = evaluate(short_records, bpe)
    num_rows = packing_plan(short_records.split("heldout"), 64, seed=1).num_rows
    assert num_rows % 4, "the last batch is to be partial"
    rows = np.concatenate([batch["row"] for batch in batches])
    assert len(rows) == 4 * len(batches)
    assert rows.tolist() == [*range(num_rows)] + [-1] * (len(rows) - num_rows)
    last = list(batches)[-1]
    filler = last["row"] == -1
    for name in ("segment_ids", "positions", "predict_ids", "predict_positions", "predict_weights"):
        assert not last[name][filler].any(), name
    assert (last["input_ids"][filler] == bpe.pad_id).all()


def test_evaluation_is_the_same_every_time_and_for_any_batch_size(short_records, bpe):
    once, again = list(evaluate(short_records, bpe)), list(evaluate(short_records, bpe))
    assert_same(once, again)
    whole = evaluate(short_records, bpe, batch_size=64)[0]
    joined = {name: np.concatenate([batch[name] for batch in once]) for name in whole}
    for name, value in joined.items():
        np.testing.assert_array_equal(value, whole[name][: len(value)])


def test_evaluation_of_the_first_rows_and_in_several_processes(short_records, bpe):
    batches = list(evaluate(short_records, bpe, max_rows=6))
    assert [batch["row"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, -1, -1]]
    parts = [
        list(evaluate(short_records, bpe, max_rows=6, process_index=i, process_count=2))
        for i in (0, 1)
    ]
    joined = [
        {name: np.concatenate([a[name], b[name]]) for name in a}
        for a, b in zip(*parts, strict=True)
    ]
    assert_same(joined, batches)


def test_requests_that_cannot_be_right(demo_records, bpe, unigram, tmp_path):
    with pytest.raises(UsageError, match="multiple of the 5 processes"):
        train(demo_records, bpe, process_count=5)
    with pytest.raises(UsageError, match=f"{demo_records.tokenizer_fingerprint}, not with"):
        train(demo_records, unigram)
    with pytest.raises(UsageError, match="no split 'test'"):
        evaluate(demo_records, bpe, split="test")
    too_few = MaskingConfig(rate=0.5, max_predictions=3)
    with pytest.raises(UsageError, match="max_predictions=3"):
        train_batches(demo_records, bpe, STAGE, too_few, seed=0)


def _worker_script(tmp_path, records, body):
    script = tmp_path / "use_workers.py"
    script.write_text(
        "from ddrp_jax.config import MaskingConfig, StageConfig\n"
        "from ddrp_jax.data.pipeline import train_batches\n"
        "from ddrp_jax.data.records import open_records\n"
        "if __name__ == '__main__':\n"
        f"    records = open_records({str(records.path)!r})\n"
        "    batches = train_batches(records, records.tokenizer(), StageConfig(length=64,\n"
        "        batch_size=12), MaskingConfig(whole_word=True), seed=5, prefetch=4, workers=2)\n"
        f"    {body}\n"
    )
    return script


def test_workers_run_in_a_program_that_parses_no_absl_flags(demo_records, bpe, tmp_path):
    body = "print([next(batches)['row'].tolist() for _ in range(3)]); batches.close()"
    script = _worker_script(tmp_path, demo_records, body)
    result = subprocess.run(
        [sys.executable, script, "--not-an-absl-flag"], capture_output=True, text=True
    )
    expected = [batch["row"].tolist() for batch in take(train(demo_records, bpe), 3)]
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == expected


def test_workers_end_with_a_killed_program(demo_records, tmp_path, children_of, all_ended):
    body = "next(batches); print('ready', flush=True); import time; time.sleep(60)"
    script = _worker_script(tmp_path, demo_records, body)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    with process:
        line = process.stdout.readline()
        children = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
    assert line == "ready\n"
    assert len(children) >= 2
    assert all_ended(children)
