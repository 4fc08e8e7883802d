import collections
import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from ddrp_jax.data.preparation import prepare_records
from ddrp_jax.data.records import check_records, open_records
from ddrp_jax.data.sources import Source
from ddrp_jax.errors import DdrpError, UsageError


def text_source(folder, documents, name="corpus.txt", **options):
    path = folder / name
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return Source(f"text:{path}", **options)


def read_all(stream):
    return [stream.document(i).tolist() for i in range(stream.num_documents)]


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def corpus(tmp_path, demo_documents):
    documents = [document.replace("\n", " ") for document in demo_documents[:300]]
    return documents, text_source(tmp_path, documents)


def test_records_hold_every_document_as_its_tokenizer_gives_it(tokenizer, corpus, tmp_path):
    documents, source = corpus
    records = prepare_records([source], tokenizer, tmp_path / "out")
    stream = records.split("train")
    expected = tokenizer.encode_batch(documents)
    assert read_all(stream) == expected
    assert (stream.num_documents, stream.num_tokens) == (300, sum(map(len, expected)))
    assert stream.bytes == sum(len(document.encode()) for document in documents)
    assert stream.largest_id == max(map(max, expected))
    assert stream.lengths.tolist() == list(map(len, expected))
    assert records.tokenizer().encode("hello") == tokenizer.encode("hello")


def test_index_json_tells_what_is_there(bpe, corpus, tmp_path):
    _, source = corpus
    prepare_records([source], bpe, tmp_path / "out", holdout=0.1, seed=3)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["version"] == 1
    assert index["tokenizer"]["fingerprint"] == bpe.fingerprint
    assert index["sources"] == [
        {"spec": source.spec, "weight": 1.0, "documents": 300, "empty_documents": 0}
    ]
    assert index["splits"]["train"]["documents"] + index["splits"]["heldout"]["documents"] == 300
    assert (index["holdout"], index["seed"]) == (0.1, 3)


def test_the_unigram_entropy_is_that_of_the_tokens(tokenizer, corpus, tmp_path):
    documents, source = corpus
    records = prepare_records([source], tokenizer, tmp_path / "out")
    counts = collections.Counter(
        token
        for ids in tokenizer.encode_batch(documents)
        for token in ids
        if token not in tokenizer.special_ids
    )
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert records.split("train").unigram_entropy == pytest.approx(entropy, rel=1e-9)


def test_the_number_of_processes_changes_nothing(bpe, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("ddrp_jax.data.preparation._CHUNK_CHARACTERS", 20_000)
    _, source = corpus
    for processes in (1, 2):
        output = tmp_path / f"out{processes}"
        prepare_records([source], bpe, output, holdout=0.1, processes=processes)
    assert files_of(tmp_path / "out1") == files_of(tmp_path / "out2")


def test_shards_end_at_documents_and_read_as_one_stream(bpe, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("ddrp_jax.data.preparation._CHUNK_CHARACTERS", 5_000)
    _, source = corpus
    whole = prepare_records([source], bpe, tmp_path / "whole").split("train")
    parts = prepare_records([source], bpe, tmp_path / "parts", shard_tokens=5_000).split("train")
    assert len(whole.shards) == 1
    assert len(parts.shards) > 10
    assert read_all(parts) == read_all(whole)
    boundaries = np.cumsum([tokens for _, tokens in parts.shards])
    assert set(boundaries) <= set(parts.offsets)
    starts, lengths = parts.offsets[[50, 3, 200]], np.array([7, 9, 0])
    expected = [*parts.document(50)[:7], *parts.document(3)[:9]]
    assert parts.gather(starts, lengths).tolist() == expected


def test_holdout_splits_by_document_and_depends_on_the_seed_alone(bpe, tmp_path):
    documents = [f"document number {i}" for i in range(2000)]
    source = text_source(tmp_path, documents)
    chosen = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        records = prepare_records([source], bpe, tmp_path / name, holdout=0.05, seed=seed)
        train, heldout = (read_all(records.split(s)) for s in ("train", "heldout"))
        assert sorted(train + heldout) == sorted(bpe.encode_batch(documents))
        chosen.append(heldout)
    assert chosen[0] == chosen[1] != chosen[2]
    assert 60 < len(chosen[0]) < 140  # 100 expected, standard deviation 10


def test_copies_of_a_document_never_lie_on_both_sides(bpe, tmp_path):
    documents = [f"document number {i}" for i in range(400)]
    source = text_source(tmp_path, documents * 3)
    records = prepare_records([source], bpe, tmp_path / "out", holdout=0.3)
    train, heldout = (
        {tuple(ids) for ids in read_all(records.split(s))} for s in ("train", "heldout")
    )
    assert not train & heldout
    assert len(train) + len(heldout) == len(set(map(tuple, bpe.encode_batch(documents))))


def test_weights_take_documents_several_times_or_in_part(bpe, tmp_path):
    once = text_source(tmp_path, [f"apple {i}" for i in range(1000)], "a.txt", weight=0.3)
    often = text_source(tmp_path, [f"pear {i}" for i in range(100)], "b.txt", weight=2.5)
    records = prepare_records([once, often], bpe, tmp_path / "out", holdout=0.1)
    train = collections.Counter(
        bpe.decode(ids).split()[0] for ids in read_all(records.split("train"))
    )
    heldout = read_all(records.split("heldout"))
    assert 220 < train["apple"] < 320  # 270 expected
    assert 190 < train["pear"] < 260  # 225 expected
    assert len({tuple(ids) for ids in heldout}) == len(heldout)


def test_vocabularies_beyond_two_bytes_are_stored_in_four(bpe, tmp_path, shared_data):
    from ddrp_jax.data.tokenizers import load_tokenizer

    roberta = load_tokenizer(shared_data / "roberta_tokenizer")
    source = text_source(tmp_path, ["Hello world"])
    assert prepare_records([source], roberta, tmp_path / "a").index["dtype"] == "<u2"
    roberta.vocab_size = 2**16 + 1
    records = prepare_records([source], roberta, tmp_path / "b")
    assert records.index["dtype"] == "<u4"
    assert records.split("train").document(0).tolist() == [31414, 232]


def test_a_long_document_is_kept_whole(bpe, tmp_path):
    source = text_source(tmp_path, ["many words " * 200_000])
    stream = prepare_records([source], bpe, tmp_path / "out").split("train")
    assert stream.num_documents == 1
    assert stream.num_tokens >= 400_000


def test_empty_documents_are_counted_and_left_out(bpe, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": " "}\n{"text": null}\n')
    records = prepare_records([Source(f"jsonl:{path}")], bpe, tmp_path / "out")
    assert records.split("train").num_documents == 1
    assert records.index["sources"][0]["empty_documents"] == 2


def test_an_empty_corpus_is_an_error_and_leaves_nothing(bpe, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DdrpError, match="corpus is empty"):
        prepare_records([Source(f"text:{tmp_path / 'empty.txt'}")], bpe, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["empty.txt"]


def test_a_holdout_that_leaves_a_split_empty_is_refused(bpe, tmp_path):
    source = text_source(tmp_path, ["one", "two"])
    with pytest.raises(UsageError, match="of 2 documents none fell to the split 'heldout'"):
        prepare_records([source], bpe, tmp_path / "out", holdout=1e-6)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_that_is_not_utf8_leaves_nothing(bpe, tmp_path, processes):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good\n\n" * 200_000 + b"\xff\n")
    with pytest.raises(DdrpError, match="byte 1200000"):
        prepare_records([Source(f"text:{path}")], bpe, tmp_path / "out", processes=processes)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.txt"]


def test_finished_records_are_replaced_only_on_request(bpe, tmp_path):
    first, second = text_source(tmp_path, ["one"], "1.txt"), text_source(tmp_path, ["two"], "2.txt")
    prepare_records([first], bpe, tmp_path / "out")
    with pytest.raises(UsageError, match="already finished; pass --overwrite"):
        prepare_records([second], bpe, tmp_path / "out")
    assert read_all(open_records(tmp_path / "out").split("train")) == bpe.encode_batch(["one"])
    prepare_records([second], bpe, tmp_path / "out", overwrite=True)
    assert read_all(open_records(tmp_path / "out").split("train")) == bpe.encode_batch(["two"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.txt", "2.txt", "out"]


def test_a_failed_replacement_leaves_the_old_records(bpe, tmp_path):
    prepare_records([text_source(tmp_path, ["one"])], bpe, tmp_path / "out")
    before = files_of(tmp_path / "out")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DdrpError, match="UTF-8"):
        prepare_records(
            [Source(f"text:{tmp_path / 'bad.txt'}")], bpe, tmp_path / "out", overwrite=True
        )
    assert files_of(tmp_path / "out") == before


def test_a_folder_with_other_files_is_never_replaced(bpe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("dear")
    with pytest.raises(UsageError, match="holds other files"):
        prepare_records([text_source(tmp_path, ["one"])], bpe, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "dear"


def test_a_full_disk_is_an_error_and_leaves_nothing(bpe, tmp_path):
    # A limit on the size of files stands in for the disk's.
    bpe.save(tmp_path / "tokenizer")
    source = text_source(tmp_path, ["some words of text"] * 100_000)
    script = (
        "import resource, signal\n"
        "from ddrp_jax.data.preparation import prepare_records\n"
        "from ddrp_jax.data.sources import Source\n"
        "from ddrp_jax.data.tokenizers import load_tokenizer\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"tokenizer = load_tokenizer({str(tmp_path / 'tokenizer')!r})\n"
        f"prepare_records([Source({source.spec!r})], tokenizer, {str(tmp_path / 'out')!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"DdrpError: cannot write {tmp_path / 'out'}: File too large" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.txt", "tokenizer"]


def test_an_output_below_a_file_is_an_error(bpe, tmp_path):
    source = text_source(tmp_path, ["one"])
    with pytest.raises(DdrpError, match=r"cannot write.*Not a directory"):
        prepare_records([source], bpe, tmp_path / "corpus.txt" / "out")


def test_a_killed_run_leaves_nothing_that_looks_finished(
    bpe, tmp_path, children_of, wait_for, all_ended
):
    bpe.save(tmp_path / "tokenizer")
    fifo = tmp_path / "corpus.txt"
    os.mkfifo(fifo)
    script = tmp_path / "prepare.py"
    script.write_text(
        "from ddrp_jax.data.preparation import prepare_records\n"
        "from ddrp_jax.data.sources import Source\n"
        "from ddrp_jax.data.tokenizers import load_tokenizer\n"
        "import pathlib\n"
        "Source.files = lambda self: [pathlib.Path(self.target)]\n"
        "if __name__ == '__main__':\n"
        f"    prepare_records([Source('text:{fifo}')], load_tokenizer('{tmp_path}/tokenizer'),\n"
        f"                    '{tmp_path}/out', processes=2)\n"
    )
    process = subprocess.Popen([sys.executable, script])
    with open(fifo, "w") as corpus:  # keeps the run waiting for more after a few chunks
        corpus.write("some words of text\n\n" * 200_000)
        corpus.flush()
        shard = tmp_path / "out.partial" / "train" / "tokens-00000.bin"
        has_tokens = wait_for(lambda: shard.exists() and shard.stat().st_size)
        children = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert has_tokens
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"no index\.json"):
        open_records(tmp_path / "out.partial")
    assert len(children) >= 2
    assert all_ended(children), "its workers are to notice"
    # The next run clears what is left.
    prepare_records([text_source(tmp_path, ["one"], "one.txt")], bpe, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    assert open_records(tmp_path / "out").split("train").num_documents == 1


@pytest.fixture
def records(bpe, tmp_path):
    source = text_source(tmp_path, [f"document number {i}" for i in range(50)])
    return prepare_records([source], bpe, tmp_path / "records", holdout=0.2)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.bin"])
def test_a_truncated_or_missing_file_is_an_error(records, name):
    path = records.path / "heldout" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(
        DdrpError, match=rf"heldout/{name}: {size - 1} bytes, expected {size} bytes"
    ):
        open_records(records.path)
    path.unlink()
    with pytest.raises(DdrpError, match=f"{name}: missing"):
        open_records(records.path)


def test_no_records_are_answered_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(UsageError, match=rf"run 'ddrp prepare --output {tmp_path}' first"):
        open_records(tmp_path)


@pytest.mark.parametrize(
    "change",
    [lambda index: index | {"version": 2}, lambda index: {"version": 1}, lambda index: [1, 2]],
)
def test_an_index_that_is_not_ours_is_an_error(records, change):
    path = records.path / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DdrpError, match="run 'ddrp prepare' again"):
        open_records(records.path)


def test_another_tokenizer_is_refused_with_both_fingerprints(records, wordpiece, bpe):
    check_records(records, bpe.fingerprint, bpe.vocab_size)
    with pytest.raises(UsageError, match=f"{bpe.fingerprint}, not with {wordpiece.fingerprint}"):
        check_records(records, wordpiece.fingerprint, wordpiece.vocab_size)


def test_ids_beyond_the_models_vocabulary_are_refused(records, bpe):
    with pytest.raises(UsageError, match="up to 999, beyond the model's vocab_size=999"):
        check_records(records, bpe.fingerprint, 999)


def test_a_swapped_tokenizer_folder_is_noticed(records, wordpiece):
    for path in (records.path / "tokenizer").iterdir():
        path.unlink()
    wordpiece.save(records.path / "tokenizer")
    with pytest.raises(DdrpError, match=wordpiece.fingerprint):
        records.tokenizer()


def test_a_split_that_is_not_there_is_named(records):
    with pytest.raises(UsageError, match="no split 'test', only train, heldout"):
        records.split("test")
