"""Where imports and exports may be written."""

from pathlib import Path

from ddrp_jax.errors import UsageError


def check_free(output: Path) -> None:
    """Raises UsageError unless `output` is a name that is free, or an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output}: exists and is not an empty folder; name a new one")
