"""A corpus of seconds and `ddrp` in processes of its own, for tests of whole runs."""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_test.py"
DDRP = Path(sys.executable).parent / "ddrp"
TEXT = """
the a of and sea ship sails wind over under green river stone light dark old new man woman
child runs walks sings reads book table tree root leaf bird song field rain snow summer
"""


def environment(devices: int = 1) -> dict[str, str]:
    """The environment of a `ddrp` process: CPU devices, and compilations kept between them."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
        Path(tempfile.gettempdir()) / "ddrp-tests-compiled"
    )
    variables = {name: value for name, value in os.environ.items() if name != "NPROC"} | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    # Threads of XLA's CPU client. A collective blocks one for each device, and several collectives
    # of a step run at once: with one thread a device they can wait for each other for ever.
    return variables if devices == 1 else variables | {"NPROC": str(8 * devices)}


def ddrp(*arguments, **options) -> subprocess.CompletedProcess:
    """Runs the installed console script and waits for it."""
    return subprocess.run(
        [str(DDRP), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
        **options,
    )


def write_records(folder: Path, *, seed: int = 0, documents: int = 300, holdout=0.1) -> Path:
    """Writes `folder/corpus.txt`, trains a tokenizer on it and prepares `folder/records`."""
    from ddrp_jax.data.preparation import prepare_records
    from ddrp_jax.data.sentencepiece_training import train_sentencepiece
    from ddrp_jax.data.sources import Source

    draw, words = random.Random(seed), TEXT.split()
    texts = [
        " ".join(draw.choice(words) for _ in range(draw.randint(5, 60))) for _ in range(documents)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    tokenizer, _ = train_sentencepiece(texts, vocab_size=60)
    source = Source(f"text:{folder / 'corpus.txt'}")
    prepare_records([source], tokenizer, folder / "records", holdout=holdout)
    return folder / "records"


@pytest.fixture(scope="session")
def tiny_records(tmp_path_factory) -> Path:
    """Records of 300 short documents, a tenth of them held out."""
    return write_records(tmp_path_factory.mktemp("corpus"))


def events(workdir: Path) -> list[dict]:
    """The lines of `metrics.jsonl` without what depends on the clock."""
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if not name.startswith("seconds_") and name != "tokens_per_second"
        }
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]
