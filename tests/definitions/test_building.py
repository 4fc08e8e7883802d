"""Examples against what the specification says of them, for every kind of tokenizer."""

import collections
import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vocabularies import ENTRIES, KINDS, built, flags, glosses, id_of, inputs, wordpiece

from ddrp_jax.data.dictionary import open_dictionary
from ddrp_jax.definitions.building import build_examples
from ddrp_jax.definitions.choosing import BuildOptions
from ddrp_jax.definitions.examples import ARRAYS
from ddrp_jax.errors import DdrpError, UsageError


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("vocabulary") / request.param)


@pytest.fixture(scope="module")
def examples(tokenizer, tmp_path_factory):
    return built(tmp_path_factory.mktemp("built") / tokenizer.kind, tokenizer)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return wordpiece(tmp_path_factory.mktemp("vocabulary") / "wordpiece")


def surface_forms(word):
    cases = {word, word[:1].upper() + word[1:], word.upper()}
    return [space + case for case in sorted(cases) for space in ("", " ")]


def spellings(folded):
    return [word for word, _, _ in ENTRIES if word.casefold() == folded] or [folded]


def test_a_slot_shows_the_pieces_before_the_wanted_one(tokenizer, examples):
    masked_pieces = collections.Counter()
    for i in range(len(examples)):
        ids = inputs(examples, i)
        begin, at = int(examples.slot_begin[i]), int(examples.slot_position[i])
        target, word = int(examples.target_id[i]), examples.headwords[examples.headword[i]]
        assert (ids[0], ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert 1 <= begin <= at < len(ids) - 1
        shown = ids[begin:at]
        assert tokenizer.mask_id not in shown
        assert not any(flags(examples, i)[: at + 1]), "the slot comes first in this template"
        forms = [tokenizer.encode(form) for s in spellings(word) for form in surface_forms(s)]
        slots = [form for form in forms if form[: len(shown) + 1] == [*shown, target]]
        if not shown:
            slots.append([target])  # a token that is the word's spelling without being its encoding
        counts = {len(slot) - len(shown) for slot in slots}
        run = next(n for n, token in enumerate([*ids[at:], -1]) if token != tokenizer.mask_id)
        assert run in counts, (word, tokenizer.id_to_token(target))
        masked_pieces[len(shown)] += 1
    assert masked_pieces[0]
    assert masked_pieces[1], "some examples ask for a second piece"


def test_a_whole_word_s_prompt_is_the_template_s_text(tokenizer, examples):
    """Against the tokenizer's own reading of the text, in one piece."""
    number_of_senses = collections.Counter()
    seen = 0
    for word, pos, definition in ENTRIES:
        sense = number_of_senses[word]
        number_of_senses[word] += 1
        if re.search(rf"\b{word}\b", definition, re.IGNORECASE):
            continue
        prompt = f"{tokenizer.mask_token} ({pos}) means: {definition}"
        expected = tokenizer.encode_with_special(prompt.replace(" ()", ""))
        for i in np.flatnonzero(examples.slot_position == examples.slot_begin):
            ids = inputs(examples, i)
            is_single = ids.count(tokenizer.mask_id) == 1
            named = examples.headwords[examples.headword[i]] == word.casefold()
            if is_single and named and examples.sense[i] == sense and word in ("tide", "sea"):
                assert ids == expected
                seen += 1
    assert seen >= 2


def test_definition_flags_are_the_definition_s_tokens(tokenizer, examples):
    texts = {}
    for word, _, definition in ENTRIES:
        texts.setdefault(word.casefold(), []).append(definition)
    for i in range(len(examples)):
        word = examples.headwords[examples.headword[i]]
        if word not in texts:
            continue  # a number
        flagged = np.array(inputs(examples, i))[np.array(flags(examples, i))]
        assert tokenizer.mask_id not in flagged
        assert not set(flagged.tolist()) & (tokenizer.special_ids - {tokenizer.unk_id})
        allowed = [
            re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "", text, flags=re.IGNORECASE)
            for text in texts[word]
        ]
        squeezed = ["".join(tokenizer.decode(tokenizer.encode(text)).split()) for text in allowed]
        assert "".join(tokenizer.decode(flagged).split()) in squeezed


def test_the_headword_is_masked_in_its_own_definition_by_word(tokenizer, examples):
    bank = [
        i
        for i in range(len(examples))
        if examples.headwords[examples.headword[i]] == "bank" and examples.sense[i] == 1
    ]
    assert bank
    definition = ENTRIES[2][2]
    for i in bank:
        ids, is_text = inputs(examples, i), flags(examples, i)
        first, last = is_text.index(True), len(ids) - 1
        masks = [n for n in range(first, last) if ids[n] == tokenizer.mask_id]
        # "the bank" and "Bank on", but not the embankment.
        expected = len(tokenizer.encode(" bank")) + len(tokenizer.encode(" Bank"))
        assert len(masks) == expected
        assert not any(is_text[n] for n in masks)
        text = tokenizer.decode([t for n, t in enumerate(ids) if is_text[n]])
        assert "embankment" in text.replace(" ##", "").replace(" ", "")
    assert "embankment" in definition
    counts = examples.index["counts"]
    assert counts["definitions_with_their_headword"] >= 1


def test_all_case_and_space_forms_of_a_word_have_its_definitions(tmp_path):
    tokenizer = KINDS["byte_bpe"](tmp_path / "vocabulary")
    examples = built(tmp_path, tokenizer)
    forms = [id_of(tokenizer, piece) for piece in ("bank", "\u0120bank", "\u0120Bank")]
    for token in forms:
        found = np.flatnonzero(examples.target_id == token)
        assert [examples.headwords[h] for h in examples.headword[found]] == ["bank", "bank"]
        assert examples.sense[found].tolist() == [0, 1]
    # Exact spelling first: one is of Poland, the other to make smooth.
    for piece, text in (("\u0120Polish", "Poland"), ("\u0120polish", "smooth")):
        (i,) = np.flatnonzero(examples.target_id == id_of(tokenizer, piece))
        assert text in tokenizer.decode(inputs(examples, i))


def test_numbers_are_spelt_out_and_pieces_have_carriers(pieces, tmp_path):
    examples = built(tmp_path, pieces)
    for piece, words in (("42", "forty-two"), ("21st", "twenty-first"), ("##7", "seven")):
        (i,) = np.flatnonzero(examples.target_id == id_of(pieces, piece))
        text = pieces.decode(np.array(inputs(examples, i))[np.array(flags(examples, i))])
        assert text.replace(" ##", "").replace(" ", "") == words
    carried = {
        "##bank": {"riverbank"},
        "##al": {"tidal"},
        "##side": {"seaside"},
        "tid": {"tidal"},
        "##s": {"tides"},
    }
    for piece, words in carried.items():
        found = np.flatnonzero(examples.target_id == id_of(pieces, piece))
        assert {examples.headwords[h] for h in examples.headword[found]} == words
    # An accented word is a token without its accents.
    (i,) = np.flatnonzero(examples.target_id == id_of(pieces, "cafe"))
    assert examples.headwords[examples.headword[i]] == "café"


def test_numbers_in_another_language_are_left_to_its_dictionary(pieces, tmp_path):
    row = {"lang_code": "it", "pos": "num", "senses": [{"glosses": ["sea"]}]}
    lines = [json.dumps({"word": word, **row}) for word in ("42", "mare", "tide")]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    dictionary = open_dictionary(f"wiktextract:{tmp_path / 'd.jsonl'}", "it")
    options = BuildOptions(holdout=0.0)
    examples = build_examples(dictionary, pieces, tmp_path / "out", options)
    assert examples.index["coverage"]["number"]["defined"] == 1
    (i,) = np.flatnonzero(examples.target_id == id_of(pieces, "42"))
    assert "sea" in pieces.decode(inputs(examples, i))


def test_coverage_counts_every_token_once(tokenizer, examples, pieces, tmp_path):
    coverage = examples.index["coverage"]
    assert sum(kind["tokens"] for kind in coverage.values()) == tokenizer.vocab_size
    assert sum(kind["defined"] for kind in coverage.values()) == len(examples.defined_ids)
    for kind in coverage.values():
        assert kind["own_definition"] + kind["carrier_word"] == kind["defined"] <= kind["tokens"]
    assert coverage["special"]["defined"] == 0
    coverage = built(tmp_path, pieces).index["coverage"]
    assert coverage["special"]["tokens"] == 5 + 3
    # "42", "21st", ten digits and "##7", each spelt out.
    assert coverage["number"] == {
        "tokens": 13,
        "defined": 13,
        "own_definition": 13,
        "carrier_word": 0,
    }
    # bank, river, polish, cafe, tide, sea, rise, the.
    assert coverage["whole word"]["own_definition"] == 8


def test_examples_are_bounded_and_divided_among_carriers(pieces, tmp_path):
    entries = [("tide", "n.", f"definition {i}") for i in range(20)]
    entries += [("tidal", "a.", f"first {i}") for i in range(5)]
    entries += [(f"{letter}al", "a.", f"{letter} sense") for letter in "bcdefg"]
    examples = built(tmp_path, pieces, entries, max_examples=6, max_carriers=3)
    counts = collections.Counter(examples.target_id.tolist())
    assert max(counts.values()) == 6
    found = np.flatnonzero(examples.target_id == id_of(pieces, "tide"))
    assert examples.sense[found].tolist() == list(range(6))
    found = np.flatnonzero(examples.target_id == id_of(pieces, "##al"))
    by_word = collections.Counter(examples.headwords[h] for h in examples.headword[found])
    # Three carriers in the dictionary's order; what the others leave goes to more senses.
    assert by_word == {"tidal": 4, "bal": 1, "cal": 1}


@pytest.mark.parametrize("max_length", [16, 20, 64])
def test_long_definitions_are_cut_and_counted(pieces, tmp_path, max_length):
    entries = [("tide", "n.", "the sea " * 40), ("sea", "n.", "the tide")]
    examples = built(tmp_path, pieces, entries, max_length=max_length)
    found = np.flatnonzero(examples.target_id == id_of(pieces, "tide"))
    assert examples.lengths[found].tolist() == [max_length]
    assert inputs(examples, found[0])[-1] == pieces.sep_id
    assert examples.lengths.max() <= max_length
    whole = built(tmp_path / "whole", pieces, entries, max_length=500)
    (uncut,) = np.flatnonzero(whole.target_id == id_of(pieces, "tide"))
    assert inputs(examples, found[0])[:-1] == inputs(whole, uncut)[: max_length - 1]
    assert (examples.lengths == np.minimum(whole.lengths, max_length)).all()
    if max_length == 64:
        assert examples.index["counts"]["definitions_cut"] == 1


def test_a_word_too_long_for_its_prompt_is_counted(pieces, tmp_path):
    entries = [("z" * 40 + "bank", "n.", "long"), ("sea", "n.", "the tide")]
    examples = built(tmp_path, pieces, entries, max_length=16)
    assert examples.index["counts"]["examples_without_room"] > 0
    assert examples.lengths.max() <= 16


def test_templates_of_another_order(tokenizer, tmp_path):
    template = "By {definition} is meant {slot}."
    examples = built(
        tmp_path, tokenizer, [("tide", "noun", "the rise of the sea")], template=template
    )
    text = f"By the rise of the sea is meant {tokenizer.mask_token}."
    expected = tokenizer.encode_with_special(text)
    single = [
        i
        for i in range(len(examples))
        if inputs(examples, i).count(tokenizer.mask_id) == 1
        and examples.headwords[examples.headword[i]] == "tide"
    ]
    assert single
    for i in single:
        if examples.slot_begin[i] == examples.slot_position[i]:
            assert inputs(examples, i) == expected


def test_the_same_seed_gives_the_same_examples(tokenizer, tmp_path):
    one = built(tmp_path / "1", tokenizer, holdout=0.3, seed=1)
    two = built(tmp_path / "2", tokenizer, holdout=0.3, seed=1)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.fingerprint == two.fingerprint
    splits = {
        tuple(built(tmp_path / "3", tokenizer, holdout=0.3, seed=seed).held_out_ids.tolist())
        for seed in range(5)
    }
    assert len(splits) > 1


ALPHABET = st.sampled_from("abs")
SOME_WORDS = ("bank", "Bank", "river", "riverbank", "tide", "Tide", "tides", "sea", "42", "the sea")
RANDOM_WORDS = st.one_of(
    st.sampled_from([word for word, _, _ in ENTRIES]),
    st.sampled_from(SOME_WORDS),
    st.text(ALPHABET, min_size=1, max_size=6),
)
RANDOM_TEXT = st.lists(st.sampled_from(SOME_WORDS), min_size=1, max_size=6).map(" ".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    entries=st.lists(
        st.tuples(RANDOM_WORDS, st.sampled_from(["", "n."]), RANDOM_TEXT), min_size=4, max_size=30
    ),
    holdout=st.floats(0.01, 0.7),
    seed=st.integers(0, 10),
)
def test_nothing_leaks_from_held_out_words(tokenizer, tmp_path_factory, entries, holdout, seed):
    folder = tmp_path_factory.mktemp("leak")
    problem = ""
    try:
        examples = built(folder, tokenizer, entries, holdout=holdout, seed=seed)
    except UsageError as error:
        problem = str(error)
    if problem:
        assert "would hold out all" in problem
        return
    train, heldout = examples.split("train"), examples.split("heldout")
    assert len(train) + len(heldout) == len(examples)
    held_out_ids = set(examples.held_out_ids.tolist())
    # Only words that are tokens can be held out.
    assert bool(held_out_ids) == bool(examples.index["coverage"]["whole word"]["own_definition"])
    assert set(examples.target_id[heldout].tolist()) == held_out_ids
    assert not held_out_ids & set(examples.target_id[train].tolist())
    words = {examples.headwords[h] for h in examples.headword[heldout]}
    assert not words & {examples.headwords[h] for h in examples.headword[train]}
    # Every token that spells a held-out word, in whatever case, is held out.
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.id_to_token(token)
        if tokenizer.kind == "byte_bpe":
            text = tokenizer.decode([token]).strip()
        elif tokenizer.word_starts[token]:
            text = piece.removeprefix("\u2581")
        else:
            continue
        if text.casefold() in words:
            assert token in held_out_ids
    # No definition of a held-out word is shown in training.
    texts = collections.defaultdict(set)
    for word, _, text in entries:
        texts[text].add(word.casefold())
    shown = {
        tuple(np.array(inputs(examples, i))[np.array(flags(examples, i), bool)]) for i in train
    }
    # What is left of a training word's definition where that word is masked may read the same.
    alike = {
        tuple(tokenizer.encode(f" {text}")) for text, owners in texts.items() if owners - words
    }
    for word, _, text in entries:
        if word.casefold() not in words:
            own = tokenizer.encode(f" {word}")
            alike.add(tuple(i for i in tokenizer.encode(f" {text}") if i not in own))
    for text, owners in texts.items():
        if owners <= words and not any(word in text.casefold() for word in owners):
            ids = tuple(tokenizer.encode(f" {text}"))
            if ids not in alike:
                assert ids not in shown


def test_an_exact_share_of_headwords_is_held_out(pieces, tmp_path):
    examples = built(tmp_path, pieces, holdout=0.25)
    # Two of eight whole words; numbers are not headwords of the dictionary.
    assert len(examples.held_out_ids) == 2
    assert examples.index["options"]["holdout"] == 0.25


def test_definitions_without_tokens_are_left_out(pieces, tmp_path):
    entries = [("tide", "n.", "\u200b\x01"), ("sea", "n.", "the tide")]
    examples = built(tmp_path, pieces, entries)
    assert id_of(pieces, "tide") not in examples.defined_ids
    assert examples.index["counts"]["definitions_without_tokens"] == 1


def test_a_dictionary_that_explains_nothing_is_an_error(pieces, tmp_path):
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x"])
    )
    from ddrp_jax.data.tokenizers import load_tokenizer

    dictionary = glosses(tmp_path / "g.jsonl", [("tide", "n.", "sea")])
    with pytest.raises(DdrpError, match="explain none of the 6 tokens"):
        build_examples(dictionary, load_tokenizer(folder), tmp_path / "out", BuildOptions())
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": 1.0}, "holdout=1.0"),
        ({"holdout": -0.1}, "holdout=-0.1"),
        ({"max_length": 8}, "max_length=8: expected at least 16"),
        ({"max_examples": 0}, "max_examples=0: expected at least 1"),
        ({"max_carriers": 0}, "max_carriers=0: expected at least 1"),
        ({"template": "{slot}"}, "{definition} is there 0 times"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        BuildOptions(**options)
