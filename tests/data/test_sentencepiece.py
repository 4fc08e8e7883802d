import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend

from ddrp_jax.data.sentencepiece_training import split_bytes, train_sentencepiece
from ddrp_jax.errors import DdrpError, UsageError

property_settings = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def pair(request, tmp_path_factory):
    """One of our models, and its tokenizer.json as the `tokenizers` library reads it."""
    model = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("exported")
    model.save(folder)
    exported = Backend.from_file(str(folder / "tokenizer.json"))
    exported.encode_special_tokens = True
    return model, exported


def exported_ids(exported, texts):
    return [e.ids for e in exported.encode_batch(list(texts), add_special_tokens=False)]


def test_special_tokens_are_ids_0_to_4(pair):
    model, _ = pair
    assert [model.id_to_token(i) for i in range(5)] == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    ids = (model.pad_id, model.unk_id, model.cls_id, model.sep_id, model.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert model.special_ids == {0, 1, 2, 3, 4}
    assert model.vocab_size == 1000


def test_encode_is_sentencepieces_own(pair, demo_documents):
    model, _ = pair
    processor = SentencePieceProcessor(model_proto=model.model)
    lines = demo_documents[7].split("\n")
    assert model.encode_batch(lines) == [processor.encode(line) for line in lines]


def test_tokenizer_json_gives_the_same_ids_on_thousands_of_lines(pair, demo_documents):
    model, exported = pair
    lines = [line for document in demo_documents[3::8] for line in document.split("\n")]
    assert len(lines) > 10_000
    ours = model.encode_batch(lines)
    theirs = exported_ids(exported, lines)
    assert [line for line, a, b in zip(lines, ours, theirs, strict=True) if a != b] == []


def test_tokenizer_json_gives_the_same_ids_on_whole_documents(pair, demo_documents):
    model, exported = pair
    documents = demo_documents[5::40]
    assert exported_ids(exported, documents) == model.encode_batch(documents)


@property_settings
@given(
    text=st.text(
        st.one_of(
            st.sampled_from(" \t\n\r\x0b\x0c\x1c\x85\u2028\u3000\xa0[]MASKCLEPUN.,a"),
            st.characters(min_codepoint=32, max_codepoint=0x17F),
            st.characters(min_codepoint=0x4E00, max_codepoint=0x4E20),
        ),
        max_size=30,
    )
)
def test_tokenizer_json_gives_the_same_ids_on_odd_text(pair, text):
    model, exported = pair
    assert exported_ids(exported, [text]) == [model.encode(text)]


@pytest.mark.parametrize("model", ["unigram", "bpe"])
def test_the_same_text_always_gives_the_same_model(model, demo_documents, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from ddrp_jax.data.sentencepiece_training import train_sentencepiece\n"
        "text = sys.stdin.read()\n"
        f"print(train_sentencepiece([text], vocab_size=300, model={model!r})[0].fingerprint)\n"
    )
    text = "\n".join(demo_documents[:10])
    fingerprints = {
        subprocess.run(
            [sys.executable, script], input=text, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    own, _ = train_sentencepiece([text], vocab_size=300, model=model)
    assert fingerprints == {own.fingerprint + "\n"}


def test_lines_too_long_for_the_trainer_are_split_and_none_is_dropped():
    filler = "\n".join(f"plain words number {i} of the text" for i in range(200))
    long_line = "zyzzyva " * 1000  # 8,000 bytes; the trainer takes 4,192
    model, report = train_sentencepiece([filler, long_line], vocab_size=80, model="bpe")
    assert (report.lines, report.split_lines, report.dropped_sentences) == (201, 1, 0)
    assert report.sentences == 202
    # Dropped, the word would have been unknown: none of its rare letters stands elsewhere.
    assert model.unk_id not in model.encode("zyzzyva")
    assert len(model.encode("zyzzyva")) <= 2


def test_a_long_line_without_spaces_is_split_within_characters():
    parts = split_bytes("é" * 5000, 4192)
    assert "".join(parts) == "é" * 5000
    assert all(len(part.encode()) <= 4192 for part in parts)


@given(st.text(max_size=80), st.integers(4, 20))
def test_split_bytes_loses_nothing_but_spaces(line, limit):
    parts = split_bytes(line, limit)
    assert all(0 < len(part.encode()) <= limit and part.strip() for part in parts)
    assert "".join("".join(parts).split()) == "".join(line.split())


def test_only_newlines_end_a_training_line():
    document = "a\u2028b\u2029c\x0bd\x0ce\nf\x1cg\x85h\ni"
    _, report = train_sentencepiece([document * 20], vocab_size=40, model="bpe")
    assert report.lines == 41


def test_sentences_with_the_trainers_own_character_are_counted():
    text = "\n".join(["some plain words"] * 50 + ["bad \u2585 line"] * 3)
    _, report = train_sentencepiece([text], vocab_size=40, model="bpe")
    assert (report.sentences, report.dropped_sentences) == (53, 3)


def test_more_text_than_the_sample_is_counted_and_sampled_fairly():
    lines = [f"first {i}" for i in range(500)] + ["zebra crossing"] * 500
    model, report = train_sentencepiece(
        ["\n".join(lines)], vocab_size=60, model="bpe", max_sentences=100
    )
    assert report.unsampled_sentences == 900
    assert len(model.encode("zebra crossing")) < len(model.encode("gnissorc arbez"))


def test_a_vocabulary_too_large_for_the_text_is_refused():
    with pytest.raises(UsageError, match=r"vocab_size=5000.*<= \d+"):
        train_sentencepiece(["a few words only"], vocab_size=5000)


def test_no_text_is_refused():
    with pytest.raises(DdrpError, match="empty"):
        train_sentencepiece(["", " \n "], vocab_size=100)
