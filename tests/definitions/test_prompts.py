"""Templates, numbers in words, and where a word stands in a text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrp_jax.definitions.prompts import DEFAULT_TEMPLATE, Filled, Template, occurrences
from ddrp_jax.definitions.prompts import spell_number as spell
from ddrp_jax.errors import UsageError


def test_the_default_template():
    template = Template(DEFAULT_TEMPLATE)
    assert template.fill("noun") == Filled("", " (noun) means: ", "", True)
    assert template.fill("") == Filled("", " means: ", "", True)


@pytest.mark.parametrize(
    ("text", "pos", "expected"),
    [
        ("{definition} is {slot}.", "n.", Filled("", " is ", ".", False)),
        ("As {pos}, {slot}: {definition}!", "n.", Filled("As n., ", ": ", "!", True)),
        ("{{x}} {slot} {definition}", "", Filled("{x} ", " ", "", True)),
        ("{slot} [{pos}]: {definition}", "", Filled("", ": ", "", True)),
        ("{slot} ( {pos} ): {definition}", "", Filled("", ": ", "", True)),
        ("{slot}: {definition} ({pos})", "adj", Filled("", ": ", " (adj)", True)),
        ("{slot}: {definition} ({pos})", "", Filled("", ": ", "", True)),
        ("{slot} ({pos}) {definition}", "{v. i. }", Filled("", " ({v. i. }) ", "", True)),
    ],
)
def test_templates_may_be_of_any_order(text, pos, expected):
    assert Template(text).fill(pos) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{slot} {word}: {definition}", "no field {word}"),
        ("{slot}: {definitoin}", "did you mean 'definition'"),
        ("{definition}", "{slot} is there 0 times, expected once"),
        ("{slot} {slot} {definition}", "{slot} is there 2 times"),
        ("{slot}", "{definition} is there 0 times"),
        ("{slot} {pos} {pos} {definition}", "{pos} is there 2 times, expected at most once"),
        ("{slot} {} {definition}", "a field is a name in braces"),
        ("{slot!r} {definition}", "a field is a name in braces"),
        ("{slot:>5} {definition}", "a field is a name in braces"),
        ("{slot {definition}", "a brace in the text is '{{'"),
        ("slot} {definition}", "a brace in the text is '{{'"),
        ("", "{slot} is there 0 times"),
    ],
)
def test_a_template_that_cannot_be_right_is_refused(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Template(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "zero"),
        ("7", "seven"),
        ("10", "ten"),
        ("15", "fifteen"),
        ("42", "forty-two"),
        ("80", "eighty"),
        ("100", "one hundred"),
        ("305", "three hundred five"),
        ("1990", "one thousand nine hundred ninety"),
        ("20000", "twenty thousand"),
        ("1000001", "one million one"),
        ("999999999999999", None),
        ("007", "zero zero seven"),
        (
            "1234567890123456",
            "one two three four five six seven eight nine zero one two three four",
        ),
        ("1st", "first"),
        ("2nd", "second"),
        ("3RD", "third"),
        ("5th", "fifth"),
        ("9th", "ninth"),
        ("12th", "twelfth"),
        ("20th", "twentieth"),
        ("21st", "twenty-first"),
        ("100th", "one hundredth"),
        ("\u0664\u0662", "forty-two"),
    ],
)
def test_numbers_in_words(text, words):
    found = spell(text)
    assert found is not None
    assert words is None or found.startswith(words)
    assert words is None or len(text) > 15 or found == words


@pytest.mark.parametrize(
    "text", ["", "a", "1a", "1.5", "-3", "1,000", "st", "0th1", "007th", "\u00b2"]
)
def test_what_is_no_whole_number_has_no_words(text):
    assert spell(text) is None


READ = {word: number for number, word in enumerate(map(spell, map(str, range(20))))}
READ |= {spell(str(tens)): tens for tens in range(20, 100, 10)}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def read(words):
    """The number that words say, by adding up."""
    total = part = 0
    for word in words.replace("-", " ").split():
        if word in SCALES:
            total, part = total + part * SCALES[word], 0
        else:
            part = part * 100 if word == "hundred" else part + READ[word]
    return total + part


@given(number=st.integers(0, 10**15 - 1))
def test_a_number_can_be_read_back(number):
    assert read(spell(str(number))) == number


@pytest.mark.parametrize(
    ("text", "word", "found"),
    [
        ("Bank on a bank, BANK!", "bank", ["Bank", "bank", "BANK"]),
        ("An embankment; banks; bank_note", "bank", []),
        ("bank-note (bank)", "bank", ["bank", "bank"]),
        ("c++ and C++.", "c++", ["c++", "C++"]),
        ("naïve", "na", []),
        ("A river bank. A river\nbank", "river bank", ["river bank"]),
        ("", "bank", []),
    ],
)
def test_words_are_found_and_not_parts_of_words(text, word, found):
    assert [text[begin:end] for begin, end in occurrences(text, word)] == found
