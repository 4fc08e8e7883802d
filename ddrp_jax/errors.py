"""The two errors that the command line turns into a message instead of a traceback."""


class DdrpError(Exception):
    """A job that cannot go on: bad data, a damaged file, a full disk. Exit status 1."""


class UsageError(DdrpError):
    """A request that cannot be right: an unknown name, a value out of range. Exit status 2."""


def nearest(name: str, known: list[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the known name closest to `name`, or `""`."""
    import difflib

    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
