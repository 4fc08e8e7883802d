"""A published model comes in, is trained on, measured, asked, and goes back."""

import random

import published
import torch
import transformers
from tiny_run import ROOT, TEXT

from ddrp_jax import cli


def test_an_imported_model_is_trained_on_and_given_back(tmp_path, capsys):
    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    source = published.save(published.make("roberta", "masked_lm"), tmp_path / "published")
    imported, records, workdir = (tmp_path / name for name in ("in", "records", "run"))
    run("import", source, imported)
    assert "encoder/layers/attention/qkv_kernel" in run("show", imported)
    answers = run("fill-mask", "--checkpoint", imported, "the old [MASK] sails")
    assert len(answers.splitlines()) == 5

    corpus = tmp_path / "corpus.txt"
    draw, words = random.Random(0), TEXT.split()
    corpus.write_text("\n\n".join(" ".join(draw.choices(words, k=30)) for _ in range(60)))
    tokenizer = imported / "tokenizer"
    run("prepare", "--input", f"text:{corpus}", "--tokenizer", tokenizer, "--holdout", "20%",
        "--output", records)  # fmt: skip
    assert "mlm_loss" in run("evaluate", "--checkpoint", imported, "--records", records)
    config = ROOT / "configs" / "go_on.py"
    run("pretrain", "--config", f"{config}:{imported}", "--init", imported, "--workdir", workdir,
        f"--config.stages[0].records={records}", "--config.stages[0].steps=2",
        "--config.stages[0].schedule.warmup_steps=0", "--config.stages[0].batch_size=8",
        "--config.train.tensorboard=False")  # fmt: skip

    run("export", workdir, tmp_path / "out", "--verify")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(model) is transformers.RobertaForMaskedLM
    before, after = published.tensors(source), published.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changes = [(after[name] - before[name]).abs().max() for name in before]
    assert 0 < torch.stack(changes).max() < 1e-2  # two small steps away, not somewhere else
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Taken after step 2 of 2" in card
    assert "| mlm_loss |" in card
