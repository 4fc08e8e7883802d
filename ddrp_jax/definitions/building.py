"""From a dictionary and a tokenizer to a folder of definition examples."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ddrp_jax
from ddrp_jax.data.dictionary import Dictionary, Entry
from ddrp_jax.data.folders import whole_folder
from ddrp_jax.data.tokenizers import Tokenizer
from ddrp_jax.definitions.choosing import (
    BATCH,
    KINDS,
    BuildOptions,
    Lexicon,
    Plan,
    choose_definitions,
)
from ddrp_jax.definitions.examples import (
    INDEX_FILE,
    VERSION,
    Examples,
    open_examples,
    write_examples,
)
from ddrp_jax.definitions.prompts import Filled, Template, occurrences
from ddrp_jax.errors import DdrpError


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
        lexicon = Lexicon(dictionary if entries is None else entries)
        kinds, own, carried, held_out = choose_definitions(
            lexicon, tokenizer, options, dictionary.language
        )
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


class _Maker:
    """Turns plans into arrays; each definition is tokenised once."""

    def __init__(self, lexicon: Lexicon, tokenizer: Tokenizer, options: BuildOptions):
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
        self, plans: Sequence[Plan], held_out: set[str]
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

    def _tokenised(self, plans: Sequence[Plan]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
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
        for start in range(0, len(segments), BATCH):
            encoded += self._tokenizer.encode_following(segments[start : start + BATCH])
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
