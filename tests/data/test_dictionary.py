"""Dictionaries: every odd line is skipped, counted and named; words stay words."""

import collections
import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrp_jax.data.dictionary import Entry, open_dictionary
from ddrp_jax.errors import DdrpError, UsageError

ODD_WORDS = ["null", "nan", "None", "true", "1e5", "NA", "-", '"', "#", "N/A", "false", "0", "''"]


def sense(*glosses, **more):
    return {"glosses": list(glosses), **more}


def entry(word="tide", *senses, **changes):
    row = {"word": word, "lang_code": "en", "pos": "noun", "senses": list(senses or [sense("g")])}
    return {**row, **changes}


def written(path, lines):
    data = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode()) + b"\n"
        for line in lines
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def wiktextract(path, *lines, language="en"):
    return open_dictionary(f"wiktextract:{written(path, lines)}", language)


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.json", "dump.jsonl.gz", "dump.json.gz"])
def test_wiktextract_entries_in_their_order(tmp_path, name):
    dictionary = wiktextract(
        tmp_path / name,
        entry("tide", sense("Rise and fall of the sea."), sense("Time.", examples=[{"text": "x"}])),
        entry("represented", sense("past tense of represent", form_of=[{"word": "represent"}])),
        entry("tide", sense("To happen."), pos="verb"),
        {"word": "bare", "lang_code": "en", "senses": [sense("Naked.")]},
    )
    expected = [
        Entry("tide", "noun", ("Rise and fall of the sea.", "Time.")),
        Entry("represented", "noun", ("past tense of represent",)),
        Entry("tide", "verb", ("To happen.",)),
        Entry("bare", "", ("Naked.",)),
    ]
    assert list(dictionary) == expected
    assert list(dictionary) == expected, "a dictionary can be read again"
    assert (dictionary.report.lines, dictionary.report.entries) == (4, 4)
    assert dictionary.report.definitions == 5
    assert not dictionary.report.skipped


def test_glosses_are_a_path_and_its_end_is_the_definition(tmp_path):
    parent = "A vessel."
    dictionary = wiktextract(
        tmp_path / "d.jsonl",
        entry("ship", sense(parent, "One that sails."), sense(parent, "One that flies.")),
    )
    assert [e.senses for e in dictionary] == [("One that sails.", "One that flies.")]


def test_every_kind_of_odd_line_is_counted(tmp_path):
    odd = [
        ("redirect", {"title": "Tyde", "redirect": "tide", "pos": "hard-redirect"}),
        ("another language", entry("mare", lang_code="it")),
        ("another language", {"lang_code": "fr"}),
        ("no language", {"word": "x", "senses": [sense("g")]}),
        ("no language", entry("x", lang_code=None)),
        ("no language", {}),
        ("no word", {"lang_code": "en", "senses": [sense("g")]}),
        ("no word", entry("  ")),
        ("no word", entry(7)),
        ("no senses", {"word": "x", "lang_code": "en"}),
        ("no senses", {"word": "x", "lang_code": "en", "senses": []}),
        ("no senses", {"word": "x", "lang_code": "en", "senses": "many"}),
        ("no definition", entry("x", {"tags": ["no-gloss"]})),
        (
            "no definition",
            entry("x", sense(), {"glosses": "g"}, "g", None, sense(None), sense(" ")),
        ),
        ("broken JSON", b'{"word": "x", "lang_code": "en"'),
        ("broken JSON", b'{"word": NaN}'),
        ("broken JSON", b"\x00"),
        ("not UTF-8", b'{"word": "caf\xe9"}'),
        ("not a JSON object", b"null"),
        ("not a JSON object", b"[1, 2]"),
        ("not a JSON object", b'"tide"'),
        ("empty line", b""),
        ("empty line", b"  \r"),
    ]
    lines = [line for _, line in odd]
    good = entry("tide", sense("Rise and fall."), {"tags": ["no-gloss"]})
    dictionary = wiktextract(tmp_path / "d.jsonl", *lines, good, *lines)
    assert list(dictionary) == [Entry("tide", "noun", ("Rise and fall.",))]
    expected = collections.Counter({kind: 0 for kind, _ in odd})
    expected.update([kind for kind, _ in odd] * 2)
    assert dictionary.report.skipped == expected
    assert dictionary.report.lines == 2 * len(odd) + 1
    assert dictionary.report.skipped_senses == {"no definition": 1}
    for kind, count in expected.items():
        assert f"{count} skipped: {kind}" in str(dictionary.report)
        assert dictionary.report.as_dict()["skipped"][kind] == count


def test_a_line_too_long_to_hold_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("ddrp_jax.data.dictionary._LINE_LIMIT", 200)
    long = entry("long", sense("g" * 1000))
    exact = json.dumps(entry("exact")).encode()
    exact += b" " * (199 - len(exact))
    dictionary = wiktextract(tmp_path / "d.jsonl", entry("a"), long, exact, long, entry("b"), long)
    assert [e.word for e in dictionary] == ["a", "exact", "b"]
    assert dictionary.report.skipped == {"line of more than 200 bytes": 3}
    assert dictionary.report.bytes == (tmp_path / "d.jsonl").stat().st_size
    assert dictionary.report.lines == 6


def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g"
    dictionary = wiktextract(
        tmp_path / "d.jsonl", entry("v", sense("\u2028x\u2028y")), entry("w", sense(text))
    )
    assert [e.senses[0] for e in dictionary] == ["x\u2028y", text]
    assert dictionary.report.lines == 2
    path = tmp_path / "d.tsv"
    path.write_text(f"w\tn.\t{text}\r\nv\t\tg\n", encoding="utf-8", newline="")
    assert list(open_dictionary(f"glosses:{path}")) == [
        Entry("w", "n.", (text,)),
        Entry("v", "", ("g",)),
    ]


@pytest.mark.parametrize("word", ODD_WORDS)
def test_words_that_look_like_values_are_words(tmp_path, word):
    expected = [Entry(word, word, (word,))]
    (tmp_path / "d.tsv").write_text(f"{word}\t{word}\t{word}\n")
    assert list(open_dictionary(f"glosses:{tmp_path / 'd.tsv'}")) == expected
    row = {"word": word, "pos": word, "definition": word}
    path = written(tmp_path / "g.jsonl", [row])
    assert list(open_dictionary(f"glosses:{path}")) == expected
    line = entry(word, sense(word), pos=word)
    assert list(wiktextract(tmp_path / "d.jsonl", line)) == expected


PLAIN = st.text(st.characters(exclude_characters="\t\n\r\ufeff", exclude_categories=["Cs"]))


@given(rows=st.lists(st.tuples(PLAIN, PLAIN, PLAIN), max_size=8))
def test_glosses_of_both_kinds_give_what_was_written(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("glosses")
    stripped = [tuple(cell.strip() for cell in row) for row in rows]
    expected = [Entry(word, pos, (text,)) for word, pos, text in stripped if word and text]
    tsv = "".join("\t".join(row) + "\n" for row in rows)
    (folder / "d.tsv").write_text(tsv, encoding="utf-8", newline="")
    lines = [dict(zip(("word", "pos", "definition"), row, strict=True)) for row in rows]
    written(folder / "d.jsonl", lines)
    for name in ("d.tsv", "d.jsonl"):
        dictionary = open_dictionary(f"glosses:{folder / name}")
        if expected:
            assert list(dictionary) == expected
        else:
            with pytest.raises(DdrpError, match="no usable entry"):
                list(dictionary)
        assert dictionary.report.lines == len(rows)
        assert dictionary.report.entries + dictionary.report.skipped.total() == len(rows)


def test_a_table_of_glosses_may_have_a_header_and_odd_rows(tmp_path):
    (tmp_path / "d.tsv").write_bytes(
        b"\xef\xbb\xbfWord\tpos\tdefinition\r\ntide\tn.\tSea.\r\nword\tpos\tdefinition\n"
        b"two\tcolumns\n\ta\tb\nx\tn.\t \ncaf\xe9\tn.\tg\n\n"
    )
    dictionary = open_dictionary(f"glosses:{tmp_path / 'd.tsv'}")
    assert list(dictionary) == [
        Entry("tide", "n.", ("Sea.",)),
        Entry("word", "pos", ("definition",)),
    ]
    assert dictionary.report.skipped == {
        "not three columns": 1,
        "no word": 1,
        "no definition": 1,
        "not UTF-8": 1,
        "empty line": 1,
    }


def test_a_folder_is_read_file_after_file(tmp_path):
    for name in ("b.jsonl", "a.json", "c.jsonl.gz"):
        written(tmp_path / name, [entry(name)])
    (tmp_path / "notes.txt").write_text("not a dictionary")
    words = [e.word for e in open_dictionary(f"wiktextract:{tmp_path}")]
    assert words == ["a.json", "b.jsonl", "c.jsonl.gz"]


def test_an_empty_dictionary_is_an_error(tmp_path):
    for name in ("d.jsonl", "d.jsonl.gz"):
        with pytest.raises(DdrpError, match="no usable entry; it is empty"):
            list(wiktextract(tmp_path / name))


def test_a_dictionary_of_another_language_is_an_error_that_names_it(tmp_path):
    lines = [entry("mare", lang_code="it")] * 3 + [entry("mer", lang_code="fr"), b"{"]
    with pytest.raises(DdrpError) as caught:
        list(wiktextract(tmp_path / "d.jsonl", *lines))
    message = str(caught.value)
    assert "of 5 lines" in message
    assert "4 skipped: another language" in message
    assert "1 skipped: broken JSON" in message
    assert "--language it" in message
    words = [e.word for e in wiktextract(tmp_path / "d.jsonl", *lines, language="it")]
    assert words == ["mare"] * 3


def test_a_damaged_archive_is_an_error(tmp_path):
    path = written(tmp_path / "d.jsonl.gz", [entry(f"w{i}") for i in range(1000)])
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DdrpError, match=r"d\.jsonl\.gz: cannot be read on after"):
        list(open_dictionary(f"wiktextract:{path}"))
    path.write_bytes(b"plain text")
    with pytest.raises(DdrpError, match="after 0 lines"):
        list(open_dictionary(f"wiktextract:{path}"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gcid", "did you mean 'gcide'"),
        ("wiktextrac:x.jsonl", "did you mean 'wiktextract'"),
        ("wiktextract:", "not a dictionary"),
        ("glosses", "not a dictionary"),
        ("gcide:path", "not a dictionary"),
        ("", "not a dictionary"),
        ("wiktextract:absent.jsonl", "no file or folder 'absent.jsonl'"),
    ],
)
def test_what_is_no_dictionary_is_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        open_dictionary(spec)


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "d.xml").write_text("<x/>")
    with pytest.raises(UsageError, match=r"expected a \.tsv or"):
        open_dictionary(f"glosses:{tmp_path / 'd.xml'}")
    with pytest.raises(UsageError, match=r"no \.jsonl or"):
        open_dictionary(f"wiktextract:{tmp_path}")
    with pytest.raises(UsageError, match="it is English"):
        open_dictionary("gcide", "fr")


@pytest.mark.skipif(importlib.util.find_spec("dictionary") is None, reason="needs the extra 'demo'")
def test_the_package_gives_all_its_definitions():
    dictionary = open_dictionary("gcide")
    entries = list(dictionary)
    words = {e.word for e in entries}
    # 171,934 in the package, of which a few hold nothing but a note on where they are from.
    assert 171_900 < sum(len(e.senses) for e in entries) < 171_934
    assert len(words) > 108_100
    assert {"null", "nan", "none", "true", "bank"} <= words
    assert all(e.word and all(e.senses) for e in entries)
    assert not any("1913 Webster]" in text for e in entries for text in e.senses)
    first = next(e for e in entries if e.word == "null")
    assert (first.pos, len(first.senses)) == ("a.", 4)
    assert first.senses[0].startswith("Of no legal or binding force")


MEMORY = r"""
import re, sys
from pathlib import Path
from ddrp_jax.data.dictionary import open_dictionary
count = sum(1 for _ in open_dictionary("wiktextract:" + sys.argv[1]))
print(count, re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    line = json.dumps(entry("tide", sense("g" * 2000))).encode() + b"\n"

    def peak(copies):
        data = line * copies
        path = tmp_path / f"d{suffix}"
        path.write_bytes(gzip.compress(data, 1) if suffix.endswith("gz") else data)
        command = [sys.executable, "-c", MEMORY, path]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        count, kilobytes = map(int, output.split())
        assert count == copies
        return kilobytes / 1024

    small, large = peak(1_000), peak(30_000)  # 2 and 60 MB
    assert large < small + 10, f"{small:.0f} MB, then {large:.0f} MB"
