"""`--config FILE[:arg]` and its overrides."""

import pytest

from ddrp_jax.commands.config_flags import load_config
from ddrp_jax.config import Config
from ddrp_jax.errors import UsageError

FILE = """
from ddrp_jax.config import Config, to_config_dict

def get_config(arg="small"):
    config = to_config_dict(Config())
    config.model.num_layers = {"small": 2, "large": 24}[arg]
    return config
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(FILE)
    return str(path)


def test_a_file_and_its_argument(file):
    assert load_config(file).model.num_layers == 2
    assert load_config(f"{file}:large").model.num_layers == 24


def test_every_form_of_an_override(file):
    config = load_config(
        file,
        [
            "--config.stages[0].steps=10",
            "--config.stages[0].name",
            "long rows",
            "--config.optimizer.eps=1e-4",
            "--config.model.dropout=0",
            "-config.train.seed",
            "7",
            "--noconfig.train.tensorboard",
            "--config.masking.whole_word",
        ],
    )
    assert (config.stages[0].steps, config.stages[0].name) == (10, "long rows")
    assert (config.optimizer.eps, config.model.dropout, config.train.seed) == (1e-4, 0.0, 7)
    assert (config.train.tensorboard, config.masking.whole_word) == (False, True)


def test_the_last_of_two_overrides_wins(file):
    overrides = ["--config.train.seed=1", "--config.train.seed=2"]
    assert load_config(file, overrides).train.seed == 2


def test_one_run_s_overrides_do_not_reach_the_next(file):
    load_config(file, ["--config.train.seed=1"])
    assert load_config(file).train.seed == Config().train.seed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.train.tensorbord=1", "did you mean 'tensorboard'?"),
        ("--config.modle.dropout=1", "did you mean 'model'?"),
        ("--config.stages[3].steps=1", "config.stages has 1 elements"),
        ("--config.stages.steps=1", "write config.stages[0].steps"),
        ("--config.stages=1", "a list cannot be replaced as a whole"),
        ("--config.train.seed=ten", "--config.train.seed=ten: expected a value of type int"),
        ("--config.train.seed.x=1", "config.train.seed has no field 'x'"),
        ("--config.model.position.kind=ddpr", "did you mean 'ddrp'?"),
        ("--config.model.dropout=1.5", "config.model.dropout=1.5: expected in [0, 1)"),
        ("stray", "'stray': unexpected argument"),
    ],
)
def test_a_wrong_override_is_named(file, override, message):
    with pytest.raises(UsageError) as error:
        load_config(file, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no function get_config()"),
        ("def get_config(: pass", "invalid syntax"),
        ("def get_config(): return {}", "returned dict, not a ConfigDict"),
        ("def get_config(arg): pass", "needs an argument after ':'"),
        ("def get_config(arg='big'): return {'small': 1}[arg]", "raised KeyError: 'big'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_config(str(path))
    assert str(error.value).startswith(f"--config={path}: ")
    assert message in str(error.value)


def test_a_missing_file_suggests_its_neighbour(file):
    with pytest.raises(UsageError, match=r"did you mean '.*experiment\.py'\?"):
        load_config(file.replace("experiment", "experimnt"))
