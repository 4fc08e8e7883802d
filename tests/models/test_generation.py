"""Generation: PyTorch's token ids, greedy and with beams; the cache; the limits of options."""

import functools

import bart
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrp_jax.config import DecoderConfig
from ddrp_jax.errors import UsageError
from ddrp_jax.models.generation import GenerationOptions, Stepper, generate

LENGTH = 14
PLAIN = {"num_beams": 4, "max_length": LENGTH}
FORCED = {"forced_bos_id": 0, "forced_eos_id": 2}
# Options, and the size of the model.
CASES = {
    "greedy": ({"max_length": LENGTH}, "small"),
    "greedy, larger": (
        {"max_length": LENGTH, "min_length": 6, "no_repeat_ngram_size": 3, **FORCED},
        "deeper",
    ),
    "greedy, no token twice": (
        {"max_length": LENGTH, "no_repeat_ngram_size": 1, "forced_eos_id": 2},
        "small",
    ),
    "beams": (PLAIN, "small"),
    "beams, larger": (PLAIN | FORCED, "deeper"),
    "long ones favoured": (PLAIN | {"length_penalty": 2.0, "forced_eos_id": 2}, "small"),
    "no penalty": (PLAIN | FORCED | {"length_penalty": 0.0, "no_repeat_ngram_size": 3}, "small"),
    "short ones favoured": (
        PLAIN | {"length_penalty": -1.0, "min_length": 5, "no_repeat_ngram_size": 3},
        "small",
    ),
    "stop when full": (PLAIN | {"early_stopping": True, "no_repeat_ngram_size": 2}, "small"),
    "never stop early": (
        PLAIN | {"early_stopping": "never", "length_penalty": 1.5, "forced_bos_id": 0},
        "small",
    ),
    "three beams": (
        {
            "num_beams": 3,
            "max_length": LENGTH,
            "early_stopping": "never",
            "length_penalty": -0.5,
            "min_length": 9,
        },
        "small",
    ),
}
NAMES = {"forced_bos_id": "forced_bos_token_id", "forced_eos_id": "forced_eos_token_id"}


@functools.cache
def pair(size):
    theirs = bart.make(**bart.SIZES[size])
    return theirs, bart.ours(theirs)


def arrays(*values):
    return (jnp.asarray(value) for value in values)


@pytest.mark.parametrize("case", CASES)
def test_token_ids_are_pytorchs(case):
    options, size = CASES[case]
    theirs, ours = pair(size)
    ids, mask = bart.batch(theirs.config.vocab_size)
    wanted = theirs.generate(
        **bart.tensors(ids, mask),
        do_sample=False,
        **{NAMES.get(name, name): value for name, value in options.items()},
    ).numpy()
    got = np.asarray(generate(ours, *arrays(ids, mask), GenerationOptions(**options)).ids)
    assert got.shape == (len(ids), LENGTH)
    np.testing.assert_array_equal(got[:, : wanted.shape[1]], wanted)
    assert (got[:, wanted.shape[1] :] == 1).all()


def written(case):
    """The ids of a case, which the test above has compiled."""
    options, size = CASES[case]
    _, ours = pair(size)
    source = bart.batch(ours.config.vocab_size)
    return generate(ours, *arrays(*source), GenerationOptions(**options)), ours, source


def test_the_cases_hold_texts_that_end_early_and_texts_that_do_not():
    for cases in (("greedy", "greedy, larger"), ("beams", "no penalty", "short ones favoured")):
        lengths = {n for case in cases for n in (written(case)[0].ids != 1).sum(axis=1).tolist()}
        assert len(lengths) > 2
        assert LENGTH in lengths


def test_a_texts_score_is_its_log_probability():
    generated, ours, source = written("beams")
    ids = np.asarray(generated.ids)
    real = ids != 1

    @jax.jit
    def read(model, *rows):
        return jax.nn.log_softmax(model.logits(model(*rows).hidden))

    log_probs = np.asarray(read(ours, *arrays(*source, ids, real)))
    each = np.take_along_axis(log_probs[:, :-1], ids[:, 1:, None], axis=2)[..., 0]
    wanted = (each * real[:, 1:]).sum(axis=1) / real[:, 1:].sum(axis=1)
    np.testing.assert_allclose(generated.scores, wanted, rtol=1e-4)


def test_steps_with_a_cache_equal_the_decoder_on_whole_texts():
    """Beams that change places at every step: each must go on from its own past."""
    _, ours = pair("deeper")
    source = bart.batch(300)
    batch, beams, length = len(source[0]), 3, 7
    draw = np.random.default_rng(0)
    memory, _ = jax.jit(type(ours).encode)(ours, *arrays(*source))
    stepper = Stepper(ours, memory, jnp.asarray(source[1]), beams, length)
    step, cache = jax.jit(stepper.__call__), stepper.empty_cache()

    @jax.jit
    def whole(model, texts):
        rows = (jnp.repeat(array, beams, axis=0) for array in arrays(*source))
        flat = texts.reshape(batch * beams, length)
        logits = model.logits(model(*rows, flat, jnp.ones_like(flat, bool)).hidden)
        return logits.reshape(batch, beams, length, -1)

    texts, ancestors = np.zeros((2, batch, beams, length), np.int32)
    rows = np.arange(batch)[:, None]
    for position in range(length):
        texts[..., position] = draw.integers(0, 300, (batch, beams))
        logits, cache = step(cache, *arrays(texts[..., position], np.int32(position), ancestors))
        wanted = whole(ours, jnp.asarray(texts))[:, :, position]
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5)
        ancestors[..., position] = np.arange(beams)
        parents = draw.integers(0, beams, (batch, beams))
        texts, ancestors = texts[rows, parents], ancestors[rows, parents]


def test_no_ngram_occurs_twice_and_no_text_ends_too_early():
    for text in np.asarray(written("short ones favoured")[0].ids):
        text = text[text != 1]
        trigrams = list(zip(text[:-2], text[1:-1], text[2:], strict=True))
        assert len(set(trigrams)) == len(trigrams)
        assert 2 not in text[1:5]


def test_the_models_own_forced_tokens():
    decoder = DecoderConfig(num_layers=1, forced_bos_id=7)
    assert GenerationOptions.of(decoder, num_beams=2) == GenerationOptions(
        num_beams=2, forced_bos_id=7
    )
    assert GenerationOptions.of(decoder, forced_bos_id=None).forced_bos_id is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length=1: expected 2 to 40"),
        ({"max_length": 41}, "max_length=41: expected 2 to 40"),
        ({"max_length": 9, "min_length": 10}, "min_length=10: expected 0 to 9"),
        ({"num_beams": 0}, "num_beams=0: expected 1 to 49"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1: expected 0 to 20"),
        ({"forced_bos_id": 99}, "forced_bos_id=99: expected 0 to 98"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    _, ours = pair("small")
    with pytest.raises(UsageError, match=message):
        generate(ours, *arrays(*bart.batch()), GenerationOptions(**options))
