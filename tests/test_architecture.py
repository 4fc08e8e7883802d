"""The direction of imports, and what importing the package does not bring along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ddrp_jax"
# Modelling files that travel with an export run in other people's PyTorch programs.
TRAVELLERS = PACKAGE / "interop" / "torch_export"
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent != TRAVELLERS)
HEAVY = {
    "torch",
    "tensorflow",
    "tensorflow_datasets",
    "matplotlib",
    "datasets",
    "pyarrow",
    "sentencepiece",
    "tokenizers",
    "transformers",
    "tensorboardX",
    "wandb",
    "grain",
    "orbax",
}


# What stands at the end of the way that data takes.
LAST = ["analysis", "interop", "definitions"]


def imports(tree, package=""):
    """Full names that a syntax tree imports; relative ones from `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(filter(None, [*(parts if node.level else []), node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_import(tree):
    """The statements that run when a module is imported: all but the bodies of functions."""
    kept = []
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(node)
        stack.extend(ast.iter_child_nodes(node))
    return ast.Module(kept, [])


def of(file, choose=lambda tree: tree):
    package = ".".join(file.relative_to(PACKAGE.parent).parent.parts)
    return set(imports(choose(ast.parse(file.read_text())), package))


def begins(name, *prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def name_of(file):
    return file.relative_to(PACKAGE).as_posix()


def test_the_rules_see_the_package():
    names = {name_of(file) for file in FILES}
    assert {"models/encoder.py", "training/checkpoint.py", "data/pipeline.py"} <= names
    assert "ddrp_jax.models.ops" in of(PACKAGE / "models" / "attention.py")
    assert any(begins(name, "orbax") for name in of(PACKAGE / "training" / "checkpoint.py"))
    assert any(begins(name, "grain") for name in of(PACKAGE / "data" / "pipeline.py"))


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("models", ["data", "training", "commands", "objectives", *LAST]),
        ("objectives", ["data", "training", "commands", "models", *LAST]),
        ("data", ["models", "objectives", "training", "commands", *LAST]),
        ("training", ["commands", *LAST]),
        ("interop", ["commands", "analysis", "definitions"]),
        ("definitions", ["commands", "analysis"]),
        ("analysis", ["commands"]),
    ],
)
def test_data_flows_one_way(room, forbidden):
    for file in FILES:
        if name_of(file).startswith(f"{room}/"):
            wrong = [n for n in of(file) if begins(n, *(f"ddrp_jax.{f}" for f in forbidden))]
            assert not wrong, f"{name_of(file)} imports {wrong}"


ONE_FILE = {
    "orbax": "training/checkpoint.py",
    "orbax.checkpoint.multihost": "training/distributed.py",  # how processes wait, no file format
    "grain": "data/pipeline.py",
}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_one_file_for_each_foreign_thing(file):
    for name in of(file):
        known = [foreign for foreign in ONE_FILE if begins(name, foreign)]
        if known:
            assert ONE_FILE[max(known, key=len)] == name_of(file), name


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_heavy_imports_are_inside_the_function_that_needs_them(file):
    wrong = [name for name in of(file, at_import) if begins(name, *HEAVY)]
    assert not wrong, f"{name_of(file)} imports {wrong} when it is imported"


def test_data_and_the_command_table_do_without_jax():
    for file in FILES:
        if name_of(file).startswith("data/"):
            assert not [n for n in of(file) if begins(n, "jax", "flax", "optax")], name_of(file)
        if name_of(file) == "cli.py" or name_of(file).startswith("commands/"):
            wrong = [n for n in of(file, at_import) if begins(n, "jax", "flax", "optax")]
            assert not wrong, f"{name_of(file)} imports {wrong} when it is imported"


LIST_MODULES = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.parametrize(
    "module", ["ddrp_jax", "ddrp_jax.cli", "ddrp_jax.config", "ddrp_jax.training.step"]
)
def test_importing_brings_nothing_heavy(module):
    result = subprocess.run(
        [sys.executable, "-c", LIST_MODULES, module], capture_output=True, text=True, check=True
    )
    brought = set(result.stdout.split())
    assert not brought & HEAVY
    if module != "ddrp_jax.training.step":
        assert not brought & {"jax", "flax"}, "commands must answer --help without them"


def test_no_file_is_longer_than_about_five_hundred_lines():
    for file in [*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]:
        assert len(file.read_text().splitlines()) <= 550, file
