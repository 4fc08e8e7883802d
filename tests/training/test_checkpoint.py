"""Checkpoints as files: written, damaged, copied, removed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.training import checkpoint
from ddrp_jax.training.state import TrainState


class FakeTokenizer:
    """Stands for any tokenizer: a checkpoint only asks it to write its files."""

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")


def make_state(step=0, size=40):
    generator = np.random.default_rng(step)
    params = {
        "encoder": {
            "layers": {"query_kernel": jnp.asarray(generator.normal(size=(2, 3, size)), "float32")},
            "word": jnp.asarray(generator.normal(size=(size, 8)), "float32"),
        }
    }
    opt_state = optax.adam(1e-3).init(params)
    return TrainState(jnp.int32(step), params, opt_state, jnp.bool_(True))


def abstract(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


@pytest.fixture
def checkpoints(tmp_path):
    made = checkpoint.Checkpoints(
        tmp_path / "run" / "checkpoints",
        config={"model": {"num_layers": 2}},
        tokenizer=FakeTokenizer(),
        keep_last=3,
        keep_best=1,
    )
    yield made
    made.close()


def save(checkpoints, step, loss=None):
    checkpoints.save(make_state(step), step=step, progress={"step": step}, held_out_loss=loss)
    checkpoints.wait()


def steps(checkpoints):
    return sorted(int(path.name) for path in checkpoints.folder.iterdir() if path.name.isdecimal())


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, other
    )


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def array_file(folder):
    """The largest file of a checkpoint: the one that holds the arrays."""
    return max(
        (folder / "arrays").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size
    )


def test_what_is_saved_comes_back(checkpoints):
    save(checkpoints, 7)
    folder = checkpoints.newest()
    assert checkpoint.read_progress(folder) == {"step": 7}
    assert checkpoint.read_config(folder) == {"model": {"num_layers": 2}}
    state = make_state(7)
    assert_equal(checkpoint.restore(folder, abstract(state)), state)
    assert_equal(checkpoint.restore_params(folder, abstract(state.params)), state.params)
    assert checkpoint.parameter_shapes(folder) == {
        "encoder/layers/query_kernel": ((2, 3, 40), "float32"),
        "encoder/word": ((40, 8), "float32"),
    }


def test_a_state_whose_memory_is_taken_while_it_is_written(checkpoints):
    def advance(state):
        return jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), state)

    advance = jax.jit(advance, donate_argnums=0)
    state = advance(make_state(size=100_000))
    expected = jax.tree.map(lambda leaf: np.array(leaf), state)
    checkpoints.save(state, step=1, progress={})
    for _ in range(5):
        state = advance(state)
    checkpoints.wait()
    assert_equal(checkpoint.restore(checkpoints.newest(), abstract(state)), expected)


def test_a_copied_folder_is_enough(checkpoints, tmp_path):
    save(checkpoints, 3)
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(checkpoints.newest(), copy)
    shutil.rmtree(checkpoints.folder)
    assert checkpoint.find_checkpoint(copy) == copy
    assert checkpoint.read_config(copy) == {"model": {"num_layers": 2}}
    assert (copy / "tokenizer" / "vocab.txt").is_file()
    state = make_state(3)
    assert_equal(checkpoint.restore_params(copy, abstract(state.params)), state.params)


def test_a_run_and_a_step_name_a_checkpoint(checkpoints):
    for step in (1, 2):
        save(checkpoints, step)
    run = checkpoints.folder.parent
    assert checkpoint.find_checkpoint(run).name == "2"
    assert checkpoint.find_checkpoint(run / "checkpoints" / "1").name == "1"
    with pytest.raises(UsageError, match="no such folder"):
        checkpoint.find_checkpoint(run / "nothing")
    with pytest.raises(UsageError, match="no checkpoint there"):
        checkpoint.find_checkpoint(run.parent)


def test_the_last_and_the_best_are_kept(checkpoints):
    for step, loss in enumerate([4.0, 2.0, 3.0, None, 5.0, None, None], start=1):
        save(checkpoints, step, loss)
    assert steps(checkpoints) == [2, 5, 6, 7]
    assert len(os.listdir(checkpoints.folder)) == 4


def truncate(folder):
    file = array_file(folder)
    file.write_bytes(file.read_bytes()[:-1])


def remove_an_array(folder):
    array_file(folder).unlink()


def flip_in_array(folder):
    flip_a_bit(array_file(folder))


def flip_in_config(folder):
    flip_a_bit(folder / "config.json")


def change_the_manifest(folder):
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"step": 3', '"step": 2'))


def empty_the_manifest(folder):
    (folder / "manifest.json").write_bytes(b"")


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()


def empty_the_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE = [
    truncate,
    remove_an_array,
    flip_in_array,
    flip_in_config,
    change_the_manifest,
    empty_the_manifest,
    remove_the_manifest,
    empty_the_folder,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_next_good_one_taken(checkpoints, caplog, damage):
    for step in (1, 2, 3):
        save(checkpoints, step)
    damaged = checkpoints.folder / "3"
    damage(damaged)
    assert checkpoints.newest().name == "2"
    assert [str(damaged) in record.getMessage() for record in caplog.records] == [True]
    # The run goes on and comes to the same step again.
    save(checkpoints, 3)
    assert checkpoints.newest().name == "3"


def test_a_flipped_bit_in_any_file_is_seen(checkpoints):
    save(checkpoints, 1)
    folder = checkpoints.newest()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        original = file.read_bytes()
        if not original:
            continue
        changed = bytearray(original)
        changed[-len(changed) // 2] ^= 0x40
        file.write_bytes(changed)
        with pytest.raises(checkpoint.DamagedError):
            checkpoint.verify(folder)
        file.write_bytes(original)
    checkpoint.verify(folder)


def test_damage_does_not_count_as_a_kept_checkpoint(checkpoints):
    for step in (1, 2, 3):
        save(checkpoints, step)
    (checkpoints.folder / "9").mkdir()
    truncate(checkpoints.folder / "3")
    assert checkpoints.newest().name == "2"
    save(checkpoints, 4)
    assert steps(checkpoints) == [1, 2, 3, 4, 9]


def test_an_older_checkpoint_without_its_manifest_does_not_stop_a_save(checkpoints):
    for step in (1, 2):
        save(checkpoints, step)
    remove_the_manifest(checkpoints.folder / "1")
    save(checkpoints, 3)
    assert checkpoints.newest().name == "3"


def test_none_usable_is_an_error(checkpoints):
    save(checkpoints, 1)
    truncate(checkpoints.folder / "1")
    (checkpoints.folder / "9").mkdir()
    with pytest.raises(DdrpError, match=r"none of its 2 checkpoints is usable \(9, 1\)"):
        checkpoints.newest()
    with pytest.raises(DdrpError, match="none of its 2 checkpoints is usable"):
        checkpoint.find_checkpoint(checkpoints.folder.parent)


def test_a_killed_save_is_ignored_and_removed(checkpoints):
    save(checkpoints, 1)
    shutil.copytree(checkpoints.folder / "1", checkpoints.folder / ".saving-2")
    assert checkpoints.newest().name == "1"
    checkpoints.clean()
    assert os.listdir(checkpoints.folder) == ["1"]


def test_every_difference_from_the_model_is_named_at_once(checkpoints):
    save(checkpoints, 1)
    params = abstract(make_state(1).params)
    encoder = params["encoder"]
    encoder["position"] = encoder["word"]
    encoder["word"] = jax.ShapeDtypeStruct((41, 8), jnp.float32)
    del encoder["layers"]
    with pytest.raises(DdrpError) as error:
        checkpoint.restore_params(checkpoints.newest(), params)
    assert str(error.value).splitlines()[1:] == [
        "  encoder/position: missing in the checkpoint",
        "  encoder/layers/query_kernel: not in this model",
        "  encoder/word: (40, 8) in the checkpoint, (41, 8) in this model",
    ]


def test_a_checkpoint_moves_between_meshes(checkpoints):
    save(checkpoints, 5)
    program = f"""
import jax, json, numpy as np, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import make_state, assert_equal, checkpoint, Path
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ("fsdp",))
state = make_state(5)
def place(leaf):
    spec = P(None, None, "fsdp") if leaf.ndim == 3 else P("fsdp") if leaf.ndim == 2 else P()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
wanted = jax.tree.map(place, state)
restored = checkpoint.restore(Path({str(checkpoints.newest())!r}), wanted)
assert_equal(restored, state)
for leaf, target in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted)):
    assert leaf.sharding == target.sharding
print(len(restored.params["encoder"]["word"].addressable_shards))
"""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "8\n"


FILL_THE_DISK = """
import resource, sys
sys.path.insert(0, {here!r})
from test_checkpoint import *
made = checkpoint.Checkpoints(
    Path(sys.argv[1]), config={{}}, tokenizer=FakeTokenizer(), keep_last=9, keep_best=0
)
# The kernel really refuses the write, as it does on a full disk.
made.save(make_state(1, size=500), step=1, progress={{}})
made.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
made.save(make_state(2, size=500_000), step=2, progress={{}})
try:
    made.wait()
except checkpoint.DdrpError as error:
    print(error)
assert made.newest().name == "1"
assert [path.name for path in made.folder.iterdir()] == ["1"]
"""


def test_a_write_that_the_disk_refuses(tmp_path):
    program = FILL_THE_DISK.format(here=str(Path(__file__).parent))
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "checkpoints")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("disk full while saving the checkpoint of step 2")
    assert "checkpoints there: 1" in result.stdout
    assert "Traceback" not in result.stderr


def test_manifest_covers_every_file(checkpoints):
    save(checkpoints, 1)
    folder = checkpoints.newest()
    listed = set(json.loads((folder / "manifest.json").read_text())["manifest"]["files"])
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert listed == found - {"manifest.json"}
