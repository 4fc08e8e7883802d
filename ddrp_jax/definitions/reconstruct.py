"""The reconstructor: a copy of a model that produces a token's embedding from its definition.

Student: the pre-trained model and a bias-free linear map `L` on its last hidden state (the
encoder's, or the decoder's where there is one). Teacher: the model's own word table, frozen.
(arXiv 2408.01308, as released; packing of several examples into a row is ours.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt32

from ddrp_jax.config import DefinitionConfig, from_config_dict
from ddrp_jax.data import pipeline
from ddrp_jax.data.frequency import rank_tokens
from ddrp_jax.data.tokenizers import Tokenizer, load_tokenizer
from ddrp_jax.definitions.examples import Examples, open_examples
from ddrp_jax.definitions.ridge import fit_ridge
from ddrp_jax.definitions.rows import ExampleRows
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.models.seq2seq import Seq2Seq, build_model
from ddrp_jax.objectives import definition
from ddrp_jax.training import checkpoint, sharding
from ddrp_jax.training.evaluation import MASK_SEED, put
from ddrp_jax.training.hardware import stage_flops
from ddrp_jax.training.loop import train
from ddrp_jax.training.pretrained import Pretrained, load_pretrained
from ddrp_jax.training.step import Batch, Objective, Sums, Training, abstract_model, build_training

# Rows of a batch outside training, and their length: enough work for a call.
_ROWS, _LENGTH = 32, 128


class Reconstructor(nnx.Module):
    """The student with its map, and the teacher where it is not the student's own table.

    Args:
        config: of the run.
        rngs: stream `params`.
    """

    def __init__(self, config: DefinitionConfig, *, rngs: nnx.Rngs):
        model = config.model
        student = build_model(model, rngs=rngs)
        # The masked-LM head has no part in this.
        self.student = student if isinstance(student, Seq2Seq) else student.encoder
        shape = (model.hidden_size, model.hidden_size)
        # N(0, 1/D), which `parameter` draws only for a model initialised by fan-in.
        value = nnx.initializers.normal(model.hidden_size**-0.5)(rngs.params(), shape)
        self.map_kernel = nnx.Param(value, out_sharding=("embed", None), eager_sharding=False)
        self.teacher = nnx.data(None)
        if config.reconstruction.train_embeddings:
            self.teacher = nnx.Param(
                jnp.zeros(self.word_table.shape),
                out_sharding=("vocab", "embed"),
                eager_sharding=False,
            )

    @property
    def word_table(self) -> Float[Array, "v d"]:
        """The student's own input embeddings."""
        return _encoder(self.student).embeddings.word[...]

    @property
    def targets(self) -> Float[Array, "v d"]:
        """The teacher's table, a constant."""
        table = self.word_table if self.teacher is None else self.teacher[...]
        return jax.lax.stop_gradient(table)

    def __call__(
        self, batch: Batch, dropout_keys: UInt32[Array, " b"] | None = None
    ) -> Float[Array, "b s d"]:
        """Returns `L h` at every place of `definitions.rows.ExampleRows`'s targets."""
        hidden = self.hidden(batch, dropout_keys)
        return hidden.astype(jnp.float32) @ self.map_kernel[...]

    def hidden(
        self, batch: Batch, dropout_keys: UInt32[Array, " b"] | None = None
    ) -> Float[Array, "b s d"]:
        """Returns the student's last hidden states at those places."""
        source = batch["input_ids"], batch["segment_ids"]
        if isinstance(self.student, Seq2Seq):
            decoder = batch["decoder_ids"], batch["decoder_segment_ids"]
            positions = batch["positions"], batch["decoder_positions"]
            return self.student(
                *source, *decoder, positions=positions, dropout_keys=dropout_keys
            ).hidden
        return self.student(*source, batch["positions"], dropout_keys=dropout_keys).hidden


def objective(config: DefinitionConfig) -> Objective:
    """Returns the objective of a reconstructor: the squared error over all target places."""

    def loss(
        model: Reconstructor, batch: Batch, keys: jax.Array, whole_batch: Batch, step: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        if not config.reconstruction.train_embeddings:
            word = _encoder(model.student).embeddings.word
            word.set_value(jax.lax.stop_gradient(word[...]))
        predictions = model(batch, keys)
        targets = jnp.take(model.targets, batch["target_ids"], axis=0)
        metrics = {}
        for name, weights in _PLACES.items():
            count = jnp.maximum(whole_batch[weights].sum(), 1)
            for measure, function in _MEASURES.items():
                total, _ = function(predictions, targets, batch[weights])
                metrics[f"{name}{measure}"] = total / count
        return metrics["error"], metrics

    def evaluate(model: Reconstructor, batch: Batch) -> Sums:
        predictions = model(batch)
        targets = jnp.take(model.targets, batch["target_ids"], axis=0)
        weights = batch["slot_weights"]
        return {
            "slot_error": definition.squared_error(predictions, targets, weights),
            "slot_cosine": definition.cosine(predictions, targets, weights),
            **definition.target_moments(targets, weights),
        }

    def is_frozen(path: str) -> bool:
        return path == "teacher" or (
            path.endswith("embeddings/word") and not config.reconstruction.train_embeddings
        )

    return Objective(
        create=lambda rngs: Reconstructor(config, rngs=rngs),
        loss=loss,
        evaluate=evaluate,
        is_frozen=is_frozen,
    )


_MEASURES = {"error": definition.squared_error, "cosine": definition.cosine}
# Prefix of a metric's name, and the weights that it is taken with.
_PLACES = {"": "target_weights", "slot_": "slot_weights"}


def train_reconstructor(
    config: DefinitionConfig, workdir: Path, *, profile: tuple[int, int] | None = None
) -> int:
    """Trains a reconstructor, or goes on from the newest good checkpoint in `workdir`.

    Args:
        config: the run.
        workdir: the run's folder, as `loop.train` keeps it.
        profile: first and last step to trace.

    Returns:
        Exit status: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        UsageError: the config cannot be right, or may not change on resume.
        DdrpError: bad data, no usable checkpoint, a full disk, a loss that is not finite.
    """
    origin = config.reconstruction.checkpoint
    return train(Reconstruction(config), workdir, origin=origin, profile=profile)


class Reconstruction:
    """The task of training a reconstructor (`training.task.Task`)."""

    criterion = "loss"

    def __init__(self, config: DefinitionConfig):
        if config.model.decoder.num_layers and config.reconstruction.reconstruct_definitions:
            raise UsageError(
                "config.reconstruction.reconstruct_definitions=True: a decoder reads the pieces of "
                "the word alone, so there is no definition to reconstruct; set it to False"
            )
        source = checkpoint.find_checkpoint(config.reconstruction.checkpoint)
        self._examples = [_open(stage.records, i) for i, stage in enumerate(config.stages)]
        self.tokenizer = self._examples[0].tokenizer()
        for examples in self._examples:
            check_examples(examples, source)
        self._source = source
        table = word_table(source, config.model.vocab_size)
        reconstruction = dataclasses.replace(
            config.reconstruction, fingerprint=table_fingerprint(table)
        )
        self.config = dataclasses.replace(config, reconstruction=reconstruction)

    def source(self, stage_index: int) -> Path:
        return self._examples[stage_index].path

    def batches(self, stage_index: int, step: int) -> pipeline.TrainBatches:
        config, stage = self.config, self.config.stages[stage_index]
        process_index, process_count = sharding.row_share(sharding.make_mesh(config.mesh))
        identity = {
            "records": self._examples[stage_index].fingerprint,
            "length": stage.length,
            "batch_size": stage.batch_size,
            "seed": config.train.seed,
        }
        return pipeline.endless_batches(
            self._rows(stage_index, "train"),
            stage.batch_size,
            identity,
            process_index=process_index,
            process_count=process_count,
            start_step=step,
            prefetch=config.train.prefetch,
            workers=config.train.workers,
        )

    def held_out(self, stage_index: int) -> Any:
        rows = self._rows(stage_index, "heldout")
        if not len(rows.chosen):
            return None
        config = self.config
        process_index, process_count = sharding.row_share(sharding.make_mesh(config.mesh))
        return pipeline.finite_batches(
            rows,
            config.train.eval_batch_size or config.stages[stage_index].batch_size,
            max_rows=config.train.eval_rows,
            process_index=process_index,
            process_count=process_count,
        )

    def training(self, stage_index: int, mesh: Mesh) -> Training:
        return build_training(self.config, stage_index, mesh, objective(self.config))

    def step_flops(self, stage_index: int) -> float:
        has_decoder = self.config.model.decoder.num_layers > 0
        decoder_length = self._rows(stage_index, "train").decoder_length if has_decoder else 0
        return stage_flops(self.config, self.config.stages[stage_index], decoder_length)

    def init_params(self, mesh: Mesh) -> Any:
        config = self.config
        pretrained = load_pretrained(self._source)
        shapes = self.training(0, mesh).abstract_state.params
        places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        student = pretrained.params
        if not config.model.decoder.num_layers:
            student = student["encoder"]
        key = jax.random.key(config.train.seed)
        size = config.model.hidden_size
        params = {
            "student": student,
            "map_kernel": jax.random.normal(key, (size, size)) * size**-0.5,
        }
        if "teacher" in shapes:
            params["teacher"] = jnp.copy(_encoder_params(student)["embeddings"]["word"])
        _check_same_shapes(params, shapes, self._source)
        if config.reconstruction.map_init == "ridge":
            params["map_kernel"] = self._ridge_map(pretrained, params)
        return jax.device_put(params, places)

    def check_checkpoint(self, path: Path) -> None:
        check_examples(self._examples[0], path)

    def measures(self, means: Mapping[str, Any]) -> dict[str, Any]:
        if not means:
            return {}
        return relative_measures(means, self.config.model.hidden_size)

    def _rows(self, stage_index: int, split: str) -> ExampleRows:
        config, examples = self.config, self._examples[stage_index]
        chosen = examples.split(split)
        is_target = self._is_target(examples)
        training = split == "train"
        if training:
            chosen = chosen[is_target[examples.target_id[chosen]]]
        corrupts = training and config.reconstruction.reconstruct_definitions
        return ExampleRows(
            examples=examples,
            chosen=chosen,
            length=config.stages[stage_index].length,
            seed=config.train.seed if training else MASK_SEED,
            tokenizer=self.tokenizer,
            corruption=config.reconstruction if corrupts else None,
            is_target=is_target if training else np.ones_like(is_target),
            decoder_start=decoder_start(config, self.tokenizer),
        )

    def _is_target(self, examples: Examples) -> np.ndarray:
        """Returns which tokens may be regressed to: none held out, none distrusted."""
        is_target = np.ones(self.tokenizer.vocab_size, bool)
        is_target[examples.held_out_ids] = False
        ratio = self.config.reconstruction.filter_ratio
        if ratio:
            ranking = rank_tokens(self.tokenizer)
            count = min(round(ratio * len(is_target)), len(ranking))
            is_target[ranking[len(ranking) - count :]] = False
        return is_target

    def _ridge_map(self, pretrained: Pretrained, params: Any) -> np.ndarray:
        """Returns the map that regresses targets on the untrained student's hidden states."""
        examples = self._examples[0]
        chosen = self._rows(0, "train").chosen
        count = min(self.config.reconstruction.ridge_examples, len(chosen))
        draw = np.random.default_rng(self.config.train.seed)
        chosen = np.sort(draw.choice(chosen, count, replace=False))
        model = _Frozen(self.config, params, pretrained.mesh, self.tokenizer)
        features = model.at_slots(examples, chosen, hidden=True)
        table = np.asarray(model.targets)
        fit = fit_ridge(
            features,
            table[examples.target_id[chosen]],
            groups=examples.headword[chosen],
            intercept=False,
        )
        return fit.weights.astype(np.float32)


class _Frozen:
    """A reconstructor that only reads: hidden states or rows at the slots of examples."""

    def __init__(self, config: DefinitionConfig, params: Any, mesh: Mesh, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        graphdef, _, shardings = abstract_model(objective(config).create, mesh)
        self._params = jax.device_put(params, shardings)
        self._where = sharding.batch_sharding(mesh)
        self._batch_size = _ROWS + -_ROWS % mesh.size
        self.targets = nnx.merge(graphdef, self._params).targets[: config.model.vocab_size]

        def read(hidden: bool):
            def function(params: Any, batch: Batch) -> jax.Array:
                model = nnx.merge(graphdef, params)
                return model.hidden(batch) if hidden else model(batch)

            return jax.jit(function, out_shardings=sharding.replicated(mesh))

        self._hidden, self._rows = read(True), read(False)

    def at_slots(self, examples: Examples, chosen: np.ndarray, *, hidden: bool) -> np.ndarray:
        """Returns float32 [n, D] for examples `chosen` [n]: hidden states, or `L h`."""
        function = self._hidden if hidden else self._rows
        longest = int(examples.lengths[chosen].max(initial=1))
        reader = ExampleRows(
            examples=examples,
            chosen=chosen,
            length=max(_LENGTH, longest),
            seed=0,
            tokenizer=self._tokenizer,
            corruption=None,
            is_target=np.ones(self._tokenizer.vocab_size, bool),
            decoder_start=decoder_start(self._config, self._tokenizer),
        )
        place = np.full(len(examples), -1, np.int64)
        place[chosen] = np.arange(len(chosen))
        out = np.empty((len(chosen), self._config.model.hidden_size), np.float32)
        for batch in pipeline.finite_batches(reader, self._batch_size):
            example = batch.pop("example")
            values = np.asarray(function(self._params, put(batch, self._where)))
            is_slot = example >= 0
            out[place[example[is_slot]]] = values[is_slot]
        return out


@dataclasses.dataclass(frozen=True)
class TrainedReconstructor:
    """A reconstructor out of a checkpoint.

    Attributes:
        path: the checkpoint's folder.
        config: of its run.
        tokenizer: of the model that it rebuilds.
        model: what reads examples.
    """

    path: Path
    config: DefinitionConfig
    tokenizer: Tokenizer
    model: _Frozen

    def produce(self, examples: Examples, token_ids: Any, senses: str = "first") -> np.ndarray:
        """Returns float32 [n, D]: the raw `L h` of each token, unnormalised.

        Args:
            examples: made with the same tokenizer; each token has a definition in it.
            token_ids: [n].
            senses: "first": of the first definition's example (the source); "mean": over all of
                the same headword's definitions.
        """
        chosen = examples.for_tokens(token_ids, senses)
        rows = self.model.at_slots(examples, chosen, hidden=False)
        if senses == "first":
            return rows
        token_ids = np.asarray(token_ids)
        distinct, which = np.unique(token_ids, return_inverse=True)
        group = np.searchsorted(distinct, examples.target_id[chosen])
        sums = np.zeros((len(distinct), rows.shape[1]))
        np.add.at(sums, group, rows)
        means = sums / np.bincount(group, minlength=len(distinct))[:, None]
        return means[which].astype(np.float32)


def load_reconstructor(path: str | Path, mesh: Mesh) -> TrainedReconstructor:
    """Loads a reconstructor of a run (its best checkpoint) or of one checkpoint's folder.

    Raises:
        UsageError: there is no checkpoint, or it holds another kind of model.
        DdrpError: it is damaged.
    """
    folder = checkpoint.find_best(path)
    values = checkpoint.read_config(folder)
    if "reconstruction" not in values:
        raise UsageError(
            f"{folder}: not a reconstructor; name the workdir of 'ddrp definitions train'"
        )
    config = from_config_dict(DefinitionConfig, values, f"{folder}/config.json")
    _, shapes, shardings = abstract_model(objective(config).create, mesh)
    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings,
    )
    params = checkpoint.restore_params(folder, abstract)
    tokenizer = load_tokenizer(folder / "tokenizer")
    return TrainedReconstructor(folder, config, tokenizer, _Frozen(config, params, mesh, tokenizer))


def produce_rows(
    path: Path, examples: Examples, token_ids: Any, senses: str, mesh: Mesh
) -> np.ndarray:
    """Returns the rows [n, D] that a reconstructor's checkpoint gives tokens."""
    return load_reconstructor(path, mesh).produce(examples, token_ids, senses)


def relative_measures(means: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Returns the loss, its share of the best constant row's, and the mean cosine.

    Args:
        means: of the sums that a reconstructor's evaluation gives.
        size: D.
    """
    constant = means["target_square"] - float(np.square(means["target"]).sum())
    error = means["slot_error"]
    relative = error * size / 100 / constant if constant > 0 else math.nan
    return {
        "loss": error,
        "slot_error": error,
        "slot_cosine": means["slot_cosine"],
        "relative_error": relative,
    }


def check_examples(examples: Examples, path: Path) -> None:
    """Raises UsageError unless examples were made with the tokenizer of a checkpoint."""
    if load_tokenizer(path / "tokenizer").fingerprint != examples.tokenizer_fingerprint:
        raise UsageError(
            f"definitions {str(examples.path)!r} were made with another tokenizer than checkpoint "
            f"{path}; run 'ddrp definitions build' with '--tokenizer {path / 'tokenizer'}'"
        )


def word_table(path: Path, vocab_size: int) -> np.ndarray:
    """Returns a checkpoint's word table, float32 [vocab_size, D], without the padding."""
    return np.asarray(checkpoint.restore_array(path, "encoder/embeddings/word"))[:vocab_size]


def table_fingerprint(table: np.ndarray) -> str:
    """Returns 16 hex digits of a word table."""
    return hashlib.sha256(np.ascontiguousarray(table, np.float32).tobytes()).hexdigest()[:16]


def decoder_start(config: DefinitionConfig, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """Returns what a decoder reads before a word's pieces; None without a decoder."""
    decoder = config.model.decoder
    return (decoder.start_id, tokenizer.cls_id) if decoder.num_layers else None


def _encoder(student: Any) -> Any:
    return student.encoder if isinstance(student, Seq2Seq) else student


def _encoder_params(student: Mapping[str, Any]) -> Mapping[str, Any]:
    return student.get("encoder", student)


def _check_same_shapes(params: Any, shapes: Any, path: Path) -> None:
    wanted, given = (
        {
            jax.tree_util.keystr(key, simple=True, separator="/"): leaf.shape
            for key, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (shapes, params)
    )
    problems = [
        f"{name}: {given.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} by "
        "config.model"
        for name in sorted(wanted.keys() | given.keys())
        if wanted.get(name) != given.get(name)
    ]
    if problems:
        raise DdrpError(f"{path} does not fit config.model:\n  " + "\n  ".join(problems))


def _open(path: str, index: int) -> Examples:
    if not path:
        raise UsageError(
            f"config.stages[{index}].records='': name a folder that 'ddrp definitions build' wrote"
        )
    return open_examples(path)
