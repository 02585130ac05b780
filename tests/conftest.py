"""What all tests share: ready ranks, and Triton's CPU interpreter.

def on_each_rank(argument): ...     # at the top level of the test file: ranks import it

def test_it(ranks):
    results = ranks.run(on_each_rank, 4, argument)     # in a fresh group of 4; one result a rank
"""

import os
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tools.ranks import Ranks

if find_spec("triton") is not None and not torch.cuda.is_available():
    # before anything imports Triton; ranks and programs that tests start inherit it
    os.environ["TRITON_INTERPRET"] = "1"

from tests.data_samples import prepared
from tests.runs import LAYOUT_3D, train_run, write_config

# Behind `nohup`, or in the background of a script, these are ignored, and programs that tests start
# would inherit that.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, default)

# Checkpoints are synced to the disk again and again, and a slow disk would make the tests slow:
# where memory can hold files (a session leaves some hundred megabytes), they are held there.
# PYTEST_DEBUG_TEMPROOT is pytest's own.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes by their length: what they hold may be of the moment (gzip's time), and workers must
    agree on the tests' names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 ranks, forked at the first use and kept for all tests; see tools/ranks.py."""
    with Ranks(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set."""
    return prepared(tmp_path_factory.mktemp("data") / "email")


@pytest.fixture(scope="session")
def saved(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps on 8 ranks, pp 2 × dp_shard 2 × tp 2, with checkpoints after 2, 4
    and 6; tests copy it."""
    folder = tmp_path_factory.mktemp("saved")
    config = write_config(
        folder, data, parallel=LAYOUT_3D, checkpoint={"interval": 2, "keep_last": 3}
    )
    assert ranks.run(train_run, 8, [config]) == [""] * 8
    return folder
