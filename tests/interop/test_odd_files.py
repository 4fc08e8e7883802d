"""Old and odd files that are taken in, and bad ones that are refused."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import published
import pytest
import torch
from flax import traverse_util

from ddrp_jax import cli
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.interop import huggingface
from ddrp_jax.interop.tensors import open_weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A BERT with its masked-LM head, and the folder it was saved in."""
    model = published.make("bert", "masked_lm")
    return model, published.save(model, tmp_path_factory.mktemp("saved") / "published")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the folder, to be spoilt."""
    return shutil.copytree(saved[1], tmp_path / "model")


def set_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def parameters(folder) -> dict[str, np.ndarray]:
    return traverse_util.flatten_dict(huggingface.read_model(folder).state.params, sep="/")


def assert_reads_as(folder, wanted):
    got = parameters(folder)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


# ---- odd, and taken in ---------------------------------------------------------------------------


def test_old_names_of_layer_norm_are_renamed_only_there(saved, folder):
    wanted = parameters(folder)

    def aged(found):
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for modern, old in names.items():
            found = {name.replace(modern, old): tensor for name, tensor in found.items()}
        return found | {"bert.extra.gamma": torch.ones(2)}

    published.rewrite(folder, aged)
    with pytest.raises(DdrpError, match=r"left over: bert.extra.gamma \[2\]$"):
        huggingface.read_model(folder)
    published.rewrite(folder, lambda found: {k: v for k, v in found.items() if "extra" not in k})
    assert any(name.endswith("gamma") for name in published.tensors(folder))
    assert_reads_as(folder, wanted)


def test_names_without_prefix(folder):
    wanted = parameters(folder)
    published.rewrite(folder, lambda found: {k.removeprefix("bert."): v for k, v in found.items()})
    assert_reads_as(folder, wanted)


def test_buffers_next_sentence_head_and_pooler_are_left_out(folder):
    wanted = parameters(folder)
    extra = {
        "bert.embeddings.position_ids": torch.arange(40)[None],
        "cls.seq_relationship.weight": torch.ones(2, published.WIDTH),
        "cls.seq_relationship.bias": torch.ones(2),
        "bert.pooler.dense.weight": torch.ones(published.WIDTH, published.WIDTH),
        "bert.pooler.dense.bias": torch.ones(published.WIDTH),
    }
    published.rewrite(folder, lambda found: found | extra)
    imported = huggingface.read_model(folder)
    assert imported.left_out.keys() == extra.keys()
    assert imported.left_out["cls.seq_relationship.bias"] == "the next-sentence head"
    assert_reads_as(folder, wanted)


def test_the_report_names_what_was_left_out(folder, tmp_path, capsys):
    extra = {"cls.seq_relationship.bias": torch.ones(2)}
    published.rewrite(folder, lambda found: found | extra)
    assert cli.main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert "cls.seq_relationship.bias: the next-sentence head" in capsys.readouterr().out


def test_a_missing_masked_lm_head_is_initialised(folder, tmp_path, capsys):
    wanted = parameters(folder)
    published.rewrite(folder, lambda found: {k: v for k, v in found.items() if "cls." not in k})
    got = parameters(folder)
    assert got.keys() == wanted.keys()
    assert 0.01 < got["head/dense_kernel"].std() < 0.03
    assert (got["head/norm/scale"] == 1).all()
    assert cli.main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert "has no masked-LM head; it was initialised" in capsys.readouterr().err


def test_a_missing_pooler_is_initialised_and_not_given_back(tmp_path, capsys):
    folder = published.save(published.make("bert", "base"), tmp_path / "model")
    published.rewrite(folder, lambda found: {k: v for k, v in found.items() if "pooler" not in k})
    assert cli.main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert "has no pooler; it was initialised" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert published.tensors(tmp_path / "back").keys() == published.tensors(folder).keys()


def test_half_a_head_is_refused(folder):
    name = "cls.predictions.transform.dense.bias"
    published.rewrite(folder, lambda found: {k: v for k, v in found.items() if k != name})
    with pytest.raises(DdrpError, match=rf"missing: {name} \[32\]$"):
        huggingface.read_model(folder)


def test_the_decoders_bias_under_either_name(folder):
    wanted = parameters(folder)
    old, new = "cls.predictions.bias", "cls.predictions.decoder.bias"
    published.rewrite(folder, lambda found: {new if k == old else k: v for k, v in found.items()})
    assert_reads_as(folder, wanted)
    # With both, the one that PyTorch computes with.
    published.rewrite(folder, lambda found: found | {old: torch.zeros(published.VOCAB)})
    assert_reads_as(folder, wanted)
    assert old in huggingface.read_model(folder).left_out


def test_a_second_copy_of_the_word_table(saved, folder, caplog):
    """An equal one is a copy; a differing one is what PyTorch computes with."""
    wanted = parameters(folder)
    word, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    published.rewrite(folder, lambda found: found | {decoder: found[word].clone()})
    assert_reads_as(folder, wanted)
    assert not caplog.records
    published.rewrite(folder, lambda found: found | {decoder: found[word] + 1})
    imported = huggingface.read_model(folder)
    assert not imported.config.tied_head
    assert decoder in caplog.text
    model = type(saved[0]).from_pretrained(folder).eval()
    ids, mask = published.batch(0)
    published.assert_same(
        published.ours(imported, ids, mask), published.theirs(model, ids, mask), 1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_read_exactly(dtype, folder):
    published.rewrite(folder, lambda found: {k: v.to(dtype) for k, v in found.items()})
    rounded = {name: tensor.float() for name, tensor in published.tensors(folder).items()}
    got = {name: tensor.read() for name, tensor in open_weights(folder).items()}
    for name, tensor in rounded.items():
        np.testing.assert_array_equal(got[name], tensor.numpy())


def test_sharded_weights(saved, folder):
    wanted = parameters(folder)
    (folder / "model.safetensors").unlink()
    saved[0].save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_reads_as(folder, wanted)
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(DdrpError, match=f"names '{lost.name}', which is not there"):
        huggingface.read_model(folder)


def test_pytorchs_own_file(saved, folder):
    wanted = parameters(folder)
    (folder / "model.safetensors").unlink()
    torch.save(saved[0].state_dict(), folder / "pytorch_model.bin")
    assert_reads_as(folder, wanted)


def test_pytorchs_own_file_needs_torch(folder, monkeypatch, capsys):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["import", str(folder), str(folder.parent / "out")]) == 2
    assert "needs torch, which is not installed; 'pip install torch'" in capsys.readouterr().err


def test_a_pickle_that_would_run_code_is_refused(folder):
    class Trap:
        def __reduce__(self):
            return (open, (str(folder / "trapped"), "w"))

    (folder / "model.safetensors").unlink()
    torch.save({"bert": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(DdrpError, match=r"pytorch_model.bin: not a file of tensors alone"):
        huggingface.read_model(folder)
    assert not (folder / "trapped").exists()


def test_architecture_left_out_is_told_by_the_tensors(tmp_path):
    for kind in ("base", "masked_lm", "classification"):
        folder = published.save(published.make("roberta", kind), tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        del config["architectures"]
        (folder / "config.json").write_text(json.dumps(config))
        assert huggingface.read_model(folder).kind == kind


def test_a_model_in_the_hubs_cache(folder, tmp_path):
    """A name is looked up through the hub's client, here in its cache, without a network."""
    commit = "0123456789" * 4
    cache = tmp_path / "hub" / "models--someone--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    shutil.copytree(folder, cache / "snapshots" / commit)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ddrp_jax.cli", "import"]
    for name, status in (("someone/model", 0), ("someone/else", 2)):
        output = tmp_path / name.replace("/", "-")
        result = subprocess.run(
            [*command, name, str(output)], env=environment, capture_output=True, text=True
        )
        assert result.returncode == status, result.stderr
        assert output.exists() == (status == 0)
    assert "someone/else: no such folder here, and not to be had from the hub" in result.stderr


# ---- bad, and refused ----------------------------------------------------------------------------


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def garble_header(folder):
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{no}")


def lose(*names):
    def spoil(folder):
        for name in names:
            (folder / name).unlink()

    return spoil


def configure(**changes):
    return lambda folder: set_config(folder, **changes)


BAD = {
    "no config": (lose("config.json"), 2, "no config.json there"),
    "no weights": (lose("model.safetensors"), 2, "no weights there; expected model.safetensors"),
    "no tokenizer": (lose("tokenizer.json"), 2, "name its folder with --tokenizer"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), 1, "not a JSON object"),
    "model type": (
        configure(model_type="gpt2"),
        2,
        "model_type='gpt2' is not supported; supported are bart, bert, ddrp, mpnet, roberta",
    ),
    "decoder": (configure(is_decoder=True), 2, "is_decoder=True is not supported"),
    "relative keys": (
        configure(position_embedding_type="relative_key"),
        2,
        "position_embedding_type='relative_key' is not supported, only 'absolute'",
    ),
    "activation": (configure(hidden_act="relu"), 2, "hidden_act='relu' is not supported"),
    "heads": (configure(num_attention_heads=5), 2, "expected a divisor of hidden_size, 32"),
    "truncated": (truncate, 1, "model.safetensors: truncated, "),
    "header cut": (cut_header, 1, "model.safetensors: truncated, 100 bytes"),
    "header garbled": (garble_header, 1, "model.safetensors: not a safetensors file"),
    "wider": (configure(hidden_size=64), 1, "wrong shape: bert.embeddings.LayerNorm.bias is [32]"),
    "fewer words": (configure(vocab_size=98), 1, "word_embeddings.weight is [99, 32], config.json"),
    "fewer layers": (
        configure(num_hidden_layers=1),
        1,
        "left over: bert.encoder.layer.1.output.dense.weight [32, 48]",
    ),
    "more layers": (
        configure(num_hidden_layers=3),
        1,
        "missing: encoder.layer.2.output.dense.weight [32, 48]",
    ),
    "padding id": (configure(pad_token_id=5), 2, "pads with id 0, its config.json says pad_token"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_and_nothing_written(fault, folder, tmp_path, capsys):
    spoil, status, message = BAD[fault]
    spoil(folder)
    assert cli.main(["import", str(folder), str(tmp_path / "out")]) == status
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_tensor_at_fault_is_named_in_one_message(folder):
    def spoilt(found):
        found.pop("bert.encoder.layer.0.attention.self.key.weight")
        found.pop("bert.embeddings.LayerNorm.bias")
        odd = {"bert.odd.weight": torch.ones(3), "cls.predictions.bias": torch.ones(5)}
        return found | odd

    published.rewrite(folder, spoilt)
    with pytest.raises(DdrpError) as caught:
        huggingface.read_model(folder)
    assert sorted(str(caught.value).split("\n  ")[1:]) == [
        "left over: bert.odd.weight [3]",
        "missing: embeddings.LayerNorm.bias [32]",
        "missing: encoder.layer.0.attention.self.key.weight [32, 32]",
        "wrong shape: cls.predictions.bias is [5], config.json asks for [99]",
    ]


def test_no_such_source(tmp_path, capsys):
    assert cli.main(["import", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["import", "export"])
def test_an_output_that_is_not_empty_is_left_alone(command, folder, tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").write_text("x")
    assert cli.main([command, str(folder), str(output)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["precious"]


def test_export_of_no_checkpoint(folder, tmp_path, capsys):
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "no checkpoint there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mpnet_has_the_buckets_that_its_class_computes_with(tmp_path):
    folder = published.save(published.make("mpnet", "base"), tmp_path / "model")
    set_config(folder, relative_attention_num_buckets=16)
    with pytest.raises(UsageError, match="relative_attention_num_buckets=16: MPNet has 32"):
        huggingface.read_model(folder)
