"""The folder of examples: what is read back, and which examples make a token's row."""

import json
import shutil

import numpy as np
import pytest
from vocabularies import built, id_of, inputs, wordpiece

from ddrp_jax.definitions.examples import ARRAYS, open_examples
from ddrp_jax.errors import DdrpError, UsageError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return wordpiece(tmp_path_factory.mktemp("vocabulary") / "wordpiece")


@pytest.fixture(scope="module")
def examples(tokenizer, tmp_path_factory):
    return built(tmp_path_factory.mktemp("built"), tokenizer, holdout=0.25)


@pytest.fixture
def folder(examples, tmp_path):
    return shutil.copytree(examples.path, tmp_path / "examples")


def test_rows_are_in_order_of_target_and_fit_each_other(examples):
    order = np.diff(examples.target_id)
    assert (order >= 0).all()
    assert examples.offsets[0] == 0
    assert examples.offsets[-1] == len(examples.input_ids) == len(examples.definition_flags)
    assert (examples.slot_position < examples.lengths - 1).all()
    assert examples.defined_ids.tolist() == sorted(set(examples.target_id.tolist()))
    for name, dtype in ARRAYS.items():
        assert getattr(examples, name).dtype == dtype
    both = np.concatenate([examples.split("train"), examples.split("heldout")])
    assert sorted(both.tolist()) == list(range(len(examples)))
    with pytest.raises(ValueError, match="'train' or 'heldout'"):
        examples.split("test")


def test_first_takes_the_first_definition_and_mean_all_of_the_same_word(examples, tokenizer):
    bank, tid, side = (id_of(tokenizer, piece) for piece in ("bank", "tid", "##side"))
    first = examples.for_tokens([side, bank, tid, bank], "first")
    assert examples.target_id[first].tolist() == [side, bank, tid, bank]
    assert not examples.sense[first].any()
    mean = examples.for_tokens([side, bank, tid], "mean")
    assert examples.target_id[mean].tolist() == [side, bank, bank, tid]
    assert examples.sense[mean].tolist() == [0, 0, 1, 0]
    # "##al" has several carriers, of which the first makes its row.
    for token in examples.defined_ids:
        all_of_it = np.flatnonzero(examples.target_id == token)
        chosen = examples.for_tokens([token], "mean")
        words = examples.headword[all_of_it]
        np.testing.assert_array_equal(chosen, all_of_it[words == words[0]])


def test_a_token_without_a_definition_makes_no_row(examples, tokenizer):
    for token in (tokenizer.mask_id, tokenizer.vocab_size - 1, 10**6):
        with pytest.raises(UsageError, match=f"no definition .* such as id {token}"):
            examples.for_tokens([int(examples.defined_ids[0]), token])
    with pytest.raises(UsageError, match="senses='all'"):
        examples.for_tokens([], "all")
    assert examples.for_tokens([]).tolist() == []


def test_padded_rows_hold_the_examples(examples, tokenizer):
    chosen = np.array([3, 0, 5])
    length = int(examples.lengths[chosen].max())
    ids, flags, inside = examples.padded(chosen, length, tokenizer.pad_id)
    for row, i in enumerate(chosen):
        expected = inputs(examples, i)
        assert ids[row].tolist() == expected + [tokenizer.pad_id] * (length - len(expected))
        assert inside[row].sum() == len(expected)
        assert not flags[row][~inside[row]].any()
        begin, end = examples.offsets[i : i + 2]
        np.testing.assert_array_equal(flags[row][inside[row]], examples.definition_flags[begin:end])
    with pytest.raises(ValueError, match="in rows of"):
        examples.padded(chosen, length - 1, tokenizer.pad_id)


def test_what_was_built_is_what_is_opened(examples, folder, tokenizer):
    opened = open_examples(folder)
    assert opened.fingerprint == examples.fingerprint
    assert opened.tokenizer().fingerprint == tokenizer.fingerprint == opened.tokenizer_fingerprint
    assert opened.vocab_size == tokenizer.vocab_size
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(opened, name), getattr(examples, name))


def test_no_held_out_words_is_no_error(tokenizer, tmp_path):
    examples = built(tmp_path, tokenizer, holdout=0.0)
    assert len(examples.held_out_ids) == 0
    assert len(examples.split("heldout")) == 0


def test_an_absent_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no index\.json there; run 'ddrp definitions build"):
        open_examples(tmp_path / "absent")


def damaged_index(folder, **changes):
    index = json.loads((folder / "index.json").read_bytes())
    (folder / "index.json").write_text(json.dumps({**index, **changes}))


def test_damage_is_noticed(folder, tmp_path):
    def copy():
        target = tmp_path / "damaged"
        shutil.rmtree(target, ignore_errors=True)
        return shutil.copytree(folder, target)

    for name in ARRAYS:
        damaged = copy()
        (damaged / f"{name}.npy").unlink()
        with pytest.raises(DdrpError, match=rf"{name}\.npy: cannot be read"):
            open_examples(damaged)
        damaged = copy()
        data = (damaged / f"{name}.npy").read_bytes()
        (damaged / f"{name}.npy").write_bytes(data[:-1])
        with pytest.raises(DdrpError, match=rf"{name}\.npy"):
            open_examples(damaged)
        damaged = copy()
        np.save(damaged / f"{name}.npy", np.zeros(3, np.float64))
        with pytest.raises(DdrpError, match=rf"{name}\.npy: float64 \(3,\), expected"):
            open_examples(damaged)
    damaged = copy()
    (damaged / "index.json").write_text("{")
    with pytest.raises(DdrpError, match=r"index\.json: damaged"):
        open_examples(damaged)
    damaged = copy()
    damaged_index(damaged, version=99)
    with pytest.raises(DdrpError, match="version 99, expected 1"):
        open_examples(damaged)


def test_another_tokenizer_in_the_folder_is_noticed(folder):
    vocabulary = json.loads((folder / "tokenizer" / "tokenizer.json").read_bytes())
    vocabulary["model"]["vocab"]["more"] = len(vocabulary["model"]["vocab"])
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(DdrpError, match="but the examples were made with"):
        open_examples(folder).tokenizer()
