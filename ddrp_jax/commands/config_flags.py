"""`--config FILE[:arg]` and `--config.path.to.field=value`, as in `ml_collections.config_flags`.

Overrides are parsed by config_flags itself, on flag values of our own; a path that does not exist
is found before that, since absl would end with a traceback.
"""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from ddrp_jax.config import Config, DefinitionConfig, RunConfig, from_config_dict
from ddrp_jax.errors import UsageError, nearest


def load_config(
    config: str, overrides: Sequence[str] = (), kind: type[RunConfig] | None = Config
) -> Any:
    """Loads a config file and applies command-line overrides.

    Args:
        config: `FILE` or `FILE:arg`; the file defines `get_config()` or `get_config(arg)`, which
            returns a ConfigDict.
        overrides: `--config.path=value`, `--config.path value`, `--config.flag`,
            `--noconfig.flag`.
        kind: the class that the file's ConfigDict has to make, and that is returned; None takes
            the one whose fields it has.

    Raises:
        UsageError: no such file or field, or a value that does not fit.
    """
    values = _apply(_load_file(config), list(overrides))
    if kind is None:
        kind = DefinitionConfig if "reconstruction" in values else Config
    return from_config_dict(kind, values)


def _load_file(config: str) -> ConfigDict:
    file, *argument = config.split(":", 1)
    if not Path(file).is_file():
        raise UsageError(f"--config={config}: there is no file {file!r}{_nearest_file(file)}")
    try:
        get_config = runpy.run_path(file).get("get_config")
    except SyntaxError as error:
        raise UsageError(f"--config={config}: {error}") from error
    if not callable(get_config):
        raise UsageError(f"--config={config}: the file defines no function get_config()")
    try:
        inspect.signature(get_config).bind(*argument)
    except TypeError as error:
        problem = "takes no argument after ':'" if argument else "needs an argument after ':'"
        raise UsageError(f"--config={config}: its get_config() {problem}") from error
    try:
        values = get_config(*argument)
    except (KeyError, ValueError) as error:
        # What a file raises for an argument that it does not know.
        given = f"({argument[0]!r})" if argument else "()"
        raise UsageError(
            f"--config={config}: get_config{given} raised {type(error).__name__}: {error}; "
            f"the docstring of {file} tells which arguments it takes"
        ) from error
    if not isinstance(values, ConfigDict):
        raise UsageError(
            f"--config={config}: get_config() returned {type(values).__name__}, not a ConfigDict; "
            "make one with ddrp_jax.config.to_config_dict"
        )
    return values


def _nearest_file(file: str) -> str:
    folder = Path(file).parent
    known = [str(path) for path in folder.glob("*.py")] if folder.is_dir() else []
    return nearest(file, known)


def _apply(values: ConfigDict, overrides: list[str]) -> ConfigDict:
    from absl import flags
    from ml_collections import config_flags
    from ml_collections.config_flags import config_path

    for argument in overrides:
        if match := re.match(r"--?(?:no)?config\.([^=]*)", argument):
            _check_path(values, match.group(1))
    flag_values = flags.FlagValues()
    # Overrides may come before or among other arguments, as argparse allows.
    flag_values.set_gnu_getopt(True)
    argv = ["ddrp", *overrides]
    try:
        config_flags.DEFINE_config_dict(
            "config", values, flag_values=flag_values, sys_argv=argv, lock_config=True
        )
        rest = flag_values(argv)
    except flags.IllegalFlagValueError as error:
        given = str(error).removeprefix("flag ").split(": ")[0]
        path = given.removeprefix("--config.").split("=")[0]
        expected = config_path.get_type(path, values).__name__
        raise UsageError(f"{given}: expected a value of type {expected}") from error
    except (flags.Error, ValueError) as error:
        raise UsageError(str(error)) from error
    if rest[1:]:
        raise UsageError(f"{rest[1]!r}: unexpected argument")
    return flag_values["config"].value


def _check_path(values: Any, path: str) -> None:
    """Raises a UsageError that names the first part of `path` which does not exist."""
    parts = re.findall(r"[^.\[\]]+|\[[^\]]*\]", path)
    done = "config"
    for part in parts:
        if part.startswith("["):
            if not isinstance(values, list | tuple):
                raise UsageError(f"--config.{path}: {done} is not a list")
            index = part[1:-1]
            if not index.isdecimal() or int(index) >= len(values):
                raise UsageError(
                    f"--config.{path}: {done} has {len(values)} elements, counted from [0]"
                )
            values = values[int(index)]
            done += part
            continue
        if isinstance(values, list | tuple):
            raise UsageError(f"--config.{path}: {done} is a list; write {done}[0].{part}")
        known = list(values) if isinstance(values, ConfigDict) else []
        if part not in known:
            hint = nearest(part, known) or (
                f"; its fields: {', '.join(known)}" if known else f"; {done} has no fields"
            )
            raise UsageError(f"--config.{path}: {done} has no field {part!r}{hint}")
        values = values[part]
        done += f".{part}"
    if isinstance(values, list | tuple):
        raise UsageError(
            f"--config.{path}: a list cannot be replaced as a whole; give its elements' fields, "
            f"as in --config.{path}[0].steps=10"
        )
