"""The classes that travel with an export compute what our encoder does, in everything PyTorch asks
of a model."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import small
import torch
import transformers
from flax import nnx, traverse_util

from ddrp_jax import cli
from ddrp_jax.config import Config, PositionConfig, StageConfig, as_dict
from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.interop import huggingface
from ddrp_jax.interop.export import named_places, plan_export, write_export
from ddrp_jax.interop.families import FAMILIES
from ddrp_jax.models.heads import MaskedLM
from ddrp_jax.training.checkpoint import Checkpoints

K = 3


def relative(kind="ddrp", **changes) -> PositionConfig:
    return PositionConfig(kind, max_distance=K, **changes)


# What differs from `small.model_config`, whose positions are DDRP's defaults.
MODELS = {
    "ddrp": {},
    "shaw": {"position": relative("shaw")},
    "two_directions": {"position": relative(directions=2), "norm_order": "pre"},
    "keys_and_values": {"position": relative(acts_on="keys_and_values")},
    "shared_by_the_model": {
        "position": relative(acts_on="keys_and_values", sharing="model"),
        "norm_order": "pre",
        "activation": "gelu_tanh",
    },
    "for_each_head": {"position": relative(acts_on="keys_and_values", sharing="head")},
    "shaw_for_each_head": {"position": relative("shaw", sharing="head", directions=2)},
    "with_absolute": {
        "position": relative(add_absolute=True),
        "token_types": 2,
        "norm_epsilon": 1e-5,
    },
    "absolute_pre": {"position": PositionConfig("absolute"), "norm_order": "pre"},
    "absolute_bare": {"position": PositionConfig("absolute"), "embedding_norm": False},
    "absolute_tanh_head": {
        "position": PositionConfig("absolute"),
        "activation": "gelu_tanh",
        "position_offset": 1,
        "max_length": 15,
    },
    "t5": {"position": PositionConfig("t5", num_buckets=8, bucket_max_distance=6)},
    "t5_absolute": {
        "position": PositionConfig("t5", add_absolute=True),
        "head_activation": "gelu",
        "activation": "gelu_tanh",
    },
    "rope": {"position": PositionConfig("rope"), "embedding_norm": False, "tied_head": False},
    "none": {"position": PositionConfig("none")},
}
# Rows of 12 (beyond K): full, padded on the left, on the right, on both sides, one token.
LENGTHS = ((0, 12), (4, 8), (0, 5), (3, 6), (11, 1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Gives a model by name and the folder of its export; each is made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            config = small.model_config(vocab_size=published.VOCAB, **MODELS[name])
            model = small.build(config)
            made[name] = model, export(model, config, folder)
        return made[name]

    return get


def export(model, config, folder):
    """Writes a checkpoint as a run does, and exports it; returns the exported folder."""
    published.write_tokenizer(folder / "tokenizer")
    stage = StageConfig(records="runs/records", length=12, batch_size=8, steps=10)
    checkpoints = Checkpoints(
        folder / "run" / "checkpoints",
        config=as_dict(Config(model=config, stages=(stage,))),
        tokenizer=load_tokenizer(folder / "tokenizer"),
        keep_last=1,
        keep_best=0,
    )
    progress = {"step": 10, "tokens_seen": 960, "seconds": {}, "stage": 0, "iterator": None}
    state = huggingface.ImportedState(nnx.to_pure_dict(nnx.state(model)), {})
    checkpoints.save(state, step=10, progress=progress, held_out_loss=3.25)
    checkpoints.close()
    (folder / "exported").mkdir()
    write_export(plan_export(folder / "run"), folder / "exported", "float32")
    return folder / "exported"


def load(folder, auto=transformers.AutoModelForMaskedLM, **options):
    return auto.from_pretrained(folder, trust_remote_code=True, **options).eval()


def batch():
    draw = np.random.default_rng(0)
    columns = np.arange(12)
    mask = np.stack([(columns >= start) & (columns < start + size) for start, size in LENGTHS])
    return np.where(mask, draw.integers(6, published.VOCAB, mask.shape), 0), mask


@jax.jit
def run_ours(model, ids, segment_ids, positions):
    output = model.encoder(
        ids, segment_ids, positions, output_hidden_states=True, statistic=small.tap
    )
    return output.hidden_states, output.statistics, model.logits(output.hidden)


def ours(model, ids, mask):
    """Hidden states, attention maps and logits at real tokens."""
    positions = FAMILIES["ddrp"].positions(ids, mask, 0)
    rows = (jnp.asarray(array, jnp.int32) for array in (ids, mask, positions))
    hidden, maps, logits = map(np.asarray, run_ours(model, *rows))
    return {
        "hidden": hidden[:, mask],
        "maps": np.moveaxis(maps, 2, 3)[:, mask],
        "logits": logits[mask][:, : published.VOCAB],
    }


def theirs(model, ids, mask, *, maps=True):
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            output_hidden_states=True,
            output_attentions=maps,
        )
    outputs = {
        "hidden": np.stack([hidden.numpy()[mask] for hidden in output.hidden_states]),
        "logits": output.logits.numpy()[mask],
    }
    if maps:
        stacked = np.stack([weights.numpy() for weights in output.attentions])
        outputs["maps"] = np.moveaxis(stacked, 2, 3)[:, mask]
    return outputs


def assert_close(got, wanted, tolerances):
    for name, tolerance in tolerances.items():
        np.testing.assert_allclose(got[name], wanted[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_maps_and_logits_are_ours(name, exported):
    model, folder = exported(name)
    loaded = load(folder)
    assert type(loaded).__name__ == "DdrpForMaskedLM"
    ids, mask = batch()
    wanted = ours(model, ids, mask)
    tolerances = {"hidden": 2e-5, "logits": 1e-4}
    # With maps asked for, and by the fused kernel without.
    assert_close(theirs(loaded, ids, mask), wanted, tolerances | {"maps": 2e-5})
    assert_close(theirs(loaded, ids, mask, maps=False), wanted, tolerances)
    eager = load(folder, attn_implementation="eager")
    assert_close(theirs(eager, ids, mask, maps=False), wanted, tolerances)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_can_be_imported_and_gives_the_same_tensors(name, exported, tmp_path):
    model, folder = exported(name)
    imported = huggingface.read_model(folder)
    got = traverse_util.flatten_dict(imported.state.params, sep="/")
    wanted = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model)), sep="/")
    assert got.keys() == wanted.keys()
    for path, array in wanted.items():
        rows = (
            published.VOCAB if path.endswith(("word", "decoder_bias", "decoder_kernel")) else None
        )
        np.testing.assert_array_equal(got[path][:rows], array[:rows], err_msg=path)
    # What only training needs is not the model's.
    trained = dataclasses.replace(
        small.model_config(vocab_size=published.VOCAB, **MODELS[name]), initializer="normal"
    )
    assert imported.config == trained
    assert cli.main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    back, there = published.tensors(tmp_path / "back"), published.tensors(folder)
    assert back.keys() == there.keys()
    assert all(torch.equal(back[key], there[key]) for key in there)


@pytest.mark.parametrize("name", ["ddrp", "absolute_pre"])
def test_verify_runs_the_code_that_travels(name, exported, tmp_path, capsys):
    _, folder = exported(name)
    run = folder.parent / "run"
    assert cli.main(["export", str(run), str(tmp_path / "out.v1"), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "hidden states: largest difference" in out
    assert "DdrpForMaskedLM" in out
    assert "Do you wish to run" not in out  # a job without a terminal has nobody to answer


@pytest.mark.parametrize("name", ["ddrp", "keys_and_values", "t5"])
def test_gradients_are_ours(name, exported):
    model, folder = exported(name)
    loaded = load(folder)
    ids, mask = batch()
    labels = np.where(mask & (np.arange(12) % 3 == 0), ids[:, ::-1], -100)
    labels[labels == 0] = -100
    loaded(
        input_ids=torch.tensor(ids),
        attention_mask=torch.tensor(mask, dtype=torch.long),
        labels=torch.tensor(labels),
    ).loss.backward()
    positions = FAMILIES["ddrp"].positions(ids, mask, 0)

    def loss(model):
        output = published.encode(model, ids, mask, positions)
        scores = jax.nn.log_softmax(model.logits(output.hidden))
        picked = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()

    grads = traverse_util.flatten_dict(
        nnx.to_pure_dict(nnx.state(jax.jit(jax.grad(loss))(model))), sep="/"
    )
    gradients = {k: p.grad for k, p in loaded.named_parameters() if p.grad is not None}
    compared = 0
    for full_name, place in named_places(plan_export(folder.parent / "run")):
        wanted = gradients[full_name].numpy().copy()
        got = place.row.transform.to_theirs(np.asarray(grads[place.path])[place.index], place.shape)
        if full_name.endswith("word_embeddings.weight"):
            wanted[0] = got[0]  # PyTorch keeps the padding's row from learning
        # A key's bias moves no weight: its gradient is rounding on both sides.
        floor = 0.01 if full_name.endswith("key.bias") else 1e-6
        error = np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), floor)
        assert error < 1e-4, (full_name, error)
        compared += 1
    assert compared == len(gradients)


def test_the_encoder_alone_and_a_classifier(exported):
    model, folder = exported("ddrp")
    ids, mask = batch()
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask).long()}
    encoder = load(folder, transformers.AutoModel)
    with torch.no_grad():
        hidden = encoder(**inputs).last_hidden_state.numpy()[mask]
        in_a_tuple = encoder(**inputs, return_dict=False)[0].numpy()[mask]
        embeds = encoder.get_input_embeddings()(inputs["input_ids"])
        from_embeds = encoder(inputs_embeds=embeds, attention_mask=inputs["attention_mask"])
    np.testing.assert_allclose(hidden, ours(model, ids, mask)["hidden"][-1], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(in_a_tuple, hidden)
    np.testing.assert_array_equal(from_embeds.last_hidden_state.detach().numpy()[mask], hidden)
    classifier = load(folder, transformers.AutoModelForSequenceClassification, num_labels=3)
    for labels in (torch.tensor([0, 1, 2, 0, 1]), torch.rand(5, 3)):
        output = classifier(**inputs, labels=labels)
        assert output.logits.shape == (5, 3)
        assert torch.isfinite(output.loss)
    output.loss.backward()
    assert all(p.grad is not None for p in classifier.parameters())


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
def test_other_heads_come_in_and_go_back(auto, exported, tmp_path, capsys):
    _, folder = exported("keys_and_values")
    model = load(folder, getattr(transformers, auto))
    model.save_pretrained(tmp_path / "there")
    published.write_tokenizer(tmp_path / "there")
    assert cli.main(["import", str(tmp_path / "there"), str(tmp_path / "ours")]) == 0
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify"]) == 0
    assert ("logits" in capsys.readouterr().out) == (auto != "AutoModel")
    there, back = published.tensors(tmp_path / "there"), published.tensors(tmp_path / "back")
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], there[name]) for name in there)


@pytest.mark.parametrize("name", ["ddrp", "with_absolute", "rope"])
def test_padding_on_either_side_changes_nothing(name, exported):
    _, folder = exported(name)
    loaded = load(folder, transformers.AutoModelForSequenceClassification)
    draw = np.random.default_rng(3)
    text = draw.integers(6, published.VOCAB, 6)
    results = []
    for before, after in ((0, 0), (0, 5), (5, 0), (2, 3)):
        ids = torch.tensor(np.concatenate([np.zeros(before), text, np.zeros(after)]))[None].long()
        mask = (ids != 0).long()
        with torch.no_grad():
            output = loaded(ids, attention_mask=mask, output_hidden_states=True)
            # Rows of other lengths, or of padding alone, beside it.
            beside = torch.cat([ids, torch.zeros_like(ids), ids.flip(1)])
            mask = torch.cat([mask, torch.zeros_like(mask), torch.ones_like(mask)])
            crowded = loaded(beside, attention_mask=mask, output_hidden_states=True)
        assert torch.isfinite(crowded.logits).all()
        hidden = output.hidden_states[-1][0, before : before + 6]
        again = crowded.hidden_states[-1][0, before : before + 6]
        results.append((hidden, output.logits[0], again, crowded.logits[0]))
    for result in results[1:]:
        for got, wanted in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(results[0][0], results[0][2], rtol=0, atol=1e-5)


def test_a_text_beyond_the_last_position_is_refused(exported):
    _, folder = exported("absolute_tanh_head")
    with pytest.raises(ValueError, match="16 tokens; this model has positions for 15"):
        load(folder)(torch.ones(1, 16, dtype=torch.long))


def test_bfloat16(exported):
    """Within what rounding to 8 bits of mantissa does to the same model in float32.

    Each of the about 16 roundings on the way to a logit (two layers of seven products, norms and
    sums, and the head's) moves a value by at most 2^-8 of its size, independently; so the standard
    deviation of a logit's error is about sqrt(16) * 2^-8 / sqrt(3) of the logits' own, and both
    implementations make it: sqrt(2) of that, and 5 deviations for the worst of 3,168 logits.
    """
    model, folder = exported("ddrp")
    ids, mask = batch()
    loaded = load(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        output = loaded(torch.tensor(ids), attention_mask=torch.tensor(mask).long())
    got = output.logits.float().numpy()[mask]
    config = small.model_config(vocab_size=published.VOCAB, dtype="bfloat16")
    graph = nnx.graphdef(nnx.eval_shape(lambda: MaskedLM(config, rngs=nnx.Rngs(0))))
    wanted = ours(nnx.merge(graph, nnx.state(model)), ids, mask)["logits"]
    tolerance = 5 * np.sqrt(2) * np.sqrt(16) * 2**-8 / np.sqrt(3) * wanted.std()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)
    assert tolerance < 0.1 * wanted.std()


def test_save_and_reload(exported, tmp_path):
    """The code travels on, and a folder of it needs nothing of this project."""
    _, folder = exported("ddrp")
    loaded = load(folder)
    loaded.save_pretrained(tmp_path / "saved")
    program = (
        "import sys; sys.modules['ddrp_jax'] = sys.modules['jax'] = None\n"
        "import torch, transformers\n"
        "ids = torch.arange(6, 14)[None]\n"
        "def logits(folder):\n"
        "    auto = transformers.AutoModelForMaskedLM\n"
        "    model = auto.from_pretrained(folder, trust_remote_code=True).eval()\n"
        "    return model(ids, attention_mask=torch.ones_like(ids)).logits\n"
        "assert torch.equal(logits(sys.argv[1]), logits(sys.argv[2]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    auto_map = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert auto_map == json.loads((folder / "config.json").read_text())["auto_map"]
    assert published.tensors(tmp_path / "saved").keys() == published.tensors(folder).keys()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torch_compile(exported):
    _, folder = exported("ddrp")
    loaded = load(folder)
    ids, mask = (torch.tensor(array) for array in batch())
    with torch.no_grad():
        wanted = loaded(ids, attention_mask=mask.long()).logits[mask]
        got = torch.compile(loaded, fullgraph=True)(ids, attention_mask=mask.long()).logits[mask]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_fill_mask_through_a_pipeline(exported):
    model, folder = exported("ddrp")
    fill = transformers.pipeline("fill-mask", model=str(folder), trust_remote_code=True)
    best = fill("the old [MASK] sails", top_k=3)
    tokenizer = load_tokenizer(folder)
    ids = np.array([tokenizer.encode_with_special("the old [MASK] sails")])
    logits = ours(model, ids, np.ones_like(ids, bool))["logits"]
    (masked,) = np.flatnonzero(ids[0] == tokenizer.mask_id)
    wanted = np.argsort(-logits[masked])[:3]
    assert [answer["token"] for answer in best] == wanted.tolist()
    probabilities = np.exp(logits[masked]) / np.exp(logits[masked]).sum()
    np.testing.assert_allclose(
        [answer["score"] for answer in best], probabilities[wanted], rtol=1e-3
    )


def test_the_card_tells_config_data_steps_and_measures(exported):
    _, folder = exported("with_absolute")
    card = (folder / "README.md").read_text()
    for text in (
        "library_name: transformers",
        "AutoModelForMaskedLM",
        "trust_remote_code=True",
        "| positions | ddrp, distances up to 3, on keys, tables for each layer, with absolute",
        "| main | `runs/records` | 12 | 8 | 10 |",
        "step 10 of 10; 960 tokens seen",
        "| mlm_loss | 3.2500 |",
        '"max_distance": 3',
    ):
        assert text in card, text
