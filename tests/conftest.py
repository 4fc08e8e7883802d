"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

pytest_plugins = ["tiny_run"]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data folder that lies beside the checkout, or where DDRP_SHARED_DATA says."""
    beside = Path(__file__).parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("DDRP_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set DDRP_SHARED_DATA to the folder of test data")
    return folder
