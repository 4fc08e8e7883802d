"""Greedy and beam generation with a key/value cache, compiled with static shapes.

Both give the token ids of PyTorch's `generate` (transformers 5). Two things differ in how:

- The beams of a text share its cross-attention keys and values; they are worked out once.
- A beam's keys stay in the cache where they were written. When beams change places, only a table
  of ancestors moves: who, among the beams, wrote the key of position t that this beam looks at.
  Each beam scores all keys of its text's beams, and masks those that are not its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ddrp_jax.config import DecoderConfig, ModelConfig
from ddrp_jax.errors import UsageError
from ddrp_jax.models import ops
from ddrp_jax.models.seq2seq import DecoderLayer, Seq2Seq

# What transformers takes for "never": beams that must not be chosen.
_NEVER = -1e9


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """How to generate; fields mean what they do in transformers' `generate`.

    Attributes:
        max_length: of the ids, with the start token.
        min_length: no text ends before.
        num_beams: 1 is greedy.
        length_penalty: a finished beam's log-probability is divided by length ** length_penalty.
        early_stopping: True stops a text when `num_beams` beams are finished; False when no
            running beam can win if it ended here; "never" when none can win at any length.
        no_repeat_ngram_size: n-grams of this size occur once; 0 allows all.
        forced_bos_id, forced_eos_id: the first token, and the last at `max_length`.
    """

    max_length: int = 20
    min_length: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None

    @classmethod
    def of(cls, decoder: DecoderConfig, **options: Any) -> GenerationOptions:
        """Returns options with the model's own forced tokens."""
        forced = {name: getattr(decoder, name) for name in ("forced_bos_id", "forced_eos_id")}
        return cls(**(forced | options))

    def check(self, config: ModelConfig) -> None:
        """Raises UsageError for options that make no sense, or not with this model."""
        limits = {
            "max_length": (2, config.max_length),
            "min_length": (0, self.max_length),
            "num_beams": (1, config.vocab_size // 2),
            "no_repeat_ngram_size": (0, self.max_length),
            "forced_bos_id": (0, config.vocab_size - 1),
            "forced_eos_id": (0, config.vocab_size - 1),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name}={value}: expected {least} to {most}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Generated:
    """What was generated.

    Attributes:
        ids: `[B, max_length]`: the start token, the text, its end token, then padding.
        scores: log-probability of each text over length ** length_penalty `[B]`; zeros where
            `num_beams` is 1, which keeps none.
    """

    ids: Int[Array, "b l"]
    scores: Float[Array, " b"]


def generate(
    model: Seq2Seq,
    source_ids: Int[Array, "b s"],
    source_mask: Bool[Array, "b s"],
    options: GenerationOptions,
) -> Generated:
    """Generates a text for each source.

    Args:
        model: the model.
        source_ids: the encoder's token ids.
        source_mask: True for real tokens.
        options: how; another value of them compiles again.

    Raises:
        UsageError: options out of range.
    """
    options.check(model.config)
    return _generate(model, source_ids, source_mask, options)


@functools.partial(jax.jit, static_argnames="options")
def _generate(
    model: Seq2Seq, source_ids: jax.Array, source_mask: jax.Array, options: GenerationOptions
) -> Generated:
    memory, _ = model.encode(source_ids, source_mask)
    stepper = Stepper(model, memory, source_mask, options.num_beams, options.max_length)
    search = _greedy if options.num_beams == 1 else _beam_search
    return search(stepper, model.config, options, source_ids.shape[0])


Cache = list[tuple[jax.Array, ...]]


class _Product:
    """A linear layer of few rows: the weights stand on the left, `[F, D]`.

    So it runs 1.5 times as fast on CPU; the barrier keeps XLA from turning it round again.
    """

    def __init__(self, kernel: jax.Array, bias: jax.Array, inputs: int, dtype: str):
        self.kernel_fd = kernel.reshape(inputs, -1).T.astype(dtype)
        self.bias = bias.reshape(-1).astype(dtype)

    def __call__(self, x_rd: Float[Array, "r d"]) -> Float[Array, "r f"]:
        return _product(self.kernel_fd, x_rd) + self.bias


def _product(
    kernel_fd: Float[Array, "f d"], x_rd: Float[Array, "r d"], dtype: Any = None
) -> Float[Array, "r f"]:
    y_fr = jnp.einsum("fd,rd->fr", kernel_fd, x_rd, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y_fr).T


class _StepLayer:
    """A decoder layer as a step needs it, its weights cut out of the stack and turned."""

    def __init__(self, layer: DecoderLayer, config: ModelConfig, memory: jax.Array):
        def product(kernel: Any, bias: Any) -> _Product:
            return _Product(kernel[...], bias[...], math.prod(kernel.shape[:axes]), config.dtype)

        own, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
        axes = 1
        self.qkv = product(own.qkv_kernel, own.qkv_bias)
        self.cross_q = product(cross.q_kernel, cross.q_bias)
        self.up = product(feed_forward.up_kernel, feed_forward.up_bias)
        self.down = product(feed_forward.down_kernel, feed_forward.down_bias)
        axes = 2
        self.out = product(own.out_kernel, own.out_bias)
        self.cross_out = product(cross.out_kernel, cross.out_bias)
        self.norms = (
            layer.self_attention_norm,
            layer.cross_attention_norm,
            layer.feed_forward_norm,
        )
        self.approximate = feed_forward.approximate
        self.memory = tuple(x_bsnh.swapaxes(1, 2) for x_bsnh in cross.keys_and_values(memory))


class Stepper:
    """The decoder, one position at a time for all beams of all texts.

    A cache holds keys and values `[B, N, T * K, H]` of each layer: K beams at the first position,
    at the second, and so on.

    Args:
        model: the model.
        memory: the encoder's output `[B, S, D]`.
        memory_mask: True for its real tokens `[B, S]`.
        num_beams: of each text.
        length: positions of the cache.
    """

    def __init__(
        self,
        model: Seq2Seq,
        memory: Float[Array, "b s d"],
        memory_mask: Bool[Array, "b s"],
        num_beams: int,
        length: int,
    ):
        self.model, self.config = model, model.config
        self.num_beams, self.length = num_beams, length
        batch, sources = memory_mask.shape
        self.memory_mask = jnp.broadcast_to(
            memory_mask[:, None, None, :], (batch, 1, num_beams, sources)
        )
        self.word_table = model.word_table.astype(model.config.dtype)
        # Apart before the loop: a slice of stacked weights inside would be copied at every step.
        self.layers = [
            _StepLayer(
                jax.tree.map(lambda leaf, i=i: leaf[i], model.decoder.layers), model.config, memory
            )
            for i in range(model.config.decoder.num_layers)
        ]

    def empty_cache(self) -> Cache:
        """Returns the cache before the first position."""
        config = self.config
        batch, beams = self.memory_mask.shape[0], self.num_beams
        shape = (batch, config.num_heads, self.length * beams, config.head_size)
        return [(jnp.zeros(shape, config.dtype),) * 2 for _ in self.layers]

    def __call__(
        self,
        cache: Cache,
        tokens_bk: Int[Array, "b k"],
        position: Int[Array, ""],
        ancestors_bkt: Int[Array, "b k t"],
    ) -> tuple[Float[Array, "b k v"], Cache]:
        """Returns float32 logits of the next token, and the cache with this position in it.

        Args:
            cache: of all positions before.
            tokens_bk: the token of each beam at this position.
            position: the position.
            ancestors_bkt: which beam wrote the key at each position before this one.
        """
        model, shape = self.model, tokens_bk.shape
        # No key is written beyond this position, and here each beam wrote its own.
        seen = jnp.arange(self.length)[:, None]
        beams = jnp.arange(self.num_beams)
        own_bktj = jnp.where(
            seen == position, beams[:, None, None] == beams, ancestors_bkt[..., None] == beams
        )
        mask = (own_bktj & (seen <= position)).reshape(*shape, -1)[:, None]
        x_bkd = model.decoder.embed(tokens_bk, jnp.full_like(tokens_bk, position), model.word_table)
        x_rd = x_bkd.reshape(-1, x_bkd.shape[-1])
        updated = []
        for layer, kept in zip(self.layers, cache, strict=True):
            q_bnkh, *new = (self._heads(y, shape) for y in jnp.split(layer.qkv(x_rd), 3, axis=1))
            kept = tuple(
                jax.lax.dynamic_update_slice_in_dim(old, new_bnkh, position * shape[1], axis=2)
                for old, new_bnkh in zip(kept, new, strict=True)
            )
            updated.append(kept)
            y = layer.out(self._attend(q_bnkh, kept, mask))
            x_rd = layer.norms[0](x_rd + y)
            q_bnkh = self._heads(layer.cross_q(x_rd), shape)
            y = layer.cross_out(self._attend(q_bnkh, layer.memory, self.memory_mask))
            x_rd = layer.norms[1](x_rd + y)
            y = layer.down(ops.gelu(layer.up(x_rd), layer.approximate))
            x_rd = layer.norms[2](x_rd + y)
        logits = _product(self.word_table, x_rd, jnp.float32) + model.logits_bias
        return logits.reshape(*shape, -1), updated

    def _heads(self, x_rd: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns `[B, N, K, H]`."""
        return x_rd.reshape(*shape, self.config.num_heads, -1).swapaxes(1, 2)

    def _attend(self, q_bnkh: jax.Array, kept: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
        """Returns the weighted sums of values, all heads of a row behind each other."""
        keys, values = kept
        q_bnkh = q_bnkh * jnp.asarray(self.config.head_size**-0.5, q_bnkh.dtype)
        # Keys on the left and a barrier, as in `_Product`.
        scores = jax.lax.optimization_barrier(jnp.einsum("bnsh,bnkh->bnsk", keys, q_bnkh))
        z_bkd, _ = ops.attend(_mix, scores.swapaxes(2, 3), mask, values, None, 0.0)
        return z_bkd.reshape(-1, z_bkd.shape[-1])


def _mix(
    probs_bnks: Float[Array, "b n k s"], values_bnsh: Float[Array, "b n s h"]
) -> Float[Array, "b k d"]:
    z_bnkh = jnp.einsum("bnks,bnsh->bnkh", probs_bnks, values_bnsh)
    z_bknh = jax.lax.optimization_barrier(z_bnkh).swapaxes(1, 2)
    return z_bknh.reshape(*z_bknh.shape[:2], -1)


def _constrained(
    scores: Float[Array, "b k v"],
    ids: Int[Array, "b k l"],
    length: Int[Array, ""],
    config: ModelConfig,
    options: GenerationOptions,
) -> Float[Array, "b k v"]:
    """Returns scores of the next token with what the options forbid at minus infinity."""
    token = jnp.arange(scores.shape[-1])
    never = -jnp.inf
    scores = jnp.where(token < config.vocab_size, scores, never)
    size = options.no_repeat_ngram_size
    if size:
        scores = _without_repeats(scores, ids, length, size)
    if options.min_length:
        too_early = (length < options.min_length) & (token == config.decoder.eos_id)
        scores = jnp.where(too_early, never, scores)
    for forced, at in (
        (options.forced_bos_id, 1),
        (options.forced_eos_id, options.max_length - 1),
    ):
        if forced is not None:
            only = jnp.where(token == forced, 0.0, never)
            scores = jnp.where(length == at, only, scores)
    return scores


def _without_repeats(scores: jax.Array, ids: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """Forbids each token that would end an n-gram that the ids hold already."""
    windows = ids.shape[-1] - size + 1
    starts = jnp.arange(windows)
    # The n-gram in the making begins with the last size - 1 ids.
    repeats = jnp.broadcast_to(starts + size <= length, (*ids.shape[:2], windows))
    for offset in range(size - 1):
        last = jax.lax.dynamic_slice_in_dim(ids, length + 1 - size + offset, 1, axis=-1)
        repeats &= ids[..., offset : offset + windows] == last
    # Windows that do not match forbid a token beyond the vocabulary, which is dropped.
    banned = jnp.where(repeats, ids[..., size - 1 :], scores.shape[-1])
    row, beam = (jnp.arange(n) for n in ids.shape[:2])
    return scores.at[row[:, None, None], beam[:, None], banned].set(-jnp.inf, mode="drop")


def _greedy(
    stepper: Stepper, config: ModelConfig, options: GenerationOptions, batch: int
) -> Generated:
    ids = jnp.full((batch, 1, options.max_length), config.pad_id, jnp.int32)
    ids = ids.at[..., 0].set(config.decoder.start_id)
    ancestors = jnp.zeros_like(ids)

    def body(state: Any) -> Any:
        length, ids, running, cache = state
        tokens = jax.lax.dynamic_index_in_dim(ids, length - 1, axis=2, keepdims=False)
        logits, cache = stepper(cache, tokens, length - 1, ancestors)
        best = jnp.argmax(_constrained(logits, ids, length, config, options), axis=-1)
        best = jnp.where(running[:, None], best, config.pad_id).astype(jnp.int32)
        ids = jax.lax.dynamic_update_index_in_dim(ids, best[..., None], length, axis=2)
        return length + 1, ids, running & (best[:, 0] != config.decoder.eos_id), cache

    def goes_on(state: Any) -> jax.Array:
        length, _, running, _ = state
        return (length < options.max_length) & running.any()

    first = (jnp.int32(1), ids, jnp.ones(batch, bool), stepper.empty_cache())
    _, ids, _, _ = jax.lax.while_loop(goes_on, body, first)
    return Generated(ids[:, 0], jnp.zeros(batch))


def _best(
    scores: Float[Array, "b k v"], before: Float[Array, "b k"], count: int
) -> tuple[Float[Array, "b c"], Int[Array, "b c"], Int[Array, "b c"]]:
    """Returns the best continuations of each text: score, the beam they go on from, token."""
    total = (scores + before[..., None]).reshape(scores.shape[0], -1)
    values, index = jax.lax.top_k(total, count)
    return values, index // scores.shape[-1], index % scores.shape[-1]


def _take(values: jax.Array, index_bc: jax.Array) -> jax.Array:
    """Returns the beams `[B, C, ...]` at an index `[B, C]`."""
    return jnp.take_along_axis(
        values, index_bc.reshape(index_bc.shape + (1,) * (values.ndim - 2)), axis=1
    )


def _beam_search(
    stepper: Stepper, config: ModelConfig, options: GenerationOptions, batch: int
) -> Generated:
    beams, longest = options.num_beams, options.max_length
    # Twice as many candidates as beams: were all the best to end, as many go on.
    candidates = 2 * beams
    # In float64, then rounded, as Python's powers are; generated tokens are one fewer than ids.
    penalties = jnp.asarray(
        np.maximum(np.arange(longest + 1.0) - 1, 0.5) ** options.length_penalty, jnp.float32
    )
    stops_when_full = options.early_stopping is True

    def body(state: Any) -> Any:
        tokens = jax.lax.dynamic_index_in_dim(state["ids"], state["length"] - 1, 2, keepdims=False)
        length = state["length"]
        logits, cache = stepper(state["cache"], tokens, length - 1, state["ancestors"])
        scores = _constrained(
            jax.nn.log_softmax(logits, axis=-1), state["ids"], length, config, options
        )
        values, parents, chosen = _best(scores, state["scores"], candidates)
        ids = jax.lax.dynamic_update_index_in_dim(
            _take(state["ids"], parents), chosen[..., None], length, axis=2
        )
        ends = (chosen == config.decoder.eos_id) | (length + 1 >= longest)

        # The best that go on.
        running, order = jax.lax.top_k(values + ends * _NEVER, beams)
        wrote = jnp.where(
            jnp.arange(longest) == length - 1, jnp.arange(beams)[:, None], state["ancestors"]
        )

        # The best of those that end, if they are among the first candidates, and of those that
        # ended before.
        full = state["finished"].all(axis=1, keepdims=True) & stops_when_full
        counts = ends & (jnp.arange(candidates) < beams)
        final = values / penalties[length + 1]
        final += (full | ~state["improvable"]) * _NEVER
        final += ~counts * _NEVER
        ended_scores, keep = jax.lax.top_k(
            jnp.concatenate([state["ended_scores"], final], axis=1), beams
        )
        ended = _take(jnp.concatenate([state["ended"], ids], axis=1), keep)
        finished = _take(jnp.concatenate([state["finished"], counts], axis=1), keep)

        # Whether the best that goes on could still beat the worst that ended.
        reach = longest
        if options.early_stopping != "never" or options.length_penalty <= 0:
            reach = length + 1
        hoped = running[:, :1] / penalties[reach]
        worst = jnp.where(finished, ended_scores.min(axis=1, keepdims=True), _NEVER)
        improvable = state["improvable"] & (hoped > worst).any(axis=1, keepdims=True)
        return {
            "length": length + 1,
            "ids": _take(ids, order),
            "scores": running,
            "ancestors": _take(wrote, _take(parents, order)),
            "cache": cache,
            "ended": ended,
            "ended_scores": ended_scores,
            "finished": finished,
            "improvable": improvable,
            "goes_on": improvable.any() & ~(finished.all() & stops_when_full) & ~ends.all(),
        }

    ids = jnp.full((batch, beams, longest), config.pad_id, jnp.int32)
    ids = ids.at[..., 0].set(config.decoder.start_id)
    first = {
        "length": jnp.int32(1),
        "ids": ids,
        # All beams are the same at first: only one of them counts.
        "scores": jnp.full((batch, beams), _NEVER).at[:, 0].set(0.0),
        "ancestors": jnp.zeros_like(ids),
        "cache": stepper.empty_cache(),
        "ended": ids,
        "ended_scores": jnp.full((batch, beams), _NEVER),
        "finished": jnp.zeros((batch, beams), bool),
        "improvable": jnp.ones((batch, 1), bool),
        "goes_on": jnp.bool_(True),
    }
    last = jax.lax.while_loop(lambda state: state["goes_on"], body, first)
    return Generated(last["ended"][:, 0], last["ended_scores"][:, 0])
