"""Set-up shared by all tests: a pool of ranks, and Triton's CPU interpreter.

def on_each_rank(argument): ...     # at the top level of the test file, because ranks import it

def test_it(ranks):
    # runs in a fresh process group of 4; returns one result per rank
    results = ranks.run(on_each_rank, 4, argument)
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from proofs.ranks import Ranks

if find_spec("triton") is not None and not torch.cuda.is_available():
    # Set before anything imports Triton; inherited by ranks and by programs that tests start.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.data_samples import prepared
from tests.runs import EXPERTS, LAYOUT_3D, run, write_config

# Under `nohup`, or in the background of a script, these signals are ignored. Programs that tests
# start would inherit that, so restore the defaults.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, default)

# Tests sync checkpoints to disk often, and a slow disk would slow them down. Temporary files
# therefore go to memory where there is room (a session leaves a few hundred megabytes).
# PYTEST_DEBUG_TEMPROOT is pytest's own variable.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length. Their content may differ between processes (gzip stores the
    time), but all pytest workers must agree on the names of tests."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_runtest_setup() -> None:
    """Skip the tests that would begin after TESTS_UNTIL (seconds since 1970). Only .ci/run sets it,
    so that a slow machine ends in time and says what it left out."""
    until = os.environ.get("TESTS_UNTIL", "")
    if until and time.time() > float(until):
        pytest.skip("not run: the time for tests was over (.ci/run)")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of up to 8 ranks, forked at first use and kept for all tests; see proofs/ranks.py."""
    with Ranks(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set."""
    return prepared(tmp_path_factory.mktemp("data") / "email")


@pytest.fixture(scope="session")
def saved(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps on 8 ranks (pp 2 × dp_shard 2 × tp 2), with checkpoints after
    steps 2, 4 and 6 and evaluations after 3 and 6. Tests work on copies of it."""
    folder = tmp_path_factory.mktemp("saved")
    config = write_config(
        folder,
        data,
        parallel=LAYOUT_3D,
        train={"eval_interval": 3, "eval_samples": 5},
        checkpoint={"interval": 2, "keep_last": 3},
    )
    run(ranks, 8, config)
    return folder


@pytest.fixture(scope="session")
def saved_experts(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in float64 of 4 steps on 4 ranks (pp 2 × dp_shard 2, ep 2) with experts and
    tied embeddings, saved and evaluated after steps 2 and 4. Tests work on copies of it."""
    folder = tmp_path_factory.mktemp("experts")
    config = write_config(
        folder,
        data,
        model=EXPERTS | {"tie_embeddings": True},
        parallel={"pp": 2, "ep": 2},
        train={"steps": 4, "dtype": "float64", "eval_interval": 2, "eval_samples": 6},
        checkpoint={"interval": 2},
    )
    run(ranks, 4, config)
    return folder
