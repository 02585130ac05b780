"""Joining the world that a launcher describes: the first thing a rank does.

torchrun keeps one store for all starts of a run, in which processes find each other, and what the ranks of the start before
left there stays. So who comes after a failure reads addresses of the dead, and waits for them (torch 2.13; a prefix made from
TORCHELASTIC_RESTART_COUNT would not do, for each node's agent counts for itself). Here the ranks of a start agree on a prefix
that no other start has:

    rank r    asks under a name that only it knows      →  join/3 = 9f2c…
    rank 0    answers who asks with its own new name    →  9f2c…  = 41d8…     (answers to the dead are read by nobody)
    rank r    has joined 41d8…                          →  41d8…/joined += 1  (rank 0 goes on when all have)
"""

import os
import sys
import time
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

from training import signals


def start_distributed() -> str:
    """Join the world that torchrun describes, or be a world of one; returns the device type, "cuda" or "cpu"."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"  # gloo for what lives on the host: offloaded tensors, the planning of checkpoints
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=join(store, rank, world_size), rank=rank, world_size=world_size)
    return device


def join(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """The part of `store` that belongs to this start of all ranks, whatever earlier starts left in it."""
    mine = uuid4().hex
    patience = _Patience()
    if rank > 0:
        store.set(f"join/{rank}", mine)
        while not _comes(store, mine):
            patience.look()
        start = store.get(mine).decode()
        store.add(f"{start}/joined", 1)
        return dist.PrefixStore(start, store)
    answered: set[bytes] = set()
    while store.add(f"{mine}/joined", 0) < world_size - 1:
        for asking in (f"join/{other}" for other in range(1, world_size)):
            if store.check([asking]) and (name := store.get(asking)) not in answered:
                store.set(name.decode(), mine)
                answered.add(name)
        time.sleep(0.01)
        patience.look()
    return dist.PrefixStore(mine, store)


def _comes(store: dist.Store, name: str) -> bool:
    """Whether somebody sets `name` within a second; the waiting is done by the store."""
    try:
        store.wait([name], timedelta(seconds=1))
    except dist.DistStoreError:
        return False
    return True


class _Patience:
    """Waits for others, but with a signal in hand not for ever: torchrun sends SIGTERM when one of them has died."""

    def __init__(self) -> None:
        self.heard: float | None = None

    def look(self) -> None:
        now = time.monotonic()
        if self.heard is None and signals.pending():
            self.heard = now
        if self.heard is not None and now - self.heard > signals.PATIENCE_SECONDS:
            sys.exit(f"{', '.join(signals.pending())} was received, and not all ranks came within {signals.PATIENCE_SECONDS} s")
