"""BART in and out: the same tensors and settings come back; what cannot be is refused."""

import json

import bart
import numpy as np
import published
import pytest
import torch
import transformers
from tiny_run import ROOT, TEXT

from ddrp_jax import cli
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.interop import huggingface
from ddrp_jax.interop.export import plan_export
from ddrp_jax.interop.verify import verify_export

NOT_COMPARED = ("transformers_version", "_name_or_path")


def save(folder, model):
    model.save_pretrained(folder)
    published.write_tokenizer(folder, pad_id=1, longest=model.config.max_position_embeddings)
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A published model and the checkpoint made of it."""
    folder = tmp_path_factory.mktemp("bart")
    source = save(folder / "published", bart.make(forced_eos_token_id=2))
    assert cli.main(["import", str(source), str(folder / "ours")]) == 0
    return source, folder / "ours"


def configure(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (transformers.BartForConditionalGeneration, "deeper"),
        (transformers.BartModel, "small"),
    ],
)
def test_it_comes_back_bit_for_bit(kind, size, tmp_path, capsys):
    model = bart.make(kind=kind, **bart.SIZES[size])
    source = save(tmp_path / "published", model)
    assert cli.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify"]) == 0
    assert "decoder's hidden states: largest difference" in capsys.readouterr().out
    got, wanted = (published.tensors(f) for f in (tmp_path / "back", source))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    got, wanted = (transformers.AutoConfig.from_pretrained(f) for f in (tmp_path / "back", source))
    for config in (got, wanted):
        for key in NOT_COMPARED:
            vars(config).pop(key, None)
    assert got.to_dict() == wanted.to_dict()
    loaded, report = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = bart.tensors(*bart.batch())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs)[0], model(**inputs)[0])


def test_settings_of_generation_come_back(tmp_path):
    model = bart.make()
    model.generation_config.update(num_beams=4, forced_bos_token_id=0, no_repeat_ngram_size=3)
    source = save(tmp_path / "published", model)
    assert huggingface.read_model(source).config.decoder.forced_bos_id == 0
    assert cli.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    wanted = json.loads((source / "generation_config.json").read_text())
    got = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    wanted.pop("transformers_version")
    assert got == wanted
    loaded = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    inputs = bart.tensors(*bart.batch())
    assert torch.equal(loaded.generate(**inputs), model.generate(**inputs))


def test_copies_of_the_word_table_are_one_table(tmp_path):
    """A file may hold it under every name, or under another one than its own."""
    source = save(tmp_path / "published", bart.make())
    wanted = huggingface.read_model(source).state.params["encoder"]["embeddings"]["word"]

    def every_name(found):
        names = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
        table = found["model.shared.weight"]
        return found | {f"{name}.weight": table.clone() for name in names}

    published.rewrite(source, every_name)
    assert not huggingface.read_model(source).left_out

    def another_name(found):
        found.pop("model.shared.weight")
        found.pop("model.encoder.embed_tokens.weight")
        found.pop("lm_head.weight")
        return found

    published.rewrite(source, another_name)
    got = huggingface.read_model(source).state.params["encoder"]["embeddings"]["word"]
    np.testing.assert_array_equal(got, wanted)
    published.rewrite(source, lambda found: found | {"lm_head.weight": torch.zeros(bart.VOCAB, 32)})
    with pytest.raises(UsageError, match=r"differs from .*several word tables is not supported"):
        huggingface.read_model(source)


def test_a_file_without_a_bias_of_the_output_has_zeros(tmp_path):
    source = save(tmp_path / "published", bart.make())
    published.rewrite(
        source, lambda found: {k: v for k, v in found.items() if k != "final_logits_bias"}
    )
    found = huggingface.read_model(source)
    assert found.kind == "generation"
    assert [part.value for part in found.initialised] == ["bias of the output matrix"]
    assert not found.state.params["final_logits_bias"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder_ffn_dim": 64},
            "decoder_ffn_dim=64 is not supported; expected the encoder's, 48",
        ),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads=2 is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported for BART"),
        ({"activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({"eos_token_id": [2, 3]}, r"eos_token_id=\[2, 3\]: expected one id"),
        (
            {"architectures": ["BartForSequenceClassification"]},
            "architectures='BartForSequenceClassification' is not supported",
        ),
    ],
)
def test_what_our_decoder_cannot_express_is_refused(changes, message, tmp_path):
    source = save(tmp_path / "published", bart.make(kind=transformers.BartModel))
    configure(source, **changes)
    with pytest.raises(UsageError, match=message):
        huggingface.read_model(source)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    source = save(tmp_path / "published", bart.make())
    name = "model.decoder.layers.1.encoder_attn.k_proj.weight"
    published.rewrite(source, lambda found: {k: v for k, v in found.items() if k != name})
    with pytest.raises(DdrpError, match=r"missing: decoder.layers.1.encoder_attn.k_proj.weight"):
        huggingface.read_model(source)


def test_verify_notices_two_layers_that_changed_places(imported, tmp_path):
    _, ours = imported
    assert cli.main(["export", str(ours), str(tmp_path / "back")]) == 0

    def swapped(found):
        one, two = (f"model.decoder.layers.{i}.encoder_attn.v_proj.weight" for i in (0, 1))
        return found | {one: found[two], two: found[one]}

    published.rewrite(tmp_path / "back", swapped)
    with pytest.raises(DdrpError, match="decoder's hidden states: largest difference"):
        verify_export(plan_export(ours), tmp_path / "back", "float32")


def test_commands_on_an_encoder_decoder(imported, tmp_path, capsys):
    source, ours = imported
    assert cli.main(["show", str(ours)]) == 0
    shown = capsys.readouterr().out
    assert "config.model.decoder.num_layers" in shown
    assert "decoder/layers/cross_attention/kv_kernel" in shown

    text = "the old [MASK] sails"
    assert cli.main(["fill-mask", "--checkpoint", str(ours), text, "--top-k", "1"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.BartForConditionalGeneration.from_pretrained(source).eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        shares = model(ids).logits[ids == tokenizer.mask_token_id].softmax(-1)[0]
    share, token = capsys.readouterr().out.split()
    assert float(share) == pytest.approx(shares.max().item(), abs=1e-4)
    assert token == tokenizer.decode([shares.argmax().item()]).strip()

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"{TEXT} {i}" for i in range(40)))
    records = tmp_path / "records"
    arguments = ["--input", f"text:{corpus}", "--tokenizer", str(ours / "tokenizer")]
    command = ["prepare", *arguments, "--holdout", "50%", "--output", str(records)]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", "--checkpoint", str(ours), "--records", str(records)]) == 2
    assert "are of an encoder alone" in capsys.readouterr().err


def test_pre_training_takes_an_encoder_alone(imported, tmp_path, capsys):
    _, ours = imported
    config = ROOT / "configs" / "go_on.py"
    command = ["pretrain", "--config", f"{config}:{ours}", "--init", str(ours)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"{TEXT} {i}" for i in range(40)))
    prepare = ["--input", f"text:{corpus}", "--tokenizer", str(ours / "tokenizer")]
    assert cli.main(["prepare", *prepare, "--output", str(tmp_path / "records")]) == 0
    command += [f"--config.stages[0].records={tmp_path / 'records'}"]
    assert cli.main([*command, "--workdir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "config.model.decoder.num_layers=2" in error
    assert "are of an encoder alone" in error
    assert not list(tmp_path.glob("run/checkpoints/*"))
