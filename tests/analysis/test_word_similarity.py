import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrp_jax.analysis.word_similarity import WordPairs, read_pairs, word_pieces, word_similarity
from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError

PIECES = ["fox", "dog", "world", "people", "hello", "quick", "##ly", "##able", "[unused3]"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *PIECES, ""]))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def table(tokenizer):
    return np.random.default_rng(0).standard_normal((tokenizer.vocab_size, 4), np.float32)


def slow_spearman(xs, ys):
    """Pearson's correlation of ranks, where equal values share the mean of their places."""

    def ranks(values):
        return [sum(v < x for v in values) + (values.count(x) - 1) / 2 for x in values]

    return np.corrcoef(ranks(xs), ranks(ys))[0, 1]


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("sun\tlight\t7.5\na\tb c\t1\n", None),
        ("sun\tlight\t7.5\r\na\tb c\t1\r\n", None),
        (
            "\ufeffWord 1,Word 2,Human (mean)\nsun,light,7.50\na,b c,1e0",
            "Word 1,Word 2,Human (mean)",
        ),
        (
            "word1\tword2\tPOS\tSimLex999\tconc(w1)\nsun\tlight\tN\t7.5\t3\na\tb c\tV\t1\t4\n",
            "word1\tword2\tPOS\tSimLex999\tconc(w1)",
        ),
        ("# judged by few\n\nsun\tlight\t7.5\t8\t7\na\tb c\t1\t1\t1\n\n", None),
    ],
)
def test_the_usual_formats_are_read(tmp_path, text, header):
    path = tmp_path / "set.txt"
    path.write_bytes(text.encode())
    assert read_pairs(path) == WordPairs("set", header, (("sun", "light", 7.5), ("a", "b c", 1.0)))


def test_spaces_part_columns_and_only_a_newline_ends_a_line(tmp_path):
    path = tmp_path / "set.txt"
    path.write_text("sun  light 7.5\n1 2\x0bx 3\n", encoding="utf-8")
    with pytest.raises(DdrpError, match="line 2 is"):
        read_pairs(path)
    path.write_text("sun  light 7.5\n1 2 3\n\u2028a\tnan\t4\n", encoding="utf-8")
    assert read_pairs(path).pairs == (("sun", "light", 7.5), ("1", "2", 3.0), ("a", "nan", 4.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line with two words"),
        ("# nothing\n\n", "no line with two words"),
        ("word1\tword2\tscore\n", "no line with two words"),
        ("a\tb\t1\nc\td\n", r"line 2 is 'c\\td', expected two words and a score"),
        ("a\tb\t1\nc\td\tx\n", "line 2 is"),
        ("a\tb\t1\n\nc\td\tnan\n", "line 3 is"),
        ("a\tb\t1\n\tb\t1\n", "line 2 is"),
        ("w\nv\n", "line 2 is"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    path = tmp_path / "set.txt"
    path.write_text(text)
    with pytest.raises(DdrpError, match=message) as caught:
        read_pairs(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"word similarity '.*set.txt': no such file"):
        read_pairs(tmp_path / "set.txt")


def test_agreement_is_spearmans_of_cosines(tokenizer, table):
    row = {piece: table[5 + i].astype(np.float64) for i, piece in enumerate(PIECES)}
    pairs = (
        ("fox", "dog", 9.0),
        ("World", "people", 4.0),
        ("hello", "quick", 1.0),
        ("fox", "fox", 10.0),
        ("dog", "hello", 4.0),
        ("quickly", "world", 5.0),
        ("worldly", "foxable", 2.0),
        ("zebra", "fox", 3.0),
        ("fox", "[unused3]", 3.0),
    )
    single = [cosine(row[a.lower()], row[b]) for a, b, _ in pairs[:5]]
    pieces = [
        *single,
        cosine((row["quick"] + row["##ly"]) / 2, row["world"]),
        cosine((row["world"] + row["##ly"]) / 2, (row["fox"] + row["##able"]) / 2),
    ]
    scores = [score for _, _, score in pairs]
    result = word_similarity(table, tokenizer, WordPairs("set", None, pairs))
    assert result == {
        "single_tokens": {
            "pairs": 9,
            "used": 5,
            "spearman": pytest.approx(slow_spearman(scores[:5], single), abs=1e-12),
        },
        "mean_of_pieces": {
            "pairs": 9,
            "used": 7,
            "spearman": pytest.approx(slow_spearman(scores[:7], pieces), abs=1e-12),
        },
    }


WORDS = ("fox", "dog", "world", "people", "hello", "quick")


@settings(max_examples=30, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.sampled_from(WORDS), st.sampled_from(WORDS), st.integers(0, 5)),
        min_size=2,
        max_size=12,
    ),
    scale=st.floats(1e-3, 1e3),
)
def test_neither_length_nor_a_monotone_score_matters(tokenizer, table, pairs, scale):
    plain = WordPairs("set", None, tuple((a, b, float(s)) for a, b, s in pairs))
    other = WordPairs("set", None, tuple((b, a, float(s**3)) for a, b, s in pairs))
    lengths = scale * np.arange(1, len(table) + 1)[:, None]
    first = word_similarity(table, tokenizer, plain)["single_tokens"]
    second = word_similarity(table.astype(np.float64) * lengths, tokenizer, other)["single_tokens"]
    assert first["used"] == second["used"] == len(pairs)
    if first["spearman"] is None:
        assert second["spearman"] is None
    else:
        assert second["spearman"] == pytest.approx(first["spearman"], abs=1e-9)


@pytest.mark.parametrize(
    ("pairs", "rows", "problem"),
    [
        ([("fox", "zebra", 1), ("fox", "dog", 2)], None, "only 1 of its 2 pairs can be used"),
        ([("fox", "dog", 2), ("dog", "world", 2)], None, "all scores are equal"),
        ([("fox", "dog", 2), ("dog", "world", 3)], "one direction", "all cosines are equal"),
        ([("fox", "dog", 2), ("dog", "world", 3)], "zeros", "only 0 of its 2 pairs can be used"),
    ],
)
def test_an_undefined_agreement_is_none_with_a_warning(
    tokenizer, table, pairs, rows, problem, caplog, monkeypatch
):
    if rows:
        lengths = np.geomspace(0.1, 7, len(table)) * (rows == "one direction")
        table = lengths[:, None] * np.array([0.3, 0.7, -0.1, 1.1])
    caplog.set_level(logging.WARNING)
    # The command line turns this off for the whole process.
    monkeypatch.setattr(logging.getLogger("ddrp_jax"), "propagate", True)
    result = word_similarity(table, tokenizer, WordPairs("some", None, tuple(pairs)))
    assert result["single_tokens"]["spearman"] is None
    assert f"some, single tokens: no rank correlation, {problem}" in caplog.text


def test_the_public_sets_with_robertas_vocabulary(shared_data):
    roberta = load_tokenizer(shared_data / "roberta_tokenizer")
    assert [roberta.id_to_token(i) for i in word_pieces(roberta, "bank")] == ["\u0120bank"]
    table = np.random.default_rng(0).standard_normal((roberta.vocab_size, 8))
    for name, size, least in (("EN-WS-353-ALL", 353, 300), ("EN-SIMLEX-999", 999, 900)):
        pairs = read_pairs(shared_data / "wordsim" / f"{name}.txt")
        assert (len(pairs.pairs), pairs.header) == (size, None)
        result = word_similarity(table, roberta, pairs)
        assert least < result["single_tokens"]["used"] < size
        assert result["mean_of_pieces"]["used"] == size
    assert pairs.pairs[0] == ("old", "new", 1.58)
