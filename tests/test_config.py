"""Config: strict at the border, with messages that name the field; the same after a round trip."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from ddrp_jax.config import (
    Config,
    DecoderConfig,
    DefinitionConfig,
    MaskingConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PositionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    as_dict,
    from_config_dict,
    to_config_dict,
)
from ddrp_jax.errors import UsageError

CLASSES = (
    Config,
    DefinitionConfig,
    DecoderConfig,
    MaskingConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PositionConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
)
CHANGED = Config(
    model=ModelConfig(
        vocab_size=99,
        num_layers=3,
        position=PositionConfig("shaw", max_distance=5, sharing="head"),
    ),
    objective=ObjectiveConfig(token_weight=0.5, head_layers="last"),
    stages=(
        StageConfig(name="short", length=16),
        StageConfig(name="long", schedule=ScheduleConfig("cosine", peak=0.1, end=0.01)),
    ),
    mesh=MeshConfig(data=2, fsdp=-1),
    train=TrainConfig(wandb="project", tensorboard=False),
)


@pytest.mark.parametrize("config", [Config(), CHANGED], ids=["defaults", "changed"])
def test_round_trips(config):
    assert from_config_dict(Config, to_config_dict(config)) == config
    assert from_config_dict(Config, json.loads(json.dumps(as_dict(config)))) == config
    assert from_config_dict(Config, ConfigDict(as_dict(config))) == config


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_valid_and_every_field_can_be_left_out(cls):
    assert from_config_dict(cls, {}) == cls()


def test_a_config_dict_can_be_overridden_field_by_field():
    values = to_config_dict(CHANGED)
    values.stages[1].schedule.peak = 0.2
    values.model.position.kind = "rope"
    config = from_config_dict(Config, values)
    assert config.stages[1].schedule.peak == 0.2
    assert config.model.position.kind == "rope"
    assert config.stages[0] == CHANGED.stages[0]


def error(cls, values):
    with pytest.raises(UsageError) as caught:
        from_config_dict(cls, values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "config.modle: there is no such field; did you mean 'model'?"),
        (
            {"model": {"num_layer": 3}},
            "config.model.num_layer: there is no such field; did you mean 'num_layers'?",
        ),
        (
            {"stages": [{}, {"name": "b", "schedule": {"peek": 1.0}}]},
            "config.stages[1].schedule.peek: there is no such field; did you mean 'peak'?",
        ),
        (
            {"mesh": {"zzz": 1}},
            "config.mesh.zzz: there is no such field; known fields: data, fsdp, tensor, dcn_data",
        ),
        (
            {"model": {"position": {"kind": "dddrp"}}},
            "config.model.position.kind='dddrp': expected one of absolute, shaw, ddrp, t5, rope, "
            "none; did you mean 'ddrp'?",
        ),
    ],
)
def test_unknown_names_suggest_the_nearest(values, message):
    assert error(Config, values) == message


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ModelConfig, {"num_layers": "3"}, "config.num_layers='3': expected int, got str"),
        (ModelConfig, {"num_layers": 2.5}, "config.num_layers=2.5: expected int, got float"),
        (ModelConfig, {"num_layers": True}, "config.num_layers=True: expected int, got bool"),
        (ModelConfig, {"dropout": "0.1"}, "config.dropout='0.1': expected float, got str"),
        (ModelConfig, {"dropout": False}, "config.dropout=False: expected float, got bool"),
        (ModelConfig, {"tied_head": 1}, "config.tied_head=1: expected bool, got int"),
        (ModelConfig, {"position": "ddrp"}, "config.position='ddrp': expected a mapping"),
        (ModelConfig, {"num_layers": None}, "config.num_layers=None: expected int, got NoneType"),
        (Config, {"stages": {"length": 3}}, "config.stages={'length': 3}: expected a list"),
        (Config, {"stages": "main"}, "config.stages='main': expected a list"),
        (Config, {"stages": [3]}, "config.stages[0]=3: expected a mapping of fields"),
        (ModelConfig, {"dtype": ["float32"]}, "config.dtype=['float32']: expected one of"),
    ],
)
def test_wrong_types_are_named(cls, values, message):
    assert error(cls, values).startswith(message)


def test_whole_numbers_of_either_type_are_taken():
    assert from_config_dict(ModelConfig, {"num_layers": 3.0}).num_layers == 3
    assert from_config_dict(ModelConfig, {"dropout": 0}).dropout == 0.0
    assert isinstance(from_config_dict(ModelConfig, {"dropout": 0}).dropout, float)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (PositionConfig, {"max_distance": 0}, "max_distance=0: expected at least 1"),
        (PositionConfig, {"directions": 4}, "directions=4: expected 2 or 3"),
        (PositionConfig, {"num_buckets": 5}, "num_buckets=5: expected an even number"),
        (PositionConfig, {"num_buckets": 2}, "num_buckets=2: expected an even number"),
        (PositionConfig, {"bucket_max_distance": 8}, "bucket_max_distance=8: expected more than"),
        (PositionConfig, {"rope_theta": 0}, "rope_theta=0.0: expected a positive number"),
        (ModelConfig, {"num_heads": 0}, "num_heads=0: expected at least 1"),
        (
            ModelConfig,
            {"hidden_size": 10, "num_heads": 4},
            "num_heads=4: expected a divisor of hidden_size, 10",
        ),
        (
            ModelConfig,
            {"hidden_size": 9, "num_heads": 3, "position": {"kind": "rope"}},
            "num_heads=3: expected an even head size for rope, not 9/3",
        ),
        (
            ModelConfig,
            {"decoder": {"num_layers": 1}},
            "position.kind='ddrp': expected 'absolute' in a model with a decoder",
        ),
        (
            ModelConfig,
            {"decoder": {"num_layers": 1}, "position": {"kind": "absolute"}},
            "position_offset=0: expected 2 in a model with a decoder",
        ),
        (
            ModelConfig,
            {
                "decoder": {"num_layers": 1},
                "position": {"kind": "absolute"},
                "position_offset": 2,
                "tied_head": False,
            },
            "tied_head=False: expected True in a model with a decoder",
        ),
        (DecoderConfig, {"num_layers": -1}, "num_layers=-1: expected at least 0"),
        (DecoderConfig, {"forced_bos_id": -1}, "forced_bos_id=-1: expected at least 0"),
        (ModelConfig, {"dropout": 1.0}, "dropout=1.0: expected in [0, 1)"),
        (ModelConfig, {"attention_dropout": -0.1}, "attention_dropout=-0.1: expected in [0, 1)"),
        (ModelConfig, {"pad_id": -1}, "pad_id=-1: expected at least 0"),
        (ModelConfig, {"norm_epsilon": 0.0}, "norm_epsilon=0.0: expected a positive number"),
        (ModelConfig, {"initializer_range": -1.0}, "initializer_range=-1.0: expected a positive"),
        (ObjectiveConfig, {"token_weight": -0.1}, "token_weight=-0.1: expected at least 0"),
        (MaskingConfig, {"rate": 0.0}, "rate=0.0: expected in (0, 1)"),
        (MaskingConfig, {"random_fraction": 1.5}, "random_fraction=1.5: expected in [0, 1]"),
        (
            MaskingConfig,
            {"mask_fraction": 0.8, "random_fraction": 0.3},
            "mask_fraction + random_fraction=1.1",
        ),
        (ScheduleConfig, {"peak": 0.0}, "peak=0.0: expected a positive number"),
        (ScheduleConfig, {"peak": float("nan")}, "peak=nan: expected a positive number"),
        (ScheduleConfig, {"peak": float("inf")}, "peak=inf: expected a positive number"),
        (ScheduleConfig, {"peak": 0.1, "end": 0.2}, "end=0.2: expected in [0, peak=0.1]"),
        (ScheduleConfig, {"warmup_steps": -1}, "warmup_steps=-1: expected at least 0"),
        (StageConfig, {"length": 2}, "length=2: expected at least 3"),
        (StageConfig, {"steps": 0}, "steps=0: expected at least 1"),
        (
            StageConfig,
            {"batch_size": 8, "accumulation": 3},
            "accumulation=3: expected a divisor of batch_size, 8",
        ),
        (OptimizerConfig, {"b2": 1.0}, "b2=1.0: expected in [0, 1)"),
        (OptimizerConfig, {"eps": 0.0}, "eps=0.0: expected a positive number"),
        (OptimizerConfig, {"clip_norm": -1}, "clip_norm=-1.0: expected at least 0"),
        (MeshConfig, {"data": -1, "fsdp": -1}, "data, fsdp, tensor=(-1, -1, 1): expected"),
        (MeshConfig, {"tensor": 0}, "data, fsdp, tensor=(-1, 1, 0): expected positive numbers"),
        (TrainConfig, {"log_every": 0}, "log_every=0: expected at least 1"),
        (TrainConfig, {"save_every": -1}, "save_every=-1: expected at least 0"),
        (TrainConfig, {"seed": 2**31}, "seed=2147483648: expected below"),
        (Config, {"stages": []}, "stages=(): expected at least one stage"),
        (Config, {"stages": [{}, {}]}, "stages=['main', 'main']: expected a different name each"),
    ],
)
def test_values_out_of_range_are_named(cls, values, message):
    assert error(cls, values).startswith(f"config.{message}")


def test_a_stage_longer_than_the_absolute_positions_is_refused():
    """RoBERTa's longest sequence is max_position_embeddings - pad - 1; without a table, any."""
    absolute = {"model": {"position": {"kind": "absolute"}, "max_length": 510}}
    stage = {"stages": [{"length": 511}]}
    message = "config.stages[0].length=511: expected at most model.max_length=510"
    assert error(Config, absolute | stage) == message
    added = {"model": {"position": {"add_absolute": True}, "max_length": 510}}
    assert error(Config, added | stage) == message
    from_config_dict(Config, {"model": {"max_length": 510}} | stage)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model = ModelConfig()


def test_every_file_of_configs_gives_a_valid_config():
    files = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
    assert files
    for file in files:
        names = runpy.run_path(str(file))
        # These take a checkpoint; other tests have one for them.
        if file.name in ("go_on.py", "definitionemb_demo.py"):
            continue
        kind, command = Config, "ddrp pretrain"
        if file.name.startswith("definitionemb_"):
            kind, command = DefinitionConfig, "ddrp definitions train"
        config = from_config_dict(kind, names["get_config"]())
        assert isinstance(config, kind)
        assert names["__doc__"].count(command), f"{file.name} does not give its command"
