"""`ddrp tokenizer` through the installed console script."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddrp_jax.data.tokenizers import load_tokenizer

DDRP = Path(sys.executable).parent / "ddrp"


def ddrp(*arguments):
    return subprocess.run([DDRP, "tokenizer", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def corpus(tmp_path):
    lines = [f"the fox number {i} sees the dog number {i * 7}" for i in range(400)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n" + "long " * 1000)
    return f"text:{tmp_path / 'corpus.txt'}"


@pytest.mark.parametrize("model", ["unigram", "bpe"])
def test_train_writes_the_same_tokenizer_each_time(corpus, tmp_path, model):
    for name in ("first", "second"):
        result = ddrp(
            *("train", "--input", corpus, "--model", model, "--vocab-size", 90),
            *("--output", tmp_path / name),
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert "401 lines, of which 1 were split for their length" in result.stdout
        assert "402 sentences, of which 0 dropped" in result.stdout
    first, second = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        for name in ("first", "second")
    )
    assert first == second
    assert set(first) == {
        *("sentencepiece.model", "tokenizer.json", "tokenizer_config.json"),
        "special_tokens_map.json",
    }
    tokenizer = load_tokenizer(tmp_path / "first")
    assert tokenizer.vocab_size == 90
    assert tokenizer.decode(tokenizer.encode("the fox sees")) == "the fox sees"


def test_adopt_takes_a_published_tokenizer(shared_data, tmp_path):
    published = shared_data / "roberta_tokenizer"
    result = ddrp("adopt", published, "--output", tmp_path / "roberta")
    assert (result.returncode, result.stderr) == (0, "")
    assert "byte_bpe, 50,265 pieces" in result.stdout
    adopted = load_tokenizer(tmp_path / "roberta")
    assert adopted.encode_with_special("Hello world") == [0, 31414, 232, 2]
    assert adopted.fingerprint == load_tokenizer(published).fingerprint


def test_an_existing_tokenizer_is_replaced_only_on_request(corpus, tmp_path):
    command = ("train", "--input", corpus, "--model", "bpe", "--output", tmp_path / "out")
    assert ddrp(*command, "--vocab-size", 80).returncode == 0
    refused = ddrp(*command, "--vocab-size", 90)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert load_tokenizer(tmp_path / "out").vocab_size == 80
    assert ddrp(*command, "--vocab-size", 90, "--overwrite").returncode == 0
    assert load_tokenizer(tmp_path / "out").vocab_size == 90


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "--input: missing"),
        (["train", "--input", "txt:a"], "did you mean 'text'"),
        (["train", "folder", "--input", "demo"], "unexpected argument 'folder'"),
        (["adopt"], "expected one FOLDER"),
        (["adopt", "/nowhere"], "vocab.txt"),
        (["trian"], "did you mean 'train'"),
        (["train", "--inputs", "demo"], "did you mean '--input'"),
    ],
)
def test_a_bad_request_is_answered_with_status_2_and_leaves_nothing(tmp_path, arguments, message):
    result = ddrp(*arguments, "--output", tmp_path / "out")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_too_large_is_refused_with_the_largest(corpus, tmp_path):
    result = ddrp("train", "--input", corpus, "--vocab-size", 50_000, "--output", tmp_path / "out")
    assert result.returncode == 2
    assert "vocab_size=50000" in result.stderr
    assert "value <=" in result.stderr
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_utf8_fails_with_status_1(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xfe\n")
    result = ddrp("train", "--input", f"text:{tmp_path / 'bad.txt'}", "--output", tmp_path / "out")
    assert result.returncode == 1
    assert "bad.txt: not UTF-8 at byte 5" in result.stderr
    assert not (tmp_path / "out").exists()


def test_help_shows_an_example():
    result = ddrp("--help")
    assert result.returncode == 0
    assert "ddrp tokenizer train --input demo" in result.stdout
