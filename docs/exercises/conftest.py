"""Ready ranks for the exercises that talk: `ranks.run(function, 2, …)`, see tools/ranks.py."""

from collections.abc import Iterator

import pytest

from tools.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool
