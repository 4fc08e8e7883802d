"""From a dictionary and a tokenizer to definition examples (section 2 of the specification).

Which definition explains a token:

1. A number's is its own name in words.
2. A surface form of a word has that word's definitions: those of the same spelling, or else of the
   same letters in whatever case.
3. Any other token is a piece of carrier words: single words whose tokenisation contains it, those
   of the fewest pieces first, then as the dictionary spells them before other cases of their
   letters, then in the dictionary's order.

Words are held out by their letters, whatever their case, and a held-out word carries nothing: so no
token of it is a target outside its own examples, and its definitions explain no other token.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ddrp_jax
from ddrp_jax.data.dictionary import Dictionary, Entry
from ddrp_jax.data.folders import whole_folder
from ddrp_jax.data.hashing import random_bits
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.definitions.examples import (
    INDEX_FILE,
    VERSION,
    Examples,
    open_examples,
    write_examples,
)
from ddrp_jax.definitions.prompts import (
    DEFAULT_TEMPLATE,
    Filled,
    Template,
    occurrences,
    spell_number,
)
from ddrp_jax.errors import DdrpError, UsageError

NUMBER_POS = "number"
KINDS = ("whole word", "piece", "number", "special")
_SHORTEST = 16  # CLS, SEP, a template and a few words
_RESERVED = re.compile(r"(\[unused\d+\]|<unused_?\d+>|<extra_id_\d+>|madeupword\d+|<?\|.*\|>?)$")
_BATCH = 20_000


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How examples are made.

    Attributes:
        template: the prompt; see `Template`.
        holdout: share of the headwords with a token of their own that are held out.
        max_length: tokens of an example, CLS and SEP included; longer definitions are cut.
        max_examples: examples for one token at most.
        max_carriers: carrier words for one token at most.
        seed: chooses the held-out headwords.
    """

    template: str = DEFAULT_TEMPLATE
    holdout: float = 0.05
    max_length: int = 64
    max_examples: int = 8
    max_carriers: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        Template(self.template)
        if not 0 <= self.holdout < 1:
            raise UsageError(f"holdout={self.holdout!r}: expected a share from 0 to below 1")
        for name, least in (("max_length", _SHORTEST), ("max_examples", 1), ("max_carriers", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: expected at least {least}")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What explains one token by one word.

    Attributes:
        target_id: the token.
        pieces: the word's pieces, of which number `piece` is the token.
        piece: counted from 0.
        headword: the word, casefolded.
        definitions: numbers of the word's definitions, in the dictionary's order.
    """

    target_id: int
    pieces: tuple[int, ...]
    piece: int
    headword: str
    definitions: Sequence[int]


class _Lexicon:
    """All definitions, by spelling and by letters."""

    def __init__(self, entries: Iterable[Entry]):
        self.words: list[str] = []
        self.pos: list[str] = []
        self.texts: list[str] = []
        self.by_spelling: dict[str, list[int]] = {}
        self._by_letters: dict[str, list[int]] = {}
        for entry in entries:
            for text in entry.senses:
                self.add(entry.word, entry.pos, text)

    def add(self, word: str, pos: str, text: str) -> int:
        """Appends a definition and returns its number."""
        number = len(self.texts)
        self.words.append(word)
        self.pos.append(pos)
        self.texts.append(text)
        self.by_spelling.setdefault(word, []).append(number)
        self._by_letters.setdefault(word.casefold(), []).append(number)
        return number

    def find(self, word: str) -> list[int]:
        """Returns the definitions of a spelling, or of the same letters in any case."""
        return self.by_spelling.get(word) or self._by_letters.get(word.casefold(), [])


def build_examples(
    dictionary: Dictionary,
    tokenizer: Tokenizer,
    output: str | Path,
    options: BuildOptions,
    *,
    overwrite: bool = False,
    entries: Iterable[Entry] | None = None,
) -> Examples:
    """Writes a folder of examples.

    Args:
        dictionary: where definitions come from.
        tokenizer: whose vocabulary is explained.
        output: the folder to make.
        options: how.
        overwrite: whether a finished folder may be replaced.
        entries: the dictionary's entries on their way through something that shows progress.

    Raises:
        UsageError: the output exists, or everything or nothing would be held out.
        DdrpError: the dictionary cannot be read, has no entry, or covers no token.
    """
    with whole_folder(Path(output), marker=INDEX_FILE, overwrite=overwrite) as working:
        lexicon = _Lexicon(dictionary if entries is None else entries)
        kinds, own, carried, held_out = _plan(lexicon, tokenizer, options)
        maker = _Maker(lexicon, tokenizer, options)
        arrays, headwords = maker.make(
            sorted([*own, *carried], key=lambda plan: plan.target_id), held_out
        )
        if not len(arrays["target_id"]):
            raise DdrpError(
                f"dictionary={dictionary.spec!r}: its {dictionary.report} explain none of the "
                f"{tokenizer.vocab_size:,} tokens of this vocabulary"
            )
        held_out_ids = sorted({plan.target_id for plan in own if plan.headword in held_out})
        arrays["held_out_ids"] = np.array(held_out_ids, np.int32)
        coverage = _coverage(kinds, {plan.target_id for plan in own}, arrays["target_id"])
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(np.ascontiguousarray(arrays[name]).tobytes())
        index = {
            "version": VERSION,
            "ddrp_jax": ddrp_jax.__version__,
            "fingerprint": digest.hexdigest()[:16],
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "kind": tokenizer.kind,
                "vocab_size": tokenizer.vocab_size,
            },
            "dictionary": {
                "spec": dictionary.spec,
                "language": dictionary.language,
                **dictionary.report.as_dict(),
            },
            "options": dataclasses.asdict(options),
            "examples": len(arrays["target_id"]),
            "tokens": len(arrays["input_ids"]),
            "held_out_ids": len(held_out_ids),
            "held_out_examples": int(arrays["held_out"].sum()),
            "counts": maker.counts(),
            "coverage": coverage,
            "headwords": headwords,
        }
        write_examples(working, arrays, index, tokenizer)
    return open_examples(output)


def _plan(
    lexicon: _Lexicon, tokenizer: Tokenizer, options: BuildOptions
) -> tuple[list[str], list[_Plan], list[_Plan], set[str]]:
    """Decides what explains each token.

    Returns:
        The kind of each token, plans by a definition of the token's own, plans by carrier words,
        and the held-out headwords.
    """
    kinds: list[str] = []
    own: dict[int, _Plan] = {}
    for token_id in range(tokenizer.vocab_size):
        text, stands_alone = _surface(tokenizer, token_id)
        kind = "whole word" if tokenizer.word_starts[token_id] else "piece"
        definitions: list[int] = []
        if token_id in tokenizer.special_ids or _RESERVED.match(text):
            kind = "special"
        elif name := spell_number(text):
            kind = "number"
            definitions = [lexicon.add(text, NUMBER_POS, name)]
        elif stands_alone and (definitions := lexicon.find(text)):
            kind = "whole word"
        kinds.append(kind)
        if definitions:
            definitions = definitions[: options.max_examples]
            own[token_id] = _Plan(token_id, (token_id,), 0, text.casefold(), definitions)
    spellings = [word for word in lexicon.by_spelling if not re.search(r"\s", word)]
    forms = _Forms(spellings, tokenizer)
    wanted = np.array([kind in ("whole word", "piece") for kind in kinds])
    wanted[list(own)] = False
    # An accented word may be a token of its own without its accents.
    for token_id, word in forms.single(wanted):
        definitions = lexicon.find(spellings[word])[: options.max_examples]
        own[token_id] = _Plan(token_id, (token_id,), 0, spellings[word].casefold(), definitions)
        kinds[token_id] = "whole word"
        wanted[token_id] = False
    numbers = {plan.headword for plan in own.values() if kinds[plan.target_id] == "number"}
    held_out = _hold_out({plan.headword for plan in own.values()} - numbers, options)
    usable = np.array([word.casefold() not in held_out for word in spellings], bool)
    carried = [
        plan
        for plans in forms.carriers(wanted, usable, options.max_carriers)
        for plan in _shared(plans, lexicon, spellings, options.max_examples)
    ]
    return kinds, list(own.values()), carried, held_out


def _surface(tokenizer: Tokenizer, token_id: int) -> tuple[str, bool]:
    """Returns a token's text, and whether it can be a word by itself."""
    piece = tokenizer.id_to_token(token_id)
    if tokenizer.kind == "wordpiece":
        text = piece.removeprefix("##") if len(piece) > 2 else piece
        return text, text == piece
    if tokenizer.kind == "byte_bpe":
        # Special tokens decode to nothing.
        return tokenizer.decode([token_id]).strip() or piece, True
    return piece.removeprefix("\u2581"), True


def _hold_out(headwords: set[str], options: BuildOptions) -> set[str]:
    """Returns the held-out headwords: the same ones in whatever order they come."""
    if not options.holdout or not headwords:
        return set()
    count = max(1, round(options.holdout * len(headwords)))
    if count >= len(headwords):
        raise UsageError(
            f"holdout={options.holdout}: would hold out all {len(headwords)} headwords that are "
            "tokens; choose a smaller share, or 0 for none"
        )
    words = sorted(headwords)
    keys = [hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words]
    draws = random_bits(options.seed, np.frombuffer(b"".join(keys), "<u8"))
    return {words[i] for i in np.argsort(draws, kind="stable")[:count]}


class _Forms:
    """The tokenisations of words in their surface forms, as flat arrays."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer):
        variants = _variants(tokenizer)
        tokens: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        for start in range(0, len(words), _BATCH):
            batch = words[start : start + _BATCH]
            texts = [variant(word) for word in batch for variant in variants]
            encoded = tokenizer.encode_batch(texts)
            lengths.append(np.array([len(ids) for ids in encoded], np.int64))
            flat = itertools.chain.from_iterable(encoded)
            tokens.append(np.fromiter(flat, np.int32))
        self.tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.words, self.variants = np.divmod(np.arange(len(self.lengths)), len(variants))

    def single(self, wanted: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields each wanted token that is a whole word, and the first word that it is."""
        forms = np.flatnonzero(self.lengths == 1)
        forms = forms[wanted[self.tokens[self.starts[forms]]]]
        ids, first = np.unique(self.tokens[self.starts[forms]], return_index=True)
        yield from zip(ids.tolist(), self.words[forms[first]].tolist(), strict=True)

    def carriers(
        self, wanted: np.ndarray, usable: np.ndarray, limit: int
    ) -> Iterator[list[tuple[int, int, int, tuple[int, ...]]]]:
        """Yields, for each wanted token, up to `limit` of (token, word, piece number, pieces)."""
        form = np.repeat(np.arange(len(self.lengths)), self.lengths)
        at = np.flatnonzero(wanted[self.tokens] & usable[self.words[form]])
        form = form[at]
        order = np.lexsort(
            (at, self.words[form], self.variants[form], self.lengths[form], self.tokens[at])
        )
        at, form = at[order], form[order]
        pairs = self.tokens[at].astype(np.int64) * (len(usable) + 1) + self.words[form]
        first = np.sort(np.unique(pairs, return_index=True)[1])
        at, form = at[first], form[first]
        _, begins = np.unique(self.tokens[at], return_index=True)
        for begin, end in itertools.pairwise([*begins.tolist(), len(at)]):
            found = []
            for i in range(begin, min(end, begin + limit)):
                start, length = self.starts[form[i]], self.lengths[form[i]]
                pieces = tuple(self.tokens[start : start + length].tolist())
                found.append(
                    (int(self.tokens[at[i]]), int(self.words[form[i]]), int(at[i] - start), pieces)
                )
            yield found


def _variants(tokenizer: Tokenizer) -> list[Any]:
    """Returns functions from a word to its surface forms, as far as the tokenizer tells them."""
    cases = [str, str.capitalize, str.upper]
    if tokenizer.encode("Word WORD") == tokenizer.encode("word word"):
        cases = cases[:1]
    # In running text a word follows a space; at the start of a text or behind a quote it does not.
    spaces = [" ", ""] if tokenizer.encode(" word") != tokenizer.encode("word") else [""]
    return [
        lambda word, case=case, space=space: space + case(word)
        for case in cases
        for space in spaces
    ]


def _shared(
    found: list[tuple[int, int, int, tuple[int, ...]]],
    lexicon: _Lexicon,
    spellings: Sequence[str],
    limit: int,
) -> Iterator[_Plan]:
    """Divides a token's examples among its carriers: first definitions first."""
    definitions = [lexicon.by_spelling[spellings[word]] for _, word, _, _ in found]
    counts = [0] * len(found)
    left = limit
    for sense in range(max(map(len, definitions))):
        for carrier, own in enumerate(definitions):
            if left and sense < len(own):
                counts[carrier] += 1
                left -= 1
    for (token_id, word, piece, pieces), own, count in zip(found, definitions, counts, strict=True):
        if count:
            yield _Plan(token_id, pieces, piece, spellings[word].casefold(), own[:count])


class _Maker:
    """Turns plans into arrays; each definition is tokenised once."""

    def __init__(self, lexicon: _Lexicon, tokenizer: Tokenizer, options: BuildOptions):
        self._lexicon, self._tokenizer, self._options = lexicon, tokenizer, options
        self._template = Template(options.template)
        self._fixed: dict[str, tuple[list[np.ndarray], bool, str]] = {}
        self._masked: set[int] = set()
        self._cut: set[int] = set()
        self._used: set[int] = set()
        self._empty: set[int] = set()
        self._no_room = 0

    def counts(self) -> dict[str, int]:
        """Returns how many definitions were used, cut, and so on."""
        return {
            "definitions": len(self._used),
            "definitions_cut": len(self._cut),
            "definitions_with_their_headword": len(self._masked & self._used),
            "definitions_without_tokens": len(self._empty),
            "examples_without_room": self._no_room,
        }

    def make(
        self, plans: Sequence[_Plan], held_out: set[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Returns the arrays of `examples.ARRAYS` but for the held-out ids, and the headwords."""
        texts = self._tokenised(plans)
        parts: list[np.ndarray] = []
        flags: list[np.ndarray] = []
        rows: list[tuple[int, ...]] = []
        headwords: dict[str, int] = {}
        for plan in plans:
            slot = np.array(plan.pieces, np.int32)
            slot[plan.piece :] = self._tokenizer.mask_id
            no_slot = np.zeros(len(slot), bool)
            for sense, number in enumerate(plan.definitions):
                fixed, slot_first, _ = self._fixed[self._lexicon.pos[number]]
                text, text_flags = texts[number]
                taken = sum(map(len, fixed)) + len(slot)
                room = self._options.max_length - taken
                if not len(text) or room < 1:
                    self._no_room += bool(len(text))
                    continue
                self._used.add(number)
                if len(text) > room:
                    self._cut.add(number)
                    text, text_flags = text[:room], text_flags[:room]
                begin = len(fixed[0]) + (0 if slot_first else len(text) + len(fixed[1]))
                pair = [(slot, no_slot), (text, text_flags)]
                (one, one_flags), (two, two_flags) = pair if slot_first else pair[::-1]
                parts += (fixed[0], one, fixed[1], two, fixed[2])
                flags += (
                    np.zeros(len(fixed[0]), bool),
                    one_flags,
                    np.zeros(len(fixed[1]), bool),
                    two_flags,
                    np.zeros(len(fixed[2]), bool),
                )
                rows.append(
                    (
                        taken + len(text),
                        begin,
                        begin + plan.piece,
                        plan.target_id,
                        headwords.setdefault(plan.headword, len(headwords)),
                        sense,
                        plan.headword in held_out,
                    )
                )
        table = np.array(rows, np.int64).reshape(-1, 7)
        arrays = {
            "offsets": np.concatenate([[0], np.cumsum(table[:, 0])]),
            "input_ids": np.concatenate(parts) if parts else np.zeros(0, np.int32),
            "definition_flags": np.concatenate(flags) if flags else np.zeros(0, bool),
            "slot_begin": table[:, 1],
            "slot_position": table[:, 2],
            "target_id": table[:, 3],
            "headword": table[:, 4],
            "sense": table[:, 5],
            "held_out": table[:, 6].astype(bool),
        }
        return arrays, list(headwords)

    def _tokenised(self, plans: Sequence[_Plan]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Returns ids and flags of every definition in use; its own headword is masks."""
        numbers = sorted({number for plan in plans for number in plan.definitions})
        segments: list[str] = []
        owners: list[tuple[int, bool]] = []  # a definition's number, and whether it is its headword
        for number in numbers:
            pos = self._lexicon.pos[number]
            if pos not in self._fixed:
                self._fixed[pos] = self._fixed_parts(self._template.fill(pos))
            lead = self._fixed[pos][2]
            text = lead + self._lexicon.texts[number]
            end = 0
            for begin, stop in occurrences(text, self._lexicon.words[number]):
                self._masked.add(number)
                # The space before a word belongs to the word.
                space = begin - len(text[:begin].rstrip())
                segments += (text[end : begin - space], text[begin - space : stop])
                owners += ((number, False), (number, True))
                end = stop
            segments.append(text[end:])
            owners.append((number, False))
        encoded: list[list[int]] = []
        for start in range(0, len(segments), _BATCH):
            encoded += self._tokenizer.encode_following(segments[start : start + _BATCH])
        ids: dict[int, list[int]] = {number: [] for number in numbers}
        flags: dict[int, list[bool]] = {number: [] for number in numbers}
        for (number, is_headword), pieces in zip(owners, encoded, strict=True):
            ids[number] += [self._tokenizer.mask_id] * len(pieces) if is_headword else pieces
            flags[number] += [not is_headword] * len(pieces)
        self._empty = {number for number in numbers if not ids[number]}
        return {
            number: (np.array(ids[number], np.int32), np.array(flags[number], bool))
            for number in numbers
        }

    def _fixed_parts(self, filled: Filled) -> tuple[list[np.ndarray], bool, str]:
        """Returns the ids before, between and behind, and what comes before a definition."""
        tokenizer = self._tokenizer
        before, between, after = filled.before, filled.between, filled.after
        prefix = before if not filled.slot_first else between
        lead = prefix[len(prefix.rstrip()) :]
        ids = [
            [tokenizer.cls_id, *tokenizer.encode(before.rstrip())],
            *tokenizer.encode_following([between.rstrip(), after]),
        ]
        ids[2].append(tokenizer.sep_id)
        return [np.array(part, np.int32) for part in ids], filled.slot_first, lead


def _coverage(kinds: Sequence[str], own: set[int], target_ids: np.ndarray) -> dict[str, Any]:
    """Returns tokens, those defined by an entry of their own, and by carriers, for each kind."""
    defined = set(np.unique(target_ids).tolist())
    total = collections.Counter(kinds)
    by_own = collections.Counter(kinds[i] for i in defined & own)
    by_carrier = collections.Counter(kinds[i] for i in defined - own)
    return {
        kind: {
            "tokens": total[kind],
            "defined": by_own[kind] + by_carrier[kind],
            "own_definition": by_own[kind],
            "carrier_word": by_carrier[kind],
        }
        for kind in KINDS
    }
