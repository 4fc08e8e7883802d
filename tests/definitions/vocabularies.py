"""Small vocabularies of every kind, and dictionaries of a few words, for definitions."""

import json
from pathlib import Path

from ddrp_jax.data.dictionary import open_dictionary
from ddrp_jax.data.sentencepiece_training import train_sentencepiece
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.definitions.building import build_examples
from ddrp_jax.definitions.choosing import BuildOptions

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "of",
    "a",
    "bank",
    "river",
    "means",
    "noun",
    "polish",
    "cafe",
    "tide",
    "sea",
    "rise",
]
TEXT = (
    "The bank of the river means a tide: Bank, bank, BANK and river. (bank) polish Polish sea "
    "noun verb rise of 42 and 7 and 1990 tides; riverbank, tidal, rising, seaside. "
)
# Words of one piece and of several, in both cases, a phrase, and words no vocabulary has whole.
ENTRIES = [
    ("bank", "noun", "The rising ground beside a river."),
    ("tide", "noun", "The rise and fall of the sea."),
    ("bank", "noun", "A house for money; the bank keeps it. Bank on an embankment."),
    ("Polish", "adj", "Of Poland."),
    ("polish", "verb", "To make smooth."),
    ("river", "noun", "A large stream."),
    ("riverbank", "noun", "The bank of a river."),
    ("tidal", "adj", "Of the tide."),
    ("sea", "", "Salt water."),
    ("seaside", "noun", "The land beside the sea."),
    ("café", "noun", "A house for coffee."),
    ("sea bank", "noun", "A bank at the sea."),
    ("rise", "verb", "To go up."),
    ("tides", "noun", "plural of tide"),
    ("zyxq", "noun", "A word that no text has."),
    ("the", "article", "Put before a noun."),
]


def wordpiece(folder: Path) -> Tokenizer:
    """An uncased WordPiece vocabulary with reserved rows, numbers and pieces of words."""
    pieces = [f"##{piece}" for piece in ("bank", "s", "al", "side", "7", *LETTERS)]
    vocabulary = [
        *SPECIAL,
        *(f"[unused{i}]" for i in range(3)),
        *dict.fromkeys([*LETTERS, *"0123456789", *WORDS, "tid", "42", "21st", *":().,;'-"]),
        *dict.fromkeys(pieces),
    ]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join([*vocabulary, ""]))
    return load_tokenizer(folder)


def byte_bpe(folder: Path) -> Tokenizer:
    """A cased byte-level BPE vocabulary."""
    from tokenizers import ByteLevelBPETokenizer

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(
        [TEXT] * 20, vocab_size=380, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    )
    folder.mkdir(parents=True)
    backend.save_model(str(folder))
    return load_tokenizer(folder)


def sentencepiece(folder: Path) -> Tokenizer:
    """A SentencePiece model of ours."""
    text = [f"{TEXT} {word} {LETTERS} {LETTERS.upper()}" for word, _, _ in ENTRIES] * 5
    tokenizer, _ = train_sentencepiece(text, vocab_size=130, model="bpe", character_coverage=1.0)
    tokenizer.save(folder)
    return tokenizer


KINDS = {"wordpiece": wordpiece, "byte_bpe": byte_bpe, "sentencepiece": sentencepiece}


def glosses(path: Path, entries=ENTRIES):
    """Writes entries as a user's own glosses and opens them."""
    names = ("word", "pos", "definition")
    lines = [json.dumps(dict(zip(names, entry, strict=True))) for entry in entries]
    path.write_text("\n".join([*lines, ""]))
    return open_dictionary(f"glosses:{path}")


def built(folder: Path, tokenizer: Tokenizer, entries=ENTRIES, **options):
    """Builds examples of a few entries; nothing is held out unless `options` say so."""
    folder.mkdir(parents=True, exist_ok=True)
    dictionary = glosses(folder / "glosses.jsonl", entries)
    options = BuildOptions(**{"holdout": 0.0, **options})
    return build_examples(dictionary, tokenizer, folder / "examples", options, overwrite=True)


def inputs(examples, i):
    """Input ids of example `i`."""
    return examples.input_ids[examples.offsets[i] : examples.offsets[i + 1]].tolist()


def flags(examples, i):
    """Definition flags of example `i`."""
    return examples.definition_flags[examples.offsets[i] : examples.offsets[i + 1]].tolist()


def id_of(tokenizer, piece):
    """The id of a piece, which the vocabulary has."""
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.id_to_token(i) == piece]
    assert ids, f"{piece!r} is not in this vocabulary"
    return ids[0]
