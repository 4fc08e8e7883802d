import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddrp_jax.data.tokenizers import load_tokenizer
from ddrp_jax.errors import DdrpError, UsageError

SPELLINGS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("<s>", "</s>", "<pad>", "<unk>", "<mask>"),
]
# Session fixtures do not change between examples.
property_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def words_of(tokenizer, text):
    """Groups the pieces of a text into words as whole-word masking does."""
    words = []
    for token in tokenizer.encode(text):
        if tokenizer.word_starts[token] or not words:
            words.append([])
        words[-1].append(token)
    return [tokenizer.decode(word).strip() for word in words]


def test_roberta_gives_the_published_ids(shared_data):
    roberta = load_tokenizer(shared_data / "roberta_tokenizer")
    assert roberta.encode_with_special("Hello world") == [0, 31414, 232, 2]
    assert roberta.encode("Hello world") == [31414, 232]
    assert (roberta.pad_id, roberta.unk_id, roberta.mask_id) == (1, 3, 50264)
    assert roberta.vocab_size == 50265


def test_robertas_mask_takes_the_space_before_it(shared_data):
    roberta = load_tokenizer(shared_data / "roberta_tokenizer")
    assert roberta.encode_with_special("Hello <mask>.") == [0, 31414, 50264, 4, 2]
    two = roberta.encode_with_special("Hello <mask> <mask> there")
    assert two == [0, 31414, 50264, 50264, *roberta.encode(" there"), 2]


def test_roberta_from_vocab_and_merges_equals_its_tokenizer_json(shared_data, tmp_path):
    published = shared_data / "roberta_tokenizer"
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(published / name, tmp_path)
    rebuilt, whole = load_tokenizer(tmp_path), load_tokenizer(published)
    lines = (shared_data / "glue" / "CoLA" / "dev.tsv").read_text("utf-8").split("\n")
    assert rebuilt.encode_batch(lines) == whole.encode_batch(lines)
    assert rebuilt.special_ids == whole.special_ids
    assert rebuilt.encode_with_special("a <mask> b") == whole.encode_with_special("a <mask> b")


def test_wordpiece_takes_the_longest_pieces_of_lower_case_words(wordpiece):
    pieces = [wordpiece.id_to_token(i) for i in wordpiece.encode("Unaffable WORLDLY fox.")]
    assert pieces == ["un", "##aff", "##able", "world", "##ly", "fox", "."]
    assert wordpiece.encode("\u4e2d") == [wordpiece.unk_id]
    assert wordpiece.decode(wordpiece.encode("unaffable fox")) == "unaffable fox"


def test_do_lower_case_false_is_respected(wordpiece_folder, tmp_path):
    shutil.copy(wordpiece_folder / "vocab.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = load_tokenizer(tmp_path)
    assert cased.encode("Fox fox") == [cased.unk_id, *cased.encode("fox")]


def test_only_a_newline_ends_a_line_of_a_vocabulary(wordpiece_folder, wordpiece):
    lines = (wordpiece_folder / "vocab.txt").read_bytes().decode().split("\n")[:-1]
    assert wordpiece.vocab_size == len(lines)
    assert [wordpiece.id_to_token(i) for i in range(len(lines))] == lines
    assert {"\u2028", "\x85"} <= set(lines)


@property_settings
@given(parts=st.lists(st.sampled_from([*SPELLINGS, " ", "a", "the dog", "\n", ",", "#"])))
def test_a_special_spelling_in_text_never_becomes_its_id(tokenizer, parts):
    text = "".join(parts)
    forbidden = tokenizer.special_ids - {tokenizer.unk_id}
    assert not forbidden & set(tokenizer.encode(text))
    (batched,) = tokenizer.encode_batch([text])
    assert batched == tokenizer.encode(text)


def test_the_unknown_tokens_spelling_is_text_too(tokenizer):
    name = tokenizer.id_to_token(tokenizer.unk_id)
    assert tokenizer.unk_id not in tokenizer.encode(name)


def test_fill_mask_recognises_the_mask_and_nothing_else(tokenizer):
    cls, mask = tokenizer.id_to_token(tokenizer.cls_id), tokenizer.mask_token
    ids = tokenizer.encode_with_special(f"the {mask} {cls} dog {mask}")
    assert ids[0] == tokenizer.cls_id
    assert ids[-1] == tokenizer.sep_id
    assert ids.count(tokenizer.mask_id) == 2
    assert ids.count(tokenizer.cls_id) == 1
    assert ids[-2] == tokenizer.mask_id


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte_bpe"])
def test_no_lone_space_stands_before_a_mask(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode_with_special(f"the dog {tokenizer.mask_token}.")
    before, after = tokenizer.encode("the dog"), tokenizer.encode("the dog.")[-1]
    assert ids == [tokenizer.cls_id, *before, tokenizer.mask_id, after, tokenizer.sep_id]


def test_a_saved_tokenizer_loads_as_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    text = "The quick brown fox, hello world [MASK] <mask>."
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.encode_with_special(text) == tokenizer.encode_with_special(text)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.kind, loaded.special_ids) == (tokenizer.kind, tokenizer.special_ids)
    np.testing.assert_array_equal(loaded.word_starts, tokenizer.word_starts)


def test_fingerprints_tell_tokenizers_apart(unigram, bpe, wordpiece, byte_bpe):
    assert len({t.fingerprint for t in (unigram, bpe, wordpiece, byte_bpe)}) == 4


def test_pieces_of_one_word_are_grouped(tokenizer):
    expected = ["the", "quick", "brown", "fox", ",", "hello", "world", "."]
    assert words_of(tokenizer, "the quick brown fox, hello world.") == expected


def test_plain_text_survives_encoding_and_decoding(unigram, bpe, byte_bpe):
    text = "the quick dog, and the world."
    for tokenizer in (unigram, bpe, byte_bpe):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode_with_special(text)) == text


def test_transformers_reads_the_saved_folder(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    mask = tokenizer.mask_token
    for text in ("The quick brown fox.", f"the dog {mask}.", f"hello {mask} {mask} world"):
        assert theirs(text)["input_ids"] == tokenizer.encode_with_special(text), text
    for role in ("pad", "unk", "cls", "sep", "mask"):
        assert getattr(theirs, f"{role}_token_id") == getattr(tokenizer, f"{role}_id")
    takes_types = tokenizer.kind == "wordpiece"
    assert ("token_type_ids" in theirs("the dog")) == takes_types


def test_a_published_truncation_never_cuts_a_document(wordpiece, tmp_path):
    wordpiece.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    description = json.loads(path.read_text("utf-8"))
    description["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(description), encoding="utf-8")
    assert len(load_tokenizer(tmp_path).encode("fox " * 50)) == 50


def test_an_empty_folder_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UsageError, match=r"vocab\.txt.*ddrp tokenizer train"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_without_a_mask_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(UsageError, match=r"no mask token \(\[MASK\] or <mask>\)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sentencepiece.model", b"\x00\x01nonsense"),
        ("tokenizer.json", b'{"version": "1.0"'),
        ("vocab.txt", b"[PAD]\n\xff\n"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DdrpError, match=name):
        load_tokenizer(tmp_path)


def test_a_merge_that_starts_with_a_hash_is_no_comment(byte_bpe_folder, tmp_path):
    vocabulary = json.loads((byte_bpe_folder / "vocab.json").read_text("utf-8"))
    vocabulary["##"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = (byte_bpe_folder / "merges.txt").read_text("utf-8")
    (tmp_path / "merges.txt").write_text(merges + "# #\n", encoding="utf-8")
    assert load_tokenizer(tmp_path).encode("##") == [vocabulary["##"]]
