import gzip
import importlib.util
import json
import subprocess
import sys

import pytest

from ddrp_jax.data.sources import Source, read_lines
from ddrp_jax.errors import DdrpError, UsageError

# Three lines; str.splitlines() would find nine.
THREE_LINES = "a\u2028b\u2029c\nd\x0be\x0cf\ng\x1ch\x85i\n"


def documents(spec, **options):
    return list(Source(spec, **options).documents())


def test_only_a_newline_ends_a_line(tmp_path):
    path = tmp_path / "odd.txt"
    path.write_bytes(THREE_LINES.encode())
    assert list(read_lines(path)) == ["a\u2028b\u2029c", "d\x0be\x0cf", "g\x1ch\x85i"]
    assert documents(f"text:{path}") == [THREE_LINES.removesuffix("\n")]


def test_blank_lines_part_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\ntwo\n \t\r\n\nthree\r\nfour")
    assert documents(f"text:{path}") == ["one\ntwo", "three\nfour"]


def test_a_file_may_be_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("three")
    assert documents(f"text:{tmp_path}", per_file=True) == ["one\n\ntwo", "three"]


def test_a_folder_gives_its_files_in_order_and_ignores_others(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "notes.md").write_text("not this")
    assert documents(f"text:{tmp_path}") == ["first", "second", "third"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes("\ufeffone\n\n\ufefftwo".encode())
    assert documents(f"text:{path}") == ["one", "\ufefftwo"]


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_bytes_that_are_not_utf8_are_named_with_their_offset(tmp_path, kind):
    path = tmp_path / "bad.txt"
    good = '{"text": "é"}\n'.encode()
    path.write_bytes(good * 3 + b'{"text": "caf\xe9"}\n')
    with pytest.raises(
        DdrpError, match=rf"bad\.txt: not UTF-8 at byte {3 * len(good) + 13} \(0xe9"
    ):
        documents(f"{kind}:{path}")


def test_the_offset_in_a_gzipped_file_counts_unpacked_bytes(tmp_path):
    path = tmp_path / "bad.gz"
    path.write_bytes(gzip.compress(b"x" * 5000 + b"\n" + b"\xff"))
    with pytest.raises(DdrpError, match="byte 5001"):
        documents(f"text:{path}")


def test_a_truncated_gzip_file_is_an_error(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(json.dumps(list(range(9999))).encode())[:-100])
    with pytest.raises(DdrpError, match=r"cut\.gz: cannot be read"):
        documents(f"text:{path}")


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a\u2028b", "id": 1}, {"text": None}, {"text": "c\nd"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert documents(f"jsonl:{path}") == ["a\u2028b", "", "c\nd"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', "no field 'text'; did you mean 'txt'.*--text-field"),
        ('{"text": 3}', "field 'text' holds int 3"),
        ('{"text": ', "line 2 is not JSON"),
        ('["text"]', "line 2 is not a JSON object"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DdrpError, match=message) as error:
        documents(f"jsonl:{path}")
    assert "bad.jsonl: line 2" in str(error.value)


def test_another_text_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "b", "text": "t"}\n')
    assert documents(f"jsonl:{path}", text_field="body") == ["b"]


@pytest.fixture
def parquet_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["one", None, "two\u2028"], "n": [1, 2, 3]})
    (tmp_path / "pq").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "pq" / "train.parquet")
    return tmp_path / "pq" / "train.parquet"


def test_parquet(parquet_file):
    assert documents(f"parquet:{parquet_file.parent}") == ["one", "", "two\u2028"]
    with pytest.raises(DdrpError, match="no field 'txt'; did you mean 'text'"):
        documents(f"parquet:{parquet_file}", text_field="txt")


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DdrpError, match=r"bad\.parquet: not a readable parquet file"):
        documents(f"parquet:{tmp_path}")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hugging_face_dataset_in_a_local_folder(parquet_file, tmp_path, monkeypatch, streaming):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    spec = f"hf:{parquet_file.parent}@train"
    assert documents(spec, streaming=streaming) == ["one", "", "two\u2028"]


def test_a_saved_hugging_face_dataset_with_splits(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["x", "y"]})
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "ds")
    assert documents(f"hf:{tmp_path / 'ds'}@test", text_field="body") == ["y"]
    with pytest.raises(DdrpError, match=r"no field 'text'.*body"):
        documents(f"hf:{tmp_path / 'ds'}@train")
    with pytest.raises(DdrpError, match="datasets cannot load it: 'dev'"):
        documents(f"hf:{tmp_path / 'ds'}@dev")


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_datasets") is not None,
    reason="tensorflow-datasets is installed",
)
def test_tensorflow_datasets_tells_how_to_install_it():
    with pytest.raises(UsageError, match=r"pip install 'ddrp-jax\[tfds\]'"):
        documents("tfds:wikipedia@train")


def test_the_demo_tells_how_to_install_it_where_it_is_absent():
    script = (
        "import sys; sys.modules['dictionary'] = None\n"
        "from ddrp_jax.data.sources import Source\n"
        "list(Source('demo').documents())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'ddrp-jax[demo]'" in result.stderr


def test_the_demo_is_running_text_of_two_and_a_half_million_words(demo_documents):
    words = [len(document.split()) for document in demo_documents]
    assert sum(words) == 2_768_614
    assert max(words) < 3000
    assert sum(count >= 250 for count in words) > 0.98 * len(words)
    text = "\n".join(demo_documents)
    assert "\nbowleg: A crooked leg.\n" in text
    assert "1913 Webster]" not in text
    assert demo_documents == list(Source("demo").documents())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("txt:a", "did you mean 'text'"),
        ("demo2", "not a source"),
        ("text:", "not a source"),
        ("text:/nowhere/at/all", "no file or folder '/nowhere/at/all'"),
        ("hf:wikitext", "such as 'hf:wikitext@train'"),
        ("hf:wikitext@", "such as 'hf:wikitext@train'"),
        ("tfds:@train", "no split named"),
    ],
)
def test_a_spec_that_cannot_be_right_is_refused_at_once(spec, message):
    with pytest.raises(UsageError, match=message):
        Source(spec)


def test_a_bare_path_is_answered_with_the_right_form(tmp_path):
    with pytest.raises(UsageError, match=f"did you mean 'text:{tmp_path}'"):
        Source(str(tmp_path))


def test_a_folder_without_matching_files_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"no \.parquet file"):
        Source(f"parquet:{tmp_path}")


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(UsageError, match="expected a positive number"):
        Source("demo", weight=weight)
