"""`ddrp evaluate`, `ddrp fill-mask` and `ddrp show` on a run that `ddrp pretrain` made."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import CONFIG, ddrp, events

from ddrp_jax.training.pretrained import load_pretrained


@pytest.fixture(scope="module")
def run(tiny_records, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tiny") / "run"
    result = ddrp(
        "pretrain",
        f"--config={CONFIG}",
        f"--config.stages[0].records={tiny_records}",
        "--noconfig.train.tensorboard",
        "--workdir",
        workdir,
    )
    assert result.returncode == 0, result.stderr
    return workdir


@pytest.fixture
def copied(run, tmp_path):
    """One checkpoint's folder, alone in another place."""
    return shutil.copytree(run / "checkpoints" / "12", tmp_path / "model")


def test_evaluate_gives_what_the_run_wrote(run, copied, tiny_records, tmp_path):
    written = events(run)[-1]
    assert (written["step"], written["split"]) == (12, "heldout")
    out = tmp_path / "result.json"
    for path in (run, copied):
        command = ["evaluate", "--checkpoint", path, "--records", tiny_records, "--rows", 16]
        result = ddrp(*command, "--json", out)
        assert result.returncode == 0, result.stderr
        measured = json.loads(out.read_text())
        assert f"mlm_loss              {measured['mlm_loss']:.4f}" in result.stdout
        assert measured["split"] == written["split"]
        for name in set(written) - {"split", "tokens_seen"}:
            np.testing.assert_allclose(measured[name], written[name], rtol=1e-6)
        assert measured["unigram_entropy"] > 0


def test_evaluate_takes_all_rows_and_any_split(run, tiny_records):
    command = ["evaluate", "--checkpoint", run, "--records", tiny_records, "--json", "-"]
    held_out = json.loads(ddrp(*command).stdout)
    train = json.loads(ddrp(*command, "--split", "train").stdout)
    # The run itself measured 16 of the rows.
    assert len({result["mlm_loss"] for result in (events(run)[-1], held_out, train)}) == 3
    result = ddrp(*command, "--split", "tset")
    assert result.returncode == 2
    assert "have no split 'tset', only train, heldout" in result.stderr


def test_fill_mask_shows_the_likeliest_tokens(run, copied):
    pretrained = load_pretrained(run)
    tokenizer = pretrained.tokenizer
    text = "the [MASK] of the sea and [MASK] ship"
    ids = jnp.array(tokenizer.encode_with_special(text))[None]
    model = pretrained.model()
    hidden = model.encoder(ids, jnp.ones_like(ids), jnp.arange(ids.shape[1])[None]).hidden
    # Every position's logits, and a softmax by hand, in double precision.
    logits = np.asarray(model.logits(hidden), np.float64)[0][ids[0] == tokenizer.mask_id]
    assert len(logits) == 2
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = []
    for number, row in enumerate(shares, start=1):
        expected.append(f"mask {number}")
        for token in np.argsort(-row)[:3].tolist():
            word = tokenizer.decode([token]).strip() or tokenizer.id_to_token(token)
            expected.append(f"{row[token]:.4f}  {word}")
    result = ddrp("fill-mask", "--checkpoint", copied, text, "--top-k", 3)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no mask here"], "there is no [MASK] in it"),
        (["a [MASK]", "--top-k=0"], "--top-k=0: expected 1 to the vocabulary's 60"),
    ],
)
def test_fill_mask_refuses(run, arguments, message):
    result = ddrp("fill-mask", "--checkpoint", run, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_show_a_checkpoint(run):
    result = ddrp("show", run)
    assert result.returncode == 0, result.stderr
    shown = json.loads(ddrp("show", run / "checkpoints" / "12", "--json", "-").stdout)
    assert (shown["step"], shown["stage"]) == (12, "long")
    assert shown["tokens_seen"] == events(run)[-1]["tokens_seen"]
    assert shown["config"] == json.loads((run / "config.json").read_text())
    assert shown["config"]["model"]["vocab_size"] == shown["tokenizer"]["vocab_size"] == 60
    params = load_pretrained(run).params
    assert shown["parameters"]["encoder/embeddings/word"]["shape"] == list(
        params["encoder"]["embeddings"]["word"].shape
    )
    assert shown["total_parameters"] == sum(entry["size"] for entry in shown["parameters"].values())
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["total", f"{shown['total_parameters']:,}"] in lines
    assert ["config.model.num_layers", "2"] in lines
    assert ["held-out", "loss", f"{shown['held_out_loss']:.4f}"] in lines


def test_show_records(tiny_records):
    result = ddrp("show", tiny_records)
    assert result.returncode == 0, result.stderr
    shown = json.loads(ddrp("show", tiny_records, "--json", "-").stdout)
    splits = shown["index"]["splits"]
    assert splits["train"]["documents"] + splits["heldout"]["documents"] == 300
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("heldout")]
    assert line.split()[1] == str(splits["heldout"]["documents"])


def test_a_damaged_checkpoint_is_named(run, copied, tiny_records):
    file = copied / "progress.json"
    file.write_text(file.read_text().replace("12", "13"))
    for command in (
        ["show", copied],
        ["evaluate", "--checkpoint", copied, "--records", tiny_records],
        ["fill-mask", "--checkpoint", copied, "a [MASK]"],
    ):
        result = ddrp(*command)
        assert result.returncode == 1
        assert f"{copied}: progress.json has changed since it was written" in result.stderr
        assert "Traceback" not in result.stderr


def test_what_is_not_there(tmp_path):
    assert ddrp("show", tmp_path / "nothing").returncode == 2
    result = ddrp("show", tmp_path)
    assert result.returncode == 2
    assert "no checkpoint there" in result.stderr
