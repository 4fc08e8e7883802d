"""`ddrp definitions build`: the whole command, and what it leaves when it fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ddrp_jax import cli
from ddrp_jax.definitions.examples import open_examples

DDRP = Path(sys.executable).parent / "ddrp"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", *"abcdefghijklmnopqrstuvwxyz"]
PIECES += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
PIECES += ["tide", "sea", "rise", "moon", "##al", "42", *"():.,"]
GLOSSES = (
    "tide\tn.\tThe rise of the sea.\nsea\t\tSalt water.\nrise\tv.\tTo go up.\ntidal\ta.\tOf it.\n"
)


def ddrp(*arguments):
    return cli.main(["definitions", "build", *map(str, arguments)])


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "in"
    (folder / "vocabulary").mkdir(parents=True)
    (folder / "vocabulary" / "vocab.txt").write_text("\n".join([*PIECES, ""]))
    (folder / "g.tsv").write_text(GLOSSES)
    return folder


def flags(inputs, output, dictionary="g.tsv"):
    kind = "wiktextract" if "json" in dictionary else "glosses"
    return (
        *("--dictionary", f"{kind}:{inputs / dictionary}", "--tokenizer", inputs / "vocabulary"),
        *("--output", output),
    )


def test_a_build_reports_its_coverage(inputs, tmp_path, capsys):
    assert ddrp(*flags(inputs, tmp_path / "out"), "--holdout", "40%") == 0
    text = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    # tide, sea and rise by their own word; letters that only carriers have.
    assert lines["whole word"][2:] == ["35", "4", "3", "1", "11.4%"]
    assert lines["number"][1:] == ["1", "1", "1", "0", "100.0%"]
    assert lines["special"][1:] == ["6", "0", "0", "0", "0.0%"]
    assert "4 entries with 4 definitions" in text
    examples = open_examples(tmp_path / "out")
    assert examples.index["coverage"]["whole word"]["own_definition"] == 3
    assert len(examples.held_out_ids) == 1
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").exists()


def test_a_folder_with_a_tokenizer_in_it_will_do(inputs, tmp_path):
    (inputs / "vocabulary").rename(tmp_path / "tokenizer")
    (inputs / "vocabulary").mkdir()
    (tmp_path / "tokenizer").rename(inputs / "vocabulary" / "tokenizer")
    assert ddrp(*flags(inputs, tmp_path / "out")) == 0
    assert open_examples(tmp_path / "out").vocab_size == len(PIECES)


def test_json_holds_the_report(inputs, tmp_path, capsys):
    assert ddrp(*flags(inputs, tmp_path / "out"), "--json", "-", "--max-length", "32") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["coverage"]["number"]["defined"] == 1
    assert result["dictionary"]["definitions"] == 4
    assert result["options"]["max_length"] == 32
    assert "headwords" not in result


def test_options_reach_the_examples(inputs, tmp_path):
    template = "{definition} names {slot}"
    options = ("--template", template, "--max-examples-per-token", "1", "--max-carriers", "1")
    assert ddrp(*flags(inputs, tmp_path / "out"), *options, "--seed", "3") == 0
    examples = open_examples(tmp_path / "out")
    assert np.bincount(examples.target_id).max() == 1
    assert (examples.slot_begin > 1).all(), "the definition comes first"
    assert examples.index["options"]["seed"] == 3


def test_a_finished_folder_is_replaced_only_when_asked(inputs, tmp_path, capsys):
    assert ddrp(*flags(inputs, tmp_path / "out")) == 0
    before = (tmp_path / "out" / "index.json").read_bytes()
    assert ddrp(*flags(inputs, tmp_path / "out"), "--max-length", "20") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "index.json").read_bytes() == before
    assert ddrp(*flags(inputs, tmp_path / "out"), "--max-length", "20", "--overwrite") == 0
    assert open_examples(tmp_path / "out").lengths.max() <= 20


ITALIAN = b'{"word": "mare", "lang_code": "it", "senses": [{"glosses": ["sea"]}]}\n'
FOREIGN_WORD = "\u6d77\tn.\t\u5927\u304d\u306a\u6c34\n"


@pytest.mark.parametrize(
    ("name", "content", "status", "message"),
    [
        ("d.jsonl", b"", 1, "no usable entry; it is empty"),
        ("d.jsonl", ITALIAN * 3, 1, "pass --language it"),
        ("d.jsonl", b"{\n", 1, "1 skipped: broken JSON"),
        ("d.tsv", b"two\tcolumns\n", 1, "1 skipped: not three columns"),
        ("d.xml", b"<x/>", 2, "expected a .tsv or"),
        (None, b"", 2, "no file or folder"),
    ],
)
def test_a_bad_dictionary_leaves_nothing(inputs, tmp_path, capsys, name, content, status, message):
    if name:
        (inputs / name).write_bytes(content)
    assert ddrp(*flags(inputs, tmp_path / "out", name or "absent.tsv")) == status
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_dictionary_that_covers_no_token_leaves_nothing(inputs, tmp_path, capsys):
    (inputs / "vocabulary" / "vocab.txt").write_text("\n".join([*PIECES[:6], "tide", ""]))
    (inputs / "g.tsv").write_text(FOREIGN_WORD, encoding="utf-8")
    assert ddrp(*flags(inputs, tmp_path / "out")) == 1
    assert "explain none of the 7 tokens" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--holdout", "100%"), "--holdout='100%'"),
        (("--holdout", "0.99"), "would hold out all 3 headwords"),
        (("--template", "{slot} {meaning}"), "no field {meaning}"),
        (("--max-length", "3"), "max_length=3: expected at least 16"),
        (("--tokenizer", "absent"), "tokenizer='absent'"),
        (("--dictionary", "gcidee"), "did you mean 'gcide'"),
    ],
)
def test_a_bad_request_leaves_nothing(inputs, tmp_path, capsys, arguments, message):
    assert ddrp(*flags(inputs, tmp_path / "out"), *arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing_that_looks_finished(inputs, tmp_path, sent):
    lines = b'{"word": "tide", "lang_code": "en", "senses": [{"glosses": ["sea"]}]}\n' * 300_000
    (inputs / "d.jsonl").write_bytes(lines)
    command = [DDRP, "definitions", "build", *flags(inputs, tmp_path / "out", "d.jsonl")]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    working = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while not working.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, sent)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (-9 if sent == signal.SIGKILL else 130)
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
    assert not (working / "index.json").exists()
    assert ddrp(*flags(inputs, tmp_path / "out")) == 0
    assert not working.exists()
    assert len(open_examples(tmp_path / "out"))
