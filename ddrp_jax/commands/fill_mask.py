"""`ddrp fill-mask`: what a checkpoint predicts for the masked tokens of a text."""

from __future__ import annotations

import argparse

from ddrp_jax.commands.output import aligned
from ddrp_jax.errors import UsageError

EXAMPLE = """
ddrp fill-mask --checkpoint runs/demo "a [MASK] of the sea"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run's folder (its newest good checkpoint) or one checkpoint's folder",
    )
    parser.add_argument(
        "text", help="a text that holds the tokenizer's mask token, [MASK] or <mask>"
    )
    parser.add_argument(
        "--top-k", type=int, default=5, metavar="K", help="predictions to show (default: 5)"
    )


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ddrp_jax.models.seq2seq import Seq2Seq, shift_right
    from ddrp_jax.training.pretrained import load_pretrained

    pretrained = load_pretrained(args.checkpoint)
    config, tokenizer = pretrained.config.model, pretrained.tokenizer
    if not 1 <= args.top_k <= config.vocab_size:
        raise UsageError(
            f"--top-k={args.top_k}: expected 1 to the vocabulary's {config.vocab_size}"
        )
    ids = np.asarray(tokenizer.encode_with_special(args.text), np.int32)
    masked = np.flatnonzero(ids == tokenizer.mask_id)
    if not len(masked):
        raise UsageError(
            f"text {args.text!r}: there is no {tokenizer.id_to_token(tokenizer.mask_id)} in it"
        )
    if config.position.has_absolute and len(ids) > config.max_length:
        raise UsageError(
            f"text: {len(ids)} tokens; this model has positions for {config.max_length}"
        )

    model = pretrained.model()
    row = jnp.asarray(ids)[None]
    if isinstance(model, Seq2Seq):
        all_real = jnp.ones_like(row, bool)
        read = shift_right(row, config.decoder.start_id)
        hidden = model(row, all_real, read, all_real).hidden
    else:
        hidden = model.encoder(row, jnp.ones_like(row), jnp.arange(len(ids))[None]).hidden
    logits = model.logits(hidden, jnp.asarray(masked)[None])
    probabilities, best = jax.lax.top_k(jax.nn.softmax(logits[0]), args.top_k)
    for number, (shares, tokens) in enumerate(zip(probabilities, best, strict=True), start=1):
        if len(masked) > 1:
            print(f"mask {number}")
        print(
            aligned(
                [
                    (
                        f"{share:.4f}",
                        tokenizer.decode([token]).strip() or tokenizer.id_to_token(token),
                    )
                    for share, token in zip(shares.tolist(), tokens.tolist(), strict=True)
                ]
            )
        )
