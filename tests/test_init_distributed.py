"""The ranks of one start find each other, whatever earlier starts left in the store."""

import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from runtime import signals
from runtime.init_distributed import fresh_store

WORLD = 4


def join_as(store: dist.TCPStore, rank: int, world: int, heard: Sequence[int] = ()) -> dist.Store:
    """`join` over a connection of the rank's own, with these signals in hand."""
    own = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60))
    return fresh_store(own, rank, world, dict.fromkeys(heard, time.monotonic()))


def joined(store: dist.TCPStore) -> list[dist.Store]:
    """What each rank of a start gets; they come in any order."""
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(lambda rank: join_as(store, rank, WORLD), reversed(range(WORLD))))


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def test_a_start_sees_nothing_of_the_one_before(store: dist.TCPStore) -> None:
    for start in range(3):
        stores = joined(store)
        assert all(not each.check(["address"]) for each in stores), "a key of the start before"
        stores[0].set("address", f"of start {start}")
        assert all(each.get("address") == f"of start {start}".encode() for each in stores)


def test_a_start_that_was_not_complete(store: dist.TCPStore) -> None:
    """Rank 0 and rank 1 died while they waited for the others, rank 3 never asked: the next start is complete all the same."""
    with patch.object(signals, "PATIENCE_SECONDS", 0.3), ThreadPoolExecutor(2) as pool:
        dead = [pool.submit(join_as, store, rank, WORLD, [signal.SIGTERM]) for rank in (0, 1)]
        assert isinstance(dead[0].exception(), SystemExit)
        assert "not all ranks came" in str(dead[0].exception())
    stores = joined(store)
    stores[0].set("address", "new")
    assert {each.get("address") for each in stores} == {b"new"}


def test_patience_without_a_signal_has_no_end(store: dist.TCPStore) -> None:
    with patch.object(signals, "PATIENCE_SECONDS", 0.0):
        first = threading.Thread(target=join_as, args=(store, 0, 2), daemon=True)
        first.start()
        time.sleep(0.3)
        assert first.is_alive()
        join_as(store, 1, 2)
        first.join(60)
        assert not first.is_alive()
