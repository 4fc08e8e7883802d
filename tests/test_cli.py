"""The `ddrp` command as a user meets it: the installed console script in a process of its own."""

import os
import subprocess
import sys

import pytest
from tiny_run import CONFIG, DDRP, ddrp

from ddrp_jax import cli


def test_help_lists_every_command_with_its_summary():
    result = ddrp("--help")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    for name, (_, summary) in cli.COMMANDS.items():
        assert any(line.split() == [*name.split(), *summary.split()] for line in lines), name


def test_no_command_shows_the_help_and_fails():
    result = ddrp()
    assert result.returncode == 2
    assert result.stdout == ddrp("--help").stdout


def test_version():
    result = ddrp("--version")
    assert (result.returncode, result.stdout) == (0, "ddrp 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["pretrian"], "'pretrain'"),
        (["fill_mask"], "'fill-mask'"),
        (["--versoin"], "'--version'"),
        (["pretrain", "--config", "c.py", "--workdri", "x"], "'--workdir'"),
        (["show", "--jsn", "x"], "'--json'"),
        (["evaluate", "--chekpoint=x", "--records", "y", "--checkpoint", "z"], "'--checkpoint'"),
    ],
)
def test_unknown_names_suggest_the_nearest(arguments, suggestion):
    result = ddrp(*arguments)
    assert result.returncode == 2
    assert f"did you mean {suggestion}?" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_flag_is_not_guessed_from_its_first_letters():
    result = ddrp("pretrain", "--conf", "c.py", "--work", "x")
    assert result.returncode == 2
    assert result.stderr.startswith("ddrp pretrain: error: ")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_command_help_has_an_example_and_needs_no_jax(command):
    program = (
        "import sys; from ddrp_jax.cli import main; status = main(sys.argv[1:])\n"
        "heavy = {'jax', 'flax', 'torch', 'datasets', 'grain', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, command, "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    _, _, example = result.stdout.partition("example:\n")
    assert example.strip().startswith(f"ddrp {command}")


def test_a_file_where_a_folder_should_be(tiny_records, tmp_path):
    (tmp_path / "run").write_text("not a folder")
    records = f"--config.stages[0].records={tiny_records}"
    result = ddrp("pretrain", "--config", CONFIG, "--workdir", tmp_path / "run", records)
    assert result.returncode == 1
    assert result.stderr == f"ddrp pretrain: error: {tmp_path / 'run'}: File exists\n"


def test_a_closed_pipe_is_not_a_traceback():
    process = subprocess.Popen(
        [str(DDRP), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_the_installed_script_starts_again_with_huge_pages():
    code = (
        "import os, sys; from ddrp_jax import cli\n"
        "cli.main = lambda: print(os.getpid(), os.environ.get('GLIBC_TUNABLES')) or 0\n"
        "print(os.getpid(), 'begins', flush=True)\n"
        "sys.exit(cli.console())"
    )
    for given, wanted, starts in ((None, cli.HUGE_PAGES, 2), ("glibc.malloc.check=0", None, 1)):
        variables = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        if given is not None:
            variables["GLIBC_TUNABLES"] = given
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True
        )
        *begun, last = result.stdout.splitlines()
        # The same process, and what is set already is left alone.
        assert begun == [f"{last.split()[0]} begins"] * starts
        assert last.split()[1] == (wanted or given)
