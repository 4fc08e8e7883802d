import collections
import json
import random

import numpy as np
import pytest

from ddrp_jax.data.frequency import count_tokens, rank_tokens, reserved_ids
from ddrp_jax.data.preparation import prepare_records
from ddrp_jax.data.sources import Source
from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError

WORDS = ["the", "the", "the", "fox", "fox", "dog", "unaffable", "world", "worldly", "zebra"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(200)]
    path = tmp_path_factory.mktemp("counted") / "corpus.txt"
    path.write_text("\n\n".join(texts))
    return path, texts


def with_rows(folder, tmp_path, rows):
    """The tokenizer of a vocab.txt with more rows."""
    text = (folder / "vocab.txt").read_bytes().decode()
    (tmp_path / "vocab.txt").write_bytes((text + "\n".join([*rows, ""])).encode())
    return load_tokenizer(tmp_path)


def test_reserved_rows_are_special_and_words_are_not(wordpiece_folder, wordpiece, tmp_path):
    rows = ["[unused0]", "[unused993]", "<unused7>", "madeupword0001", "<extra_id_3>", "<|end|>"]
    words = ["unused", "[unused]", "unused12", "extra", "madeupword", "||"]
    tokenizer = with_rows(wordpiece_folder, tmp_path, [*rows, *words])
    added = set(range(wordpiece.vocab_size, wordpiece.vocab_size + len(rows)))
    assert reserved_ids(tokenizer) == wordpiece.special_ids | added


def test_ids_without_a_piece_are_reserved(wordpiece, tmp_path):
    wordpiece.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    description = json.loads(path.read_text())
    size = wordpiece.vocab_size
    description["model"]["vocab"]["later"] = size + 3
    path.write_text(json.dumps(description))
    tokenizer = load_tokenizer(tmp_path)
    assert reserved_ids(tokenizer) - wordpiece.special_ids == {size, size + 1, size + 2}
    assert rank_tokens(tokenizer)[-1] == size + 3


def test_robertas_reserved_rows(shared_data):
    roberta = load_tokenizer(shared_data / "roberta_tokenizer")
    reserved = reserved_ids(roberta) - roberta.special_ids
    assert {roberta.id_to_token(token) for token in reserved} == {
        "<|endoftext|>",
        "madeupword0000",
        "madeupword0001",
        "madeupword0002",
    }


def test_without_a_corpus_the_order_is_the_vocabularys(tokenizer):
    expected = [i for i in range(tokenizer.vocab_size) if i not in reserved_ids(tokenizer)]
    assert rank_tokens(tokenizer).tolist() == expected


def test_with_a_corpus_the_counts_rank_and_ties_keep_the_order(tokenizer, corpus):
    path, texts = corpus
    counts = collections.Counter(token for text in texts for token in tokenizer.encode(text))
    expected = [i for i in range(tokenizer.vocab_size) if i not in reserved_ids(tokenizer)]
    expected.sort(key=lambda token: (-counts[token], token))
    assert rank_tokens(tokenizer, f"text:{path}").tolist() == expected
    counted = count_tokens(tokenizer, Source(f"text:{path}"))
    assert {i: n for i, n in enumerate(counted.tolist()) if n} == counts


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_records_rank_as_their_text_does(wordpiece, corpus, tmp_path, holdout):
    source = Source(f"text:{corpus[0]}")
    folder = tmp_path / "records"
    prepare_records([source], wordpiece, folder, holdout=holdout, shard_tokens=500)
    np.testing.assert_array_equal(count_tokens(wordpiece, folder), count_tokens(wordpiece, source))
    np.testing.assert_array_equal(
        rank_tokens(wordpiece, str(folder)), rank_tokens(wordpiece, source)
    )


def test_other_fields_are_read(wordpiece, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "fox fox dog"}\n')
    source = Source(f"jsonl:{path}", text_field="body")
    assert rank_tokens(wordpiece, source)[:2].tolist() == wordpiece.encode("fox dog")


def test_bad_corpora_are_refused(wordpiece, byte_bpe, corpus, tmp_path):
    with pytest.raises(UsageError, match=r"no file or folder '.*nowhere'"):
        rank_tokens(wordpiece, f"text:{tmp_path / 'nowhere'}")
    with pytest.raises(UsageError, match=r"did you mean 'text:"):
        rank_tokens(wordpiece, str(corpus[0]))
    (tmp_path / "empty.txt").write_text("\n\n \n")
    with pytest.raises(DdrpError, match=r"corpus 'text:.*empty.txt': no text in it"):
        rank_tokens(wordpiece, f"text:{tmp_path / 'empty.txt'}")
    prepare_records([Source(f"text:{corpus[0]}")], wordpiece, tmp_path / "records")
    with pytest.raises(UsageError, match=f"made with tokenizer {wordpiece.fingerprint}, not with"):
        rank_tokens(byte_bpe, tmp_path / "records")
