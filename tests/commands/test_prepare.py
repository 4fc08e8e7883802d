"""`ddrp prepare` through the installed console script."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from ddrp_jax.commands import output, prepare
from ddrp_jax.data.records import open_records
from ddrp_jax.data.sentencepiece_training import train_sentencepiece
from ddrp_jax.errors import UsageError

DDRP = Path(sys.executable).parent / "ddrp"


def ddrp(*arguments):
    return subprocess.run([DDRP, "prepare", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    documents = [f"the fox number {i} sees the dog number {i * 7}" for i in range(500)]
    train_sentencepiece(documents, vocab_size=80, model="bpe")[0].save(folder / "tokenizer")
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    (folder / "more.jsonl").write_text('{"body": "a fox"}\n' * 10 + '{"body": ""}\n')
    return folder


def test_records_from_two_sources_with_weights_and_a_heldout_split(inputs, tmp_path):
    common = ("--tokenizer", inputs / "tokenizer", "--processes", 2, "--text-field", "body")
    result = ddrp(
        *("--input", f"text:{inputs / 'corpus.txt'}", f"jsonl:{inputs / 'more.jsonl'}"),
        *("--weights", 1, 3, "--holdout", "5%", "--output", tmp_path / "out", *common),
    )
    assert (result.returncode, result.stderr) == (0, "")
    records = open_records(tmp_path / "out")
    train, heldout = records.split("train"), records.split("heldout")
    # "a fox", ten times in the file, falls to the training split.
    assert train.num_documents + heldout.num_documents == 500 + 3 * 10
    assert 5 <= heldout.num_documents <= 60
    assert f"{train.num_tokens:,}" in result.stdout
    assert f"{train.unigram_entropy:.3f} nats" in result.stdout
    assert "1 empty documents were left out" in result.stdout


def test_a_second_run_refuses_without_overwrite(inputs, tmp_path):
    command = (
        *("--input", f"text:{inputs / 'corpus.txt'}", "--tokenizer", inputs / "tokenizer"),
        *("--output", tmp_path / "out", "--processes", 1),
    )
    assert ddrp(*command).returncode == 0
    before = (tmp_path / "out" / "index.json").read_bytes()
    refused = ddrp(*command, "--holdout", "5%")
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert (tmp_path / "out" / "index.json").read_bytes() == before
    assert ddrp(*command, "--holdout", "5%", "--overwrite").returncode == 0
    assert "heldout" in open_records(tmp_path / "out").splits


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 1, "corpus is empty"),
        (b"caf\xe9\n", 1, "corpus.txt: not UTF-8 at byte 3"),
    ],
)
def test_bad_text_leaves_nothing(inputs, tmp_path, content, status, message):
    (tmp_path / "corpus.txt").write_bytes(content)
    result = ddrp(
        *("--input", f"text:{tmp_path / 'corpus.txt'}", "--tokenizer", inputs / "tokenizer"),
        *("--output", tmp_path / "out"),
    )
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--input: missing"),
        (["--input", "demo", "--weights", "1", "2"], "2 given for 1 inputs"),
        (["--input", "demo", "--holdout", "150%"], "expected a share such as 0.5%"),
        (["--input", "demo", "--processes", "0"], "expected at least 1"),
        (["--input", "tfds:wiki"], "such as 'tfds:wiki@train'"),
    ],
)
def test_a_bad_request_is_answered_with_status_2(inputs, tmp_path, arguments, message):
    result = ddrp(*arguments, "--tokenizer", inputs / "tokenizer", "--output", tmp_path / "out")
    assert result.returncode == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_kind_of_source_and_an_example():
    result = ddrp("--help")
    assert result.returncode == 0
    for form in ("text:PATH", "jsonl:PATH", "parquet:PATH", "hf:NAME", "tfds:NAME@SPLIT", "demo"):
        assert form in result.stdout
    assert "--holdout 0.5%" in result.stdout


@pytest.mark.parametrize(
    ("text", "value"), [("0.5%", 0.005), ("0.005", 0.005), ("0", 0.0), ("12%", 0.12)]
)
def test_share(text, value):
    assert prepare.share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["half", "-1%", "1", "100%", "nan", ""])
def test_share_refuses_what_is_none(text):
    with pytest.raises(UsageError, match="--holdout"):
        prepare.share(text)


def test_a_long_job_without_a_terminal_prints_plain_lines(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    prepare.run(
        parser.parse_args(
            [
                *("--input", f"text:{inputs / 'corpus.txt'}", "--processes", "1"),
                *("--tokenizer", str(inputs / "tokenizer"), "--output", str(tmp_path / "out")),
            ]
        )
    )
    error = capsys.readouterr().err
    assert error.startswith("500 documents, ")
    assert "\x1b" not in error
