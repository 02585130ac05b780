"""What all tests share: ready ranks.

def on_each_rank(argument): ...            # at the top level of the test file, so that ranks can import it

def test_it(ranks):
    results = ranks.run(on_each_rank, 4, argument)     # in a fresh process group of 4; one result a rank
"""

from collections.abc import Iterator

import pytest

from tools.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to 8 ranks, forked at the first use and kept for all tests; see tools/ranks.py."""
    with Ranks(8) as pool:
        yield pool
