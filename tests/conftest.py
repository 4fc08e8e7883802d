"""What every test shares: eight CPU devices, checked shapes, and the folder of test data."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

pytest_plugins = ["tiny_run"]

# jax reads these once, when it is imported.
DEVICES = "--xla_force_host_platform_device_count"
os.environ["JAX_PLATFORMS"] = "cpu"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()
# Threads of XLA's CPU client. A collective blocks one for each device, and several collectives of a
# step run at once: with as many threads as devices they can wait for each other for ever.
os.environ.setdefault("NPROC", "64")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ddrp_jax" / "tests"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Shapes named in annotations are checked at every call of the mathematical core.
CHECKED = ("models", "objectives", "training.optimizer", "training.sharding", "training.step")
install_import_hook([f"ddrp_jax.{module}" for module in CHECKED], "beartype.beartype")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data folder that lies beside the checkout, or where DDRP_SHARED_DATA says."""
    beside = Path(__file__).parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("DDRP_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set DDRP_SHARED_DATA to the folder of test data")
    return folder
