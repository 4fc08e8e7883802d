"""Packed rows of examples: what the model sees, and what is asked of it."""

import numpy as np
import pytest
from vocabularies import KINDS, built, flags, inputs

from ddrp_jax.config import ReconstructionConfig
from ddrp_jax.data.frequency import reserved_ids
from ddrp_jax.definitions.rows import ExampleRows
from ddrp_jax.errors import UsageError

LENGTH = 80


@pytest.fixture(scope="module", params=KINDS)
def examples(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return built(folder, KINDS[request.param](folder / "tokenizer"), holdout=0.25)


def rows_of(examples, *, corruption=None, chosen=None, decoder_start=None, length=LENGTH):
    tokenizer = examples.tokenizer()
    is_target = np.ones(tokenizer.vocab_size, bool)
    is_target[examples.held_out_ids] = False
    return ExampleRows(
        examples=examples,
        chosen=examples.split("train") if chosen is None else chosen,
        length=length,
        seed=3,
        tokenizer=tokenizer,
        corruption=corruption,
        is_target=is_target,
        decoder_start=decoder_start,
    )


def all_rows(reader, epoch=0):
    return reader.read(np.arange(reader.num_rows), np.full(reader.num_rows, epoch))


def segments(batch, prefix=""):
    """Each segment's row and columns."""
    for row, ids in enumerate(batch[f"{prefix}segment_ids"]):
        assert (np.diff(ids[ids > 0]) >= 0).all()
        assert not ids[np.count_nonzero(ids) :].any()
        for number in range(1, ids.max() + 1):
            columns = np.flatnonzero(ids == number)
            assert (np.diff(columns) == 1).all()
            yield row, columns


def test_every_example_is_one_segment_and_asks_for_its_piece(examples):
    reader = rows_of(examples)
    batch = all_rows(reader)
    seen = []
    for row, columns in segments(batch):
        (index,) = batch["example"][row, columns][batch["example"][row, columns] >= 0]
        seen.append(index)
        assert batch["input_ids"][row, columns].tolist() == inputs(examples, index)
        assert batch["positions"][row, columns].tolist() == list(range(len(columns)))
        slot = columns[examples.slot_position[index]]
        assert batch["example"][row, slot] == index
        assert batch["target_ids"][row, slot] == examples.target_id[index]
        assert np.flatnonzero(batch["target_weights"][row, columns]).tolist() == [
            examples.slot_position[index]
        ]
    assert sorted(seen) == examples.split("train").tolist()
    np.testing.assert_array_equal(batch["slot_weights"], batch["target_weights"])
    padding = batch["segment_ids"] == 0
    assert (batch["input_ids"][padding] == reader.tokenizer.pad_id).all()


def test_corruption_touches_definitions_alone_and_asks_for_all_of_them(examples):
    plain = all_rows(rows_of(examples))
    reader = rows_of(examples, corruption=ReconstructionConfig())
    held_out = set(examples.held_out_ids.tolist())
    kept = masked = changed = 0
    batches = [all_rows(reader, epoch) for epoch in range(40)]
    for batch in batches:
        for row, columns in segments(batch):
            (index,) = batch["example"][row, columns][batch["example"][row, columns] >= 0]
            original, flagged = inputs(examples, index), flags(examples, index)
            for place, column in enumerate(columns):
                now = batch["input_ids"][row, column]
                if not flagged[place]:
                    assert now == original[place]
                    continue
                wanted = batch["target_weights"][row, column]
                assert wanted == (original[place] not in held_out)
                assert batch["target_ids"][row, column] == (original[place] if wanted else 0)
                kept += now == original[place]
                masked += now == reader.tokenizer.mask_id
                if now not in (original[place], reader.tokenizer.mask_id):
                    changed += 1
                    assert now not in reserved_ids(reader.tokenizer)
    total = kept + masked + changed
    # Four standard deviations of the share; a random token is the old one once in a vocabulary.
    error = 4 * np.sqrt(0.25 / total)
    assert abs(masked / total - 0.5) < error
    assert abs(changed / total - 0.25) < error + 0.25 / 50
    np.testing.assert_array_equal(batches[0]["slot_weights"], plain["slot_weights"])
    assert (batches[0]["input_ids"] != batches[1]["input_ids"]).any()


def test_a_row_depends_on_its_number_and_epoch_alone(examples):
    reader = rows_of(examples, corruption=ReconstructionConfig())
    whole = all_rows(reader, epoch=2)
    alone = reader.read(np.array([-1, 1]), np.array([0, 2]))
    for name in set(whole) - {"row"}:
        np.testing.assert_array_equal(alone[name][1], whole[name][1])
    for name in ("segment_ids", "positions", "target_weights", "slot_weights"):
        assert not alone[name][0].any()
    assert (alone["example"][0] == -1).all()


def test_a_decoder_reads_the_pieces_before_the_wanted_one(examples):
    reader = rows_of(examples, decoder_start=(2, 0))
    batch = all_rows(reader)
    seen = 0
    for row, columns in segments(batch, "decoder_"):
        last = columns[-1]
        index = batch["example"][row, last]
        begin, end = examples.slot_begin[index], examples.slot_position[index]
        shown = inputs(examples, index)[begin:end]
        assert batch["decoder_ids"][row, columns].tolist() == [2, 0, *shown]
        assert batch["decoder_positions"][row, columns].tolist() == list(range(len(columns)))
        assert batch["target_ids"][row, last] == examples.target_id[index]
        assert np.flatnonzero(batch["target_weights"][row, columns]).tolist() == [len(columns) - 1]
        # The same segment of the encoder holds the example.
        number = batch["decoder_segment_ids"][row, last]
        source = batch["input_ids"][row][batch["segment_ids"][row] == number]
        assert source.tolist() == inputs(examples, index)
        seen += 1
    assert seen == len(examples.split("train"))


def test_rows_too_short_for_an_example_are_refused(examples):
    longest = int(examples.lengths[examples.split("train")].max())
    reader = rows_of(examples, length=longest - 1)
    with pytest.raises(UsageError, match=f"length={longest - 1}: .* up to {longest} tokens"):
        _ = reader.num_rows
