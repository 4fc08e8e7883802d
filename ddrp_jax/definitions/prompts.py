"""What a definition's prompt says: templates, numbers in words, words inside their definitions."""

from __future__ import annotations

import dataclasses
import re
import string

from ddrp_jax.errors import UsageError, nearest

DEFAULT_TEMPLATE = "{slot} ({pos}) means: {definition}"
_FIELDS = ("slot", "pos", "definition")
# A part of speech that the dictionary does not name goes with its brackets and the space before.
_POS_GROUP = re.compile(r"\s*(?:\(\s*\{pos\}\s*\)|\[\s*\{pos\}\s*\]|\{pos\})")

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"))
_LARGEST_DIGITS = 15
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


@dataclasses.dataclass(frozen=True)
class Filled:
    """The fixed text of a prompt.

    Attributes:
        before: text before the first of slot and definition.
        between: text between them.
        after: text behind the second.
        slot_first: whether the slot comes before the definition.
    """

    before: str
    between: str
    after: str
    slot_first: bool


class Template:
    """A prompt's text with the fields `{slot}`, `{definition}` and, where wanted, `{pos}`."""

    def __init__(self, text: str):
        """Checks the text.

        Raises:
            UsageError: a brace is unmatched, a field is unknown, missing or there twice.
        """
        self.text = text
        fields = [field for _, field in _parsed(text) if field]
        for field in fields:
            if field not in _FIELDS:
                hint = nearest(field, list(_FIELDS)) or f"; known fields: {', '.join(_FIELDS)}"
                raise UsageError(f"template={text!r}: there is no field {{{field}}}{hint}")
        for field, needed in (("slot", 1), ("definition", 1), ("pos", 0)):
            if not needed <= fields.count(field) <= 1:
                raise UsageError(
                    f"template={text!r}: {{{field}}} is there {fields.count(field)} times, "
                    f"expected {'once' if needed else 'at most once'}, "
                    f"as in {DEFAULT_TEMPLATE!r}"
                )

    def fill(self, pos: str) -> Filled:
        """Returns the fixed text for a part of speech, which may be empty."""
        text = self.text if pos else _POS_GROUP.sub("", self.text)
        literals, order = [""], []
        for literal, field in _parsed(text):
            literals[-1] += literal
            if field == "pos":
                literals[-1] += pos
            elif field:
                order.append(field)
                literals.append("")
        before, between, after = literals
        return Filled(before.lstrip(), between, after.rstrip(), order[0] == "slot")


def spell_number(text: str) -> str | None:
    """Returns a whole number or an ordinal in English words, or None for what is neither.

    `42` is `forty-two`, `21st` is `twenty-first`, `007` is `zero zero seven`, and so is every
    number of more than 15 digits, digit by digit.
    """
    digits, ordinal = text, False
    if text[-2:].lower() in ("st", "nd", "rd", "th"):
        digits, ordinal = text[:-2], True
    if not digits.isdecimal():
        return None
    if len(digits) > _LARGEST_DIGITS or (digits[0] == "0" and len(digits) > 1):
        return None if ordinal else " ".join(_ONES[int(digit)] for digit in digits)
    words = _spelt(int(digits))
    return _ordinal(words) if ordinal else words


def occurrences(text: str, word: str) -> list[tuple[int, int]]:
    """Returns where `word` stands in `text` as a word, in any case of its letters."""
    if word.lower() not in text.lower():
        return []
    pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    return [match.span() for match in pattern.finditer(text)]


def _parsed(text: str) -> list[tuple[str, str]]:
    """Returns pairs of literal text and the field behind it, which may be empty."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(f"template={text!r}: {error}; a brace in the text is '{{{{'") from error
    pairs = []
    for literal, field, form, conversion in parts:
        if field is not None and (form or conversion or not field):
            raise UsageError(
                f"template={text!r}: a field is a name in braces, such as {{slot}}, and no more"
            )
        pairs.append((literal, field or ""))
    return pairs


def _spelt(number: int) -> str:
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" {_spelt(rest)}" if rest else "")
    scale, name = next(pair for pair in _SCALES if number >= pair[0])
    count, rest = divmod(number, scale)
    return f"{_spelt(count)} {name}" + (f" {_spelt(rest)}" if rest else "")


def _ordinal(words: str) -> str:
    start = max(words.rfind(" "), words.rfind("-")) + 1
    last = words[start:]
    if last in _ORDINALS:
        last = _ORDINALS[last]
    elif last.endswith("y"):
        last = f"{last[:-1]}ieth"
    else:
        last += "th"
    return words[:start] + last
