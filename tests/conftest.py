"""What all tests share: ready ranks, and Triton's CPU interpreter.

def on_each_rank(argument): ...            # at the top level of the test file, so that ranks can import it

def test_it(ranks):
    results = ranks.run(on_each_rank, 4, argument)     # in a fresh process group of 4; one result a rank
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tools.ranks import Ranks

if find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; ranks and programs that tests start inherit it


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 ranks, forked at the first use and kept for all tests; see tools/ranks.py."""
    with Ranks(8) as pool:
        yield pool
