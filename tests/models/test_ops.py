"""Hand-written backward passes against automatic differentiation and finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrp_jax.models import ops


def draw(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def plain_layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias


def plain_gelu(x, approximate=False):
    return jax.nn.gelu(x, approximate=approximate)


def plain_linear(x, kernel, bias):
    return jnp.einsum("...d,df->...f", x, kernel) + bias


def plain_feed_forward(x, up, up_bias, down, down_bias, approximate=False):
    return plain_gelu(x @ up + up_bias, approximate) @ down + down_bias


FEED_FORWARD = (draw(2, 3, 4), draw(4, 6), draw(6), draw(6, 4), draw(4))
CASES = {
    "layer_norm": (
        functools.partial(ops.layer_norm, epsilon=1e-5),
        plain_layer_norm,
        (draw(2, 3, 6), draw(6), draw(6, seed=1)),
    ),
    "gelu": (lambda x: ops.gelu(x, False), plain_gelu, (3 * draw(2, 50),)),
    "gelu_tanh": (
        lambda x: ops.gelu(x, True),
        functools.partial(plain_gelu, approximate=True),
        (3 * draw(2, 50),),
    ),
    # Both orders of the kernel's gradient: it turns the smaller factor.
    "linear_wide": (ops.linear, plain_linear, (draw(2, 3, 4), draw(4, 9), draw(9))),
    "linear_narrow": (ops.linear, plain_linear, (draw(2, 3, 9), draw(9, 4), draw(4))),
    "logits": (
        ops.logits,
        lambda x, table, bias: plain_linear(x, table.T, bias),
        (draw(2, 3, 4), draw(9, 4), draw(9)),
    ),
    "feed_forward": (
        lambda *a: ops.feed_forward(*a, False),
        plain_feed_forward,
        FEED_FORWARD,
    ),
    "feed_forward_tanh": (
        lambda *a: ops.feed_forward(*a, True),
        functools.partial(plain_feed_forward, approximate=True),
        FEED_FORWARD,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_plain_function(name):
    function, plain, arguments = CASES[name]
    pull = draw(*jax.eval_shape(plain, *arguments).shape, seed=9)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function, *arguments):
        out, pull_back = jax.vjp(function, *arguments)
        return out, *pull_back(pull)

    got, wanted = (with_gradients(f, *arguments) for f in (function, plain))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences_of_the_plain_function_in_float64(name):
    function, plain, arguments = CASES[name]
    grads = jax.jit(jax.grad(lambda *a: (function(*a) ** 2).sum(), tuple(range(len(arguments)))))(
        *arguments
    )
    with jax.enable_x64(True):
        arguments = [jnp.asarray(a, jnp.float64) for a in arguments]
        moves = [draw(*a.shape, seed=5, dtype=np.float64) for a in arguments]
        total = jax.jit(lambda *a: (plain(*a) ** 2).sum())
        ahead, behind = (
            total(*(a + step * move for a, move in zip(arguments, moves, strict=True)))
            for step in (1e-5, -1e-5)
        )
        slope = sum(jnp.vdot(g, move) for g, move in zip(grads, moves, strict=True))
        size = sum(jnp.vdot(abs(g), abs(move)) for g, move in zip(grads, moves, strict=True))
        assert abs(slope - (ahead - behind) / 2e-5) <= 1e-5 * size


def test_exact_gelu_is_not_the_approximation():
    one = jnp.ones((1,))
    assert ops.gelu(one, False)[0] == pytest.approx(0.8413447, abs=2e-7)
    assert ops.gelu(one, True)[0] == pytest.approx(0.8411920, abs=2e-7)


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_far_from_zero_is_finite(approximate):
    x = jnp.asarray([-1e12, -300.0, -20.0, 20.0, 300.0, 1e12])
    np.testing.assert_array_equal(ops.gelu(x, approximate), jnp.maximum(x, 0))
    slope = jax.grad(lambda x: ops.gelu(x, approximate).sum())(x)
    np.testing.assert_array_equal(slope, (x > 0).astype(np.float32))


def test_layer_norm_of_equal_values_is_the_bias():
    x = jnp.full((2, 4), 3.0)
    np.testing.assert_array_equal(
        ops.layer_norm(x, jnp.ones(4), jnp.arange(4.0), 1e-12), jnp.tile(jnp.arange(4.0), (2, 1))
    )
    grad = jax.grad(lambda x: (ops.layer_norm(x, jnp.ones(4), jnp.ones(4), 1e-5) ** 2).sum())(x)
    assert np.isfinite(grad).all()


def mix(probs, values):
    z = jnp.einsum("bnts,bsnh->btnh", probs, values)
    return z.reshape(*z.shape[:2], -1)


MASK = jnp.asarray(np.tril(np.ones((2, 1, 5, 5), bool)))


def plain_attend(scores, values, keep=1.0):
    weights = jnp.exp(scores) * MASK
    weights = weights / weights.sum(-1, keepdims=True)
    return mix(weights * keep, values), weights


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_attention_weights_and_gradients_are_those_of_the_plain_softmax(rate, with_weights):
    scores, values = draw(2, 3, 5, 5), draw(2, 5, 3, 4)
    keys = ops.row_keys(jnp.uint32(1), jnp.uint32(2), jnp.arange(2, dtype=jnp.uint32))
    pulls = (draw(2, 5, 12, seed=1), draw(2, 3, 5, 5, seed=2))[: 1 + with_weights]
    keep = ops.dropout(jnp.ones_like(scores), keys, rate)
    assert rate == 0 or 0 < (np.asarray(keep) == 0).mean() < 1

    @jax.jit
    def fused(scores, values):
        z, weights = ops.attend(mix, scores, MASK, values, keys, rate, with_weights)
        assert (weights is not None) == with_weights
        return (z, weights)[: len(pulls)]

    @jax.jit
    def plain(scores, values):
        return plain_attend(scores, values, keep)[: len(pulls)]

    def total(function, *arguments):
        return sum(
            (out * pull).sum() for out, pull in zip(function(*arguments), pulls, strict=True)
        )

    for got, wanted in zip(fused(scores, values), plain(scores, values), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    got, wanted = (
        jax.grad(functools.partial(total, f), (0, 1))(scores, values) for f in (fused, plain)
    )
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert not np.any(np.asarray(got[0])[:, :, ~np.asarray(MASK)[0, 0]])


def test_a_query_with_nothing_to_attend_to_gives_no_nan():
    scores, values = draw(1, 1, 3, 3), draw(1, 3, 1, 2)
    mask = jnp.zeros((1, 1, 3, 3), bool)

    def z(scores, values):
        return ops.attend(mix, scores, mask, values, None, 0.0)[0]

    np.testing.assert_allclose(
        z(scores, values), jnp.tile(values.mean(1).reshape(1, 1, -1), (1, 3, 1)), atol=1e-6
    )
    for grad in jax.grad(lambda *a: z(*a).sum(), (0, 1))(scores, values):
        assert np.isfinite(grad).all()


def test_large_scores_do_not_overflow():
    scores = 1e4 * draw(2, 1, 5, 5)
    z, probs = ops.attend(mix, scores, MASK, draw(2, 5, 1, 2), None, 0.0, True)
    assert np.isfinite(z).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


# bfloat16 keeps 8 bits: rounding to nearest moves a value by at most 2^-8 of itself. How often the
# largest term is rounded on its way: kernel, product and sum in a linear function, twice that and
# the GELU between in a feed-forward, the result alone where everything else is float32.
ROUNDINGS = {"linear_wide": 3, "linear_narrow": 3, "feed_forward": 7, "feed_forward_tanh": 7}


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_float32_but_for_the_rounding_of_its_values(name):
    function, plain, (x, *parameters) = CASES[name]
    x = x.astype(jnp.bfloat16)
    exact = jax.jit(plain)(x.astype(jnp.float32), *parameters)
    got = jax.jit(function)(x, *parameters)
    assert got.dtype == (jnp.float32 if name == "logits" else jnp.bfloat16)
    # Each rounding moves the result by no more than 2^-8 of the same sum over absolute values.
    size = jnp.abs(exact)
    sizes = [jnp.abs(a) for a in (x.astype(jnp.float32), *parameters)]
    if name.startswith("feed_forward"):
        # |gelu(a)| <= |a|, and its slope is at most 1.13.
        size = 1.13 * plain_linear(plain_linear(*sizes[:3]), *sizes[3:])
    elif name not in ("layer_norm", "gelu", "gelu_tanh"):
        size = plain(*sizes)
    bound = 1.01 * ROUNDINGS.get(name, 1) * 2.0**-8 * size + 1e-6
    assert np.all(np.abs(got.astype(jnp.float32) - exact) <= bound)
    if parameters:
        grads = jax.eval_shape(
            jax.grad(lambda p: function(x, *p).astype(jnp.float32).sum()), parameters
        )
        assert all(grad.dtype == jnp.float32 for grad in grads)


def test_column_sum_is_a_sum_in_float32():
    x = draw(3, 5, 4)
    np.testing.assert_allclose(ops.column_sum(x), x.sum((0, 1)), rtol=1e-6, atol=1e-6)
    ones = jnp.ones((1000, 2), jnp.bfloat16)  # bfloat16 cannot count beyond 256
    np.testing.assert_array_equal(ops.column_sum(ones), [1000, 1000])
