"""Which definitions explain which token of a vocabulary (section 2 of the specification).

1. A number's is its own name in English words.
2. A surface form of a word has that word's definitions: those of the same spelling, or else of the
   same letters in whatever case.
3. Any other token is a piece of carrier words: single words whose tokenisation contains it, those
   of the fewest pieces first, then as the dictionary spells them before other cases of their
   letters, then in the dictionary's order.

Words are held out by their letters, whatever their case, and a held-out word carries nothing: so no
token of it is a target outside its own examples, and its definitions explain no other token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ddrp_jax.data.dictionary import Entry
from ddrp_jax.data.frequency import reserved_ids
from ddrp_jax.data.hashing import random_bits
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.definitions.prompts import DEFAULT_TEMPLATE, Template, spell_number
from ddrp_jax.errors import UsageError

NUMBER_POS = "number"
KINDS = ("whole word", "piece", "number", "special")
BATCH = 20_000  # texts that are tokenised at a time
_SHORTEST = 16  # CLS, SEP, a template and a few words


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
class Plan:
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


class Lexicon:
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


def choose_definitions(
    lexicon: Lexicon, tokenizer: Tokenizer, options: BuildOptions, language: str = "en"
) -> tuple[list[str], list[Plan], list[Plan], set[str]]:
    """Decides what explains each token.

    Args:
        lexicon: the dictionary's definitions; those of numbers are added.
        tokenizer: whose vocabulary is explained.
        options: how.
        language: of the definitions. We can name numbers in English ("en"); in another language a
            number has the definitions that the dictionary gives it.

    Returns:
        The kind of each token, plans by a definition of the token's own, plans by carrier words,
        and the held-out headwords.
    """
    kinds: list[str] = []
    own: dict[int, Plan] = {}
    reserved = reserved_ids(tokenizer)
    for token_id in range(tokenizer.vocab_size):
        text, stands_alone = _surface(tokenizer, token_id)
        kind = "whole word" if tokenizer.word_starts[token_id] else "piece"
        definitions: list[int] = []
        if token_id in reserved:
            kind = "special"
        elif name := spell_number(text):
            kind = "number"
            in_english = language == "en"
            definitions = (
                [lexicon.add(text, NUMBER_POS, name)] if in_english else lexicon.find(text)
            )
        elif stands_alone and (definitions := lexicon.find(text)):
            kind = "whole word"
        kinds.append(kind)
        if definitions:
            definitions = definitions[: options.max_examples]
            own[token_id] = Plan(token_id, (token_id,), 0, text.casefold(), definitions)
    spellings = [word for word in lexicon.by_spelling if not re.search(r"\s", word)]
    forms = _Forms(spellings, tokenizer)
    wanted = np.array([kind in ("whole word", "piece") for kind in kinds])
    wanted[list(own)] = False
    # An accented word may be a token of its own without its accents.
    for token_id, word in forms.single(wanted):
        definitions = lexicon.find(spellings[word])[: options.max_examples]
        own[token_id] = Plan(token_id, (token_id,), 0, spellings[word].casefold(), definitions)
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
    begins = bool(tokenizer.word_starts[token_id])
    if tokenizer.kind == "wordpiece":
        return (piece if begins else piece[2:]), begins
    if tokenizer.kind == "sentencepiece":
        return piece.removeprefix("\u2581"), begins
    # At the start of a text and behind a bracket or quote a word has no mark. Special tokens
    # decode to nothing.
    return tokenizer.decode([token_id]).strip() or piece, True


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
        surface_forms = _surface_forms(tokenizer)
        tokens: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        for start in range(0, len(words), BATCH):
            batch = words[start : start + BATCH]
            texts = [form for word in batch for form in surface_forms(word)]
            encoded = tokenizer.encode_batch(texts)
            lengths.append(np.array([len(ids) for ids in encoded], np.int64))
            flat = itertools.chain.from_iterable(encoded)
            tokens.append(np.fromiter(flat, np.int32))
        self.tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.words, self.variants = np.divmod(
            np.arange(len(self.lengths)), len(surface_forms("word"))
        )

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


def _surface_forms(tokenizer: Tokenizer) -> Callable[[str], list[str]]:
    """Returns a function from a word to its surface forms, as far as the tokenizer tells them."""
    is_cased = tokenizer.encode("Word WORD") != tokenizer.encode("word word")
    # In running text a word follows a space; at the start of a text or behind a quote it does not.
    spaces = (" ", "") if tokenizer.encode(" word") != tokenizer.encode("word") else ("",)

    def forms(word: str) -> list[str]:
        cases = (word, word[:1].upper() + word[1:], word.upper()) if is_cased else (word,)
        return [space + case for case in cases for space in spaces]

    return forms


def _shared(
    found: list[tuple[int, int, int, tuple[int, ...]]],
    lexicon: Lexicon,
    spellings: Sequence[str],
    limit: int,
) -> Iterator[Plan]:
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
            yield Plan(token_id, pieces, piece, spellings[word].casefold(), own[:count])
