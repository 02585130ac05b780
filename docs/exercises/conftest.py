"""Four running ranks for the exercises that communicate: `ranks.run(function, 2, …)`, see
tools/ranks.py."""

from collections.abc import Iterator

import pytest

from tools.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool
