"""The `ddrp` command: one table from a command's name to the module that runs it.

A command module has `add_arguments(parser)`, `run(args)` (an exit status, or None for 0) and
`EXAMPLE`, the command lines shown at the end of its help. One that takes `--config` says so with
`CONFIG_OVERRIDES = True` and finds the `--config.path=value` arguments in `args.overrides`.

Exit status: 0 done, 1 failed, 2 a request that cannot be right, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import errno
import glob
import importlib.util
import logging
import os
import re
import sys
from typing import Any, NoReturn

import ddrp_jax
from ddrp_jax.errors import DdrpError, UsageError, nearest

HUGE_PAGES = "glibc.malloc.hugetlb=1"

COMMANDS = {
    "tokenizer": ("ddrp_jax.commands.tokenizer", "train a tokenizer, or adopt a published one"),
    "prepare": ("ddrp_jax.commands.prepare", "turn a corpus into records to train on"),
    "pretrain": ("ddrp_jax.commands.pretrain", "pre-train an encoder, or go on with a run"),
    "evaluate": ("ddrp_jax.commands.evaluate", "measure a checkpoint on held-out records"),
    "fill-mask": ("ddrp_jax.commands.fill_mask", "predict the masked tokens of a text"),
    "compare": ("ddrp_jax.commands.compare", "hold runs against each other, as table and figure"),
    "import": ("ddrp_jax.commands.import_", "take a published PyTorch model in"),
    "export": ("ddrp_jax.commands.export", "give a checkpoint back as a PyTorch model"),
    "definitions build": (
        "ddrp_jax.commands.definitions_build",
        "turn a dictionary into examples of a vocabulary's tokens",
    ),
    "definitions train": (
        "ddrp_jax.commands.definitions_train",
        "train a model to produce a token's embedding from its definition",
    ),
    "definitions evaluate": (
        "ddrp_jax.commands.definitions_evaluate",
        "measure produced rows on held-out words, beside baselines",
    ),
    "definitions apply": (
        "ddrp_jax.commands.definitions_apply",
        "put produced rows into the model's word table",
    ),
    "definitions report": (
        "ddrp_jax.commands.definitions_report",
        "measure a word table before and after its rows were replaced",
    ),
    "plan": (
        "ddrp_jax.commands.plan",
        "compile a run's step for a TPU that is not there, and tell what it would cost",
    ),
    "show": ("ddrp_jax.commands.show", "tell what a checkpoint or a record folder holds"),
}


def console() -> int:
    """Runs the command of this process: the entry point of the installed script."""
    _use_huge_pages()
    return main()


def _use_huge_pages() -> None:
    """Starts this process again, once, with huge pages for what `malloc` takes from the system.

    XLA's CPU programs take their memory anew for every step. In pages of 4 kB that cost a small
    model a seventh of its step (`benchmarks/definitionemb_step.py`, and the same with
    GLIBC_TUNABLES=glibc.malloc.hugetlb=0). glibc reads the setting when a process starts; other C
    libraries do not know it.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = HUGE_PAGES
        os.execv(sys.executable, sys.orig_argv)


def main(argv: list[str] | None = None) -> int:
    """Runs one `ddrp` command.

    Args:
        argv: arguments after the program's name; those of this process if None.

    Returns:
        The exit status. Every expected failure is one message on standard error.
    """
    argv = sys.argv[1:] if argv is None else argv
    prog = "ddrp"
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(_help())
            return 0 if argv else 2
        if argv[0] == "--version":
            print(f"ddrp {ddrp_jax.__version__}")
            return 0
        words = _command_words(argv)
        command = " ".join(words)
        if command not in COMMANDS:  # a group: `ddrp definitions`
            print(_help(command))
            return 0 if argv[1:] else 2
        prog = f"ddrp {command}"
        return _run(command, argv[len(words) :]) or 0
    except UsageError as error:
        return _fail(prog, str(error), 2)
    except DdrpError as error:
        return _fail(prog, str(error), 1)
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", 130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" while writing {error.filename!r}" if error.filename else ""
            return _fail(prog, f"no space left on the disk{where}; free some and try again", 1)
        if error.filename is None:
            raise
        return _fail(prog, f"{error.filename}: {error.strerror}", 1)


def _command_words(argv: list[str]) -> list[str]:
    """Returns the arguments that name a command, or a group whose help is wanted.

    Raises:
        UsageError: they name neither.
    """
    if argv[0] in COMMANDS:
        return argv[:1]
    group = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if group and (not argv[1:] or argv[1] in ("-h", "--help")):
        return argv[:1]
    if group and " ".join(argv[:2]) in COMMANDS:
        return argv[:2]
    if group:
        given, kind, known = argv[1], f"'ddrp {argv[0]}' command", [n.split()[1] for n in group]
    elif argv[0].startswith("-"):
        given, kind, known = argv[0], "flag", ["--help", "--version"]
    else:
        given, kind, known = argv[0], "command", list(dict.fromkeys(n.split()[0] for n in COMMANDS))
    hint = nearest(given, known) or f"; known {kind}s: {', '.join(known)}"
    raise UsageError(f"{given!r}: there is no such {kind}{hint}")


def _run(command: str, argv: list[str]) -> int | None:
    module_name, summary = COMMANDS[command]
    module = importlib.import_module(module_name)
    parser = _Parser(
        prog=f"ddrp {command}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n{_indented(module.EXAMPLE)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    takes_overrides = getattr(module, "CONFIG_OVERRIDES", False)
    _check_flags(parser, argv, takes_overrides)
    try:
        args, extra = parser.parse_known_args(argv)
    except SystemExit as end:  # argparse's own --help
        return int(end.code or 0)
    if takes_overrides:
        args.overrides = extra
    elif extra:
        raise UsageError(f"{extra[0]!r}: unexpected argument; see '{parser.prog} --help'")
    _mark_absl_flags_parsed()
    _skip_absent_tpu()
    _show_warnings(parser.prog)
    return module.run(args)


def _check_flags(parser: _Parser, argv: list[str], takes_overrides: bool) -> None:
    """Names an unknown flag; argparse would rather complain of the required one it stands for."""
    known = parser.known_flags()
    for argument in argv:
        flag = argument.split("=")[0]
        is_value = not flag.startswith("-") or " " in flag or flag == "-" or _is_number(argument)
        is_override = takes_overrides and re.match(r"--?(no)?config\.", flag)
        if flag == "--":
            return
        if not is_value and not is_override and flag not in known:
            hint = nearest(flag, known) or f"; see '{parser.prog} --help'"
            raise UsageError(f"{flag}: there is no such flag{hint}")


def _mark_absl_flags_parsed() -> None:
    """Grain starts worker processes only in a program whose absl flags were parsed."""
    from absl import flags

    flags.FLAGS.mark_as_parsed()


def _skip_absent_tpu() -> None:
    """Where libtpu is there to plan with alone, jax would ask it for chips, and it complains."""
    from ddrp_jax.training.hardware import has_tpu

    others = glob.glob("/dev/nvidia[0-9]*")
    if importlib.util.find_spec("libtpu") and not has_tpu() and not others:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _show_warnings(prog: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{prog}: warning: %(message)s"))
    logger = logging.getLogger("ddrp_jax")
    logger.handlers[:] = [handler]
    logger.propagate = False


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors that suggest the nearest choice."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def known_flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = nearest(str(value), choices)
            name = "/".join(action.option_strings) or action.dest
            raise UsageError(f"{name}={value!r}: expected one of {', '.join(choices)}{hint}")


def _help(group: str = "") -> str:
    shown = {name: text for name, (_, text) in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in shown.items())
    if group:
        return f"usage: ddrp {group} COMMAND [flags]\n\ncommands:\n{rows}"
    return (
        f"usage: ddrp COMMAND [flags]\n\n{ddrp_jax.__doc__}\n\ncommands:\n{rows}\n\n"
        "flags:\n  --help     this text; 'ddrp COMMAND --help' tells a command's flags\n"
        "  --version  the version\n\n"
        "example:\n  ddrp pretrain --config configs/demo.py --workdir runs/demo"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fail(prog: str, message: str, status: int) -> int:
    sys.stdout.flush()
    print(f"{prog}: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(console())
