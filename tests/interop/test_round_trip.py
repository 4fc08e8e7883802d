"""`ddrp import` then `ddrp export`: the same tensors, config and tokenizer come back."""

import json
import subprocess
import sys

import published
import pytest
import torch
import transformers

from ddrp_jax import cli
from ddrp_jax.config import Config, PositionConfig, from_config_dict
from ddrp_jax.errors import DdrpError
from ddrp_jax.interop.export import plan_export, write_export
from ddrp_jax.interop.verify import verify_export
from ddrp_jax.training import checkpoint

ROUND_TRIPS = {
    f"{family}_{kind}": (family, kind, {})
    for family in ("bert", "roberta", "mpnet")
    for kind in ("base", "masked_lm", "classification")
}
ROUND_TRIPS |= {
    "untied": ("roberta", "masked_lm", {"tie_word_embeddings": False, "pad_token_id": 3}),
    "settings": (
        "bert",
        "classification",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "hidden_dropout_prob": 0.2,
            "classifier_dropout": 0.3,
            "initializer_range": 0.05,
            "id2label": {0: "no", 1: "perhaps", 2: "yes"},
            "label2id": {"no": 0, "perhaps": 1, "yes": 2},
            "problem_type": "single_label_classification",
            "type_vocab_size": 1,
        },
    ),
}
# What the library writes of itself.
NOT_COMPARED = ("transformers_version", "_name_or_path")


def there_and_back(source, folder, *flags):
    """Runs both commands; returns the exported folder."""
    assert cli.main(["import", str(source), str(folder / "ours")]) == 0
    assert cli.main(["export", str(folder / "ours"), str(folder / "back"), *flags]) == 0
    return folder / "back"


def assert_same_tensors(got, wanted):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_tensors_config_and_tokenizer_come_back(name, tmp_path):
    family, kind, changes = ROUND_TRIPS[name]
    model = published.make(family, kind, **changes)
    source = published.save(model, tmp_path / "published")
    back = there_and_back(source, tmp_path)
    assert_same_tensors(published.tensors(back), published.tensors(source))
    wanted = transformers.AutoConfig.from_pretrained(source).to_dict()
    got = transformers.AutoConfig.from_pretrained(back).to_dict()
    for config in (wanted, got):
        for key in NOT_COMPARED:
            config.pop(key, None)
    assert got == wanted
    text = "the old ship sails under a bridge [MASK] xyz"
    published_tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert tokenizer(text)["input_ids"] == published_tokenizer(text)["input_ids"]
    assert tokenizer.mask_token_id == published_tokenizer.mask_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id
    assert tokenizer.model_max_length == published_tokenizer.model_max_length


def test_stock_models_load_as_stock_models(tmp_path, capsys):
    """No remote code, nothing missing or left over, and the same outputs."""
    model = published.make("mpnet", "masked_lm")
    back = there_and_back(published.save(model, tmp_path / "published"), tmp_path, "--verify")
    assert capsys.readouterr().out.count("largest difference") == 2
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(
        back, output_loading_info=True
    )
    assert type(loaded) is transformers.MPNetForMaskedLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids, mask = published.batch(1)
    published.assert_same(
        published.theirs(loaded.eval(), ids, mask), published.theirs(model, ids, mask), 0
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_types_come_back(dtype, tmp_path, capsys):
    model = published.make("bert", "masked_lm").to(getattr(torch, dtype))
    source = published.save(model, tmp_path / "published")
    back = there_and_back(source, tmp_path, "--dtype", dtype, "--verify")
    assert_same_tensors(published.tensors(back), published.tensors(source))
    assert json.loads((back / "config.json").read_text())["dtype"] == dtype
    assert "largest difference" in capsys.readouterr().out


def test_a_value_beyond_float16_is_refused(tmp_path, capsys):
    model = published.make("bert", "masked_lm")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[9, 3] = -1e5
    source = published.save(model, tmp_path / "published")
    assert cli.main(["import", str(source), str(tmp_path / "ours")]) == 0
    status = cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "x"), "--dtype=float16"])
    assert status == 2
    error = capsys.readouterr().err
    assert "word_embeddings" in error
    assert "1e+05" in error
    assert "bfloat16" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "published"]


def test_the_vocabulary_is_padded_within_and_cut_back_on_export(tmp_path):
    source = published.save(published.make("bert", "masked_lm"), tmp_path / "published")
    back = there_and_back(source, tmp_path)
    shapes = checkpoint.parameter_shapes(tmp_path / "ours")
    assert shapes["encoder/embeddings/word"] == ((128, published.WIDTH), "float32")
    exported = published.tensors(back)["bert.embeddings.word_embeddings.weight"]
    assert exported.shape == (published.VOCAB, published.WIDTH)
    padding = checkpoint.restore_array(tmp_path / "ours", "encoder/embeddings/word")
    assert not padding[published.VOCAB :].any()


def test_the_checkpoint_carries_config_and_tokenizer(tmp_path):
    source = published.save(published.make("roberta", "masked_lm"), tmp_path / "published")
    assert cli.main(["import", str(source), str(tmp_path / "ours")]) == 0
    path = checkpoint.find_checkpoint(tmp_path / "ours")
    config = from_config_dict(Config, checkpoint.read_config(path))
    assert config.model.position == PositionConfig("absolute")
    assert (config.model.position_offset, config.model.pad_id) == (2, 1)
    assert (path / "tokenizer" / "tokenizer.json").exists()


def test_a_missing_table_of_token_types_is_exported_as_zeros(tmp_path):
    """Our own BERT without token types is a stock BERT whose types add nothing."""
    source = published.save(published.make("bert", "masked_lm"), tmp_path / "published")

    def without_types(found):
        name = "bert.embeddings.token_type_embeddings.weight"
        return {k: v for k, v in found.items() if k != name}

    published.rewrite(source, without_types)
    config = json.loads((source / "config.json").read_text()) | {"type_vocab_size": 0}
    (source / "config.json").write_text(json.dumps(config))
    assert cli.main(["import", str(source), str(tmp_path / "ours")]) == 0
    (tmp_path / "back").mkdir()
    write_export(plan_export(tmp_path / "ours"), tmp_path / "back", "float32")
    types = published.tensors(tmp_path / "back")["bert.embeddings.token_type_embeddings.weight"]
    assert types.shape == (2, published.WIDTH)
    assert not types.any()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").type_vocab_size == 2


def test_verify_notices_a_wrong_tensor(tmp_path):
    source = published.save(published.make("bert", "masked_lm"), tmp_path / "published")
    back = there_and_back(source, tmp_path)
    export = plan_export(tmp_path / "ours")
    assert "logits" in verify_export(export, back, "float32")

    def swapped(found):
        one, two = (f"bert.encoder.layer.{i}.attention.self.query.bias" for i in (0, 1))
        return found | {one: found[two], two: found[one]}

    published.rewrite(back, swapped)
    with pytest.raises(DdrpError, match="hidden states: largest difference"):
        verify_export(export, back, "float32")


def test_an_export_needs_no_torch(tmp_path):
    """In a process in which torch and transformers cannot be imported."""
    source = published.save(published.make("roberta", "masked_lm"), tmp_path / "published")
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from ddrp_jax.cli import main; source, folder = sys.argv[1:]\n"
        "assert main(['import', source, folder + '/ours']) == 0\n"
        "assert main(['export', folder + '/ours', folder + '/back']) == 0\n"
        "assert main(['export', folder + '/ours', folder + '/more', '--verify']) == 2\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(source), str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "pip install torch" in result.stderr
    assert not (tmp_path / "more").exists()
    assert_same_tensors(published.tensors(tmp_path / "back"), published.tensors(source))


def test_export_holds_one_parameter_at_a_time(tmp_path):
    """Peak memory above that of a process that imported the same modules."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    model = published.make("bert", "masked_lm", **wide)
    source = published.save(model, tmp_path / "published")
    assert cli.main(["import", str(source), str(tmp_path / "ours")]) == 0
    size = (source / "model.safetensors").stat().st_size
    program = (
        "import resource, sys\n"
        "from ddrp_jax.interop.export import plan_export, write_export\n"
        "from pathlib import Path\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "Path(sys.argv[2]).mkdir()\n"
        "write_export(plan_export(sys.argv[1]), Path(sys.argv[2]), 'float32')\n"
        "print(peak() - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ours"), str(tmp_path / "back")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1.3 * size
