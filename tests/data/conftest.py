"""Small real tokenizers of every kind, and records made with them."""

import json
import time
from pathlib import Path

import pytest

from ddrp_jax.data.preparation import prepare_records
from ddrp_jax.data.sentencepiece_training import train_sentencepiece
from ddrp_jax.data.sources import Source
from ddrp_jax.data.tokenizers import load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind. "
    "A hello to the world: unaffable people say hello, worldly people wave."
)


@pytest.fixture(scope="session")
def demo_documents():
    pytest.importorskip("dictionary", reason="needs the extra 'demo'")
    return list(Source("demo").documents())


@pytest.fixture(scope="session")
def unigram(demo_documents):
    return _trained(demo_documents, "unigram")


@pytest.fixture(scope="session")
def bpe(demo_documents):
    return _trained(demo_documents, "bpe")


def _trained(documents, model):
    # Full coverage: tests tell documents apart by their digits, which are rare here.
    return train_sentencepiece(
        documents[::20], vocab_size=1000, model=model, character_coverage=1.0
    )[0]


@pytest.fixture(scope="session")
def wordpiece_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordpiece")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["un", "the", "quick", "brown", "fox", "dog", "hello", "world", "people", "mask", "cls"]
    pieces = ["##aff", "##able", "##ly", *(f"##{letter}" for letter in letters)]
    vocabulary = [*SPECIAL, *letters, *words, *pieces, *"[]<>/.,:'\u2028\x85"]
    (folder / "vocab.txt").write_bytes("\n".join([*vocabulary, ""]).encode())
    return folder


@pytest.fixture(scope="session")
def byte_bpe_folder(tmp_path_factory):
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("byte_bpe")
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(
        [TEXT] * 50, vocab_size=400, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    )
    backend.save_model(str(folder))
    assert (folder / "vocab.json").exists()
    return folder


@pytest.fixture(scope="session")
def wordpiece(wordpiece_folder):
    return load_tokenizer(wordpiece_folder)


@pytest.fixture(scope="session")
def byte_bpe(byte_bpe_folder):
    return load_tokenizer(byte_bpe_folder)


@pytest.fixture(scope="session", params=["unigram", "bpe", "wordpiece", "byte_bpe"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def demo_records(demo_documents, bpe, tmp_path_factory):
    """Records of a tenth of the demo corpus, with a held-out split, in several shards."""
    folder = tmp_path_factory.mktemp("demo_records")
    lines = [json.dumps({"text": document}) for document in demo_documents[::10]]
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    source = Source(f"jsonl:{folder / 'corpus.jsonl'}")
    return prepare_records([source], bpe, folder / "records", holdout=0.05, shard_tokens=200_000)


@pytest.fixture
def children_of():
    """Gives a function from a process id to the ids of the processes it started."""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs Linux's /proc")

    def children(pid):
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text().split()]

    return children


@pytest.fixture
def wait_for():
    """Gives a function that waits until a condition holds, and tells whether it came to."""

    def wait(condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    return wait


def is_running(pid):
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def all_ended(wait_for):
    """Gives a function that waits for processes to end, and tells whether they did."""
    return lambda pids: wait_for(lambda: not any(map(is_running, pids)), 20)
