"""Four running ranks for the exercises that communicate: `ranks.run(function, 2, …)`, see
proofs/ranks.py. Their process group names collectives that do not match, and deadlocks, at once
(proofs/strict); gloo would wait for minutes."""

from collections.abc import Iterator

import pytest

from proofs.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, timeout=60, backend="strict") as pool:
        yield pool
