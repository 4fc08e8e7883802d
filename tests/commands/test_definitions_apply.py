"""`ddrp definitions apply` on a small BERT: what changes, and that nothing else does."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from ddrp_jax import cli
from ddrp_jax.config import (
    Config,
    DefinitionConfig,
    MeshConfig,
    ReconstructionConfig,
    StageConfig,
    as_dict,
    from_config_dict,
)
from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.definitions.examples import open_examples
from ddrp_jax.definitions.reconstruct import Reconstruction, produce_rows
from ddrp_jax.definitions.replace import WORD_TABLE
from ddrp_jax.training import checkpoint
from ddrp_jax.training.sharding import make_mesh

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", "a", *LETTERS]
PIECES += [f"##{letter}" for letter in LETTERS]
PIECES += ["tide", "sea", "rise", "moon", "water", "##al", "42", "salt", *"():.,"]
GLOSSES = [
    ("sea", "n.", "A body of salt water."),
    ("sea", "n.", "A wave."),
    ("tide", "n.", "The rise of the sea."),
    ("tide", "v.", "To flow."),
    ("rise", "v.", "To go up."),
    ("tidal", "a.", "Of the tide."),
    ("water", "n.", "What the sea is made of."),
]
CORPUS = "The tide of the sea. The sea of salt."
WORDS_KEY = "bert.embeddings.word_embeddings.weight"


def write_published(folder, pieces=PIECES, seed=0):
    """A BERT that transformers saves, all of whose values are random."""
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=96,
    )
    torch.manual_seed(seed)
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join([*pieces, ""]))


def write_model(folder, **changes):
    write_published(folder / "published", **changes)
    assert cli.main(["import", str(folder / "published"), str(folder / "model")]) == 0
    return folder / "model"


def write_definitions(model, folder):
    folder.mkdir(exist_ok=True)
    (folder / "g.tsv").write_text("".join("\t".join(row) + "\n" for row in GLOSSES))
    output = folder / "definitions"
    arguments = ("--dictionary", f"glosses:{folder / 'g.tsv'}", "--tokenizer", str(model))
    assert cli.main(["definitions", "build", *arguments, "--output", str(output)]) == 0
    return output


def write_reconstructor(model, definitions, folder, **changes):
    """A reconstructor as a run starts from it: the model itself and a random map."""
    config = from_config_dict(Config, checkpoint.read_config(model))
    task = Reconstruction(
        DefinitionConfig(
            model=config.model,
            stages=(StageConfig(records=str(definitions), length=96, batch_size=8),),
            reconstruction=ReconstructionConfig(checkpoint=str(model)),
        )
    )
    params = task.init_params(make_mesh(MeshConfig()))
    folder.mkdir(parents=True)
    values = as_dict(task.config)
    values["model"] |= changes
    checkpoint.save_alone(
        folder,
        {"params": params},
        config=values,
        tokenizer=task.tokenizer,
        step=0,
        progress={"step": 0},
    )
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apply")
    model = write_model(folder)
    definitions = write_definitions(model, folder / "in")
    reconstructor = write_reconstructor(model, definitions, folder / "reconstructor")
    (folder / "corpus.txt").write_text(CORPUS)
    return SimpleNamespace(
        folder=folder,
        model=model,
        definitions=definitions,
        reconstructor=reconstructor,
        tokenizer=load_tokenizer(model / "tokenizer"),
    )


def apply(made, output, *arguments, **changes):
    paths = {"model": made.model, "definitions": made.definitions} | {
        "reconstructor": made.reconstructor,
        **changes,
    }
    return cli.main(
        [
            *("definitions", "apply", "--checkpoint", str(paths["model"])),
            *("--definitions", str(paths["definitions"])),
            *("--reconstructor", str(paths["reconstructor"])),
            *("--output", str(output), *map(str, arguments)),
        ]
    )


def params(path):
    return {
        name: checkpoint.restore_array(path, name) for name in checkpoint.parameter_shapes(path)
    }


def changed_rows(before, after):
    """Ids of the rows that differ; asserts that all else is the same to the bit."""
    old, new = params(before), params(after)
    assert old.keys() == new.keys()
    for name in old.keys() - {WORD_TABLE}:
        assert old[name].tobytes() == new[name].tobytes(), name
    rows = (old[WORD_TABLE].view(np.uint32) != new[WORD_TABLE].view(np.uint32)).any(axis=1)
    return np.flatnonzero(rows)


def ids(made, *pieces):
    tokens = [made.tokenizer.id_to_token(i) for i in range(made.tokenizer.vocab_size)]
    return sorted(tokens.index(piece) for piece in pieces)


def digests(folder):
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_rarest_defined_rows_are_replaced_and_nothing_else(made, tmp_path, capsys):
    output = tmp_path / "out"
    assert apply(made, output, "--ratio", "0.2", "--export", tmp_path / "torch") == 0
    # 0.2 of 75 pieces: the last fifteen, of which these have a definition.
    count = round(0.2 * made.tokenizer.vocab_size)
    defined = open_examples(made.definitions).defined_ids
    chosen = [i for i in range(made.tokenizer.vocab_size)[-count:] if i in defined]
    assert set(ids(made, "tide", "sea", "rise", "water", "##al", "42")) <= set(chosen)
    assert changed_rows(made.model, output).tolist() == chosen
    assert f"{len(chosen)} of {made.tokenizer.vocab_size} rows replaced" in capsys.readouterr().out
    # The rows are the reconstructor's.
    examples = open_examples(made.definitions)
    rows = produce_rows(made.reconstructor, examples, chosen, "first", make_mesh(MeshConfig()))
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(params(output)[WORD_TABLE][chosen], rows, rtol=1e-6, atol=1e-6)
    # A full checkpoint of ours: config, tokenizer, and where the rows come from.
    checkpoint.verify(output)
    assert (output / "config.json").read_bytes() == (made.model / "config.json").read_bytes()
    assert digests(output / "tokenizer") == digests(made.model / "tokenizer")
    progress, before = checkpoint.read_progress(output), checkpoint.read_progress(made.model)
    (replaced,) = progress.pop("replaced")
    assert progress == before
    assert replaced["ids"] == len(chosen)
    assert replaced["ratio"] == 0.2
    assert replaced["reconstructor"] == str(made.reconstructor)
    assert replaced["senses"] == "first"
    # PyTorch's model: the same tensors but for those rows.
    old = load_file(made.folder / "published" / "model.safetensors")
    new = load_file(tmp_path / "torch" / "model.safetensors")
    assert old.keys() == new.keys()
    for name in old.keys() - {WORDS_KEY}:
        assert old[name].tobytes() == new[name].tobytes(), name
    differs = (old[WORDS_KEY] != new[WORDS_KEY]).any(axis=1)
    assert np.flatnonzero(differs).tolist() == chosen
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "torch")
    head, table = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert head.data_ptr() == table.data_ptr(), "the head is tied to the new table"
    np.testing.assert_array_equal(table.detach().numpy(), new[WORDS_KEY])


def test_ratio_one_replaces_every_defined_row(made, tmp_path):
    assert apply(made, tmp_path / "out", "--ratio", "100%") == 0
    defined = open_examples(made.definitions).defined_ids
    assert changed_rows(made.model, tmp_path / "out").tolist() == defined.tolist()
    assert not set(defined.tolist()) & {*made.tokenizer.special_ids, PIECES.index("[unused0]")}


def test_frequency_comes_from_a_corpus_where_one_is_named(made, tmp_path):
    corpus = f"text:{made.folder / 'corpus.txt'}"
    share = 16 / made.tokenizer.vocab_size
    assert apply(made, tmp_path / "out", "--ratio", share, "--frequency", corpus) == 0
    changed = set(changed_rows(made.model, tmp_path / "out").tolist())
    assert not changed & set(ids(made, "tide", "sea", "salt"))
    assert set(ids(made, "rise", "water", "##al")) <= changed


@pytest.mark.parametrize("kind", ["text", "records"])
def test_only_tokens_of_a_corpus_are_replaced(made, tmp_path, kind):
    corpus = f"text:{made.folder / 'corpus.txt'}"
    if kind == "records":
        arguments = ("--input", corpus, "--tokenizer", str(made.model / "tokenizer"))
        assert cli.main(["prepare", *arguments, "--output", str(tmp_path / "records")]) == 0
        corpus = tmp_path / "records"
    assert apply(made, tmp_path / "out", "--tokens-from", corpus) == 0
    # "salt", "the" and "of" occur, and have no definition.
    changed = changed_rows(made.model, tmp_path / "out").tolist()
    assert changed == ids(made, "tide", "sea")


def test_senses_are_the_first_or_the_mean(made, tmp_path):
    corpus = f"text:{made.folder / 'corpus.txt'}"
    for senses in ("first", "mean"):
        arguments = ("--tokens-from", corpus, "--senses", senses)
        assert apply(made, tmp_path / senses, *arguments) == 0
    first, mean = (params(tmp_path / senses)[WORD_TABLE] for senses in ("first", "mean"))
    two_senses = ids(made, "sea", "tide")
    assert (first[two_senses] != mean[two_senses]).any(axis=1).all()


def test_definitions_are_built_with_a_run_s_tokenizer(made, tmp_path):
    shutil.copytree(made.model, tmp_path / "run" / "checkpoints" / "7")
    definitions = write_definitions(tmp_path / "run", tmp_path / "in")
    assert open_examples(definitions).tokenizer_fingerprint == made.tokenizer.fingerprint


def test_a_second_replacement_is_recorded_behind_the_first(made, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert apply(made, once, "--ratio", "0.2") == 0
    definitions = write_definitions(once, tmp_path / "in")
    reconstructor = write_reconstructor(once, definitions, tmp_path / "reconstructor")
    arguments = {"model": once, "definitions": definitions, "reconstructor": reconstructor}
    assert apply(made, twice, "--ratio", "1", **arguments) == 0
    replaced = checkpoint.read_progress(twice)["replaced"]
    assert [record["ratio"] for record in replaced] == [0.2, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ratio", "0"), "--ratio='0': expected a share"),
        (("--ratio", "1.5"), "--ratio='1.5': expected a share"),
        (("--ratio", "nan"), "--ratio='nan': expected a share"),
        (("--ratio", "half"), "--ratio='half': expected a share"),
        (("--ratio", "0.001"), "none of the rarest 0 of"),
        ((), "one of the arguments --ratio --tokens-from is required"),
        (("--ratio", "1", "--tokens-from", "demo"), "not allowed with"),
        (("--tokens-from", "demo", "--frequency", "demo"), "--frequency: goes with --ratio"),
        (("--tokens-from", "text:absent"), "no file or folder 'absent'"),
        (("--ratio", "1", "--senses", "all"), "expected one of first, mean"),
    ],
)
def test_a_bad_request_writes_nothing(made, tmp_path, capsys, arguments, message):
    assert apply(made, tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_touched(made, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert apply(made, tmp_path / "out", "--ratio", "1") == 2
    assert apply(made, tmp_path / "new", "--ratio", "1", "--export", tmp_path / "out") == 2
    assert apply(made, tmp_path / "new", "--ratio", "1", "--export", tmp_path / "new") == 2
    assert "the same folder as --output" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def refused(made, tmp_path, capsys, message, **paths):
    capsys.readouterr()
    assert apply(made, tmp_path / "out", "--ratio", "1", **paths) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_another_model_of_the_same_tokenizer_is_refused(made, tmp_path, capsys):
    other = write_model(tmp_path / "other", seed=1)
    refused(made, tmp_path, capsys, "another model's word table", model=other)


def test_another_tokenizer_is_refused(made, tmp_path, capsys):
    pieces = [*PIECES]
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    other = write_model(tmp_path / "other", pieces=pieces)
    definitions = write_definitions(other, tmp_path / "other" / "in")
    message = "made with another tokenizer"
    refused(made, tmp_path, capsys, message, definitions=definitions)
    message = "trained with tokenizer"
    refused(made, tmp_path, capsys, message, definitions=definitions, model=other)


def test_another_number_of_rows_is_refused(made, tmp_path, capsys):
    rows = len(PIECES) + 5
    other = write_reconstructor(
        made.model, made.definitions, tmp_path / "reconstructor", vocab_size=rows
    )
    message = f"trained for a word table of {rows} rows, that of checkpoint"
    refused(made, tmp_path, capsys, message, reconstructor=other)


def test_what_is_no_reconstructor_is_refused(made, tmp_path, capsys):
    refused(made, tmp_path, capsys, "not a reconstructor", reconstructor=made.model)
    for name in ("model", "reconstructor"):
        refused(made, tmp_path, capsys, "no such folder", **{name: tmp_path / "absent"})
    absent = {"definitions": tmp_path / "absent"}
    refused(made, tmp_path, capsys, "run 'ddrp definitions build", **absent)


def test_rows_that_are_not_finite_are_refused(made, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    loaded = params(made.reconstructor)
    (name,) = [name for name in loaded if name.startswith("map")]
    values = np.array(loaded[name])
    values[0] = np.nan
    checkpoint.save_alone(
        broken,
        {"params": loaded | {name: values}},
        config=checkpoint.read_config(made.reconstructor),
        tokenizer=made.tokenizer,
        step=0,
        progress={"step": 0},
    )
    assert apply(made, tmp_path / "out", "--ratio", "1", reconstructor=broken) == 1
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_damaged_reconstructor_is_named(made, tmp_path, capsys):
    damaged = shutil.copytree(made.reconstructor, tmp_path / "damaged")
    (damaged / "config.json").write_text(json.dumps({}))
    assert apply(made, tmp_path / "out", "--ratio", "1", reconstructor=damaged) == 1
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
