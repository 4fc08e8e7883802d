"""One interface over SentencePiece, WordPiece and byte-level BPE tokenizers.

Text is only ever text here: a document that spells `[MASK]` or `</s>` gets the ordinary pieces of
that spelling. The one exception is `encode_with_special`, which fill-mask uses.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import as_path

SENTENCEPIECE_FILE = "sentencepiece.model"
TOKENIZER_JSON = "tokenizer.json"
# The roles every encoder needs, with the spellings that published vocabularies give them.
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_SPACE_MARK = "\u2581"  # SentencePiece's stand-in for the space before a word
_BYTE_SPACE_MARKS = ("\u0120", "\u010a", "\u010d", "\u0109")  # space, LF, CR, TAB in byte BPE


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
        kind: "sentencepiece", "wordpiece" or "byte_bpe".
        vocab_size: one more than the largest id.
        pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
        special_ids: every id that text never gets, and the unknown token's.
        mask_token: the spelling of the mask token.
        mask_takes_space: whether a mask stands for a word and the space before it.
        fingerprint: 16 hex digits that change whenever ids may.
        word_starts: bool [vocab_size]; True where a piece begins a word. A piece of punctuation
            is a word of its own.
    """

    kind: str
    vocab_size: int
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    special_ids: frozenset[int]
    mask_token: str
    mask_takes_space: bool
    fingerprint: str
    word_starts: np.ndarray

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special tokens are left out."""

    @abc.abstractmethod
    def id_to_token(self, token_id: int) -> str:
        """Returns the spelling of one piece."""

    @abc.abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes what `load_tokenizer` and `transformers.AutoTokenizer` need into `folder`."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts that go on right behind a token, such as a mask."""
        return self.encode_batch(texts)

    def encode_with_special(self, text: str) -> list[int]:
        """Returns CLS, the ids of `text`, SEP; each spelling of the mask becomes the mask token."""
        first, *others = text.split(self.mask_token)
        ids = [self.cls_id, *self.encode(self._before_mask(first) if others else first)]
        for i, part in enumerate(others):
            if i + 1 < len(others):
                part = self._before_mask(part)
            ids += [self.mask_id, *self.encode_following([part])[0]]
        return [*ids, self.sep_id]

    def _before_mask(self, text: str) -> str:
        return text.rstrip() if self.mask_takes_space else text


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model of ours: its five special tokens are control symbols by name."""

    kind = "sentencepiece"
    mask_takes_space = True

    def __init__(self, model: bytes, source: str = "the model"):
        """Loads a serialised model.

        Raises:
            DdrpError: `model` is not a SentencePiece model.
            UsageError: it lacks one of the special tokens.
        """
        from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DdrpError(f"{source}: not a SentencePiece model: {error}") from error
        pieces = range(self._processor.get_piece_size())
        ids = {self._processor.id_to_piece(i): i for i in pieces}
        special = _find_roles(ids, {}, source)
        self.vocab_size = len(pieces)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[special[role]] for role in ROLES
        )
        self.special_ids = frozenset(
            i
            for i in pieces
            if self._processor.is_control(i)
            or self._processor.is_unknown(i)
            or self._processor.is_unused(i)
        )
        self.mask_token = special["mask"]
        self.fingerprint = _fingerprint(model)
        self.word_starts = _word_starts([self.id_to_token(i) for i in pieces], self.kind)
        # A copy that does not put a space before its text, for what follows a mask directly.
        self._continuation = SentencePieceProcessor()
        self._continuation.LoadFromSerializedProto(_without_dummy_prefix(model))

    @property
    def model(self) -> bytes:
        """The serialised SentencePiece model."""
        return self._model

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([i for i in map(int, ids) if i not in self.special_ids])

    def id_to_token(self, token_id: int) -> str:
        return self._processor.id_to_piece(int(token_id))

    def save(self, folder: str | Path) -> None:
        from ddrp_jax.data.sentencepiece_export import tokenizer_json

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SENTENCEPIECE_FILE).write_bytes(self._model)
        (folder / TOKENIZER_JSON).write_text(tokenizer_json(self), encoding="utf-8")
        names = {f"{role}_token": self.id_to_token(getattr(self, f"{role}_id")) for role in ROLES}
        _write_transformers_files(folder, names, ["input_ids", "attention_mask"])

    def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            (self._processor if text[:1].isspace() else self._continuation).encode(
                text, out_type=int
            )
            for text in texts
        ]


class PublishedTokenizer(Tokenizer):
    """A WordPiece, byte-level BPE or other tokenizer as the `tokenizers` library describes it."""

    def __init__(
        self, description: str, names: dict[str, str], inputs: list[str] | None, source: str
    ):
        """Loads the text of a `tokenizer.json`.

        Args:
            description: the JSON text.
            names: spellings of special tokens, by role ("cls_token", ...), where they are known.
            inputs: what the model takes ("input_ids", "token_type_ids", ...), where it is known.
            source: how errors call it.

        Raises:
            DdrpError: the text is not such a description.
            UsageError: a special token is missing.
        """
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_str(description)
        except Exception as error:  # the library raises bare Exception
            raise DdrpError(f"{source}: not a tokenizer.json: {error}") from error
        self._description, self._names = description, names
        # A published file may carry the settings of a fine-tuning run; a corpus is never cut.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        special = _find_roles(vocabulary, names, source)
        self.kind = _published_kind(json.loads(description), source)
        types = ["token_type_ids"] if self.kind == "wordpiece" else []
        self._inputs = inputs or ["input_ids", *types, "attention_mask"]
        self.vocab_size = max(vocabulary.values()) + 1
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            vocabulary[special[role]] for role in ROLES
        )
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(
            {vocabulary[name] for name in special.values()}
            | {i for i, token in added.items() if token.special}
        )
        self.mask_token = special["mask"]
        self.mask_takes_space = self.mask_id in added and added[self.mask_id].lstrip
        self.fingerprint = _fingerprint(description.encode())
        pieces = [""] * self.vocab_size
        for piece, i in vocabulary.items():
            pieces[i] = piece
        self.word_starts = _word_starts(pieces, self.kind)
        self._check_spellings(special, source)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def id_to_token(self, token_id: int) -> str:
        return self._backend.id_to_token(int(token_id)) or ""

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_JSON).write_text(self._description, encoding="utf-8")
        names = {f"{role}_token": self.id_to_token(getattr(self, f"{role}_id")) for role in ROLES}
        _write_transformers_files(folder, self._names | names, self._inputs)

    def _check_spellings(self, special: dict[str, str], source: str) -> None:
        """Refuses a vocabulary in which the pieces of a spelling merge into the special token."""
        for spelling in special.values():
            if (self.special_ids - {self.unk_id}) & set(self.encode(f"a {spelling}{spelling} b")):
                raise DdrpError(
                    f"{source}: text that spells {spelling!r} would become that special token"
                )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads a tokenizer from a folder of ours or a published one.

    The folder holds `sentencepiece.model` (ours), or `tokenizer.json`, or `vocab.txt` (WordPiece),
    or `vocab.json` and `merges.txt` (byte-level BPE).

    Raises:
        UsageError: none of these is there, or a special token is missing.
        DdrpError: a file is damaged.
    """
    folder = as_path(folder)
    if (folder / SENTENCEPIECE_FILE).exists():
        path = folder / SENTENCEPIECE_FILE
        return SentencePieceTokenizer(path.read_bytes(), str(path))
    settings = _read_json(folder / "tokenizer_config.json") | _read_json(
        folder / "special_tokens_map.json"
    )
    names = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, dict | str)
    }
    if (folder / TOKENIZER_JSON).exists():
        source = folder / TOKENIZER_JSON
        description = _read_text(source)
    elif (folder / "vocab.txt").exists():
        source = folder / "vocab.txt"
        description = _describe_wordpiece(source, settings)
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        source = folder / "vocab.json"
        description = _describe_byte_bpe(source, folder / "merges.txt", settings)
    else:
        raise UsageError(
            f"tokenizer={str(folder)!r}: expected a folder with {SENTENCEPIECE_FILE}, "
            f"{TOKENIZER_JSON}, vocab.txt, or vocab.json and merges.txt; "
            "train one with 'ddrp tokenizer train'"
        )
    return PublishedTokenizer(description, names, settings.get("model_input_names"), str(source))


def _describe_wordpiece(path: Path, settings: dict[str, Any]) -> str:
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    vocabulary = {piece: i for i, piece in enumerate(_read_lines(path))}
    special = _find_roles(vocabulary, {}, str(path))
    backend = Backend(models.WordPiece(vocabulary, unk_token=special["unk"]))  # type: ignore[call-arg]
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(
        (special["sep"], vocabulary[special["sep"]]), (special["cls"], vocabulary[special["cls"]])
    )
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special.values()]
    )
    return backend.to_str()


def _describe_byte_bpe(vocab_path: Path, merges_path: Path, settings: dict[str, Any]) -> str:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    vocabulary = _read_json(vocab_path)
    special = _find_roles(vocabulary, {}, str(vocab_path))
    lines = _read_lines(merges_path)
    merges = []
    # Only the first line may be a comment: "# #" is a merge of two pieces.
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise DdrpError(f"{merges_path}: line {number} is {line!r}, expected two pieces")
        merges.append((pair[0], pair[1]))
    prefix = settings.get("add_prefix_space", False)
    backend = Backend(models.BPE(vocabulary, merges))  # type: ignore[call-arg]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(
        (special["sep"], vocabulary[special["sep"]]),
        (special["cls"], vocabulary[special["cls"]]),
        add_prefix_space=prefix,
    )
    backend.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False, lstrip=role == "mask")
            for role, name in special.items()
        ]
    )
    return backend.to_str()


def _find_roles(vocabulary: dict[str, int], names: dict[str, str], source: str) -> dict[str, str]:
    """Returns the spelling of each role's token; `names` wins over the usual spellings."""
    found = {}
    for role, spellings in ROLES.items():
        candidates = [names[f"{role}_token"]] if f"{role}_token" in names else list(spellings)
        present = [spelling for spelling in candidates if spelling in vocabulary]
        if not present:
            raise UsageError(
                f"{source}: no {role} token ({' or '.join(candidates)}) in its vocabulary of "
                f"{len(vocabulary)} pieces; an encoder needs pad, unk, cls, sep and mask"
            )
        found[role] = present[0]
    return found


def _published_kind(description: dict[str, Any], source: str) -> str:
    if description["model"].get("type") == "WordPiece":
        return "wordpiece"
    parts = json.dumps([description.get("pre_tokenizer"), description.get("decoder")])
    if '"ByteLevel"' in parts:
        return "byte_bpe"
    if '"Metaspace"' in parts:
        return "sentencepiece"
    raise UsageError(
        f"{source}: a {description['model'].get('type')} tokenizer; expected WordPiece, "
        "byte-level BPE or SentencePiece with Metaspace"
    )


def _word_starts(pieces: Iterable[str], kind: str) -> np.ndarray:
    if kind == "wordpiece":
        starts = [not piece.startswith("##") for piece in pieces]
    else:
        marks = (_SPACE_MARK,) if kind == "sentencepiece" else _BYTE_SPACE_MARKS
        # ASCII punctuation stands for itself in both alphabets; a byte fallback piece ("<0x0A>")
        # or a stand-in for a byte above 127 continues the word it is in.
        starts = [
            piece.startswith(marks)
            or (piece[:1].isascii() and not piece[:1].isalnum() and not piece.startswith("<0x"))
            for piece in pieces
        ]
    return np.array(starts, dtype=bool)


def _without_dummy_prefix(model: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.add_dummy_prefix = False
    return proto.SerializeToString()


def _write_transformers_files(folder: Path, names: dict[str, str], inputs: list[str]) -> None:
    # The generic class reads tokenizer.json as it is; model classes may rebuild parts of it.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": inputs,
        **names,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", names)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DdrpError(f"{path}: not JSON: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DdrpError(f"{path}: not UTF-8 at byte {error.start}") from error


def _read_lines(path: Path) -> list[str]:
    """Returns the lines of a file; `\\n` alone ends one, since a piece may hold any other."""
    lines = [line.removesuffix("\r") for line in _read_text(path).split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
