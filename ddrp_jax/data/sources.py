"""Where documents come from: text, JSON lines, parquet, dataset libraries, a dictionary."""

from __future__ import annotations

import dataclasses
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ddrp_jax.data.gcide import plain_text, read_gcide
from ddrp_jax.errors import DdrpError, UsageError, nearest

# How a source is written on the command line.
FORMS = {
    "text": "text:PATH            a text file (.txt, .gz) or a folder of them",
    "jsonl": "jsonl:PATH           JSON lines (.jsonl, .json, .gz), a file or a folder",
    "parquet": "parquet:PATH         a parquet file or a folder of them",
    "hf": "hf:NAME[:CONFIG]@SPLIT  a Hugging Face dataset: a name on the hub or a local folder",
    "tfds": "tfds:NAME@SPLIT      a TensorFlow dataset (extra 'tfds')",
    "demo": "demo                 an English dictionary's definitions and examples (extra 'demo')",
}
_SUFFIXES = {
    "text": (".txt", ".gz"),
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
}
# Words of a demo document: a few rows of 128 tokens, so that rows are mostly whole stretches of
# text and not glued entries, yet thousands of documents to hold some out from.
_DEMO_DOCUMENT_WORDS = 250


@dataclasses.dataclass(frozen=True)
class Source:
    """A stream of documents.

    Attributes:
        spec: how it was written, as in `FORMS`.
        weight: how often each document is taken: 0.3 keeps three in ten of them, 2 takes each
            twice.
        text_field: the field with the text, for everything but plain text.
        per_file: plain text: a file is one document; otherwise blank lines part documents.
        streaming: Hugging Face: read without downloading the whole first.
        processes: Hugging Face: how many download and convert.
    """

    spec: str
    weight: float = 1.0
    text_field: str = "text"
    per_file: bool = False
    streaming: bool = False
    processes: int = 1

    def __post_init__(self) -> None:
        if self.kind not in FORMS or (self.kind != "demo" and not self.target):
            hint = nearest(self.kind, list(FORMS)) if ":" in self.spec else ""
            if Path(self.spec).exists():
                hint = f"; did you mean 'text:{self.spec}'?"
            forms = "\n  ".join(FORMS.values())
            raise UsageError(f"input={self.spec!r}: not a source{hint}\n  {forms}")
        if self.kind in ("hf", "tfds") and not all(self.target.rpartition("@")[::2]):
            raise UsageError(
                f"input={self.spec!r}: no split named; expected {FORMS[self.kind].split()[0]}, "
                f"such as '{self.kind}:{self.target.rstrip('@')}@train'"
            )
        if not 0 < self.weight < float("inf"):
            raise UsageError(f"weight={self.weight!r} of {self.spec!r}: expected a positive number")
        if self.kind in _SUFFIXES:
            self.files()

    @property
    def kind(self) -> str:
        """What stands before the first colon."""
        return self.spec.partition(":")[0]

    @property
    def target(self) -> str:
        """What stands behind it: a path, or a name and a split."""
        return self.spec.partition(":")[2]

    def files(self) -> list[Path]:
        """Returns the files of a text, JSON lines or parquet source, sorted.

        Raises:
            UsageError: the path does not exist, or no file in the folder has a known suffix.
        """
        path, suffixes = Path(self.target), _SUFFIXES[self.kind]
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise UsageError(f"input={self.spec!r}: no file or folder {str(path)!r}")
        files = sorted(p for p in path.rglob("*") if p.name.endswith(suffixes) and p.is_file())
        if not files:
            raise UsageError(f"input={self.spec!r}: no {' or '.join(suffixes)} file in that folder")
        return files

    def documents(self) -> Iterator[str]:
        """Yields the documents, in an order that never changes.

        Raises:
            DdrpError: a file is not UTF-8, damaged, or lacks the text field.
            UsageError: what reads this source is not installed.
        """
        readers: dict[str, Callable[[Source], Iterator[str]]] = {
            "text": _read_text,
            "jsonl": _read_json_lines,
            "parquet": _read_parquet,
            "hf": _read_hugging_face,
            "tfds": _read_tensorflow_datasets,
            "demo": _read_demo,
        }
        return readers[self.kind](self)


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a plain or gzipped UTF-8 file, without their end.

    Only `\\n` ends a line: U+2028, form feeds and their like are part of the text. A `\\r` before
    the `\\n` goes with it, and so does a byte order mark.

    Raises:
        DdrpError: the file is not UTF-8 (names the byte, counted in the unpacked text) or not gzip.
    """
    offset = 0
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for raw in file:
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise DdrpError(
                        f"{path}: not UTF-8 at byte {offset + error.start} "
                        f"(0x{raw[error.start]:02x}); convert the file to UTF-8 first"
                    ) from error
                if offset == 0:
                    line = line.removeprefix("\ufeff")
                offset += len(raw)
                yield line.removesuffix("\n").removesuffix("\r")
    except (OSError, EOFError, zlib.error) as error:
        raise DdrpError(f"{path}: cannot be read: {error}") from error


def _read_text(source: Source) -> Iterator[str]:
    for path in source.files():
        lines: list[str] = []
        for line in read_lines(path):
            if line.strip() or source.per_file:
                lines.append(line)
            elif lines:
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)


def _read_json_lines(source: Source) -> Iterator[str]:
    import orjson

    for path in source.files():
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DdrpError(f"{path}: line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DdrpError(f"{path}: line {number} is not a JSON object: {line[:80]}")
            yield from _field_texts([row], source, f"{path}: line {number}")


def _read_parquet(source: Source) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    for path in source.files():
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                if source.text_field not in names:
                    _raise_no_field(source.text_field, names, str(path))
                for batch in file.iter_batches(columns=[source.text_field]):
                    yield from _field_texts(batch.to_pylist(), source, str(path))
        except (pyarrow.ArrowException, OSError) as error:
            raise DdrpError(f"{path}: not a readable parquet file: {error}") from error


def _read_hugging_face(source: Source) -> Iterator[str]:
    import datasets

    name, _, split = source.target.rpartition("@")
    name, _, config = name.partition(":")
    try:
        if any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(name)
            data = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            data = datasets.load_dataset(
                name,
                config or None,
                split=split,
                streaming=source.streaming,
                num_proc=source.processes
                if source.processes > 1 and not source.streaming
                else None,
            )
    except Exception as error:  # that library raises whatever its loaders raise
        raise DdrpError(f"{source.spec}: datasets cannot load it: {error}") from error
    for batch in data.iter(batch_size=1000):
        if source.text_field not in batch:
            _raise_no_field(source.text_field, list(batch), source.spec)
        rows = ({source.text_field: value} for value in batch[source.text_field])
        yield from _field_texts(rows, source, source.spec)


def _read_tensorflow_datasets(source: Source) -> Iterator[str]:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise UsageError(
            f"input={source.spec!r}: tensorflow-datasets is not installed; "
            "run: pip install 'ddrp-jax[tfds]'"
        ) from error
    name, _, split = source.target.rpartition("@")
    try:
        rows = tensorflow_datasets.as_numpy(tensorflow_datasets.load(name, split=split))
    except Exception as error:  # that library raises whatever its loaders raise
        raise DdrpError(f"{source.spec}: tensorflow-datasets cannot load it: {error}") from error
    for row in rows:
        value = row.get(source.text_field)
        if isinstance(value, bytes):
            row = {**row, source.text_field: value.decode("utf-8")}
        yield from _field_texts([row], source, source.spec)


def _read_demo(source: Source) -> Iterator[str]:
    """Yields stretches of consecutive dictionary entries as running text, `word: definitions`."""
    for file in read_gcide("input='demo'"):
        entries: list[str] = []
        words = 0
        for entry in file:
            text = _demo_entry(entry)
            if not text:
                continue
            entries.append(text)
            words += text.count(" ") + 1
            if words >= _DEMO_DOCUMENT_WORDS:
                yield "\n".join(entries)
                entries, words = [], 0
        if entries:
            yield "\n".join(entries)


def _demo_entry(entry: dict[str, Any]) -> str:
    sentences = []
    for use in entry["pos"]:
        for definition in use["definitions"]:
            for text in (definition["text"], *definition["examples"]):
                sentence = plain_text(text)
                if sentence:
                    sentences.append(sentence if sentence[-1] in ".!?;:" else sentence + ".")
    return f"{entry['entry']}: {' '.join(sentences)}" if sentences else ""


def _field_texts(rows: Iterable[dict[str, Any]], source: Source, place: str) -> Iterator[str]:
    """Yields the text field of each row; a null is an empty document."""
    for row in rows:
        if source.text_field not in row:
            _raise_no_field(source.text_field, list(row), place)
        text = row[source.text_field]
        if text is not None and not isinstance(text, str):
            raise DdrpError(
                f"{place}: field {source.text_field!r} holds {type(text).__name__} {text!r:.60}, "
                "expected text"
            )
        yield text or ""


def _raise_no_field(field: str, names: list[str], place: str) -> None:
    raise DdrpError(
        f"{place}: no field {field!r}{nearest(field, names) or '.'} It has {', '.join(names)}; "
        "name one with --text-field"
    )
