"""`ddrp plan` with the TPU's own compiler, on a small model."""

import importlib.util
import json
import re

import pytest
from tiny_run import CONFIG, ROOT

from ddrp_jax import cli

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install 'ddrp-jax[tpu-plan]'",
)

VOCABULARY, LAYERS, WIDTH, HIDDEN, HEADS, LENGTH, PREDICTIONS = 500, 2, 32, 64, 2, 32, 5
MAX_DISTANCE = 63
# Rows of the padded vocabulary, as in `models.encoder`: a multiple of 128.
PADDED = 512
MODEL = (f"--config.model.vocab_size={VOCABULARY}",)


def plan(tmp_path, *arguments):
    """Returns what a plan writes as JSON, and what it prints."""
    output = tmp_path / "plan.json"
    command = ["plan", f"--config={CONFIG}", *MODEL, f"--json={output}", *arguments]
    assert cli.main(command) == 0
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory):
    """The same run with 2 and with 4 rows on each of 4 chips."""
    folder = tmp_path_factory.mktemp("plan")
    plans = plan(folder, "--topology=v5e:2x2", "--sweep=batch=2,4")
    assert [each["sweep"] for each in plans] == [{"batch": "2"}, {"batch": "4"}]
    return plans


def layer_parameters():
    """Of one layer of the tiny model, written down once more."""
    position = (MAX_DISTANCE + 1 + 3) * (WIDTH // HEADS)
    attention = 4 * (WIDTH * WIDTH + WIDTH) + position
    return attention + 2 * WIDTH * HIDDEN + HIDDEN + WIDTH + 2 * 2 * WIDTH


def test_memory_adds_up_and_parameters_are_on_every_chip(data_parallel):
    for each in data_parallel:
        (stage,) = each["stages"]
        memory = dict(stage["memory"])
        total, available = memory.pop("total"), memory.pop("available")
        assert total == sum(memory.values())
        assert available == 16 * 2**30
        assert stage["fits"]
        # Two moments of each parameter, and a step count or two.
        assert 0 <= memory["optimizer"] - 2 * memory["parameters"] < 100
        assert memory["parameters"] >= 4 * LAYERS * layer_parameters()


def test_chips_exchange_gradients_and_scalars_alone(data_parallel):
    few, many = (each["stages"][0] for each in data_parallel)
    # Nothing for each token: twice the rows, the same exchanges.
    assert few["collectives"] == many["collectives"]
    assert {exchange["kind"] for exchange in few["collectives"]} == {"all-reduce"}
    assert {exchange["axes"] for exchange in few["collectives"]} == {"data"}
    size = sum(exchange["bytes"] * exchange["count"] for exchange in few["collectives"])
    parameters = few["memory"]["parameters"]
    # The word table's gradient comes in two parts, from the input and from the tied head, and that
    # of relative vectors by offset, before it is divided over distance and direction.
    twice = 4 * PADDED * WIDTH + LAYERS * 4 * (2 * MAX_DISTANCE + 1) * (WIDTH // HEADS)
    assert parameters <= size <= parameters + twice + 1000


def test_products_are_those_of_the_model(data_parallel):
    for each in data_parallel:
        (stage,) = each["stages"]
        tokens = stage["rows_per_chip"] * LENGTH
        by_token = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN + 2 * LENGTH * WIDTH
        head = stage["rows_per_chip"] * PREDICTIONS * (WIDTH * WIDTH + WIDTH * VOCABULARY)
        expected = 3 * 2 * (LAYERS * tokens * by_token + head)
        assert stage["model_flops"] == expected
        # The program's own: relative scores, sums as products and the padded vocabulary on top.
        assert expected < stage["flops"] < 1.6 * expected


def test_times_follow_from_cycles_and_links(data_parallel):
    for each in data_parallel:
        (stage,) = each["stages"]
        assert stage["step_seconds"] == pytest.approx(
            stage["compute_seconds"] + stage["communication_seconds"]
        )
        cycle = stage["compute_seconds"] / (stage["megacycles"] * 1e6)
        assert 0.9e9 < 1 / cycle < 2e9, "a v5e chip's clock"
        rate = stage["batch_size"] * LENGTH / stage["step_seconds"]
        assert stage["tokens_per_second"] == pytest.approx(rate)
        assert stage["tokens"] == stage["steps"] * stage["batch_size"] * LENGTH
        assert stage["days"] * 24 * each["chips"] == pytest.approx(stage["chip_hours"])
        assert each["chip_hours"] == pytest.approx(stage["chip_hours"])
        assert stage["mfu"] == pytest.approx(
            stage["model_flops"] / stage["step_seconds"] / 197e12
        ), "of the published peak"


def test_fsdp_keeps_a_share_of_the_parameters_on_each_chip(tmp_path, data_parallel, capsys):
    arguments = ("--topology=v5e:2x2", "--config.mesh.data=1", "--config.mesh.fsdp=4")
    (stage,) = plan(tmp_path, *arguments)["stages"]
    whole = data_parallel[0]["stages"][0]["memory"]["parameters"]
    # What is too small to divide stays whole.
    assert whole / 4 <= stage["memory"]["parameters"] < whole / 3
    kinds = {exchange["kind"] for exchange in stage["collectives"]}
    assert "all-gather" in kinds
    assert {exchange["axes"] for exchange in stage["collectives"]} <= {"fsdp", "data+fsdp"}
    shown = capsys.readouterr().out
    assert re.search(r"fits +yes", shown)
    assert f"MFU                     {stage['mfu']:.3f}" in shown


@pytest.mark.parametrize("name", ["definitionemb_roberta_base", "definitionemb_bart_large"])
def test_a_reconstructor_is_planned_too(tmp_path, name):
    output = tmp_path / "plan.json"
    sizes = {
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.num_heads": 2,
        "model.intermediate_size": 128,
        "model.vocab_size": 500,
        "stages[0].length": 32,
    }
    is_bart = "bart" in name
    if is_bart:
        sizes["model.decoder.num_layers"] = 1
    flags = [f"--config.{field}={value}" for field, value in sizes.items()]
    command = ["plan", f"--config={ROOT / 'configs' / name}.py", f"--json={output}", *flags]
    assert cli.main([*command, "--topology=v5e:2x2"]) == 0
    (stage,) = json.loads(output.read_text())["stages"]
    rows, d, f = stage["rows_per_chip"], 64, 128
    assert rows == 32 / 4
    forward = 2 * 32 * (2 * (4 * d * d + 2 * d * f) + 4 * 32 * d)
    if is_bart:
        # A quarter as long: self-attention, cross-attention to the 32 tokens, and feed-forward.
        forward += 2 * 8 * (4 * d * d + 2 * d * d + 2 * d * f) + 2 * 32 * 2 * d * d
        forward += 4 * 8 * d * (8 + 32)
    assert stage["model_flops"] == 3 * rows * forward
    assert stage["flops"] > stage["model_flops"]
    assert {exchange["kind"] for exchange in stage["collectives"]} == {"all-reduce"}
    # The teacher, or for BART the frozen word table itself, has no moments and no gradient.
    memory = stage["memory"]
    frozen = 4 * PADDED * d
    assert abs(memory["optimizer"] - 2 * (memory["parameters"] - frozen)) < 100
    size = sum(exchange["bytes"] * exchange["count"] for exchange in stage["collectives"])
    assert size < memory["parameters"] - frozen + 10_000


def test_what_does_not_fit_is_told_with_what_would_help(tmp_path, capsys):
    result = plan(tmp_path, "--topology=v5e:1x1", "--config.stages[0].batch_size=1000000")
    (stage,) = result["stages"]
    assert not stage["fits"]
    assert result["days"] is None
    assert stage["memory"]["total"] > stage["memory"]["available"]
    shown = capsys.readouterr().out
    assert "long does not fit; what would help:" in shown
    assert "--config.model.remat=" in shown
    accumulation = int(re.search(r"accumulation=(\d+) keeps the batch", shown)[1])
    assert 1_000_000 % accumulation == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology=v5e:3x3",), "known: v5e:1x1, v5e:2x2, v5e:2x4"),
        (("--topology=v7:2x2",), "known: v4:2x2x1"),
        ((), "--topology is missing"),
        (("--topology=v5e:2x2", "--config.mesh.fsdp=3"), "config.mesh"),
        (("--topology=v5e:2x2", "--config.stages[0].batch_size=6"), "batch_size=6"),
        (("--topology=v5e:2x2", "--config.mesh.dcn_data=2"), "dcn_data=2"),
        (("--topology=v5e:2x2", "--stage=short"), "stage 'short': the config has long"),
        (("--topology=v5e:2x2", "--sweep=rows=2"), "--sweep='rows=2': expected batch="),
        (("--topology=v5e:2x2", "--sweep=batch=2,x"), "'x' is not a number of rows"),
        (("--sweep=topology=v5e:2x2,v5e:9x9",), "'v5e:9x9' is not known"),
    ],
)
def test_what_cannot_be_right_is_found_before_a_compilation(tmp_path, capsys, arguments, message):
    output = tmp_path / "plan.json"
    command = ["plan", f"--config={CONFIG}", *MODEL, f"--json={output}", *arguments]
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not output.exists()


def test_the_table_in_the_launch_guide_is_what_the_plan_says(tmp_path):
    """One row of it, of the real base model; the others take as long each."""
    guide = (ROOT / "launch" / "README.md").read_text()
    row = re.search(r"\| absolute \+ MLM, T=128 \| ([\d.]+) \| ([\d.]+) GB \| ([\d.]+) \|", guide)
    output = tmp_path / "plan.json"
    command = [
        *("plan", f"--config={ROOT / 'configs' / 'bert_base.py'}", "--topology=v5e:1x1"),
        *("--stage=short", "--config.stages[0].batch_size=96", f"--json={output}"),
    ]
    assert cli.main(command) == 0
    (stage,) = json.loads(output.read_text())["stages"]
    said = [float(cell) for cell in row.groups()]
    temporaries = stage["memory"]["temporaries"] / 1e9
    # The compiler gives the same figures on any machine; the guide rounds them to three digits.
    assert [stage["megacycles"], temporaries, stage["mfu"]] == pytest.approx(said, rel=2e-3)
